"""How the self-attentions of a model are called, what they attend with, and what they return: their form.

The attention itself sees one sequence of N tokens: those of the token grid in raster order, and before or after them
the tokens outside the grid, such as text in joint attention. A form tells which of the arguments they come from.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from ..attention.rotary import Rotary, rotary_table, rotated

_FLOAT16_MAX = 65504.0
_ROTARY_NAMES = ("rotary_emb", "image_rotary_emb", "freqs_cis")
"""What diffusers' attentions call what is handed to them for RoPE."""


class AttentionArguments(NamedTuple):
    """Arguments of an attention's forward, as diffusers names them."""

    hidden_states: torch.Tensor
    encoder_hidden_states: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    rotary_emb: Any = None
    """Whatever the model hands over for RoPE, under one of several names."""
    encoder_hidden_states_mask: torch.Tensor | None = None


def attention_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AttentionArguments:
    """Read what an attention's forward was called with, as a hook gets it."""
    given = {name: value for name, value in kwargs.items() if name in AttentionArguments._fields}
    told = next((kwargs[name] for name in _ROTARY_NAMES if kwargs.get(name) is not None), None)
    given |= {"rotary_emb": told} if told is not None else {}
    return AttentionArguments(*args, **given)


class AttentionInput(NamedTuple):
    """What a self-attention attends with."""

    hidden_states: torch.Tensor
    """(B, N, hidden size)."""
    context: torch.Tensor | None = None
    """(B, n, channels): tokens outside the grid that come by themselves; the N of the others are then without them."""
    rotary: Rotary | None = None
    """(cos, sin) of all tokens, each (1 or B, N, 1, D)."""
    key_mask: torch.Tensor | None = None
    """(B, N) of all tokens, see :func:`key_padding_mask`."""
    rotary_by_head: Rotary | None = None
    """(cos, sin) of all tokens, each (1 or B, N, H, D), in place of ``rotary`` where heads turn by other angles."""


Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value of all tokens, normed where the model norms them: each (B, N, H, D)."""


class AttentionForm:
    """Self-attention over the tokens of the grid alone, beside a cross-attention: Wan's, SANA's, DiT's.

    Forms have no state. They expect ``to_q``, ``to_k``, ``to_v``, ``to_out``, optional ``norm_q`` and ``norm_k``, and
    ``heads``, as diffusers' ``Attention`` and its relatives have them.
    """

    rotary_argument: ClassVar[str] = "rotary_emb"
    """What the model's own processors call what is handed to them for RoPE."""
    has_outside: ClassVar[bool] = False
    """Whether there are tokens outside the grid."""
    rope_by_head: ClassVar[bool] = False
    """Whether RoPE turns every head by other angles; it is then applied to what :meth:`project` gives, before φ."""

    def is_cross_attention(self, arguments: AttentionArguments) -> bool:
        """Whether a call is that of a cross-attention, which is none of ours."""
        return arguments.encoder_hidden_states is not None

    def read(self, attn: Any, arguments: AttentionArguments) -> AttentionInput:
        """What the arguments mean.

        Raises:
            ValueError: a mask that is no key-padding mask.
        """
        hidden_states, mask = arguments.hidden_states, arguments.attention_mask
        key_mask = key_padding_mask(mask, *hidden_states.shape[:2]) if mask is not None else None
        rotary = self.rotary(attn, arguments)
        if self.rope_by_head:
            return AttentionInput(hidden_states, None, None, key_mask, rotary)
        return AttentionInput(hidden_states, None, rotary, key_mask)

    def rotary(self, attn: Any, arguments: AttentionArguments) -> Rotary | None:
        """RoPE of all tokens, (cos, sin), each (1 or B, N, 1, D); None for none.

        By default as it is handed over, or of (N, D) each. With :attr:`rope_by_head` each is (1 or B, N, H, D).
        """
        if arguments.rotary_emb is None or arguments.rotary_emb[0].ndim != 2:
            rotary: Rotary | None = arguments.rotary_emb
            return rotary
        cos, sin = (table[None, :, None] for table in arguments.rotary_emb)
        return cos, sin

    def outside(self, given: AttentionInput, grid: tuple[int, ...]) -> tuple[int, int]:
        """How many tokens stand before and after those of the grid.

        Args:
            given: input of the attention.
            grid: token grid.

        Raises:
            ValueError: the attention has other tokens than the grid.
        """
        count, tokens = given.hidden_states.shape[1], math.prod(grid)
        if count != tokens:
            raise ValueError(
                f"The token grid {grid} holds {tokens} tokens, but the attention got {count}. Was the processor made "
                "for another resolution, or are the tokens split over devices? MHLA does not run under context "
                "parallelism."
            )
        return 0, 0

    def project(self, attn: Any, given: AttentionInput) -> Projected:
        """Query, key and value of all tokens, query and key turned already where :attr:`rope_by_head`.

        Under autocast a norm may give float32 where the projections give the lower type; all three then take the lower
        one, as those of ``scaled_dot_product_attention`` do.
        """
        query, key, value = project_tokens(attn, given.hidden_states)
        if given.rotary_by_head is not None:
            table = rotary_table(given.rotary_by_head)
            query, key = rotated(query, table), rotated(key, table)
        return lowered((query, key, value))

    def hand_on(self, attn: Any, output: torch.Tensor, given: AttentionInput) -> Any:
        """What the attention returns, from the output of its heads for all tokens (B, N, H, D)."""
        output = attn.to_out[1](attn.to_out[0](output.flatten(2)))
        if getattr(attn, "residual_connection", False):
            output = output + given.hidden_states
        factor = getattr(attn, "rescale_output_factor", 1.0)
        if factor != 1:
            output = output / factor
        return finite(output)

    def run(self, processor: Callable[..., Any], attn: Any, arguments: AttentionArguments) -> Any:
        """What one of the model's own processors returns."""
        named = {name: value for name, value in arguments._asdict().items() if value is not None}
        if "rotary_emb" in named:
            named[self.rotary_argument] = named.pop("rotary_emb")
        return processor(attn, **named)

    def heads_output(self, returned: Any) -> torch.Tensor:
        """What the heads of an attention without an output projection give, from what it returns."""
        output: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
        return output

    def projections(self, attn: Any) -> list[nn.Module]:
        """All linear layers of the attention."""
        names = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
        found = [getattr(attn, name, None) for name in names]
        return [module for module in (*found, output_projection(attn)) if module is not None]


