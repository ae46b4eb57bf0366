"""The two pictures of this study, from its tables: error over cost without training, and errors while adapting.

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
TOKENS = {518: "1,369", 1036: "5,476"}
COLOURS = dict(zip(VARIANTS, ("#999999", "#1f77b4", "#17becf", "#2ca02c", "#d62728"), strict=True))
ENDINGS = (
    (", means alone, along the curve", "#999999", "sparse, means alone, along the curve"),
    (", means alone", "#1f77b4", "sparse, means alone"),
    ("", "#d62728", "sparse"),
)
SMOOTHED = 10
"""Updates that a point of a loss is the mean of."""


def save(figure: Any, name: str) -> None:
    """Write a picture beside this file."""
    with written_aside(HERE / name) as aside:
        figure.savefig(aside, dpi=110)


def draw_error_over_cost(plt: Any) -> None:
    """Errors over the keys that a query attends to, with states, means alone, and in another order, at two sizes."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.6), sharey="row", sharex="col", layout="constrained")
    for column, (pixels, tokens) in enumerate(TOKENS.items()):
        rows = {row["self-attention"]: row for row in csv.DictReader((HERE / f"untrained-{pixels}.csv").open())}
        for axis, measured in zip(axes[:, column], ("features", "attention"), strict=True):
            for ending, colour, label in ENDINGS:
                chosen = [rows[f"sparse {density:.1%}{ending}"] for density in DENSITIES]
                points = [(float(row["cost"]), float(row[measured])) for row in chosen]
                axis.plot(*zip(*points, strict=True), "o-", color=colour, label=label)
            default = rows["sparse 2.5%"]
            spot = float(default["cost"]), float(default[measured])
            axis.plot(*spot, "o", ms=13, mfc="none", mec="black", label="the default")
            for name, style in (("MHLA", "--"), ("plain linear", ":")):
                axis.axhline(float(rows[name][measured]), color="#2ca02c", linestyle=style, label=name)
            axis.set_yscale("log")
            axis.grid(alpha=0.3, which="both")
        axes[0, column].set_title(f"{pixels} pixels, {tokens} tokens")
        axes[1, column].set_xlabel("keys per query / N")
    axes[0, 0].set_ylabel("error of the features")
    axes[1, 0].set_ylabel("error of one attention")
    axes[0, 1].legend(fontsize=8)
    save(figure, "error-over-cost.png")


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
    save(figure, "adapted.png")


def main() -> None:
    """Draw both."""
    plt = require_matplotlib()
    draw_error_over_cost(plt)
    draw_adaptation(plt)


if __name__ == "__main__":
    main()
