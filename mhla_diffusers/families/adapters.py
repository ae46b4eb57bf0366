"""Attention adapters: how a model calls its self-attentions, and what it expects back.

A patched attention runs three steps: ``read`` makes :class:`AttentionInputs` of the arguments of the call, MHLA attends
with these, and ``project_output`` makes the attention's return value. MHLA sees one sequence of N tokens: the token
grid in raster order, with extra tokens such as text before or after it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from ..attention.layout import Extra, Shape
from ..attention.rope import Rotary, rotary_of_complex, rotated
from ..config import PatchConfig

Arguments = Mapping[str, Any]
"""Arguments of an attention's call by diffusers' names: hidden_states, encoder_hidden_states, attention_mask,
rotary_emb (RoPE as the model passes it, under any name), encoder_hidden_states_mask and perturbation_mask; and tables,
what :meth:`AttentionAdapter.tables` made of RoPE for another layer. Those that are None are left out."""
Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value of all tokens, after the model's norms: each (B, N, H, D)."""

ONE_SEQUENCE = ("hidden_states", "attention_mask", "rotary_emb")
""":attr:`AttentionAdapter.places` of attentions whose text comes in ``hidden_states``."""
_PLACES = ("hidden_states", "encoder_hidden_states", "attention_mask", "rotary_emb")
_NAMES = {name: name for name in (*_PLACES, "encoder_hidden_states_mask", "perturbation_mask")}
_NAMES |= dict.fromkeys(("image_rotary_emb", "freqs_cis", "query_rotary_emb"), "rotary_emb")
"""Names of arguments of diffusers' attentions → that of :data:`Arguments`."""
_FLOAT16_MAX = 65504.0


@dataclass(frozen=True)
class AttentionInputs:
    """What one self-attention attends with: N tokens, those of the grid and the extra ones.

    If tokens are split over processes, all fields hold this process's tokens.
    """

    query: torch.Tensor
    """(B, N, H, D)."""
    key: torch.Tensor
    """(B, N, H, D); in a sequence that goes on with a fresh state, keys of earlier tokens may stand in front."""
    value: torch.Tensor
    """Like ``key``."""
    hidden_states: torch.Tensor
    """(B, tokens, hidden size), input of the attention, which the gate projects: of all N tokens or of the grid's."""
    grid: Shape
    extra: Extra = (0, 0)
    """How many tokens stand before and after those of the grid."""
    rotary: Rotary | None = None
    """(cos, sin) of all tokens, each (1 or B, N, 1, D)."""
    key_mask: torch.Tensor | None = None
    """(B, N) of all tokens, see :func:`key_padding_mask`."""
    context: torch.Tensor | None = None
    """(B, n, channels): extra tokens that the model passes on their own, and gets back on their own."""
    attended: torch.Tensor | None = None
    """(B, 1, 1): 1 for samples that attend, 0 for samples whose tokens each get their own value."""
    feed_forward: torch.Tensor | None = None
    """(B, N, ...): hidden channels of the feed-forward that the attention runs too."""


