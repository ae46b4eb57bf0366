"""How processors read the calls of attentions that MHLA is not trained for. To be deleted with them.

Also what only the step counter of those processors needs: the time that a forward is given.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..attention.layout import Extra, Shape
from ..attention.rope import Rotary, rotary_of_complex, rotated
from ..config import CausalConfig, PatchConfig
from .mhla import (
    Arguments,
    AttentionAdapter,
    AttentionInputs,
    Projected,
    WanAdapter,
    _count,
    _in_heads,
    _is_fused,
    finite,
    grid_of_table,
    project_tokens,
)

ONE_SEQUENCE = ("hidden_states", "attention_mask", "rotary_emb")
""":attr:`AttentionAdapter.places` of attentions whose text comes in ``hidden_states``."""


class OldAdapter(AttentionAdapter):
    """Attention whose RoPE differs between heads, or pairs other channels than neighbours."""

    pairs_halves: ClassVar[bool] = False
    """Whether RoPE pairs channel i with channel i + n / 2 of the n that it rotates, as Llama's does.

    MHLA pairs neighbours, so :meth:`read` then puts the channels of query and key in that order.
    """

    def rotates_halves(self, attn: Any) -> bool:
        """Whether RoPE that differs between heads rotates the halves of a head against each other, not neighbours.

        The tables are of neighbours all the same. diffusers calls it ``rope_type="split"``.
        """
        return bool(getattr(attn, "rope_type", None) == "split")

    def rotated(
        self, attn: Any, arguments: Arguments, query: Tensor, key: Tensor, rotary: Rotary | None
    ) -> tuple[Tensor, Tensor, Rotary | None]:
        """Pair channels as MHLA does, or rotate here where heads differ."""
        if rotary is None:
            return query, key, None
        if self.pairs_halves:
            channels = arguments["rotary_emb"][0].shape[-1]
            return _paired(query, channels), _paired(key, channels), rotary
        if not self.rope_by_head:
            return query, key, rotary
        if self.rotates_halves(attn):
            query, key = (x.unflatten(-1, (2, -1)).mT.flatten(-2) for x in (query, key))
        query, key = (rotated(x, rotary) for x in (query, key))
        if self.rotates_halves(attn):
            query, key = (x.unflatten(-1, (-1, 2)).mT.flatten(-2) for x in (query, key))
        return query, key, None

    def tables(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return what :meth:`rotary` returns for the order of channels that :meth:`read` puts query and key in."""
        rotary = self.rotary(attn, arguments)
        if rotary is None or not self.pairs_halves:
            return rotary
        cos, sin = (_paired(table, table.shape[-1]) for table in rotary)
        still = self.heads(attn)[1] - cos.shape[-1]  # channels that the tables lack are not rotated
        return functional.pad(cos, (0, still), value=1.0), functional.pad(sin, (0, still))


class JointAdapter(OldAdapter):
    """Joint attention: the context, usually text, is in one sequence with the tokens of the grid.

    A context that is passed as its own argument uses its own projections (``add_q_proj``, …) if the attention has them.
    In single-stream blocks, which have no such argument, ``hidden_states`` holds the context.

    Args:
        context_first: whether the context comes before the grid.
        rotary_argument: see :class:`AttentionAdapter`, as the others.
    """

    has_extra = True
    text_mask: ClassVar[str | None] = None
    """Argument that masks the context alone, (B, n); every token of the grid then takes part."""

    def __init__(self, context_first: bool = False, rotary_argument: str = "image_rotary_emb", **others: Any) -> None:
        super().__init__(rotary_argument, **others)
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


def project_context(attn: Any, context: torch.Tensor) -> Projected:
    """Return query, key and value of the context by its own projections."""
    if _is_fused(attn):
        projected = attn.to_added_qkv(context).chunk(3, dim=-1)
    else:
        projected = attn.add_q_proj(context), attn.add_k_proj(context), attn.add_v_proj(context)
    norms = (getattr(attn, name, None) for name in ("norm_added_q", "norm_added_k"))
    return _in_heads(attn, projected, *norms)


