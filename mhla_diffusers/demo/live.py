"""The live part of the demo: two attentions adapt from scratch, and their loss curves are drawn as they fall."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..files import written_aside
from ..reporting import require_matplotlib
from .adaptation import Adaptation, held_out_curve
from .variants import Variant, recipe_of

Curves = dict[str, list[tuple[int, float]]]
"""Name of the attention → (updates, held-out loss)."""
LIVE = ("exact", "linear")
"""Which variants are adapted before one's eyes; SANA has MHLA instead."""
_TRANSFER = 0.4
"""Updates of attention transfer before them, as a part of the updates, where the recipe has any."""


def adapt_live(variants: list[Variant], updates: int, adaptation: Adaptation, goal: float, folder: Path) -> Curves:
    """Adapt each variant, shortened recipe, from the weights that the pipeline ships with.

    Args:
        variants: which.
        updates: of each, end to end; cheap ones of attention transfer come before.
        adaptation: what they have in common.
        goal: held-out loss of the control, drawn as a line.
        folder: the runs go into ``live``, the picture into ``loss.png``, redrawn whenever the loss was measured.

    Returns:
        The curves.
    """
    curves: Curves = {}
    shutil.rmtree(folder / "live", ignore_errors=True)  # of an earlier demo, perhaps of another length
    for variant in variants:
        run = folder / "live" / variant.short

        def redraw(_: torch.nn.Module, __: Path, name: str = variant.name, run: Path = run) -> None:
            draw_loss_curves({**curves, name: held_out_curve(run)}, goal, folder / "loss.png")

        recipe = recipe_of(variant, adaptation.tiny)
        transfer = round(_TRANSFER * updates) if recipe.transfer_steps else 0
        short = replace(recipe, steps=updates, transfer_steps=transfer)
        adaptation.adapt(adaptation.patched(variant.patch), short, run, redraw)
        curves[variant.name] = held_out_curve(run)
    return curves


def draw_loss_curves(curves: Curves, goal: float, file: Path) -> None:
    """Held-out loss over the updates of each adaptation, with the control's as a line."""
    plt: Any = require_matplotlib()
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.axhline(goal, color="black", linestyle="--", label="control")
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), marker="o", markersize=3, label=name)
    axes.set_xlabel("updates")
    axes.set_ylabel("held-out loss")
    axes.set_yscale("log")
    axes.legend()
    with written_aside(file) as aside:
        figure.savefig(aside, dpi=110)
    plt.close(figure)