class JointForm(AttentionForm):
    """Joint attention: the context, text as a rule, stands in one sequence with the tokens of the grid.

    Context that comes as an argument of its own has projections of its own (``add_q_proj``, …) where the attention has
    them. Where the attention has no such argument, as in blocks of a single stream, the sequence holds the context.
    """

    rotary_argument = "image_rotary_emb"
    has_outside = True
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

    def outside(self, given: AttentionInput, grid: tuple[int, ...]) -> tuple[int, int]:
        """All tokens but those of the grid.

        Raises:
            ValueError: fewer tokens than the grid has, or more beside a context.
        """
        count, tokens = given.hidden_states.shape[1], math.prod(grid)
        if count < tokens or (given.context is not None and count != tokens):
            super().outside(given, grid)
        others = count - tokens + (given.context.shape[1] if given.context is not None else 0)
        return (others, 0) if self.context_first else (0, others)

    def project(self, attn: Any, given: AttentionInput) -> Projected:
        """Query, key and value of all tokens, see :meth:`AttentionForm.project`."""
        own = project_tokens(attn, given.hidden_states)
        if given.context is None:
            return lowered(own)
        added = getattr(attn, "add_q_proj", None) is not None
        others = _project_context(attn, given.context) if added else project_tokens(attn, given.context)
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