def _paired(x: torch.Tensor, channels: int) -> torch.Tensor:
    """Return channels i and i + n / 2 of the first n as neighbours; the others stay where they are."""
    pairs = x[..., :channels].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return pairs if channels == x.shape[-1] else torch.cat([pairs, x[..., channels:]], dim=-1)


def _has_added(attn: Any) -> bool:
    return getattr(attn, "add_q_proj", None) is not None


def _through(projection: Any, output: torch.Tensor) -> torch.Tensor:
    """Apply the output projection, if any: one module, or a linear layer and dropout."""
    for module in projection if isinstance(projection, nn.ModuleList) else [projection]:
        output = module(output) if module is not None else output
    return output


class AllegroAdapter(OldAdapter):
    """Channels that RoPE pairs become neighbours; its tables are of single axes, with the place of every token."""

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return (cos, sin), each (1, N, 1, D), for channels as :meth:`project` orders them."""
        if "rotary_emb" not in arguments:
            return None
        tables, places = arguments["rotary_emb"]
        found = [[functional.embedding(at, x) for x in pair] for at, pair in zip(places, tables, strict=True)]
        cos, sin = (_in_pairs(torch.cat(axes, dim=-1))[:, :, None] for axes in zip(*found, strict=True))
        return cos, sin

    def project(self, attn: Any, arguments: Arguments) -> Projected:
        """Reorder the channels of query and key."""
        query, key, value = super().project(attn, arguments)
        return _in_pairs(query), _in_pairs(key), value


def _in_pairs(x: Tensor) -> Tensor:
    """Return channels i and i + D / 6 of each third of D as neighbours."""
    return x.unflatten(-1, (3, 2, -1)).transpose(-1, -2).flatten(-3)


class AnyFlowAdapter(AttentionAdapter):
    """RoPE comes as complex numbers (1, 1, N, D / 2), one table for the query and one for the key."""

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return RoPE of the query, which is that of the key."""
        return super().rotary(attn, {**arguments, "rotary_emb": arguments["rotary_emb"]["query"][0]})


class ChromaAdapter(JointAdapter):
    """Blocks make a mask of pairs, (B, 1, N, N), of one of tokens."""

    def key_mask(self, arguments: Arguments) -> Tensor | None:
        """Take (B, N) of the last query, which is of the image."""
        if (mask := arguments.get("attention_mask")) is not None:
            arguments = {**arguments, "attention_mask": mask[:, :, -1:]}
        return super().key_mask(arguments)


class CogView4Adapter(JointAdapter):
    """RoPE pairs halves; no mask."""

    pairs_halves = True

    def key_mask(self, arguments: Arguments) -> Tensor | None:
        """Refuse a mask with ValueError."""
        if "attention_mask" in arguments:
            raise ValueError(
                "CogView4's own attention adds its attention_mask to the scores, 1 or 0, and so hides no token; MHLA "
                "does not repeat that. Leave attention_mask out, as CogView4Pipeline does."
            )
        return None

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return the tables on the device of the tokens."""
        if (rotary := arguments.get("rotary_emb")) is not None:
            device = arguments["hidden_states"].device
            arguments = {**arguments, "rotary_emb": tuple(table.to(device) for table in rotary)}
        return super().rotary(attn, arguments)


class EasyAnimateAdapter(JointAdapter):
    """Blocks whose projections serve both streams do not project the output of the text."""

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Return the tokens of the video, projected, and those of the text."""
        tokens, text = super().project_output(attn, output, inputs)
        has_own = getattr(attn, "to_add_out", None) is not None
        return tokens, text if has_own or inputs.context is None else output.flatten(2)[:, : inputs.context.shape[1]]


