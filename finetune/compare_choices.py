"""Which exact tiles to choose: the tiny Wan pipeline without any training, on a CPU.

python finetune/compare_choices.py --output outputs/choices

Every row spends the same number of exact pairs, and differs in what a pair is judged by (the softmax weight that it
holds, or what leaving it to its mean does to the output) and in what the budget is shared over (nothing: as many key
tiles for every query tile; the heads of a layer; all layers). λ and β are as in a fresh patch but for the last row.
"""

import argparse
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from mhla_diffusers import MHLAConfig, apply_mhla, calibrate_sparse, mhla_layers
from mhla_diffusers.attention.tile_scores import list_length, spend
from mhla_diffusers.demo.adaptation import Adaptation
from mhla_diffusers.demo.latents import digit_latents
from mhla_diffusers.families import predict
from mhla_diffusers.files import write_text
from mhla_diffusers.patching.exact_calibration import measure_tiles
from mhla_diffusers.tiny import TINY, load_tiny

Scores = dict[str, torch.Tensor]
"""Name of the attention → (H, T, T)."""


def evenly(scores: Scores, share: float) -> Scores:
    """As many key tiles for every query tile."""
    count = list_length(share, next(iter(scores.values())).shape[-1])
    best = {name: score.topk(count, dim=-1).indices for name, score in scores.items()}
    return {name: torch.zeros_like(scores[name], dtype=torch.bool).scatter(-1, best[name], True) for name in scores}


def over_heads(scores: Scores, share: float) -> Scores:
    """The heads of a layer share its budget."""
    return {name: spend([score], share)[0] for name, score in scores.items()}


def over_layers(scores: Scores, share: float) -> Scores:
    """All heads of all layers share one budget."""
    return dict(zip(scores, spend(list(scores.values()), share), strict=True))


class Choices:
    """A fresh patch whose tiles are chosen in one way or another."""

    def __init__(self, adaptation: Adaptation, config: MHLAConfig) -> None:
        self.adaptation, self.config = adaptation, config

    def patched(self) -> Any:
        """The patched pipeline, not calibrated."""
        return apply_mhla(load_tiny(self.adaptation.tiny.family), self.config)

    def run(self, pipe: Any) -> None:
        """What is measured on: training samples at timesteps evenly spread."""
        batch = self.adaptation.batch(pipe.transformer, range(16), (torch.arange(16) + 0.5) / 16)
        predict(pipe.transformer, batch)

    @torch.no_grad()
    def measured(self) -> tuple[Scores, Scores]:
        """Softmax weight, and error, of every pair."""
        pipe = self.patched()
        found, _ = measure_tiles(pipe, lambda: self.run(pipe))
        return {name: m.masses for name, m in found.items()}, {name: m.errors for name, m in found.items()}

    def loss(self, masks: Scores) -> float:
        """Held-out loss with these exact pairs."""
        pipe = self.patched()
        layers: dict[str, Any] = mhla_layers(pipe)
        for name, layer in layers.items():
            layer.sparse.choose(masks[name.removesuffix(".mhla")])
        return fmean(self.adaptation.held_out_losses(pipe))

    def calibrated_losses(self) -> tuple[float, float]:
        """Held-out loss after calibration, with λ and β as in a fresh patch, and as fitted."""
        pipe = self.patched()
        calibrate_sparse(pipe, lambda: self.run(pipe))
        layers: dict[str, Any] = mhla_layers(pipe)
        masks = {name.removesuffix(".mhla"): layer.sparse.mask for name, layer in layers.items()}
        return self.loss(masks), fmean(self.adaptation.held_out_losses(pipe))


def main() -> None:
    """Measure, choose, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/choices"))
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--tiles", type=int, nargs=3, default=[9, 4, 4])
    arguments = parser.parse_args()
    tiny = TINY["wan"]
    data = digit_latents(load_tiny(tiny.family), tiny, arguments.samples, arguments.held_out, seed=1)
    adaptation = Adaptation(tiny, data, arguments.held_out, seed=1, validate_every=1, batch_size=tiny.batch_size)
    config = MHLAConfig(
        blocks=tiny.blocks,
        mixing_per_head=True,
        sparse="calibrated",
        exact_tiles=tuple(arguments.tiles),
        density=arguments.share,
    )
    choices = Choices(adaptation, config)
    masses, errors = choices.measured()
    fresh, fitted = choices.calibrated_losses()
    softmax = fmean(adaptation.held_out_losses(load_tiny(tiny.family)))
    rows = [("softmax attention", "", softmax)]
    for judged_by, scores in (("softmax weight", masses), ("error", errors)):
        for shared, choose in (("nothing", evenly), ("heads", over_heads), ("heads and layers", over_layers)):
            rows.append((judged_by, shared, choices.loss(choose(scores, arguments.share))))
    rows.append(("error × weight of the layer", "heads and layers", fresh))
    rows.append(("the same, λ and β fitted", "heads and layers", fitted))
    lines = ["| judged by | budget shared over | held-out loss |", "| --- | --- | --- |"]
    lines += [f"| {judged_by} | {shared} | {loss:.4f} |" for judged_by, shared, loss in rows]
    write_text("\n".join([*lines, ""]), arguments.output / "choices.md")
    sys.stdout.write((arguments.output / "choices.md").read_text())


if __name__ == "__main__":
    main()
