"""The command line, `catj`. Its commands are in `commands`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cost_aware_operator.cli.commands import COMMANDS, what_is_missing

EPILOG = (
    "Exit status: 0 it is done, 1 the job failed or something could not be read, 2 the input is wrong, 3 there is no such job or no "
    "cluster, 4 the time is over, 130 interrupted."
)


def parser(chosen: str | None) -> argparse.ArgumentParser:
    """The arguments: those of the chosen command, and of the others only their names.

    Raises:
        ModuleNotFoundError: a package that the chosen command needs is not installed.
    """
    result = argparse.ArgumentParser(prog="catj", description="CostAwareTrainingJobs at a glance.", epilog=EPILOG)
    verbs = result.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    for verb, command in COMMANDS.items():
        arguments = verbs.add_parser(verb, help=command.help)
        if verb == chosen:
            command.load().add_arguments(arguments)
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point."""
    given = sys.argv[1:] if argv is None else list(argv)
    chosen = next((word for word in given if not word.startswith("-")), None)
    try:
        arguments = parser(chosen).parse_args(given)
        sys.exit(COMMANDS[arguments.verb].load().run(arguments))
    except ModuleNotFoundError as error:
        print(f"catj: {chosen} {what_is_missing(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