class Flux3Adapter(JointAdapter):
    """All tokens come in one argument."""

    places = ONE_SEQUENCE


class FramepackAdapter(JointAdapter):
    """Frames of the history stand before the grid, and the context after it."""

    def extra(self, arguments: Arguments, tokens: int) -> Extra:
        """Count the tokens before and after the grid; ValueError for fewer than the grid has."""
        count = arguments["hidden_states"].shape[1]
        if count < tokens:
            AttentionAdapter.extra(self, arguments, tokens)
        return count - tokens, arguments["encoder_hidden_states"].shape[1]

    def read(self, attn: Any, arguments: Arguments, grid: Shape, tokens: int) -> AttentionInputs:
        """Leave the history to query, key and value: a gate reads the tokens of the grid."""
        inputs = super().read(attn, arguments, grid, tokens)
        return replace(inputs, hidden_states=inputs.hidden_states[:, inputs.extra[0] :])


_LENGTH = "original_context_length"


class HeliosAdapter(AttentionAdapter):
    """Frames of the history stand before the grid."""

    has_extra = True

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Keep the number of the window's tokens, the fifth argument, which the model's own processor needs."""
        fifth = args[4] if len(args) > 4 else kwargs.get(_LENGTH, kwargs.get("key_rotary_emb"))
        return {**super().arguments(args, kwargs), _LENGTH: fifth}

    def extra(self, arguments: Arguments, tokens: int) -> Extra:
        """Count the tokens before the grid; ValueError if the window is not the grid."""
        if arguments[_LENGTH] != tokens:
            super().extra(arguments, tokens)
        return arguments["hidden_states"].shape[1] - tokens, 0

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return RoPE of all tokens; the model passes cosines and sines in one table (B, N, 2 D)."""
        cos, sin = arguments["rotary_emb"].unsqueeze(2).chunk(2, dim=-1)
        return cos, sin

    def project(self, attn: Any, arguments: Arguments) -> Projected:
        """Weigh the keys of the history as the model does, which RoPE does not change."""
        query, key, value = super().project(attn, arguments)
        history = key.shape[1] - arguments[_LENGTH]
        if attn.is_amplify_history and history:
            scale = 1 + torch.sigmoid(attn.history_key_scale) * (attn.max_scale - 1)
            key = torch.cat([key[:, :history] * scale[:, None], key[:, history:]], dim=1)
        return query, key, value


class HunyuanVideo15Adapter(JointAdapter):
    """The mask covers the text alone."""

    text_mask = "attention_mask"

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Set the heads' output to 0 for masked text: the model masks queries as well."""
        if inputs.key_mask is not None:
            output = output * inputs.key_mask[:, :, None, None]
        return super().project_output(attn, output, inputs)


class Ideogram4Adapter(JointAdapter):
    """All tokens come in one argument, and the mask says which belong together."""

    places = ONE_SEQUENCE
    pairs_halves = True

    def heads(self, attn: Any) -> tuple[int, int]:
        """Return the number of heads and head dim."""
        return int(attn.num_heads), int(attn.head_dim)

    def key_mask(self, arguments: Arguments) -> Tensor | None:
        """Return the keys (B, N) that the last token sees, which is of the image."""
        mask: Tensor = arguments["attention_mask"]
        return mask[:, 0, -1]

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return RoPE of all tokens, given as (B, N, D)."""
        cos, sin = arguments["rotary_emb"]
        return cos.unsqueeze(2), sin.unsqueeze(2)

    def project(self, attn: Any, arguments: Arguments) -> Projected:
        """Return query, key and value of all tokens, before RoPE."""
        projected = (getattr(attn, name)(arguments["hidden_states"]) for name in self.inputs[:3])
        query, key, value = (x.unflatten(-1, (-1, attn.head_dim)) for x in projected)
        return attn.norm_q(query), attn.norm_k(key), value

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Give padding its own value, the mean of values that are all the same."""
        if inputs.key_mask is not None:
            output = output.where(inputs.key_mask[..., None, None], inputs.value)
        return super().project_output(attn, output, inputs)


