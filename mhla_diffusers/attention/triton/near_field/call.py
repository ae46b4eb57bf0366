"""One call of the near field's operators: its tensors and settings."""

from dataclasses import dataclass

import torch

from ...blocks import Shape
from ...near_field import far_field_mask
from ..call import Call


@dataclass(frozen=True)
class NearFieldCall:
    """A query attends to its own block with softmax attention, and to the others through their summaries."""

    far: Call
    """MHLA over the other blocks, which has the query, key and value of both."""
    far_field_weight: torch.Tensor
    """λ, (H,) float32 contiguous."""
    key_mask: torch.Tensor | None
    """(B, N) float32 contiguous, for the keys of the own block."""

    @property
    def has_far_field(self) -> bool:
        """Whether there are other blocks."""
        return self.far.state_shape[2] > 1


def near_field_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    far_field_weight: torch.Tensor,
    grid: Shape,
    blocks: Shape,
    feature_map: str,
    rotary: torch.Tensor | None,
    rope_before: bool,
    eps: float,
    key_mask: torch.Tensor | None,
) -> NearFieldCall:
    """The arguments of the operator, in its order; the diagonal of ``mixing`` must be zero."""
    far = Call(
        query,
        key,
        value,
        mixing,
        tuple(grid),
        tuple(blocks),
        feature_map,
        rotary,
        rope_before,
        normalize=True,
        eps=eps,
        key_mask=far_field_mask(key_mask) if key_mask is not None else None,
        output_norm=None,
        output_gate=None,
    )
    return NearFieldCall(far, far_field_weight, key_mask)
