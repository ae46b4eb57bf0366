"""Joint attention: text, or another context, in one sequence with the tokens of the grid."""

from typing import Any, ClassVar

import torch
from torch import nn

from ..attention.rope import Rotary
from .forms import AttentionArguments, AttentionForm, AttentionInput, key_padding_mask
from .projecting import Projected, finite, lowered, project_context, project_tokens


class JointForm(AttentionForm):
    """Joint attention: the context, text as a rule, stands in one sequence with the tokens of the grid.

    Context that comes as an argument of its own has projections of its own (``add_q_proj``, …) where the attention has
    them. Where the attention has no such argument, as in blocks of a single stream, the sequence holds the context.
    """

    rotary_argument = "image_rotary_emb"
    has_extra = True
    context_first: ClassVar[bool] = False
    """Whether the context stands before the tokens of the grid."""

    def is_cross_attention(self, arguments: AttentionArguments) -> bool:
        """Never."""
        return False

    def read(self, attn: Any, arguments: AttentionArguments) -> AttentionInput:
        """What the arguments mean.

        Raises:
            ValueError: a mask that is no key-padding mask.
        """
        hidden_states, context = arguments.hidden_states, arguments.encoder_hidden_states
        return AttentionInput(hidden_states, context, self.rotary(attn, arguments), self.key_mask(arguments))

    def key_mask(self, arguments: AttentionArguments) -> torch.Tensor | None:
        """(B, N) of all tokens; by default ``attention_mask`` is one of them all.

        Raises:
            ValueError: a mask that is no key-padding mask.
        """
        mask = arguments.attention_mask
        if mask is None:
            return None
        return key_padding_mask(mask, len(arguments.hidden_states), _count(arguments))

    def mask_beside_grid(self, arguments: AttentionArguments, mask: torch.Tensor | None) -> torch.Tensor | None:
        """(B, N), bool, of a mask (B, n) of the context alone: the tokens of the grid all take part."""
        if mask is None:
            return None
        return self.joined(mask.new_ones(arguments.hidden_states.shape[:2]), mask).bool()

    def rotary(self, attn: Any, arguments: AttentionArguments) -> Rotary | None:
        """RoPE of all tokens; by default (cos, sin), each (N, D), of all tokens or of those without the context."""
        if arguments.rotary_emb is None:
            return None
        cos, sin = (table[None, :, None] for table in arguments.rotary_emb)
        missing = _count(arguments) - cos.shape[1]
        if not missing:
            return cos, sin
        still = cos.new_ones(1, missing, 1, cos.shape[-1])  # text that no angle turns
        return self.joined(cos, still), self.joined(sin, torch.zeros_like(still))

    def joined(self, tokens: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """(B, N, ...) and (B, n, ...) side by side."""
        return torch.cat([context, tokens] if self.context_first else [tokens, context], dim=1)

    def extra(self, given: AttentionInput, tokens: int) -> tuple[int, int]:
        """All tokens but those of the grid.

        Raises:
            ValueError: fewer tokens than the grid has, or more beside a context.
        """
        count = given.hidden_states.shape[1]
        if count < tokens or (given.context is not None and count != tokens):
            super().extra(given, tokens)
        others = count - tokens + (given.context.shape[1] if given.context is not None else 0)
        return (others, 0) if self.context_first else (0, others)

    def project(self, attn: Any, given: AttentionInput) -> Projected:
        """Query, key and value of all tokens, see :meth:`AttentionForm.project`."""
        own = project_tokens(attn, given.hidden_states)
        if given.context is None:
            return lowered(own)
        added = getattr(attn, "add_q_proj", None) is not None
        others = project_context(attn, given.context) if added else project_tokens(attn, given.context)
        query, key, value = (self.joined(x, y) for x, y in zip(own, others, strict=True))
        return lowered((query, key, value))

    def hand_on(self, attn: Any, output: torch.Tensor, given: AttentionInput) -> Any:
        """The tokens of ``hidden_states``, and if the context came by itself, a pair of them and of the context."""
        own, output_context = getattr(attn, "to_out", None), getattr(attn, "to_add_out", None)
        output = output.flatten(2)
        if given.context is None:
            return finite(_through(own, output))
        shared = getattr(attn, "add_q_proj", None) is None
        tokens, context = self._parted(_through(own, output) if shared else output, given)
        if shared:
            return finite(tokens), finite(context)
        return finite(_through(own, tokens)), finite(_through(output_context, context))

    def _parted(self, output: torch.Tensor, given: AttentionInput) -> tuple[torch.Tensor, torch.Tensor]:
        """The inverse of :meth:`joined`."""
        count = given.hidden_states.shape[1]
        others = output.shape[1] - count
        if self.context_first:
            return output[:, others:], output[:, :others]
        return output[:, :count], output[:, count:]


def _count(arguments: AttentionArguments) -> int:
    context = arguments.encoder_hidden_states
    return int(arguments.hidden_states.shape[1]) + (int(context.shape[1]) if context is not None else 0)


def _through(projection: Any, output: torch.Tensor) -> torch.Tensor:
    """Through an output projection, one or a linear layer and dropout, if there is one."""
    for module in projection if isinstance(projection, nn.ModuleList) else [projection]:
        output = module(output) if module is not None else output
    return output
