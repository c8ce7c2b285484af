"""How right the cost models are on measured configurations, leaving one source out at a time.

python -m bench.accuracy          the table
python -m bench.accuracy --fit    parameters fitted to all sources, as they stand in costs/parameters.py
"""

from __future__ import annotations

import statistics
import sys

from bench.accuracy import scoring
from bench.accuracy.measured import rows

from cost_aware_operator.costs.models.calibrate import KNOBS, calibrate, value


def fit() -> None:
    """Prints the parameters of a fit to every source."""
    found = calibrate(scoring.observations(rows()), scoring.LITERATURE)
    for knob in KNOBS:
        start, end = value(scoring.LITERATURE, knob.name), value(found.parameters, knob.name)
        print(f"{knob.name:22} {start:10.4g} -> {end:10.4g}")


def table() -> None:
    """Prints the scores."""
    scored = scoring.leave_one_source_out()
    print(f"{'source, left out of its own fit':62} rows  model %  naive %  bias %")
    for source, group in scoring.by_source(scored).items():
        bias = 100 * statistics.mean(s.error for s in group)
        model, naive = scoring.percent(s.error for s in group), scoring.percent(s.naive_error for s in group)
        print(f"{source[:62]:62} {len(group):4}  {model:7.1f}  {naive:7.1f}  {bias:6.1f}")
    for name, centre in (("mean", statistics.mean), ("median", statistics.median)):
        model = scoring.percent((s.error for s in scored), centre)
        naive = scoring.percent((s.naive_error for s in scored), centre)
        print(f"{name + ' of all rows':62} {len(scored):4}  {model:7.1f}  {naive:7.1f}")
    after = scoring.after_one_observation(scored)
    print(
        f"after one observation of the same machine: median {scoring.percent(after, statistics.median):.1f} % of {len(after)}"
    )
    measured = sum(1 for s in scored if s.row.memory_gib)
    print(f"peak memory: mean {scoring.memory_error(scored):.1f} % of {measured}")
    print(f"\n{'layouts of one model, accelerators and batch':66} n    tau  regret %  naive tau  model %  naive %")
    for r in scoring.rankings(scored):
        print(
            f"{r.name[:64]:64} {r.size:3}  {r.tau:5.2f}  {100 * r.regret:8.1f}  {r.naive_tau:9.2f}  {r.mape:7.1f}  {r.naive_mape:7.1f}"
        )


if __name__ == "__main__":
    fit() if "--fit" in sys.argv[1:] else table()
