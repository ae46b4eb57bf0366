"""How MHLA reads the call of a self-attention: before RoPE, which acts behind the feature map.

A patched attention runs three steps: ``read`` makes :class:`AttentionInputs` of the arguments of the call, MHLA attends
with these, and ``project_output`` makes the attention's return value. One adapter each serves SANA, the plain attention
of DiT and PixArt, and Wan with those that share its attention.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import nn

from ..attention.layout import Extra, Shape
from ..attention.rope import Rotary, rotary_of_complex
from ..config import PatchConfig

Arguments = Mapping[str, Any]
"""Arguments of an attention's call by diffusers' names: hidden_states, encoder_hidden_states, attention_mask,
rotary_emb (RoPE as the model passes it, under any name), encoder_hidden_states_mask and perturbation_mask; and tables,
what :meth:`AttentionAdapter.tables` made of RoPE for another layer. Those that are None are left out."""


Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value of all tokens, after the model's norms: each (B, N, H, D)."""

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
        class_path: end of the import path of the self-attentions' class, if no other family uses that class.
        processor: import path of the processor that the library gives the self-attentions; empty for their class's
            default, or of a class without one ``AttnProcessor2_0``.
        cross_processor: the same of the cross-attentions.
        perturbed_processors: class of a perturbed-attention guidance processor → number of parts of the batch; it
            perturbs the last part.
    """

    has_extra: bool = False
    """Whether there are extra tokens."""
    rope_by_head: ClassVar[bool] = False
    """Whether RoPE rotates each head by different angles; :meth:`read` then applies it, before the feature map."""
    places: ClassVar[tuple[str, ...]] = _PLACES
    """Names of the arguments that the attention takes, and passes to its processor, by place."""
    inputs: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
    """Attributes of an attention that are linear layers before the heads, that of the queries first; some are absent.
    """
    outputs: ClassVar[tuple[str, ...]] = ("to_out",)
    """Attributes that may hold the linear layer after the heads, or a list that begins with it."""

    def __init__(
        self,
        rotary_argument: str = "rotary_emb",
        *,
        class_path: str | None = None,
        processor: str = "",
        cross_processor: str = "",
        perturbed_processors: Mapping[str, int] | None = None,
    ) -> None:
        self.rotary_argument, self.class_path = rotary_argument, class_path
        self.processor, self.cross_processor = processor, cross_processor
        self.perturbed_processors = perturbed_processors or {}

    def of(self, attn: Any) -> "AttentionAdapter":
        """Return the adapter of one self-attention, by default this one."""
        return self

    def own_processor(self, attn: Any) -> Any:
        """Return a fresh processor of the kind that the library gives a self-attention."""
        return usual_processor(attn, self.processor)

    def recognises(self, attn: Any) -> bool:
        """Whether a self-attention of an unknown model belongs to this family, by its class."""
        path = f".{type(attn).__module__}.{type(attn).__qualname__}"
        return self.class_path is not None and path.endswith(f".{self.class_path}")

    def recognises_cross(self, attn: Any) -> bool:
        """Whether a cross-attention of an unknown model needs this family's processor."""
        return False

    def grid_of(self, attn: Any, rotary: Rotary) -> tuple[int, ...] | None:
        """Return the token grid that RoPE tables of a self-attention imply; None for another model, or no grid.

        With it diffusers' own ``set_attn_processor`` needs no ``grid``.
        """
        return None

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
        query, key, rotary = self.rotated(attn, arguments, query, key, rotary)
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

    def rotated(
        self, attn: Any, arguments: Arguments, query: torch.Tensor, key: torch.Tensor, rotary: Rotary | None
    ) -> tuple[torch.Tensor, torch.Tensor, Rotary | None]:
        """Return query and key, each (B, N, H, D), and the RoPE that MHLA applies: by default all of it."""
        return query, key, rotary

    def key_mask(self, arguments: Arguments) -> torch.Tensor | None:
        """Return (B, N), by default from ``attention_mask``; ValueError for one that is not a key-padding mask."""
        mask, hidden_states = arguments.get("attention_mask"), arguments["hidden_states"]
        return None if mask is None else key_padding_mask(mask, len(hidden_states), _count(arguments))

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return RoPE of all tokens, (cos, sin), each (1 or B, N, 1, D), or None.

        By default the model passes complex numbers (N or B, N, D / 2), tables (N, D), or tables of this shape.
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
        return self.rotary(attn, arguments)

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


