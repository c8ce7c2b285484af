"""One rank's scraped metrics as numbers, and what two scrapes of all ranks say about the time between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from cost_aware_trainer.contract import LaunchStage, LinkLevel, Metric, Phase

WEIGHT_MOVING = (Phase.COMPUTE, Phase.OPTIMIZER)
"""The phases whose share of the ranks' time is the efficiency."""


class ScrapeError(ValueError):
    """A rank answered with something that is not its metrics."""


@dataclass(frozen=True)
class RankSample:
    """One rank at one moment. Counters count since the rank's process started."""

    rank: int
    """The rank's number."""
    attempt: int
    """The attempt that its process belongs to."""
    step: int = 0
    """The newest step that is done."""
    total_steps: int = 0
    """Steps of the whole run."""
    steps: float = 0.0
    """Steps that this process has done."""
    tokens: float = 0.0
    """Tokens that this rank has trained."""
    step_seconds: float = 0.0
    """Seconds of steps by the clock."""
    model_flops: float = 0.0
    """Floating-point operations that the model needed for them."""
    communication_bytes: float = 0.0
    """Bytes sent in training collectives."""
    memory_bytes: float = 0.0
    """Peak memory, in bytes."""
    loss: float | None = None
    """Training loss of the newest step, nats per token."""
    heldout_loss: float | None = None
    """Loss of the newest evaluation, nats per token."""
    checkpoint_step: int | None = None
    """Step of the newest whole checkpoint."""
    resumed_step: int | None = None
    """Step that the attempt resumed from; None before it has."""
    phase_seconds: Mapping[Phase, float] = field(default_factory=dict)
    """Seconds of steps by phase."""
    network_bytes_per_second: float | None = None
    """A rank's share of its node's network as the ranks' probe found it; None on one node."""
    stage_seconds: Mapping[LaunchStage, float] = field(default_factory=dict)
    """From the attempt's order to the end of its first step; empty before that, and of ranks that do not tell."""


@dataclass(frozen=True)
class Scrape:
    """One look at all ranks."""

    at: float
    """The moment, in seconds of a clock that only grows."""
    ranks: tuple[RankSample, ...]
    """Samples of the ranks that answered."""


@dataclass(frozen=True)
class Observation:
    """What happened between two scrapes of one attempt."""

    seconds: float
    """Seconds between the two."""
    tokens_per_second: float
    """Tokens a second of all ranks."""
    steps_per_second: float
    """Steps a second, the mean over the ranks."""
    shares: Mapping[Phase, float]
    """Shares of the ranks' step time by phase; they add up to 1."""
    attempt: int = 0
    """The attempt."""
    steps: float = 0.0
    """Steps of the run in between."""
    rank_step_seconds: Mapping[Phase, float] = field(default_factory=dict)
    """Seconds of one step by phase, on the rank that works longest: the slowest rank holds up all."""
    working_seconds: Mapping[int, float] = field(default_factory=dict)
    """Seconds of one step in which a rank computes or updates, by rank."""
    ranks: int = 1
    """Number of ranks."""
    rank_tokens_per_second: float = 0.0
    """Tokens per second of a rank, by the clock."""
    reference_tokens_per_second: float = 0.0
    """Tokens per second of a rank that never waits, measured over the same steps."""
    flops_per_second: float = 0.0
    """Floating-point operations per second of a rank, by the clock: what the model needs, not what the hardware did."""
    network_bytes_per_second: float | None = None
    """A rank's share of its node's network, as the ranks' own probe found it at their start; None on one node."""

    @property
    def efficiency(self) -> float:
        """The share of step time that moves the weights.

        That is throughput per rank over the reference throughput per rank: the tokens of both are the same and cancel.
        """
        return sum(self.shares[phase] for phase in WEIGHT_MOVING)


def parse_rank(text: str) -> RankSample:
    """Reads one rank's exposition text.

    Raises:
        ScrapeError: not exposition text, or the series that every rank has are missing.
    """
    values: dict[str, float] = {}
    phases: dict[str, float] = {}
    labels: dict[str, str] = {}
    links: dict[str, float] = {}
    stages: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == Metric.LINK_BANDWIDTH:
                    links[sample.labels["level"]] = sample.value
                elif sample.name == Metric.RECONFIGURATION_SECONDS:
                    stages[sample.labels["stage"]] = sample.value
                elif sample.name == Metric.PHASE_SECONDS:
                    phases[sample.labels["phase"]] = sample.value
                elif sample.name.startswith("catj_rank_"):
                    values[sample.name] = sample.value
                    labels = dict(sample.labels)
    except (KeyError, ValueError, OverflowError, IndexError, TypeError) as error:
        raise ScrapeError(f"not a rank's metrics: {error!r}") from None
    return sample_of(labels, values, phases, links, stages)


