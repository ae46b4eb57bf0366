"""How a residual is best carried from dense steps to the others: faded, as it is, or with its second difference.

    OMP_NUM_THREADS=1 python studies/carry/second_difference.py

tiny-wan at a density of 5 %, ten clips, residuals at full rank. The residual R₁ of the latest dense step s₁ is added at
step s in one of these ways; R₀ is that of the dense step s₀ before it:

- dropped: not at all;
- kept: R₁;
- faded: f^(s − s₁) R₁, with f measured, as the package does (mhla_diffusers/patching/residual.py);
- second difference: R₁ + (s − s₁) / (s₁ − s₀) · (R₁ − R₀), which takes the change of the residual to be steady, as
  QuantSparse (arXiv 2509.23681) does. Dense steps are those of the others, or as many in pairs of neighbours.

Rows go to second-difference.csv beside this file: PSNR to the unpatched clips, and by how much a clip is above "faded",
each with its standard error over the clips.
"""

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from carry import frames
from torch import nn

from mhla_diffusers import apply_mhla
from mhla_diffusers.config import NOTHING_DENSE
from mhla_diffusers.generation.similarity import psnr
from mhla_diffusers.patching.residual import FIRST_FADING
from mhla_diffusers.tiny import load_tiny
from studies.adaptation.digits import TINY
from studies.adaptation.judging import Yardstick

FILE = Path(__file__).parent / "second-difference.csv"
DENSITY, SCENES = 0.05, 10
LASTS, LEAST_LEFT = 0.9, 0.05


class Seen(NamedTuple):
    """What a dense step showed."""

    step: int
    residual: torch.Tensor
    """dense − sparse, (B, N, C)."""


Rule = Callable[[Seen, Seen | None, int], torch.Tensor | float]
"""Latest dense step, the one before it, present step → what is added."""


def faded(new: Seen, old: Seen | None, step: int) -> torch.Tensor | float:
    """What is left of the residual; 0 for a sample whose residual has not lasted."""
    if old is None:
        return FIRST_FADING ** (step - new.step) * new.residual
    norm, product, old_norm = (
        (a * b).sum((1, 2), keepdim=True)
        for a, b in ((new.residual,) * 2, (new.residual, old.residual), (old.residual,) * 2)
    )
    share = (product / old_norm).clamp(LEAST_LEFT, 1)
    lasts = norm - 2 * share * product + share.square() * old_norm <= LASTS**2 * norm
    return lasts * share ** ((step - new.step) / (new.step - old.step)) * new.residual


def second_difference(new: Seen, old: Seen | None, step: int) -> torch.Tensor | float:
    """The residual and its change since the dense step before, as often as it may have happened again."""
    if old is None:
        return new.residual
    return new.residual + (step - new.step) / (new.step - old.step) * (new.residual - old.residual)


RULES: dict[str, Rule] = {
    "dropped": lambda new, old, step: 0.0,
    "kept": lambda new, old, step: new.residual,
    "faded": faded,
    "second difference": second_difference,
}


class Carrying(nn.Module):
    """A patched self-attention with the unpatched one beside it, which runs as well at dense steps.

    Args:
        sparse: patched.
        dense: the same of an unpatched model.
        rule: what is added at the other steps.
        dense_steps: indices.
    """

    def __init__(self, sparse: nn.Module, dense: nn.Module, rule: Rule, dense_steps: set[int]) -> None:
        super().__init__()
        self.sparse, self.dense, self.rule, self.dense_steps = sparse, dense, rule, dense_steps
        self.calls = 0
        self.seen: dict[int, list[Seen]] = {0: [], 1: []}
        """By the branch of guidance: tiny-wan is called with the caption and then without."""

    def forward(self, *arguments: Any) -> torch.Tensor:
        """(B, N, C)."""
        step, branch = divmod(self.calls, 2)
        self.calls += 1
        output, seen = self.sparse(*arguments), self.seen[branch]
        if step in self.dense_steps:
            exact = self.dense(*arguments)
            seen.append(Seen(step, exact - output))
            return exact
        before = seen[-2] if len(seen) > 1 else None
        return output + self.rule(seen[-1], before, step)


def clips(yardstick: Yardstick, steps: int, rule: Rule, dense_steps: set[int]) -> torch.Tensor:
    """Generate all scenes."""
    pipe, own = load_tiny("wan"), load_tiny("wan").transformer
    apply_mhla(pipe, density=DENSITY, **NOTHING_DENSE)
    for block, exact in zip(pipe.transformer.blocks, own.blocks, strict=True):
        block.attn1 = Carrying(block.attn1, exact.attn1, rule, dense_steps)
    return frames(yardstick.generate(pipe, num_inference_steps=steps))


def main() -> None:
    """Measure all rules."""
    yardstick = Yardstick(TINY["wan"], TINY["wan"].random_scenes(SCENES, seed=1), seed=1)
    with FILE.open("w", newline="") as output:
        table = csv.writer(output)
        table.writerow(["steps", "dense steps", "rule", "psnr", "psnr error", "above faded", "above faded error"])
        for steps, number in ((50, 5), (20, 5)):
            unpatched = frames(yardstick.generate(load_tiny("wan"), num_inference_steps=steps))
            spread = set(range(0, steps, steps // number))
            pairs = {start + i for start in range(0, steps, 2 * steps // number) for i in (0, 1)}
            runs = [(name, name, spread) for name in ("faded", "dropped", "kept", "second difference")]
            runs.append(("second difference, pairs", "second difference", pairs))
            first: list[float] = []
            for name, rule, dense_steps in runs:
                made = clips(yardstick, steps, RULES[rule], dense_steps)
                ratios = [float(psnr(a, b).mean()) for a, b in zip(made, unpatched, strict=True)]
                first = first or ratios
                cells = [len(dense_steps), name]
                for numbers in (ratios, [a - b for a, b in zip(ratios, first, strict=True)]):
                    cells += [f"{fmean(numbers):.2f}", f"{stdev(numbers) / len(numbers) ** 0.5:.2f}"]
                table.writerow([steps, *cells])
                output.flush()
                sys.stdout.write(f"{steps} | {' | '.join(map(str, cells))}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