def output_projection(attn: Any) -> Any:
    """The linear layer behind an attention's heads; None in blocks where another layer projects them."""
    found = getattr(attn, "to_out", None)
    return found[0] if found is not None else None


def project_tokens(attn: Any, hidden_states: torch.Tensor) -> Projected:
    """Query, key and value (B, N, H, D) by ``to_q``, ``to_k``, ``to_v`` or ``to_qkv``."""
    if attn.fused_projections:
        projected = attn.to_qkv(hidden_states).chunk(3, dim=-1)
    else:
        projected = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
    return _in_heads(attn, projected, attn.norm_q, attn.norm_k)


def _project_context(attn: Any, context: torch.Tensor) -> Projected:
    """The same by the projections that a context has of its own."""
    if attn.fused_projections:
        projected = attn.to_added_qkv(context).chunk(3, dim=-1)
    else:
        projected = attn.add_q_proj(context), attn.add_k_proj(context), attn.add_v_proj(context)
    return _in_heads(attn, projected, attn.norm_added_q, attn.norm_added_k)


def _in_heads(attn: Any, projected: tuple[torch.Tensor, ...], norm_query: Any, norm_key: Any) -> Projected:
    query, key, value = projected
    return (
        _normed_heads(query, norm_query, attn.heads),
        _normed_heads(key, norm_key, attn.heads),
        value.unflatten(-1, (attn.heads, -1)),
    )


def lowered(projected: Projected) -> Projected:
    """Query, key and value in the type of autocast, where it is on."""
    query, key, value = projected
    device = value.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and value.dtype != torch.float64:
        lower = torch.get_autocast_dtype(device)
        return query.to(lower), key.to(lower), value.to(lower)
    return query, key, value


def finite(output: torch.Tensor) -> torch.Tensor:
    """In float16 clipped to what it can hold, as diffusers' own linear attention is: infinity would spread."""
    return output.clip(-_FLOAT16_MAX, _FLOAT16_MAX) if output.dtype == torch.float16 else output


def _normed_heads(x: torch.Tensor, norm: Any, heads: int) -> torch.Tensor:
    """(B, N, H * D) to (B, N, H, D); a norm across heads acts before the split, another one after it."""
    if norm is None:
        return x.unflatten(-1, (heads, -1))
    if _is_across_heads(norm, x.shape[-1]):
        x = norm(x)
        return x.unflatten(-1, (heads, -1))
    x = norm(x.unflatten(-1, (heads, -1)))
    return x


def _is_across_heads(norm: Any, inner_dim: int) -> bool:
    """Whether a query or key norm has a weight for every channel of all heads."""
    weight = getattr(norm, "weight", None)
    return weight is not None and weight.numel() == inner_dim


def key_padding_mask(attention_mask: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """The (B, N) mask of ``mhla_attention`` from the mask that diffusers passes to an attention.

    A bias that softmax attention adds to the scores of a key multiplies the key's weight by its exponential, which
    linear attention can do as well; a mask that differs between queries it cannot.

    Raises:
        ValueError: if the mask is not the same for every query, or holds integers.
    """
    shape = tuple(attention_mask.shape)
    if shape not in ((batch, tokens), (batch, 1, tokens), (batch, 1, 1, tokens)):
        raise ValueError(
            f"MHLA honours key-padding masks of shape ({batch}, {tokens}), ({batch}, 1, {tokens}) or "
            f"({batch}, 1, 1, {tokens}); got {shape}. A mask that differs between queries has no linear form: "
            "keep softmax attention in this layer with layers=[...]."
        )
    if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
        raise ValueError(
            f"A mask of {attention_mask.dtype} is ambiguous; give bool (True takes part) or the floating point bias "
            "that softmax attention would add, for example mask.bool()."
        )
    mask = attention_mask.reshape(batch, tokens)
    if mask.dtype == torch.bool:
        return mask
    # as in softmax, only differences between the keys of a sample count
    return (mask.float() - mask.float().amax(dim=-1, keepdim=True)).exp()