class AttentionAdapter:
    """Self-attention over the tokens of the grid alone, as in Wan, SANA and DiT.

    Adapters have no state. They expect ``to_q``, ``to_k``, ``to_v``, ``to_out``, optional ``norm_q`` and ``norm_k``,
    and ``heads``, as diffusers' ``Attention`` and its relatives have them.

    Args:
        rotary_argument: the own processors' argument name for RoPE.
    """

    has_extra: bool = False
    """Whether there are extra tokens."""
    rope_by_head: ClassVar[bool] = False
    """Whether RoPE rotates each head by different angles; :meth:`read` then applies it, before the feature map."""
    pairs_halves: ClassVar[bool] = False
    """Whether RoPE pairs channel i with channel i + n / 2 of the n that it rotates, as Llama's does.

    MHLA pairs neighbours, so :meth:`read` then puts the channels of query and key in that order.
    """
    places: ClassVar[tuple[str, ...]] = _PLACES
    """Names of the arguments that the attention takes, and passes to its processor, by place."""
    inputs: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
    """Attributes of an attention that are linear layers before the heads, that of the queries first; some are absent.
    """
    outputs: ClassVar[tuple[str, ...]] = ("to_out",)
    """Attributes that may hold the linear layer after the heads, or a list that begins with it."""

    def __init__(self, rotary_argument: str = "rotary_emb") -> None:
        self.rotary_argument = rotary_argument

    def heads(self, attn: Any) -> tuple[int, int]:
        """Return the number of heads and head dim."""
        return int(attn.heads), int(attn.inner_dim) // int(attn.heads)

    def output_projection(self, attn: Any) -> Any:
        """Return the linear layer after the heads; None in blocks that project them in another layer.

        If it also takes other channels, they come after those of the heads.
        """
        found = next((getattr(attn, name) for name in self.outputs if hasattr(attn, name)), None)
        return found[0] if isinstance(found, nn.ModuleList) else found

    def projections(self, attn: Any) -> list[nn.Module]:
        """Return all linear layers that the attention runs."""
        names = (*(("to_qkv", "to_added_qkv") if _is_fused(attn) else self.inputs), "to_add_out", "to_gate_logits")
        found = [getattr(attn, name, None) for name in names]
        return [module for module in (*found, self.output_projection(attn)) if module is not None]

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Name the arguments of an attention's forward, or of its processor's call without the attention."""
        given = [*zip(self.places, args, strict=False), *((_NAMES.get(name), value) for name, value in kwargs.items())]
        return {name: value for name, value in given if name is not None and value is not None}

    def read(self, attn: Any, arguments: Arguments, grid: Shape, tokens: int) -> AttentionInputs:
        """Interpret the arguments of a call, and project to query, key and value.

        Args:
            attn: the attention.
            arguments: of its call.
            grid: token grid.
            tokens: of the grid, on this process.

        Raises:
            ValueError: a mask that is not a key-padding mask, or another number of tokens than the grid has.
        """
        extra = self.extra(arguments, tokens)
        rotary = arguments["tables"] if "tables" in arguments else self.tables(attn, arguments)
        query, key, value = self.project(attn, arguments)
        if rotary is not None and self.pairs_halves:
            channels = arguments["rotary_emb"][0].shape[-1]
            query, key = _paired(query, channels), _paired(key, channels)
        elif rotary is not None and self.rope_by_head:
            if self.rotates_halves(attn):
                query, key = (x.unflatten(-1, (2, -1)).mT.flatten(-2) for x in (query, key))
            query, key = (rotated(x, rotary) for x in (query, key))
            if self.rotates_halves(attn):
                query, key = (x.unflatten(-1, (-1, 2)).mT.flatten(-2) for x in (query, key))
            rotary = None
        device = value.device.type
        if device != "meta" and torch.is_autocast_enabled(device) and value.dtype != torch.float64:
            # a norm may return float32 and projections the lower type: as in scaled_dot_product_attention
            query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
        return AttentionInputs(
            query,
            key,
            value,
            arguments["hidden_states"],
            grid,
            extra,
            rotary,
            self.key_mask(arguments),
            arguments.get("encoder_hidden_states"),
            arguments.get("perturbation_mask"),
        )

    def key_mask(self, arguments: Arguments) -> torch.Tensor | None:
        """Return (B, N), by default from ``attention_mask``; ValueError for one that is not a key-padding mask."""
        mask, hidden_states = arguments.get("attention_mask"), arguments["hidden_states"]
        return None if mask is None else key_padding_mask(mask, len(hidden_states), _count(arguments))

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return RoPE of all tokens, (cos, sin), each (1 or B, N, 1, D), or None.

        By default the model passes complex numbers (N or B, N, D / 2), tables (N, D), or tables of this shape. With
        :attr:`rope_by_head` each is (1 or B, N, H, D).
        """
        rotary: Any = arguments.get("rotary_emb")
        if isinstance(rotary, torch.Tensor):
            is_double = arguments["hidden_states"].dtype == torch.float64
            return rotary_of_complex(rotary if is_double else rotary.to(torch.complex64))
        if rotary is None or rotary[0].ndim != 2:
            found: Rotary | None = rotary
            return found
        return rotary[0][None, :, None], rotary[1][None, :, None]

    def tables(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return what :meth:`rotary` returns for the order of channels that :meth:`read` puts query and key in."""
        rotary = self.rotary(attn, arguments)
        if rotary is None or not self.pairs_halves:
            return rotary
        cos, sin = (_paired(table, table.shape[-1]) for table in rotary)
        still = self.heads(attn)[1] - cos.shape[-1]  # channels that the tables lack are not rotated
        return functional.pad(cos, (0, still), value=1.0), functional.pad(sin, (0, still))

    def check_order(self, arguments: Arguments, config: PatchConfig | None) -> None:
        """Raise unless a patch sees the same later frames as the model; by default it must see all."""

    def extra(self, arguments: Arguments, tokens: int) -> Extra:
        """Count the extra tokens before and after the grid.

        Args:
            arguments: of the attention's call.
            tokens: of the grid, on this process.

        Raises:
            ValueError: the number of tokens is not that of the grid.
        """
        count = arguments["hidden_states"].shape[1]
        if count != tokens:
            raise ValueError(
                f"The token grid holds {tokens} tokens, but the attention got {count}. Was the processor made for "
                "another resolution, or are the tokens split over processes? Then use "
                "transformer.enable_parallelism(); calibration and audits run on one process, before it."
            )
        return 0, 0

    def project(self, attn: Any, arguments: Arguments) -> Projected:
        """Return query, key and value of all tokens, before RoPE."""
        return project_tokens(attn, arguments["hidden_states"])

    def rotates_halves(self, attn: Any) -> bool:
        """Whether RoPE that differs between heads rotates the halves of a head against each other, not neighbours.

        The tables are of neighbours all the same. diffusers calls it ``rope_type="split"``.
        """
        return bool(getattr(attn, "rope_type", None) == "split")

    def ordered(self, arguments: Arguments, output: torch.Tensor) -> torch.Tensor:
        """Reorder the output of the model's own attention, (B, N, ...), as :meth:`read` orders the tokens."""
        return output

    def project_output(self, attn: Any, output: torch.Tensor, inputs: AttentionInputs) -> Any:
        """Return value of the attention, from the output of its heads for all tokens (B, N, H, D)."""
        output = attn.to_out[1](attn.to_out[0](output.flatten(2)))
        if getattr(attn, "residual_connection", False):
            output = output + inputs.hidden_states
        factor = getattr(attn, "rescale_output_factor", 1.0)
        if factor != 1:
            output = output / factor
        return finite(output)

    def run(self, processor: Callable[..., Any], attn: Any, arguments: Arguments) -> Any:
        """Return value of the model's own processors."""
        named = dict(arguments)
        if "rotary_emb" in named:
            named[self.rotary_argument] = named.pop("rotary_emb")
        return processor(attn, **named)

    def heads_output(self, attn: Any, found: Any) -> torch.Tensor:
        """Return the heads' output, given the output projection's input or, without one, the attention's output."""
        output: torch.Tensor = found[0] if isinstance(found, tuple) else found
        heads, head_dim = self.heads(attn)
        return output[..., : heads * head_dim]


class JointAdapter(AttentionAdapter):
    """Joint attention: the context, usually text, is in one sequence with the tokens of the grid.

    A context that is passed as its own argument uses its own projections (``add_q_proj``, …) if the attention has them.
    In single-stream blocks, which have no such argument, ``hidden_states`` holds the context.

    Args:
        context_first: whether the context comes before the grid.
        rotary_argument: see :class:`AttentionAdapter`.
    """

    has_extra = True
    text_mask: ClassVar[str | None] = None
    """Argument that masks the context alone, (B, n); every token of the grid then takes part."""

    def __init__(self, context_first: bool = False, rotary_argument: str = "image_rotary_emb") -> None:
        super().__init__(rotary_argument)
        self.context_first = context_first

    def key_mask(self, arguments: Arguments) -> torch.Tensor | None:
        """Return (B, N) of all tokens, bool if :attr:`text_mask` names the mask."""
        if self.text_mask is None:
            return super().key_mask(arguments)
        if (mask := arguments.get(self.text_mask)) is None:
            return None
        return self.joined(mask.new_ones(arguments["hidden_states"].shape[:2]), mask).bool()

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return RoPE of all tokens; where the model's RoPE lacks the context, the context is not rotated."""
        rotary = super().rotary(attn, arguments)
        if rotary is None or not (missing := _count(arguments) - rotary[0].shape[1]):
            return rotary
        cos, sin = rotary
        still = cos.new_ones(len(cos), missing, *cos.shape[2:])
        return self.joined(cos, still), self.joined(sin, torch.zeros_like(still))

    def joined(self, tokens: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Return (B, N, ...) and (B, n, ...) as one sequence."""
        return torch.cat([context, tokens] if self.context_first else [tokens, context], dim=1)

    def extra(self, arguments: Arguments, tokens: int) -> Extra:
        """Count all tokens but the grid's; ValueError for fewer than the grid has, or more beside a context."""
        count, context = arguments["hidden_states"].shape[1], arguments.get("encoder_hidden_states")
        if count < tokens or (context is not None and count != tokens):
            super().extra(arguments, tokens)
        others = count - tokens + (context.shape[1] if context is not None else 0)
        return (others, 0) if self.context_first else (0, others)

    def project(self, attn: Any, arguments: Arguments) -> Projected:
        """Return query, key and value of all tokens, before RoPE."""
        own, context = project_tokens(attn, arguments["hidden_states"]), arguments.get("encoder_hidden_states")
        if context is None:
            return own
        others = (project_context if _has_added(attn) else project_tokens)(attn, context)
        query, key, value = (self.joined(x, y) for x, y in zip(own, others, strict=True))
        return query, key, value

    def project_output(self, attn: Any, output: torch.Tensor, inputs: AttentionInputs) -> Any:
        """Return the tokens of ``hidden_states``; a pair with the context if that is its own argument."""
        own, of_context = getattr(attn, "to_out", None), getattr(attn, "to_add_out", None)
        output = output.flatten(2)
        if inputs.context is None:
            return finite(_through(own, output))
        if not _has_added(attn):
            output, own, of_context = _through(own, output), None, None
        count = inputs.context.shape[1]
        at = count if self.context_first else output.shape[1] - count
        first, last = output[:, :at], output[:, at:]
        context, tokens = (first, last) if self.context_first else (last, first)
        return finite(_through(own, tokens)), finite(_through(of_context, context))


class ParallelAdapter(JointAdapter):
    """Single-stream attention that also runs the feed-forward, as in Flux.2.

    One layer, ``to_qkv_mlp_proj``, makes query, key, value and the feed-forward's hidden channels; another, ``to_out``,
    takes heads and feed-forward together.
    """

    places = ONE_SEQUENCE
    inputs = ("to_qkv_mlp_proj",)

    def read(self, attn: Any, arguments: Arguments, grid: Shape, tokens: int) -> AttentionInputs:
        """Run the first layer, and keep the feed-forward's channels for the second."""
        fused = attn.to_qkv_mlp_proj(arguments["hidden_states"])
        of_heads = 3 * attn.inner_dim * fused.shape[-1] // attn.to_qkv_mlp_proj.out_features  # may be split by heads
        projected, hidden = fused.tensor_split([of_heads], dim=-1)
        return replace(super().read(attn, {**arguments, "projected": projected}, grid, tokens), feed_forward=hidden)

    def project(self, attn: Any, arguments: Arguments) -> Projected:
        """Split what the first layer made into heads."""
        return _in_heads(attn, arguments["projected"].chunk(3, dim=-1), attn.norm_q, attn.norm_k)

    def project_output(self, attn: Any, output: torch.Tensor, inputs: AttentionInputs) -> Any:
        """Run the second layer on heads and feed-forward."""
        return finite(attn.to_out(torch.cat([output.flatten(2), attn.mlp_act_fn(inputs.feed_forward)], dim=-1)))


def without(arguments: Arguments, name: str) -> dict[str, Any]:
    """Return the arguments but one."""
    return {other: value for other, value in arguments.items() if other != name}


def project_tokens(attn: Any, hidden_states: torch.Tensor) -> Projected:
    """Return query, key and value by ``to_q``, ``to_k``, ``to_v`` or ``to_qkv``."""
    if _is_fused(attn):
        fused = attn.to_qkv(hidden_states)
        of_keys = (fused.shape[-1] - int(attn.inner_dim)) // 2  # fewer than the queries' where heads share them
        projected = fused.split([int(attn.inner_dim), of_keys, of_keys], dim=-1)
    else:
        projected = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
    return _in_heads(attn, projected, getattr(attn, "norm_q", None), getattr(attn, "norm_k", None))


def project_context(attn: Any, context: torch.Tensor) -> Projected:
    """Return query, key and value of the context by its own projections."""
    if _is_fused(attn):
        projected = attn.to_added_qkv(context).chunk(3, dim=-1)
    else:
        projected = attn.add_q_proj(context), attn.add_k_proj(context), attn.add_v_proj(context)
    norms = (getattr(attn, name, None) for name in ("norm_added_q", "norm_added_k"))
    return _in_heads(attn, projected, *norms)


def _in_heads(attn: Any, projected: tuple[torch.Tensor, ...], norm_query: Any, norm_key: Any) -> Projected:
    """Bring (B, N, H * D) to (B, N, H, D), normed; a norm across heads acts before the split, any other after it.

    Keys and values that groups of heads share are repeated.
    """
    head_dim = int(attn.inner_dim) // int(attn.heads)  # the heads may be those of one process

    def normed(x: torch.Tensor, norm: Any) -> torch.Tensor:
        weight = getattr(norm, "weight", None)
        if weight is not None and weight.numel() == x.shape[-1]:
            return norm(x).unflatten(-1, (-1, head_dim))
        x = x.unflatten(-1, (-1, head_dim))
        return x if norm is None else norm(x)

    query, key, value = projected
    shared = query.shape[-1] // key.shape[-1]
    key, value = normed(key, norm_key), normed(value, None)
    if shared > 1:
        key, value = (x.repeat_interleave(shared, dim=2) for x in (key, value))
    return normed(query, norm_query), key, value


def _paired(x: torch.Tensor, channels: int) -> torch.Tensor:
    """Return channels i and i + n / 2 of the first n as neighbours; the others stay where they are."""
    pairs = x[..., :channels].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return pairs if channels == x.shape[-1] else torch.cat([pairs, x[..., channels:]], dim=-1)


def finite(output: torch.Tensor) -> torch.Tensor:
    """Clip float16 to its range, as diffusers' own linear attention does: infinity would spread."""
    return output.clip(-_FLOAT16_MAX, _FLOAT16_MAX) if output.dtype == torch.float16 else output


def key_padding_mask(attention_mask: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """Return the (B, N) mask of ``mhla_attention`` from the mask that diffusers passes to an attention.

    A bias that softmax attention adds to a key's scores multiplies the key's weight by its exponential, which linear
    attention can do too. It cannot apply a mask that differs between queries.

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
    # as in softmax, only differences between the keys of a sample count; of one that is -inf throughout, none does
    mask = mask.float()
    return (mask - mask.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(mask.dtype).min)).exp()


def _count(arguments: Arguments) -> int:
    """Return the number of tokens: the grid's and any context passed separately."""
    context = arguments.get("encoder_hidden_states")
    return int(arguments["hidden_states"].shape[1]) + (int(context.shape[1]) if context is not None else 0)


def _is_fused(attn: Any) -> bool:
    """Whether its projections are fused, which some classes of diffusers do not know of."""
    return bool(getattr(attn, "fused_projections", False))


def _has_added(attn: Any) -> bool:
    return getattr(attn, "add_q_proj", None) is not None


def _through(projection: Any, output: torch.Tensor) -> torch.Tensor:
    """Apply the output projection, if any: one module, or a linear layer and dropout."""
    for module in projection if isinstance(projection, nn.ModuleList) else [projection]:
        output = module(output) if module is not None else output
    return output
