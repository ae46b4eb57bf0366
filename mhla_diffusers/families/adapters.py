"""Attention adapters: the arguments, inputs and outputs of a model's self-attentions.

A patched attention runs four steps: ``read`` the arguments, ``project`` to query, key and value, attend (MHLA), and
``project_output``. MHLA sees one sequence of N tokens: the token grid in raster order, with extra tokens such as text
before or after it.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ..attention.rope import Rotary, rotary_of_complex, rotary_table, rotated
from ..config import MHLAConfig

Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value of all tokens, after the model's norms: each (B, N, H, D)."""

_ROTARY_NAMES = ("rotary_emb", "image_rotary_emb", "freqs_cis", "query_rotary_emb")
"""Argument names that diffusers' attentions use for RoPE."""
_FLOAT16_MAX = 65504.0


class AttentionArguments(NamedTuple):
    """Arguments of an attention's forward, as diffusers names them."""

    hidden_states: torch.Tensor
    encoder_hidden_states: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    rotary_emb: Any = None
    """RoPE as the model passes it, under any of these names."""
    encoder_hidden_states_mask: torch.Tensor | None = None
    perturbation_mask: torch.Tensor | None = None


class AttentionInput(NamedTuple):
    """What a self-attention attends with."""

    hidden_states: torch.Tensor
    """(B, N, hidden size)."""
    context: torch.Tensor | None = None
    """(B, n, channels): extra tokens passed separately, not in ``hidden_states``."""
    rotary: Rotary | None = None
    """(cos, sin) of all tokens, each (1 or B, N, 1, D)."""
    key_mask: torch.Tensor | None = None
    """(B, N) of all tokens, see :func:`key_padding_mask`."""
    rotary_by_head: Rotary | None = None
    """(cos, sin), each (1 or B, N, H, D), in place of ``rotary`` if heads rotate by different angles."""
    projected: torch.Tensor | None = None
    """(B, N, 3 H D): query, key and value, where one layer makes them together with :attr:`feed_forward`."""
    feed_forward: torch.Tensor | None = None
    """(B, N, ...): hidden channels of the feed-forward that the attention runs too."""
    frames_in_block: int | None = None
    """Frames per block of a block-causal mask; no query may see a later block."""
    attended: torch.Tensor | None = None
    """(B, 1, 1), 1 for samples that attend, 0 for samples of which every token gets its own value."""
    halves: int = 0
    """Channels of query and key whose halves RoPE pairs, see :attr:`AttentionAdapter.pairs_halves`."""


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
    """Whether RoPE rotates each head by different angles; :meth:`project` then applies it, before the feature map."""
    pairs_halves: ClassVar[bool] = False
    """Whether RoPE pairs channel i with channel i + n / 2 of the n that it rotates, as Llama's does.

    MHLA pairs neighbours, so :meth:`project` then puts the channels of query and key in that order.
    """
    rotary_second: ClassVar[bool] = False
    """Whether RoPE is the second argument, in place of a context."""
    idle: ClassVar[tuple[str, ...]] = ()
    """Attributes of an attention that do not run while it is patched."""

    def __init__(self, rotary_argument: str = "rotary_emb") -> None:
        self.rotary_argument = rotary_argument

    def heads(self, attn: Any) -> tuple[int, int]:
        """Number of heads and head dim."""
        return int(attn.heads), int(attn.inner_dim) // int(attn.heads)

    def query_projection(self, attn: Any) -> Any:
        """The linear layer that makes the queries."""
        return attn.to_q

    def output_projection(self, attn: Any) -> Any:
        """The linear layer after the heads; None in blocks that project them in another layer.

        If it also takes other channels, they come after those of the heads.
        """
        found = getattr(attn, "to_out", None)
        return found[0] if found is not None else None

    def projections(self, attn: Any) -> list[nn.Module]:
        """All linear layers that the attention runs."""
        fused, apart = ("to_qkv", "to_added_qkv"), ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
        names = (*(fused if _is_fused(attn) else apart), "to_add_out", "to_gate_logits")
        found = [getattr(attn, name, None) for name in names]
        return [module for module in (*found, self.output_projection(attn)) if module is not None]

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AttentionArguments:
        """Arguments of the attention's forward, from what a hook gets."""
        given = {name: value for name, value in kwargs.items() if name in AttentionArguments._fields}
        rotary = next((kwargs[name] for name in _ROTARY_NAMES if kwargs.get(name) is not None), None)
        given |= {"rotary_emb": rotary} if rotary is not None else {}
        arguments = AttentionArguments(*args, **given)
        return self.received(arguments) if self.rotary_second else arguments

    def received(self, arguments: AttentionArguments) -> AttentionArguments:
        """Arguments of the attention's processor, which some attentions pass in another order."""
        if not self.rotary_second or arguments.encoder_hidden_states is None:
            return arguments
        return arguments._replace(encoder_hidden_states=None, rotary_emb=arguments.encoder_hidden_states)

    def is_cross_attention(self, arguments: AttentionArguments) -> bool:
        """Whether this call is cross-attention, which is never patched."""
        return arguments.encoder_hidden_states is not None

    def read(self, attn: Any, arguments: AttentionArguments) -> AttentionInput:
        """Interpret the arguments of a call.

        Raises:
            ValueError: a mask that is no key-padding mask.
        """
        given = AttentionInput(
            arguments.hidden_states,
            self.context(arguments),
            key_mask=self.key_mask(arguments),
            attended=arguments.perturbation_mask,
        )
        rotary = self.rotary(attn, arguments)
        if rotary is not None and self.pairs_halves:
            channels = rotary[0].shape[-1]
            return given._replace(rotary=_neighbours(rotary, self.heads(attn)[1]), halves=channels)
        return given._replace(rotary_by_head=rotary) if self.rope_by_head else given._replace(rotary=rotary)

    def context(self, arguments: AttentionArguments) -> torch.Tensor | None:
        """Extra tokens that are passed on their own."""
        return None

    def key_mask(self, arguments: AttentionArguments) -> torch.Tensor | None:
        """(B, N) of all tokens; by default ``attention_mask`` covers them all.

        Raises:
            ValueError: a mask that is no key-padding mask.
        """
        mask = arguments.attention_mask
        return None if mask is None else key_padding_mask(mask, len(arguments.hidden_states), _count(arguments))

    def rotary(self, attn: Any, arguments: AttentionArguments) -> Rotary | None:
        """RoPE of all tokens, (cos, sin), each (1 or B, N, 1, D), or None.

        By default the model passes complex numbers (N or B, N, D / 2), tables (N, D), or tables of this shape. With
        :attr:`rope_by_head` each is (1 or B, N, H, D).
        """
        rotary = arguments.rotary_emb
        if isinstance(rotary, torch.Tensor):
            is_double = arguments.hidden_states.dtype == torch.float64
            return rotary_of_complex(rotary if is_double else rotary.to(torch.complex64))
        if rotary is None or rotary[0].ndim != 2:
            return rotary
        return rotary[0][None, :, None], rotary[1][None, :, None]

    def check_order(self, given: AttentionInput, config: MHLAConfig | None) -> None:
        """Raise unless a patch sees the same later frames as the model; by default it must see all."""

    def extra(self, given: AttentionInput, tokens: int) -> tuple[int, int]:
        """Number of extra tokens before and after the grid.

        Args:
            given: input of the attention.
            tokens: of the grid, on this process.

        Raises:
            ValueError: the number of tokens is not that of the grid.
        """
        count = given.hidden_states.shape[1]
        if count != tokens:
            raise ValueError(
                f"The token grid holds {tokens} tokens, but the attention got {count}. Was the processor made for "
                "another resolution, or are the tokens split over processes without "
                "transformer.enable_parallelism(), which MHLA needs? Calibration and audits run on one process, "
                "before enable_parallelism()."
            )
        return 0, 0

    def prepared(self, attn: Any, given: AttentionInput) -> AttentionInput:
        """With what :meth:`project` and :meth:`project_output` share, if a layer of the attention makes it."""
        return given

    def project(self, attn: Any, given: AttentionInput) -> Projected:
        """Query, key and value of all tokens; already rotated if :attr:`rope_by_head`.

        Under autocast a norm may return float32 while the projections return the lower type; all three are then cast to
        the lower type, as in ``scaled_dot_product_attention``.
        """
        return lowered(self.with_rope(attn, project_tokens(attn, given.hidden_states), given))

    def with_rope(self, attn: Any, projected: Projected, given: AttentionInput) -> Projected:
        """Query and key with channels in MHLA's order, and after RoPE that differs between heads, if any."""
        query, key, value = projected
        if given.halves:
            query, key = _paired(query, given.halves), _paired(key, given.halves)
        if given.rotary_by_head is None:
            return query, key, value
        table = rotary_table(given.rotary_by_head)
        if not self.rotates_halves(attn):
            return rotated(query, table), rotated(key, table), value
        query, key = (rotated(x.unflatten(-1, (2, -1)).mT.flatten(-2), table) for x in (query, key))
        query, key = (x.unflatten(-1, (-1, 2)).mT.flatten(-2) for x in (query, key))
        return query, key, value

    def rotates_halves(self, attn: Any) -> bool:
        """Whether RoPE that differs between heads rotates the halves of a head against each other, not neighbours.

        The tables are of neighbours all the same. diffusers calls it ``rope_type="split"``.
        """
        return bool(getattr(attn, "rope_type", None) == "split")

    def ordered(self, given: AttentionInput, output: torch.Tensor) -> torch.Tensor:
        """What the model's own attention computes (B, N, ...), in the order in which :meth:`read` gives the tokens."""
        return output

    def project_output(self, attn: Any, output: torch.Tensor, given: AttentionInput) -> Any:
        """Return value of the attention, from the output of its heads for all tokens (B, N, H, D)."""
        if given.attended is not None:
            value = project_tokens(attn, given.hidden_states)[2].to(output)
            output = torch.lerp(value, output, given.attended.to(output)[..., None])
        if (gate := self.gate(attn, given)) is not None:
            output = output * gate[..., None]
        output = attn.to_out[1](attn.to_out[0](output.flatten(2)))
        if getattr(attn, "residual_connection", False):
            output = output + given.hidden_states
        factor = getattr(attn, "rescale_output_factor", 1.0)
        if factor != 1:
            output = output / factor
        return finite(output)

    def gate(self, attn: Any, given: AttentionInput) -> torch.Tensor | None:
        """(B, N, H), which multiplies the output of each head; None for no gates."""
        return None

    def run(self, processor: Callable[..., Any], attn: Any, arguments: AttentionArguments) -> Any:
        """Return value of the model's own processors."""
        named = {name: value for name, value in arguments._asdict().items() if value is not None}
        if "rotary_emb" in named:
            named[self.rotary_argument] = named.pop("rotary_emb")
        return processor(attn, **named)

    def heads_output(self, attn: Any, found: Any) -> torch.Tensor:
        """Output of the heads, from the input of the output projection, or without one the attention's return value."""
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

    def __init__(self, context_first: bool = False, rotary_argument: str = "image_rotary_emb") -> None:
        super().__init__(rotary_argument)
        self.context_first = context_first

    def is_cross_attention(self, arguments: AttentionArguments) -> bool:
        """Never."""
        return False

    def context(self, arguments: AttentionArguments) -> torch.Tensor | None:
        """The context, if it is passed as its own argument."""
        return arguments.encoder_hidden_states

    def mask_of_context(self, arguments: AttentionArguments, mask: torch.Tensor | None) -> torch.Tensor | None:
        """(B, N), bool, from a mask (B, n) of the context alone: all tokens of the grid take part."""
        if mask is None:
            return None
        return self.joined(mask.new_ones(arguments.hidden_states.shape[:2]), mask).bool()

    def rotary(self, attn: Any, arguments: AttentionArguments) -> Rotary | None:
        """RoPE of all tokens; where the model's RoPE lacks the context, the context is not rotated."""
        rotary = super().rotary(attn, arguments)
        if rotary is None or not (missing := _count(arguments) - rotary[0].shape[1]):
            return rotary
        cos, sin = rotary
        still = cos.new_ones(len(cos), missing, *cos.shape[2:])  # the context is not rotated
        return self.joined(cos, still), self.joined(sin, torch.zeros_like(still))

    def joined(self, tokens: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """(B, N, ...) and (B, n, ...) as one sequence."""
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
        """Query, key and value of all tokens, see :meth:`AttentionAdapter.project`."""
        own = project_tokens(attn, given.hidden_states)
        if given.context is not None:
            others = (project_context if _has_added(attn) else project_tokens)(attn, given.context)
            query, key, value = (self.joined(x, y) for x, y in zip(own, others, strict=True))
            own = query, key, value
        return lowered(self.with_rope(attn, own, given))

    def project_output(self, attn: Any, output: torch.Tensor, given: AttentionInput) -> Any:
        """The tokens of ``hidden_states``; a pair with the context if that is its own argument."""
        own, of_context = getattr(attn, "to_out", None), getattr(attn, "to_add_out", None)
        output = output.flatten(2)
        if given.context is None:
            return finite(_through(own, output))
        if not _has_added(attn):
            output, own, of_context = _through(own, output), None, None
        count = given.context.shape[1]
        at = count if self.context_first else output.shape[1] - count
        first, last = output[:, :at], output[:, at:]
        context, tokens = (first, last) if self.context_first else (last, first)
        return finite(_through(own, tokens)), finite(_through(of_context, context))


class ParallelAdapter(JointAdapter):
    """Single-stream attention that also runs the feed-forward, as in Flux.2.

    One layer, ``to_qkv_mlp_proj``, makes query, key, value and the feed-forward's hidden channels; another, ``to_out``,
    takes heads and feed-forward together.
    """

    def query_projection(self, attn: Any) -> Any:
        """The first layer."""
        return attn.to_qkv_mlp_proj

    def output_projection(self, attn: Any) -> Any:
        """The second layer."""
        return attn.to_out

    def projections(self, attn: Any) -> list[nn.Module]:
        """Both."""
        return [attn.to_qkv_mlp_proj, attn.to_out]

    def received(self, arguments: AttentionArguments) -> AttentionArguments:
        """Mask and RoPE one place earlier than others pass them, for want of a context of its own."""
        mask, rotary = arguments.encoder_hidden_states, arguments.attention_mask
        return AttentionArguments(arguments.hidden_states, None, mask, rotary)

    def prepared(self, attn: Any, given: AttentionInput) -> AttentionInput:
        """Runs the first layer."""
        projected, hidden = attn.to_qkv_mlp_proj(given.hidden_states).tensor_split([3 * attn.inner_dim], dim=-1)
        return given._replace(projected=projected, feed_forward=hidden)

    def project(self, attn: Any, given: AttentionInput) -> Projected:
        """What the first layer made."""
        projected: Any = given.projected if given.projected is not None else self.prepared(attn, given).projected
        return lowered(_in_heads(attn, projected.chunk(3, dim=-1), attn.norm_q, attn.norm_k))

    def project_output(self, attn: Any, output: torch.Tensor, given: AttentionInput) -> Any:
        """By the second layer."""
        return finite(attn.to_out(torch.cat([output.flatten(2), attn.mlp_act_fn(given.feed_forward)], dim=-1)))


def project_tokens(attn: Any, hidden_states: torch.Tensor) -> Projected:
    """Query, key and value by ``to_q``, ``to_k``, ``to_v`` or ``to_qkv``."""
    if _is_fused(attn):
        fused = attn.to_qkv(hidden_states)
        of_keys = (fused.shape[-1] - int(attn.inner_dim)) // 2  # fewer than the queries' where heads share them
        projected = fused.split([int(attn.inner_dim), of_keys, of_keys], dim=-1)
    else:
        projected = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
    return _in_heads(attn, projected, attn.norm_q, attn.norm_k)


def project_context(attn: Any, context: torch.Tensor) -> Projected:
    """The same by the context's own projections."""
    if _is_fused(attn):
        projected = attn.to_added_qkv(context).chunk(3, dim=-1)
    else:
        projected = attn.add_q_proj(context), attn.add_k_proj(context), attn.add_v_proj(context)
    return _in_heads(attn, projected, attn.norm_added_q, attn.norm_added_k)


def _in_heads(attn: Any, projected: tuple[torch.Tensor, ...], norm_query: Any, norm_key: Any) -> Projected:
    """(B, N, H * D) to (B, N, H, D), normed; a norm across heads acts before the split, any other after it.

    Keys and values that groups of heads share are repeated.
    """

    def normed(x: torch.Tensor, norm: Any, heads: int) -> torch.Tensor:
        weight = getattr(norm, "weight", None)
        if weight is not None and weight.numel() == x.shape[-1]:
            return norm(x).unflatten(-1, (heads, -1))
        x = x.unflatten(-1, (heads, -1))
        return x if norm is None else norm(x)

    query, key, value = projected
    shared = query.shape[-1] // key.shape[-1]
    key, value = (normed(x, norm, attn.heads // shared) for x, norm in ((key, norm_key), (value, None)))
    if shared > 1:
        key, value = (x.repeat_interleave(shared, dim=2) for x in (key, value))
    return normed(query, norm_query, attn.heads), key, value


def _paired(x: torch.Tensor, channels: int) -> torch.Tensor:
    """Channels i and i + n / 2 of the first n as neighbours; the others stay where they are."""
    pairs = x[..., :channels].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return pairs if channels == x.shape[-1] else torch.cat([pairs, x[..., channels:]], dim=-1)


def _neighbours(rotary: Rotary, head_dim: int) -> Rotary:
    """Tables of paired halves as tables of paired neighbours; channels that they lack are not rotated."""
    missing = head_dim - rotary[0].shape[-1]
    cos, sin = (_paired(table, table.shape[-1]) for table in rotary)
    return functional.pad(cos, (0, missing), value=1.0), functional.pad(sin, (0, missing))


def lowered(projected: Projected) -> Projected:
    """Query, key and value in the type of autocast, where it is on."""
    query, key, value = projected
    device = value.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and value.dtype != torch.float64:
        lower = torch.get_autocast_dtype(device)
        return query.to(lower), key.to(lower), value.to(lower)
    return query, key, value


def finite(output: torch.Tensor) -> torch.Tensor:
    """Clip float16 to its range, as diffusers' own linear attention does: infinity would spread."""
    return output.clip(-_FLOAT16_MAX, _FLOAT16_MAX) if output.dtype == torch.float16 else output


def key_padding_mask(attention_mask: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """The (B, N) mask of ``mhla_attention`` from the mask that diffusers passes to an attention.

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
    # as in softmax, only differences between the keys of a sample count
    return (mask.float() - mask.float().amax(dim=-1, keepdim=True)).exp()


def _count(arguments: AttentionArguments) -> int:
    """Number of tokens: the grid's and any context passed separately."""
    context = arguments.encoder_hidden_states
    return int(arguments.hidden_states.shape[1]) + (int(context.shape[1]) if context is not None else 0)


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
