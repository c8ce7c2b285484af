"""Checkpoint intervals and the productive share of time under exponential failures. Times are seconds unless the name says hours."""

from __future__ import annotations

import math

LONGEST_EXPONENT = 7.0
"""exp(7): a run expected to take more than about 1,100 times its work is reported as one that never ends."""


def optimal_interval(stall_seconds: float, mtbf_seconds: float, write_seconds: float = 0.0) -> float:
    """Seconds of work between saves: Daly's estimate, no shorter than a save takes.

    sqrt(2 C M) (1 + sqrt(C/2M)/3 + C/18M) - C for C < 2M, else M (Daly 2006, higher-order estimate); its first term is Young's (1974).
    C is what blocks training, not the time of the write behind it. Infinite if nothing fails.
    """
    c, m = stall_seconds, mtbf_seconds
    if math.isinf(m):
        return math.inf
    best = m if c >= 2 * m else math.sqrt(2 * c * m) * (1 + math.sqrt(c / (2 * m)) / 3 + c / (18 * m)) - c
    return max(best, write_seconds, 1e-3)


def expected_goodput(
    interval_seconds: float, stall_seconds: float, recovery_seconds: float, mtbf_seconds: float
) -> float:
    """Productive share of time: tau / (M e^(R/M) (e^((tau + C)/M) - 1)), exact for exponential failures (Daly 2006).

    About 1 - C/tau - (tau/2 + R)/M where failures are rare. 0 where no interval would ever be finished.
    """
    if math.isinf(mtbf_seconds):
        return 1.0 if math.isinf(interval_seconds) else interval_seconds / (interval_seconds + stall_seconds)
    exponent = (interval_seconds + stall_seconds) / mtbf_seconds
    if exponent + recovery_seconds / mtbf_seconds > LONGEST_EXPONENT:
        return 0.0
    return interval_seconds / (mtbf_seconds * math.exp(recovery_seconds / mtbf_seconds) * math.expm1(exponent))


def goodput_of_waits(recovery_seconds: float, mtbf_seconds: float) -> float:
    """Goodput if a failure costs only the wait: M / (M e^(R/M)), as a wait may be interrupted too."""
    ratio = recovery_seconds / mtbf_seconds
    return math.exp(-ratio) if ratio <= LONGEST_EXPONENT else 0.0


def repeated_hours(losses_per_hour: float, hours: float) -> float:
    """Expected hours of work that begins again at every loss: (e^(kT) - 1)/k; infinite if it would never end."""
    exponent = losses_per_hour * hours
    if not exponent <= LONGEST_EXPONENT:
        return math.inf
    return math.expm1(exponent) / losses_per_hour if exponent > 1e-12 else hours
