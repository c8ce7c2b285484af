"""`catj version`: what is installed."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

from cost_aware_operator.cli.commands import EXTRAS

DISTRIBUTION = "cost-aware-training"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`catj version` has no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Prints versions of the package, of Python, and of what extras bring; returns the exit status."""
    print(f"{DISTRIBUTION} {version(DISTRIBUTION)}, Python {platform.python_version()}")
    for name, extra in EXTRAS.items():
        try:
            print(f"  {name} {version(name)}")
        except PackageNotFoundError:
            print(f"  {name} is not installed: pip install '{DISTRIBUTION}[{extra}]'")
    return 0