class Kandinsky5Adapter(OldAdapter):
    """Names of its own, and RoPE as matrices, which rounds what it rotates."""

    rope_by_head = True
    inputs = ("to_query", "to_key", "to_value")
    outputs = ("out_layer",)

    def heads(self, attn: Any) -> tuple[int, int]:
        """Return the number of heads and head dim."""
        return int(attn.num_heads), int(attn.to_query.out_features) // int(attn.num_heads)

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return None, since :meth:`project` rotates."""
        return None

    def project(self, attn: Any, arguments: Arguments) -> Projected:
        """Return query and key after RoPE, given as (1 or B, N, 1, D / 2, 2, 2)."""
        head_dim, matrices = self.heads(attn)[1], arguments.get("rotary_emb")

        def rotated(x: Tensor, norm: Any) -> Tensor:
            normed = norm(x.float()).type_as(x)
            if matrices is None:
                return normed
            turned = (matrices * normed.unflatten(-1, (-1, 1, 2)).float()).sum(dim=-1).flatten(-2)
            return turned.bfloat16().type_as(x)

        projected = (getattr(attn, name)(arguments["hidden_states"]) for name in self.inputs)
        query, key, value = (x.unflatten(-1, (-1, head_dim)) for x in projected)
        return rotated(query, attn.query_norm), rotated(key, attn.key_norm), value

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Run the output layer."""
        return finite(attn.out_layer(output.flatten(2)))


class Kandinsky6Adapter(Kandinsky5Adapter):
    """RoPE as matrices (N, 1, D / 2, 2, 2), one for query and key."""

    rope_by_head = False

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return the cosines and sines of the matrices."""
        matrices = arguments["rotary_emb"]
        cos, sin = (matrices[..., row, 0].repeat_interleave(2, dim=-1)[None] for row in (0, 1))
        return cos, sin

    def project(self, attn: Any, arguments: Arguments) -> Projected:
        """Return query, key and value of all tokens, before RoPE."""
        projected = (getattr(attn, name)(arguments["hidden_states"]) for name in self.inputs)
        query, key, value = (x.unflatten(-1, (-1, self.heads(attn)[1])) for x in projected)
        return attn.query_norm(query), attn.key_norm(key), value

    def run(self, processor: Any, attn: Any, arguments: Arguments) -> Any:
        """Return value of the model's own processor, which takes RoPE of query and key apart."""
        return processor(attn, **arguments, rotary_emb_kv=arguments["rotary_emb"])


class Krea2Adapter(JointAdapter):
    """All tokens come in one argument, heads share keys, and a gate of the input weighs the output."""

    places = ONE_SEQUENCE

    def heads(self, attn: Any) -> tuple[int, int]:
        """Return the number of the queries' heads and head dim."""
        return int(attn.num_heads), int(attn.head_dim)

    def projections(self, attn: Any) -> list[torch.nn.Module]:
        """Add the gate."""
        return [*super().projections(attn), attn.to_gate]

    def project(self, attn: Any, arguments: Arguments) -> Projected:
        """Return query, key and value of all tokens, keys and values repeated for the heads that share them."""
        projected = (getattr(attn, name)(arguments["hidden_states"]) for name in self.inputs[:3])
        query, key, value = (x.unflatten(-1, (-1, attn.head_dim)) for x in projected)
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (attn.norm_k(key), value))
        return attn.norm_q(query), key, value

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Gate the channels of the heads, then project them."""
        gate = attn.to_gate(inputs.hidden_states).sigmoid()
        return super().project_output(attn, output * gate.unflatten(-1, output.shape[2:]), inputs)


class LTXAdapter(OldAdapter):
    """Conditioning frames of ``LTXConditionPipeline`` come before the grid, with their own positions."""

    rope_by_head = True

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return (cos, sin), each (B, N, H, D), of tables over the channels of all heads."""
        if "rotary_emb" not in arguments:
            return None
        cos, sin = (table.unflatten(2, (attn.heads, -1)) for table in arguments["rotary_emb"])
        return cos, sin

    def extra(self, arguments: Arguments, tokens: int) -> tuple[int, int]:
        """Count all tokens before the grid, which comes last."""
        others = arguments["hidden_states"].shape[1] - tokens
        return (others, 0) if others > 0 else super().extra(arguments, tokens)


