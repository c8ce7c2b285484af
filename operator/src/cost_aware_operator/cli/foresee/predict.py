"""`catj predict FILE.json`: step time and memory of layouts, without a GPU and without a cluster."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from cost_aware_operator.costs.request.fields import RequestError
from cost_aware_operator.costs.request.questions import answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `catj predict`."""
    parser.add_argument(
        "file", metavar="FILE.json", help="a list of objects {model, hardware, layout}; - reads standard input"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the answers; returns the exit status."""
    return predict(arguments.file)


def predict(file: str) -> int:
    """Reads a list of objects, prints a list of answers in the same order; `-` is standard input. Returns the exit status."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        document = json.loads(text, parse_constant=_no_number, object_pairs_hook=_once)
        found = answer(document)
    except RequestError as error:
        for line in str(error).splitlines():
            print(f"catj: {file}{'' if line.startswith('[') else ': '}{line}", file=sys.stderr)
        return 2
    except (ValueError, RecursionError) as error:
        print(f"catj: {file}: is not JSON: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"catj: {file}: {error.strerror or error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=2, allow_nan=False))
    return 0


def _no_number(name: str) -> NoReturn:
    raise RequestError(f"{name} is no number that JSON knows: write a finite one, or null")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise RequestError(f"{name}: is given twice in one object: write it once")
        found[name] = value
    return found
