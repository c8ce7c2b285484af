"""Dollars against time as a picture."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np

from cost_aware_operator.costs.search.three_d import Ranking

mpl.use("Agg")
from matplotlib import pyplot as plt

MOST_POINTS = 20_000
"""Most points that are drawn; more would cover one another."""
MOST_LABELS = 8


def draw(ranking: Ranking, file: str) -> None:
    """Every feasible plan as a point, the Pareto front as a line with its degrees.

    Raises:
        OSError: the file cannot be written.
    """
    columns, front = ranking.columns, ranking.pareto()
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    rows = np.linspace(0, len(columns) - 1, min(len(columns), MOST_POINTS)).astype(int)
    for index, offer in enumerate(ranking.offers):
        own = rows[columns.offer[rows] == index]
        if len(own):
            axes.scatter(columns.hours[own], columns.usd[own], s=5, alpha=0.25, label=offer.name)
    axes.plot(columns.hours[front], columns.usd[front], "k.-", linewidth=1.2, label="Pareto front")
    step = max(1, -(-len(front) // MOST_LABELS))
    for row in front[::step]:
        layout = ranking.layout(row)
        text = f"{int(columns.nodes[row])} nodes, {layout.data}x{layout.tensor}x{layout.pipeline}"
        at = (columns.hours[row], columns.usd[row])
        axes.annotate(text, at, textcoords="offset points", xytext=(0, -7), fontsize=8, rotation=-35, va="top")
    axes.set(xscale="log", yscale="log", xlabel="hours of the whole run", ylabel="dollars of the whole run")
    axes.set_title(f"{len(columns):,} feasible plans, data x tensor x pipeline")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(markerscale=3, fontsize=8)
    figure.savefig(file, dpi=130)
    plt.close(figure)
