"""One call of the near field's operators: its tensors and settings."""

from dataclasses import dataclass, replace

import torch

from ...call import Call
from ...near_field import far_field_mask
from ..arguments import state_shape


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
        return state_shape(self.far)[2] > 1


def near_field_call(call: Call) -> NearFieldCall:
    """From a call with a far field weight and without norm and gate; the diagonal of its ``mixing`` must be zero."""
    mask = far_field_mask(call.key_mask) if call.key_mask is not None else None
    far = replace(call, key_mask=mask, far_field_weight=None)
    assert call.far_field_weight is not None
    return NearFieldCall(far, call.far_field_weight, call.key_mask)
