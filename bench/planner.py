"""How long the search takes: every plan for 64 GPUs, for 16,384 GPUs of three types, and for any number of nodes up to that.

python bench/planner.py
"""

from __future__ import annotations

import json
import time

from cost_aware_operator.costs.models.machines import machine
from cost_aware_operator.costs.models.model_parallel import DecoderShape
from cost_aware_operator.costs.search.combinations import Bounds, Offer, Work
from cost_aware_operator.costs.search.three_d import ThreeDParallelCostAnalyzer
from cost_aware_operator.costs.tables.hardware import NumberFormat
from cost_aware_operator.costs.tables.prices import shipped
from cost_aware_operator.planning.space import fees_of

LLAMA_8B = DecoderShape(32, 4096, 32, 8, 14336, 8192, 128256)
LLAMA_405B = DecoderShape(126, 16384, 128, 8, 53248, 8192, 128256)
TYPES = ("p5.48xlarge", "p4de.24xlarge", "p5en.48xlarge")
REPEATS = 7


def offers(*names: str) -> list[Offer]:
    """Nodes at their list prices."""
    book = shipped()
    found = []
    for name in names:
        price = book.price(name)
        assert price is not None
        found.append(Offer(name, machine(name), price.hourly_usd, NumberFormat.BF16, False, *fees_of(book, name, [])))
    return found


def main() -> None:
    """Prints a line a question: how many plans, the fastest and the median run."""
    analyzer = ThreeDParallelCostAnalyzer()
    for name, work, bought, bounds in (
        ("8 B on 64 GPUs", Work(LLAMA_8B, 256, 1000), offers("p5.48xlarge"), Bounds(8, 8)),
        ("405 B on 16,384 GPUs, 3 types", Work(LLAMA_405B, 16384, 1000), offers(*TYPES), Bounds(2048, 2048)),
        ("405 B on 1 to 2,048 nodes, 3 types", Work(LLAMA_405B, 2048, 1000), offers(*TYPES), Bounds(1, 2048)),
    ):
        seconds = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            ranking = analyzer.search(work, bought, bounds)
            seconds.append(time.perf_counter() - began)
        line = {
            "question": name,
            "combinations": ranking.combinations,
            "feasible": len(ranking.columns),
            "best_ms": round(1000 * min(seconds), 1),
            "median_ms": round(1000 * sorted(seconds)[len(seconds) // 2], 1),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