class SanaAdapter(AttentionAdapter):
    """SANA's; SANA 1.5 and SANA-Video norm query and key across heads, which diffusers' common processor does not."""

    def recognises_cross(self, attn: Any) -> bool:
        """Whether it norms query and key across heads."""
        weight = getattr(attn.norm_q, "weight", None)
        return weight is not None and weight.numel() == attn.inner_dim


class WanAdapter(AttentionAdapter):
    """Wan's, and that of relatives with a copy of its class."""

    def grid_of(self, attn: Any, rotary: Rotary) -> tuple[int, ...] | None:
        """Read the grid from the sines."""
        return grid_of_table(rotary[1]) if self.recognises(attn) else None


_LAID_OUT: set[tuple[int, ...]] = set()
"""Shapes of unflattened tables whose coordinates were checked to be the token grid."""


def grid_of_table(table: Any) -> tuple[int, ...]:
    """Return the token grid of RoPE's sines, (1, N, 1, D), read from the three coordinates of every token.

    The table is a flattened (frames, height, width, D), and outside of inference mode a view of it. Once the
    coordinates have been checked against that shape, the shape alone is enough, and nothing waits for the device.
    """
    laid_out = tuple(table._base.shape[:-1]) if table._base is not None else None
    if laid_out in _LAID_OUT:
        return laid_out
    if not hasattr(table, "token_grid"):  # all layers of a forward get the same table
        # an axis has a third of the channels; that of frames also the remainder
        height = 2 * (table.shape[-1] // 6)
        frames = table.shape[-1] - 2 * height
        # the first channel of an axis is sin(coordinate), which is 0 only for coordinate 0
        at_zero = table[0, :, 0, [0, frames, frames + height]] == 0
        along = [at_zero[:, [axis for axis in range(3) if axis != counted]].all(dim=1).sum() for counted in range(3)]
        table.token_grid = tuple(torch.stack(along).tolist())
    if table.token_grid == laid_out:
        _LAID_OUT.add(table.token_grid)
    grid: tuple[int, ...] = table.token_grid
    return grid


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


def project_tokens(attn: Any, hidden_states: torch.Tensor) -> Projected:
    """Return query, key and value by ``to_q``, ``to_k``, ``to_v`` or ``to_qkv``."""
    if _is_fused(attn):
        fused = attn.to_qkv(hidden_states)
        of_keys = (fused.shape[-1] - int(attn.inner_dim)) // 2  # fewer than the queries' where heads share them
        projected = fused.split([int(attn.inner_dim), of_keys, of_keys], dim=-1)
    else:
        projected = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
    return _in_heads(attn, projected, getattr(attn, "norm_q", None), getattr(attn, "norm_k", None))


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


def finite(output: torch.Tensor) -> torch.Tensor:
    """Clip float16 to its range, as diffusers' own linear attention does: infinity would spread."""
    return output.clip(-_FLOAT16_MAX, _FLOAT16_MAX) if output.dtype == torch.float16 else output


def _count(arguments: Arguments) -> int:
    """Return the number of tokens: the grid's and any context passed separately."""
    context = arguments.get("encoder_hidden_states")
    return int(arguments["hidden_states"].shape[1]) + (int(context.shape[1]) if context is not None else 0)


def _is_fused(attn: Any) -> bool:
    """Whether its projections are fused, which some classes of diffusers do not know of."""
    return bool(getattr(attn, "fused_projections", False))


def part_of(block: Any, path: str) -> Any:
    """Return what a dotted path of attributes names in a block; None if it is absent."""
    return reduce(lambda found, name: getattr(found, name, None), path.split("."), block)


def usual_processor(attn: Any, path: str = "") -> Any:
    """Return a fresh processor: of an import path, else of the default of an attention's class."""
    own = None if path else getattr(type(attn), "_default_processor_cls", None)
    return (own or imported(path or "diffusers.models.attention_processor.AttnProcessor2_0"))()


def imported(path: str) -> Any:
    """Import what a dotted path names."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