class LTX2Adapter(LTXAdapter):
    """Further tokens come after the grid, each head may have a gate, and guidance may skip the attention of samples."""

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return (cos, sin), each (B, N, H, D); of halves tables (B, H, N, D / 2), an angle for each channel pair."""
        if "rotary_emb" not in arguments or not self.rotates_halves(attn):
            return super().rotary(attn, arguments)
        cos, sin = (table.transpose(1, 2).repeat_interleave(2, dim=-1) for table in arguments["rotary_emb"])
        return cos, sin

    def extra(self, arguments: Arguments, tokens: int) -> tuple[int, int]:
        """Count all tokens after the grid, which comes first."""
        return super().extra(arguments, tokens)[::-1]

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Give tokens of samples that guidance skips their own value, then gate the heads."""
        if inputs.attended is not None:
            output = torch.lerp(inputs.value.to(output), output, inputs.attended.to(output)[..., None])
        if attn.to_gate_logits is not None:
            output = output * (2 * attn.to_gate_logits(inputs.hidden_states).sigmoid())[..., None]
        return super().project_output(attn, output, inputs)


class Lumina2Adapter(JointAdapter):
    """Moves the padding of shorter samples to the front, so that every image is at the end, and its output back."""

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Leave out ``encoder_hidden_states``, which are the same tokens again."""
        return without(super().arguments(args, kwargs), "encoder_hidden_states")

    def read(self, attn: Any, arguments: Arguments, grid: Shape, tokens: int) -> AttentionInputs:
        """Move the padding."""
        if (mask := self.key_mask(arguments)) is not None:
            padding = _padding(mask)
            raw = arguments["attention_mask"].reshape(mask.shape)
            rolled: dict[str, Any] = {
                "hidden_states": _rolled(arguments["hidden_states"], padding),
                "attention_mask": _rolled(raw, padding),
            }
            if "tables" not in arguments:
                rolled["tables"] = self.tables(attn, arguments)
            arguments = {**arguments, **rolled}
        return super().read(attn, arguments, grid, tokens)

    def tables(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Move the padding."""
        tables, mask = super().tables(attn, arguments), self.key_mask(arguments)
        if tables is None or mask is None:
            return tables
        padding = _padding(mask)
        return _rolled(tables[0], padding), _rolled(tables[1], padding)

    def run(self, processor: Any, attn: Any, arguments: Arguments) -> Any:
        """Give ``encoder_hidden_states`` back, from which the model's processor takes keys and values."""
        return super().run(processor, attn, {**arguments, "encoder_hidden_states": arguments["hidden_states"]})

    def ordered(self, arguments: Arguments, output: Tensor) -> Tensor:
        """Move the padding to the front."""
        mask = self.key_mask(arguments)
        return output if mask is None else _rolled(output, _padding(mask))

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Move the padding back to the end, as the model has it."""
        if inputs.key_mask is not None:
            output = _rolled(output, -_padding(inputs.key_mask))
        return super().project_output(attn, output, inputs)


def _padding(key_mask: Tensor) -> Tensor:
    """Return the tokens of each sample that take no part: (B,)."""
    return (key_mask == 0).sum(dim=1)


def _rolled(x: Tensor, by: Tensor) -> Tensor:
    """Return the tokens (B, N, ...) of each sample moved to later places, those at the end to the front."""
    places = torch.arange(x.shape[1], device=x.device) - by[:, None]
    return x[torch.arange(len(by), device=x.device)[:, None], places % x.shape[1]]


class MiniMaxH3Adapter(JointAdapter):
    """RoPE pairs halves and is the second argument."""

    places = ("hidden_states", "rotary_emb", "attention_mask")
    pairs_halves = True


class MochiAdapter(JointAdapter):
    """RoPE has a table for each head, the mask covers the text alone, and masked text is moved last."""

    rope_by_head = True
    text_mask = "attention_mask"

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return (cos, sin), each (1, N, H, D), of tables (N, H, D / 2) with an angle for each channel pair."""
        if (rotary := arguments.get("rotary_emb")) is not None:
            tables = tuple(table[None].repeat_interleave(2, dim=-1) for table in rotary)
            arguments = {**arguments, "rotary_emb": tables}
        return super().rotary(attn, arguments)

    def project_output(self, attn: Any, output: Tensor, inputs: AttentionInputs) -> Any:
        """Return text as the model does: tokens that take part first, and 0 for the others."""
        if inputs.key_mask is not None and inputs.context is not None:
            count = inputs.context.shape[1]
            kept, text = inputs.key_mask[:, -count:], output[:, -count:]
            order = kept.int().argsort(dim=1, descending=True, stable=True)[:, :, None, None]
            text = (text * kept[:, :, None, None]).gather(1, order.expand_as(text))
            output = torch.cat([output[:, :-count], text], dim=1)
        return super().project_output(attn, output, inputs)


