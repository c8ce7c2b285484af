"""Stragglers of a job under a plan, from its manifest and its scrapes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cost_aware_operator.api.spec import JobSpec
from cost_aware_operator.costs.models.model_parallel import head_in_layers
from cost_aware_operator.costs.models.stages import interleaved, stage_work
from cost_aware_operator.observing.samples import Scrape
from cost_aware_operator.observing.stragglers import SlowRank, stragglers
from cost_aware_operator.planning.plan import Plan
from cost_aware_operator.planning.presets import shape_of


def stragglers_under(spec: JobSpec, plan: Plan, scrapes: Sequence[Scrape]) -> tuple[SlowRank, ...]:
    """The stragglers of a run under a plan."""
    works: list[tuple[float, ...]] = []
    if spec.model is not None:
        shape = shape_of(spec.model)
        chunked = plan.interleave > 1
        layers = interleaved(shape.layers, plan.pipeline, plan.interleave) if chunked else plan.stage_layers
        # in a small model what surrounds the products takes the time, and the head costs next to nothing
        works = [stage_work(layers, head) for head in (head_in_layers(shape), 0.0)]
    return stragglers(scrapes, plan.data * plan.tensor, works)
