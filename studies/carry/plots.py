"""Draw psnr-over-cost.png from the tables beside this file.

python studies/carry/plots.py
"""

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from mhla_diffusers.config import PROFILES

HERE = Path(__file__).parent
SHOWN = {
    "density alone": (lambda row: not row["dense steps"] and not row["cache"], "C7", "s"),
    "dense steps, dropped": (lambda row: row["corrected"] == "no" and not row["cache"], "C1", "x"),
    "dense steps, corrected": (lambda row: row["corrected"] == "yes" and not row["cache"], "C0", "o"),
    "a step cache alone": (lambda row: row["cache"], "C2", "^"),
}


def main() -> None:
    """Draw a panel for each table."""
    names = "wan-50", "wan-20", "wan-long-20"
    figure, axes = pyplot.subplots(1, len(names), figsize=(4.6 * len(names), 3.6), squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], names, strict=True):
        rows = list(csv.DictReader((HERE / f"{name}.csv").open()))
        for label, (belongs, colour, marker) in SHOWN.items():
            points = [(float(row["cost"]), float(row["psnr"]), row) for row in rows if belongs(row)]
            points = sorted((point for point in points if point[1] < 90), key=lambda point: point[0])
            if not points:
                continue
            style = "-" if label == "density alone" else "none"
            axis.plot(
                *zip(*[point[:2] for point in points], strict=True),
                linestyle=style,
                color=colour,
                marker=marker,
                label=label,
            )
            if label == "dense steps, corrected":
                for cost, psnr, row in points:
                    dense, density = row["dense steps"], f"{float(row['density']):.1%}".replace(".0%", "%")
                    label = dense if dense in PROFILES else density
                    axis.annotate(label, (cost, psnr), (3, 4), textcoords="offset points", fontsize=7, color=colour)
        pipeline, _, steps = name.rpartition("-")
        axis.set(
            xlabel="keys that a query attends to / N, one pooled key for 32", title=f"tiny-{pipeline}, {steps} steps"
        )
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("PSNR to the unpatched samples (dB)")
    axes[0][0].legend(fontsize=7)
    figure.savefig(HERE / "psnr-over-cost.png", dpi=120)


if __name__ == "__main__":
    main()