class QwenImageAdapter(JointAdapter):
    """The text has its own mask and RoPE table."""

    text_mask = "encoder_hidden_states_mask"

    def key_mask(self, arguments: Arguments) -> Tensor | None:
        """Return (B, N) of all tokens; ValueError for a mask of another kind."""
        if "attention_mask" in arguments:
            raise ValueError(
                "Qwen-Image masks its text with encoder_hidden_states_mask and takes no attention_mask; leave it out."
            )
        return super().key_mask(arguments)

    def rotary(self, attn: Any, arguments: Arguments) -> Rotary | None:
        """Return RoPE of image and text."""
        if "rotary_emb" not in arguments:
            return None
        of_grid, of_text = (rotary_of_complex(numbers) for numbers in arguments["rotary_emb"])
        cos, sin = (self.joined(own, text) for own, text in zip(of_grid, of_text, strict=True))
        return cos, sin


class SkyReelsV2Adapter(WanAdapter):
    """Wan's, reading diffusion forcing's mask as a block length."""

    def key_mask(self, arguments: Arguments) -> Tensor | None:
        """Return None for a block-causal mask, which :meth:`check_order` compares with the patch."""
        is_block_causal = self.frames_in_block(arguments) is not None
        return super().key_mask(without(arguments, "attention_mask") if is_block_causal else arguments)

    def frames_in_block(self, arguments: Arguments) -> int | None:
        """Return the frames per block of a block-causal mask (1, 1, N, N); None for a mask of keys or none.

        Raises:
            ValueError: another mask that differs between queries.
        """
        mask, rotary = arguments.get("attention_mask"), arguments.get("rotary_emb")
        if mask is None or mask.ndim != 4 or mask.shape[2] != mask.shape[3] or rotary is None:
            return None
        if not hasattr(mask, "frames_in_block"):  # all layers of a forward are handed the same mask
            frames = grid_of_table(rotary[1])[0]
            step = max(1, mask.shape[2] // frames)
            between = mask[0, 0, ::step, ::step].cpu()  # the model repeats what it lets frames see for all their tokens
            length = int(between[0].sum())
            block = torch.arange(len(between)) // max(1, length)
            if mask.dtype != torch.bool or not torch.equal(between, block[:, None] >= block):
                raise ValueError(
                    f"SkyReels-V2's attention got a mask {tuple(mask.shape)} of {mask.dtype} that is not block-causal "
                    f"over {frames} frames and differs between queries, for which MHLA has no form."
                )
            mask.frames_in_block = length
        found: int = mask.frames_in_block
        return found

    def check_order(self, arguments: Arguments, config: PatchConfig | None) -> None:
        """Raise ValueError unless a patch is causal with the mask's block length."""
        length = self.frames_in_block(arguments)
        if length is None or (
            isinstance(config, CausalConfig) and (config.causal, config.block_length) == ("block", length)
        ):
            return
        order = "sees all frames"
        if isinstance(config, CausalConfig):
            order = f"has causal={config.causal!r} with block_length={config.block_length}"
        raise ValueError(
            f"SkyReels-V2's diffusion forcing masks later blocks of {length} latent frames from every frame, since the "
            f"pipeline was called with causal_block_size={length}, and this patch {order}: its KV states know no mask "
            f"that differs between queries. Patch with causal='block', block_length={length}, which needs no mask; or "
            "call the pipeline with causal_block_size=1, with any ar_step, for which there is none. Left out, it is "
            "that of the last call, transformer.config.num_frame_per_block. The mask goes to all layers, so no choice "
            "of layers=[...] keeps it away."
        )


class SD3Adapter(JointAdapter):
    """Some blocks have a second attention, over the image alone."""

    def of(self, attn: Any) -> AttentionAdapter:
        """Return the joint adapter, or for ``attn2`` that of an attention without text."""
        return self if attn.add_q_proj is not None else AttentionAdapter()


class Flux2Adapter(JointAdapter):
    """Attentions of single-stream blocks also run the feed-forward."""

    def of(self, attn: Any) -> AttentionAdapter:
        """Return the adapter of the kind of block."""
        return _PARALLEL if hasattr(attn, "to_qkv_mlp_proj") else self


_PARALLEL = ParallelAdapter(context_first=True)


class HunyuanDiTAdapter(AttentionAdapter):
    """Cross-attention norms query and key, and may rotate the query."""

    def recognises_cross(self, attn: Any) -> bool:
        """Whether it has LayerNorm in every head."""
        return isinstance(getattr(attn, "norm_q", None), nn.LayerNorm)


_MODELS, _COMMON = "diffusers.models.transformers", "diffusers.models.attention_processor"
_HUNYUAN_VIDEO = f"{_MODELS}.transformer_hunyuan_video.HunyuanVideoAttnProcessor2_0"
_ALLEGRO, _HUNYUAN_DIT = f"{_COMMON}.AllegroAttnProcessor2_0", f"{_COMMON}.HunyuanAttnProcessor2_0"
_LTX2 = f"{_MODELS}.transformer_ltx2.LTX2PerturbedAttnProcessor"

ADAPTERS: dict[str, AttentionAdapter] = {
    "allegro": AllegroAdapter("image_rotary_emb", processor=_ALLEGRO, cross_processor=_ALLEGRO),
    "anyflow": AnyFlowAdapter(),
    "auraflow": JointAdapter(context_first=True, processor=f"{_COMMON}.AuraFlowAttnProcessor2_0"),
    "chroma": ChromaAdapter(context_first=True),
    "cogvideox": JointAdapter(context_first=True, processor=f"{_COMMON}.CogVideoXAttnProcessor2_0"),
    "cogview4": CogView4Adapter(context_first=True, processor=f"{_MODELS}.transformer_cogview4.CogView4AttnProcessor"),
    "easyanimate": EasyAnimateAdapter(
        context_first=True, processor=f"{_MODELS}.transformer_easyanimate.EasyAnimateAttnProcessor2_0"
    ),
    "flux": JointAdapter(context_first=True, class_path="FluxAttention"),
    "flux2": Flux2Adapter(context_first=True),
    "flux3": Flux3Adapter(context_first=True, class_path="Flux3Attention"),
    "framepack": FramepackAdapter(processor=_HUNYUAN_VIDEO),
    "helios": HeliosAdapter(),
    "hunyuan_dit": HunyuanDiTAdapter(
        "image_rotary_emb",
        processor=_HUNYUAN_DIT,
        cross_processor=_HUNYUAN_DIT,
        # HunyuanDiTPAGPipeline's, with and without classifier-free guidance
        perturbed_processors={"PAGCFGHunyuanAttnProcessor2_0": 3, "PAGHunyuanAttnProcessor2_0": 2},
    ),
    "hunyuan_image": JointAdapter(processor=f"{_MODELS}.transformer_hunyuanimage.HunyuanImageAttnProcessor"),
    "hunyuan_video": JointAdapter(processor=_HUNYUAN_VIDEO),
    "hunyuan_video15": HunyuanVideo15Adapter(
        processor=f"{_MODELS}.transformer_hunyuan_video15.HunyuanVideo15AttnProcessor2_0"
    ),
    "ideogram4": Ideogram4Adapter(context_first=True),
    "kandinsky5": Kandinsky5Adapter(),
    "kandinsky6": Kandinsky6Adapter(),
    "krea2": Krea2Adapter(context_first=True),
    "longcat_image": JointAdapter(context_first=True, class_path="LongCatImageAttention"),
    "ltx": LTXAdapter("image_rotary_emb", class_path="LTXAttention"),
    # does what the other of its two processors does, where no guidance skips attention
    "ltx2": LTX2Adapter("query_rotary_emb", class_path="LTX2Attention", processor=_LTX2, cross_processor=_LTX2),
    "lumina2": Lumina2Adapter(context_first=True, processor=f"{_MODELS}.transformer_lumina2.Lumina2AttnProcessor2_0"),
    "minimax_h3": MiniMaxH3Adapter(context_first=True, rotary_argument="rotary_emb"),
    "mochi": MochiAdapter(class_path="MochiAttention", processor=f"{_COMMON}.MochiAttnProcessor2_0"),
    "qwenimage": QwenImageAdapter(
        context_first=True, processor=f"{_MODELS}.transformer_qwenimage.QwenDoubleStreamAttnProcessor2_0"
    ),
    "sd3": SD3Adapter(processor=f"{_COMMON}.JointAttnProcessor2_0"),
    "skyreels_v2": SkyReelsV2Adapter(class_path="transformer_skyreels_v2.SkyReelsV2Attention"),
    "z_image": JointAdapter(
        rotary_argument="freqs_cis", processor=f"{_MODELS}.transformer_z_image.ZSingleStreamAttnProcessor"
    ),
}
"""Of families by name."""

_TAKE_SIGMA = {"auraflow", "chroma", "flux", "flux2", "flux3", "ideogram4", "krea2", "longcat_image", "lumina2"}
_TAKE_SIGMA |= {"qwenimage", "z_image"}
_REVERSED = ("ideogram4", "lumina2", "z_image")


def time_of(family: str, arguments: Mapping[str, Any]) -> Any:
    """Return the time of the grid's tokens in a forward, in the transformer's scale; None if it is not given."""
    if family == "minimax_h3":  # the time of the last row, which is of the video
        return arguments["timestep"][arguments["timestep_indices"][-1]]
    return arguments.get("t" if family == "z_image" else "timestep")


def scheduler_timestep(family: str, transformer: Any, timestep: Tensor) -> Tensor:
    """Return the scheduler's timestep, from the transformer's argument for the time."""
    if family == "sana" and transformer.config.guidance_embeds:  # SANA-Sprint: t of sin t / (sin t + cos t)
        return torch.atan2(timestep, 1 - timestep)
    if family == "sana":
        return timestep / float(transformer.config.timestep_scale)
    if family not in _TAKE_SIGMA:
        return timestep
    return 1000 * (1 - timestep if family in _REVERSED else timestep)
