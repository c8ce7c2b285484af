"""The command line: `catj watch|status|costs` of jobs on a cluster; `catj plan|explain JOB.yaml`, `catj predict FILE.json` without."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cost_aware_operator.cli.commands import COMMANDS, what_is_missing


def parser(chosen: str | None) -> argparse.ArgumentParser:
    """The arguments: those of the chosen command, and of the others only their names.

    Raises:
        ModuleNotFoundError: a package that the chosen command needs is not installed.
    """
    result = argparse.ArgumentParser(prog="catj", description="CostAwareTrainingJobs at a glance.")
    verbs = result.add_subparsers(dest="verb", required=True)
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
