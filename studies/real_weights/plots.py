"""The pictures of this study, from its tables: error over cost without training, beside rivals, and while adapting.

python studies/real_weights/plots.py
"""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
from adapted import UPDATES, VARIANTS, file_name
from untrained import DENSITIES

from mhla_diffusers.files import written_aside
from mhla_diffusers.reporting import require_matplotlib

HERE = Path(__file__).parent
ASSETS = HERE.parents[1] / "assets"
TOKENS = {518: "1,369", 1036: "5,476"}
COLOURS = dict(zip(VARIANTS, ("#999999", "#1f77b4", "#17becf", "#2ca02c"), strict=True))
ENDINGS = (
    (", means alone, along the curve", "#999999", "sparse, means alone, along the curve"),
    (", means alone", "#1f77b4", "sparse, means alone"),
    (", to first order", "#ff7f0e", "sparse, to first order"),
    ("", "#d62728", "sparse"),
)
RIVAL_COLOURS = {
    "ours": "#d62728",
    "ours, nothing fitted": "#ff9896",
    "PISA": "#1f77b4",
    "SVG2, centroids for the rest": "#9467bd",
    "SVG2": "#c5b0d5",
    "SubBlock": "#2ca02c",
    "block-sparse": "#7f7f7f",
}
LABEL_STEP = 1.13
"""Least quotient of the heights of two names."""
SMOOTHED = 10
"""Updates that a point of a loss is the mean of."""


def save(figure: Any, file: Path) -> None:
    """Write a picture."""
    with written_aside(file) as aside:
        figure.savefig(aside, dpi=110)


def draw_error_over_cost(plt: Any) -> None:
    """Errors over the keys that a query attends to, with states, means alone, and in another order, at two sizes."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.6), sharey="row", sharex="col", layout="constrained")
    for column, (pixels, tokens) in enumerate(TOKENS.items()):
        rows = {row["self-attention"]: row for row in csv.DictReader((HERE / f"untrained-{pixels}.csv").open())}
        for axis, measured in zip(axes[:, column], ("features", "attention"), strict=True):
            for ending, colour, label in ENDINGS:
                names = [f"sparse {density:.1%}{ending}" for density in DENSITIES]
                points = [(float(rows[x]["cost"]), float(rows[x][measured])) for x in names if x in rows]
                axis.plot([x for x, _ in points], [y for _, y in points], "o-", color=colour, label=label)
            for name, style in (("MHLA", "--"), ("plain linear", ":")):
                axis.axhline(float(rows[name][measured]), color="#2ca02c", linestyle=style, label=name)
            axis.set_yscale("log")
            axis.grid(alpha=0.3, which="both")
        axes[0, column].set_title(f"{pixels} pixels, {tokens} tokens")
        axes[1, column].set_xlabel("keys per query / N")
    axes[0, 0].set_ylabel("error of the features")
    axes[1, 0].set_ylabel("error of one attention")
    axes[0, 1].legend(fontsize=7)
    save(figure, HERE / "error-over-cost.png")


def draw_rivals(plt: Any) -> None:
    """Error of one attention over cost, of ours and of published sparse attentions, named at the curves' ends."""
    with (HERE / "rivals-attention-1036.csv").open() as file:
        rows = list(csv.DictReader(file))
    figure, axis = plt.subplots(figsize=(8.4, 4.4), layout="constrained")
    last = 0.0
    curves = {
        name: sorted((float(row["cost"]), float(row["attention"])) for row in rows if row["self-attention"] == name)
        for name in RIVAL_COLOURS
    }
    for name, points in sorted(curves.items(), key=lambda curve: curve[1][-1][1]):
        colour, (cost, error) = RIVAL_COLOURS[name], points[-1]
        axis.plot(*zip(*points, strict=True), "o-", color=colour, lw=3 if name == "ours" else 1.5)
        last = max(error, last * LABEL_STEP)
        line = {"arrowstyle": "-", "color": colour, "lw": 0.6}
        place = {"xytext": (1.03, last), "textcoords": axis.get_yaxis_transform(), "va": "center"}
        axis.annotate(name, (cost, error), color=colour, arrowprops=line, **place)
    axis.set(yscale="log", xlabel="cost: keys per query / N, listed, pooled, and as many as states cost")
    axis.set_ylabel("error of one attention")
    axis.yaxis.set_major_formatter("{x:.2f}")
    axis.yaxis.set_minor_formatter("{x:.2f}")
    axis.grid(alpha=0.3, which="both")
    save(figure, ASSETS / "error-over-cost.png")


def draw_adaptation(plt: Any) -> None:
    """Losses of both stages over the updates, and the error on photographs, for the first seed of every attention."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for variant in VARIANTS:
        file = HERE / "adapted" / f"{file_name(variant, 0)}.json"
        if not file.is_file():
            continue
        result, first = json.loads(file.read_text()), 0
        for axis, (stage, steps) in zip(axes, UPDATES.items(), strict=False):
            losses = np.convolve(result[stage], np.ones(SMOOTHED) / SMOOTHED, "valid")
            axis.plot(first + SMOOTHED + np.arange(len(losses)), losses, color=COLOURS[variant], label=variant)
            first += steps
        axes[2].plot(*zip(*result["photographs"], strict=True), "o-", color=COLOURS[variant], label=variant)
    titles = ("attention transfer: squared error", "distillation: squared error", "photographs: error of the features")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="updates", ylim=(0, None))
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    save(figure, HERE / "adapted.png")


def main() -> None:
    """Draw all."""
    plt = require_matplotlib()
    draw_error_over_cost(plt)
    draw_rivals(plt)
    draw_adaptation(plt)


if __name__ == "__main__":
    main()
