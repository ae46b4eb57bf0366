"""Residuals: the error of sparse attention measured at a dense step corrects the steps after it.

At a dense step s₀ every attention computes both outputs of its heads and keeps R = dense − sparse, (B, N, C), at low
rank. A later step s returns sparse + f^(s − s₀) R. The fading f is measured per attention and sample at the next dense
step s₁: of the old residual the share a = <R₁, R₀> / <R₀, R₀> is left, so f = a^(1 / (s₁ − s₀)). Where the old residual
has not lasted, ‖R₁ − a R₀‖ > 0.9 ‖R₁‖, nothing is corrected until the next dense step. Steps are counted, not forwards.

Reusing residuals over steps is an idea of DiTFastAttn (arXiv 2406.08552) and QuantSparse (2509.23681). The low rank is
found by a fixed random projection with one power step (Halko et al., arXiv 0909.4061).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..config import Step

Place = tuple[int, int]
"""Number of a layer, and of the call of attention that it makes."""
Errors = dict[Place, torch.Tensor]
""":attr:`Residual.error` of every attention at its latest dense step."""
RANK = 64
"""Rank at which residuals are stored. It keeps 92 to 99 % of a residual's energy in DINOv2-S (studies/real_weights)."""
FIRST_FADING = 0.95
"""Fading per step before a second dense step has measured it (studies/carry)."""
_MOST_AT_A_TIME = 2**24
_LEAST_LEFT = 0.05
"""Smallest share of an old residual that is taken to be left in a new one."""
_LASTS = 0.9
"""Part of the norm of a new residual that the old one may leave unexplained."""


def residual_bytes(tokens: int, channels: int) -> int:
    """Return the bytes of one attention's residual, for one sample and guidance branch."""
    return 2 * min(RANK, tokens, channels) * (tokens + channels)


@dataclass(frozen=True)
class Residual:
    """dense − sparse of one attention at a dense step, as left @ right."""

    left: torch.Tensor
    """(B, N, r), orthonormal columns, in the type of the outputs or bfloat16."""
    right: torch.Tensor
    """(B, r, C), like ``left``."""
    shape: torch.Size
    step: int
    fading: torch.Tensor
    """Per step, float32 (B, 1, 1)."""
    weight: torch.Tensor
    """1, or 0 for samples whose residual has not lasted, float32 (B, 1, 1)."""
    error: torch.Tensor
    """The relative error of this attention at the dense step without and with the correction, float32 (2,)."""

    @classmethod
    def measured(cls, dense: torch.Tensor, sparse: torch.Tensor, step: int, before: "Residual | None") -> "Residual":
        """Return the residual of outputs (B, N, C) at a dense step; ``before`` is that of the dense step before."""
        samples, tokens, channels = dense.shape
        rank = min(RANK, tokens, channels)
        old = before if before is not None and before.shape == dense.shape and before.step < step else None
        size = max(1, _MOST_AT_A_TIME // (samples * channels))
        parts = [slice(start, start + size) for start in range(0, tokens, size)]

        def difference(at: slice) -> torch.Tensor:
            return dense[:, at].float() - sparse[:, at].float()

        basis = sum((r.mT @ (r @ _projection(channels, rank, r.device)) for r in map(difference, parts)), start=_ZERO)
        basis = _orthonormal(_orthonormal(basis))
        gram = sum(((y.mT @ y) for y in (difference(at) @ basis for at in parts)), start=_ZERO)
        mixed = basis @ _inverse_root(gram)
        kept = dense.dtype if dense.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
        left = dense.new_empty((samples, tokens, rank), dtype=kept)
        right = torch.zeros((samples, rank, channels), device=dense.device)
        sums = torch.zeros((4, samples, 1, 1), device=dense.device)
        for at in parts:
            new = difference(at)
            left[:, at] = new @ mixed
            right += left[:, at].float().mT @ new
            past = new if old is None else old.left[:, at].float() @ old.right.float()
            pairs = (new, new), (new, past), (past, past), (exact := dense[:, at].float(), exact)
            sums += torch.stack([(x * y).sum((1, 2), True) for x, y in pairs])
        norm, product, old_norm, whole = sums
        fading, weight, corrected = torch.full_like(norm, FIRST_FADING), torch.ones_like(norm), norm
        if old is not None:
            share = (product / old_norm.clamp_min(1e-30)).clamp(_LEAST_LEFT, 1)
            fading = share ** (1 / (step - old.step))
            weight = (norm - 2 * share * product + share.square() * old_norm <= _LASTS**2 * norm).float()
            used = old.weight * old.fading ** (step - old.step)
            corrected = norm - 2 * used * product + used.square() * old_norm
        error = (torch.stack([norm.sum(), corrected.sum().clamp_min(0)]) / whole.sum().clamp_min(1e-30)).sqrt()
        return cls(left, right.to(kept), dense.shape, step, fading, weight, error)

    def add_to(self, output: torch.Tensor, step: int) -> torch.Tensor:
        """Return an output (B, N, C) of a later step with the faded residual added."""
        factor = self.weight * self.fading ** max(0, step - self.step)  # a solver may look back at an earlier step
        return torch.baddbmm(output, self.left.to(output.dtype), (self.right * factor).to(output.dtype))


_ZERO: Any = 0


@cache
def _projection(channels: int, rank: int, device: torch.device) -> torch.Tensor:
    """Return the fixed random projection (C, r), the same on every device and in every process."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.device("cpu"):
        return torch.randn(channels, rank, generator=generator).to(device)


def _inverse_root(gram: torch.Tensor) -> torch.Tensor:
    """Return L⁻ᵀ of the Cholesky factor of (B, r, r), with a little of its trace so that it always exists."""
    eye = torch.eye(gram.shape[-1], device=gram.device)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    factor, _ = torch.linalg.cholesky_ex(gram + (1e-6 * trace + 1e-30) * eye)
    return torch.linalg.solve_triangular(factor, eye.expand_as(gram), upper=False).mT


def _orthonormal(x: torch.Tensor) -> torch.Tensor:
    """Orthonormalise the columns (B, n, r), by Cholesky QR."""
    return x @ _inverse_root(x.mT @ x)


class BranchState:
    """The residuals of one branch of the guidance, such as with the caption, of all attentions of a model."""

    def __init__(self) -> None:
        self.residuals: dict[Place, Residual] = {}
        self.conditions: Callable[[], torch.Tensor | None] = lambda: None
        """Returns what the model was given beside the latents, such as the caption; None if it is gone."""

    def record(self, place: Place, dense: torch.Tensor, sparse: torch.Tensor, step: int) -> Residual:
        """Keep the residual of an attention at a dense step."""
        self.residuals[place] = Residual.measured(dense, sparse, step, self.residuals.get(place))
        return self.residuals[place]

    def correct(self, place: Place, output: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the output of an attention with the residual that its latest dense step has measured."""
        residual = self.residuals.get(place)
        if residual is None or residual.shape != output.shape:
            return output
        if step.index == step.count - 1:
            del self.residuals[place]
        return residual.add_to(output, step.index)