def sample_of(
    labels: Mapping[str, str],
    values: Mapping[str, float],
    phases: Mapping[str, float],
    links: Mapping[str, float] | None = None,
    stages: Mapping[str, float] | None = None,
) -> RankSample:
    """A rank's sample from its labels, series by name, seconds by phase and stage, and links' rates by level.

    Raises:
        ScrapeError: a label is missing, or a value is none that can be.
    """
    try:
        return RankSample(
            rank=int(labels["rank"]),
            attempt=int(labels["attempt"]),
            step=math.floor(values.get(Metric.STEP, 0)),
            total_steps=math.floor(values.get(Metric.TOTAL_STEPS, 0)),
            steps=values.get(Metric.STEPS, 0.0),
            tokens=values.get(Metric.TOKENS, 0.0),
            step_seconds=values.get(Metric.STEP_SECONDS, 0.0),
            model_flops=values.get(Metric.MODEL_FLOPS, 0.0),
            communication_bytes=values.get(Metric.COMMUNICATION_BYTES, 0.0),
            memory_bytes=values.get(Metric.MEMORY_BYTES, 0.0),
            loss=_finite(values.get(Metric.LOSS)),
            heldout_loss=_finite(values.get(Metric.HELDOUT_LOSS)),
            checkpoint_step=_step(values.get(Metric.CHECKPOINT_STEP)),
            resumed_step=_step(values.get(Metric.RESUMED_STEP)),
            phase_seconds={Phase(name): value for name, value in phases.items()},
            network_bytes_per_second=_rate((links or {}).get(LinkLevel.NETWORK)),
            # a trainer of another version may know other stages
            stage_seconds={s: value for s in LaunchStage if (value := _rate((stages or {}).get(s))) is not None},
        )
    except (KeyError, ValueError, OverflowError) as error:
        raise ScrapeError(f"not a rank's metrics: {error!r}") from None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _rate(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and value > 0 else None


def _step(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) and value >= 0 else None


def observe(scrapes: Sequence[Scrape]) -> Observation | None:
    """Speed and shares from the oldest scrape of the newest attempt to the newest one; None until steps were taken."""
    if not scrapes or not scrapes[-1].ranks:
        return None
    newest = scrapes[-1]
    attempt = max(r.attempt for r in newest.ranks)
    ranks = {r.rank: r for r in newest.ranks if r.attempt == attempt}
    comparable = [s for s in scrapes[:-1] if {r.rank for r in s.ranks if r.attempt == attempt} == set(ranks)]
    if not comparable:
        return None
    oldest = comparable[0]
    before = {r.rank: r for r in oldest.ranks}
    seconds = newest.at - oldest.at
    stepped = sum(r.step_seconds - before[i].step_seconds for i, r in ranks.items())
    if seconds <= 0 or stepped <= 0:
        return None
    spent = {
        phase: sum(r.phase_seconds.get(phase, 0.0) - before[i].phase_seconds.get(phase, 0.0) for i, r in ranks.items())
        for phase in Phase
    }
    total = sum(spent.values())
    if total <= 0:
        return None
    by_rank = {
        i: {p: r.phase_seconds.get(p, 0.0) - before[i].phase_seconds.get(p, 0.0) for p in Phase}
        for i, r in ranks.items()
    }
    steps = {i: r.steps - before[i].steps for i, r in ranks.items()}
    working = {i: sum(by_rank[i][p] for p in WEIGHT_MOVING) / steps[i] for i in ranks if steps[i] > 0}
    tokens = sum(r.tokens - before[i].tokens for i, r in ranks.items())
    worked = sum(spent[p] for p in WEIGHT_MOVING)
    probed = [r.network_bytes_per_second for r in ranks.values() if r.network_bytes_per_second is not None]
    busiest = max(working, key=lambda i: working[i]) if working else None
    return Observation(
        attempt=attempt,
        steps=sum(steps.values()) / len(ranks),
        rank_step_seconds={} if busiest is None else {p: s / steps[busiest] for p, s in by_rank[busiest].items()},
        working_seconds=working,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        ranks=len(ranks),
        rank_tokens_per_second=tokens / total,
        reference_tokens_per_second=tokens / worked if worked > 0 else 0.0,
        flops_per_second=sum(r.model_flops - before[i].model_flops for i, r in ranks.items()) / len(ranks) / seconds,
        steps_per_second=sum(r.steps - before[i].steps for i, r in ranks.items()) / len(ranks) / seconds,
        shares={phase: value / total for phase, value in spent.items()},
        network_bytes_per_second=min(probed, default=None),
    )
