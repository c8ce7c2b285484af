"""The commands of `catj`, by the module that has each one's arguments and work. Only the one that is asked for is imported."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast


class CommandModule(Protocol):
    """What a command's module has."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        """Does the work; returns the exit status."""


@dataclass(frozen=True)
class Command:
    """One command."""

    module: str
    """Module, from this package on."""
    help: str
    """Line in `catj --help`."""

    def load(self) -> CommandModule:
        """Imports the module.

        Raises:
            ModuleNotFoundError: a package that it needs is not installed.
        """
        return cast("CommandModule", import_module(f"{__package__}.{self.module}"))


COMMANDS: Mapping[str, Command] = {
    "submit": Command("jobs.submit", "make a job of a manifest"),
    "list": Command("jobs.listing", "jobs, their state, progress and dollars"),
    "watch": Command("jobs.watch", "follow a job until it ends, then say what it did and cost"),
    "status": Command("jobs.status", "one job's state, progress, efficiency and dollars, now"),
    "events": Command("jobs.events", "what happened to a job"),
    "suspend": Command("jobs.changing", "let a job save a checkpoint and end its pods"),
    "resume": Command("jobs.changing", "let a suspended job go on"),
    "delete": Command("jobs.changing", "delete a job; checkpoints and bill stay"),
    "costs": Command("jobs.costs", "bills of jobs, also of those that are gone; their backup"),
    "predict": Command("foresee.predict", "step time and memory of model layouts, with no GPU and no cluster"),
    "plan": Command("foresee.plan", "what a manifest should run on, in which degrees, and what it will cost"),
    "explain": Command("foresee.explain", "the arithmetic of one plan, line by line, with formulas and sources"),
    "simulate": Command(
        "foresee.simulate", "what the adjuster would do with a job, on machines that differ from the tables"
    ),
    "version": Command("version", "versions of this package and of what it works with"),
}

EXTRAS: Mapping[str, str] = {
    **dict.fromkeys(("aiohttp", "kubernetes", "kopf"), "operator"),
    **dict.fromkeys(("torch",), "trainer"),
    **dict.fromkeys(("matplotlib",), "plot"),
}
"""The extra that brings a package, by the package's name when it is imported."""


def what_is_missing(error: ModuleNotFoundError) -> str:
    """What to install for a module that was not found.

    Raises:
        ModuleNotFoundError: the error itself, if no extra has the module.
    """
    name = (error.name or "").partition(".")[0]
    if name not in EXTRAS:
        raise error
    return f"needs the package {name}, which is not installed: pip install 'cost-aware-training[{EXTRAS[name]}]'"
