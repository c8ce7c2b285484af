"""A check, what it is told, what it finds, and the document that all of them become."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1


class Verdict(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Setting:
    """What every check is told."""

    device: str
    """`cuda` or `cpu`."""
    small: bool
    """Whether models are tiny, so that all checks end in minutes."""
    ranks: int
    """The most ranks that may run beside each other: one for each GPU; two on a CPU."""
    folder: Path
    """Folder for files that nobody keeps."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """What `machine.facts` has found."""

    @property
    def on_cuda(self) -> bool:
        """Whether the ranks compute on GPUs."""
        return self.device == "cuda"

    @property
    def worlds(self) -> tuple[int, ...]:
        """Numbers of ranks to try: one, and as many as there may be."""
        return (1, self.ranks) if self.ranks > 1 else (1,)

    @property
    def left_out_worlds(self) -> list[str]:
        """What is said where there is one GPU only."""
        return [] if self.ranks > 1 else ["several ranks: the machine has one GPU"]


@dataclass(frozen=True)
class Found:
    """What a check has measured, and what is wrong with it."""

    figures: Mapping[str, Any]
    """Figures by name; units are in the names."""
    problems: Sequence[str] = ()
    """What is wrong; the check has passed if nothing is."""
    left_out: Sequence[str] = ()
    """Parts that were not done, each with its reason."""


class SkippedError(Exception):
    """A check that makes no sense here. It may have figures all the same."""

    def __init__(self, reason: str, figures: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.reason, self.figures = reason, dict(figures or {})


def check_judged(setting: Setting, without_gpu: str, with_tiny_models: str, figures: Mapping[str, Any]) -> None:
    """Raises SkippedError, with the figures, where they cannot be judged: without a GPU, or with tiny models on one."""
    if not setting.on_cuda:
        raise SkippedError(without_gpu, figures)
    if setting.small:
        raise SkippedError(f"--small: {with_tiny_models}", figures)


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str
    """Its name in the document and on the command line."""
    protects: str
    """A line that says what would go wrong unseen without it."""
    run: Callable[[Setting], Found]
    """Does it. What it raises, other than `SkippedError`, is a failure."""
    limit_seconds: float = 600.0
    """Seconds after which it is ended and has failed."""


@dataclass(frozen=True)
class Outcome:
    """How one check ended, as JSON values."""

    verdict: Verdict
    """How it ended."""
    reason: str = ""
    """Why it failed or was skipped."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Figures by name."""
    left_out: Sequence[str] = ()
    """Parts that were not done, each with its reason."""

    @classmethod
    def of(cls, found: Found) -> Outcome:
        """The outcome of a check that came to its end."""
        verdict = Verdict.FAILED if found.problems else Verdict.PASSED
        return cls(verdict, "; ".join(found.problems), dict(found.figures), list(found.left_out))


def document_of(
    machine: Mapping[str, Any], setting: Setting, ended: Sequence[tuple[Check, Outcome, float]]
) -> dict[str, Any]:
    """The one JSON document, its checks in the order in which they were done."""
    verdicts = [outcome.verdict for _, outcome, _ in ended]
    return {
        "format_version": FORMAT_VERSION,
        "device": setting.device,
        "small": setting.small,
        "machine": dict(machine),
        "counts": {verdict.value: verdicts.count(verdict) for verdict in Verdict},
        "checks": [
            {
                "name": check.name,
                "protects": check.protects,
                "result": outcome.verdict.value,
                "reason": outcome.reason,
                "seconds": round(seconds, 1),
                "figures": rounded(outcome.figures),
                "left_out": list(outcome.left_out),
            }
            for check, outcome, seconds in ended
        ],
    }


def exit_code_of(outcomes: Sequence[Outcome]) -> int:
    """1 if a check has failed, otherwise 0."""
    return int(any(outcome.verdict is Verdict.FAILED for outcome in outcomes))


def rounded(value: Any) -> Any:
    """The value with every number to six digits: more are noise, and make two documents hard to compare."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value
