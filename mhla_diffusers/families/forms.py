"""How the self-attentions of a model are called, what they attend with, and what they return: their form.

The attention itself sees one sequence of N tokens: those of the token grid in raster order, and before or after them
the extra tokens, such as text in joint attention. A form tells which of the arguments they come from.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from ..attention.rope import Rotary, rotary_table, rotated
from ..config import MHLAConfig
from .projecting import Projected, finite, lowered, project_tokens

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


class AttentionInput(NamedTuple):
    """What a self-attention attends with."""

    hidden_states: torch.Tensor
    """(B, N, hidden size)."""
    context: torch.Tensor | None = None
    """(B, n, channels): extra tokens that come by themselves; the N of the others are then without them."""
    rotary: Rotary | None = None
    """(cos, sin) of all tokens, each (1 or B, N, 1, D)."""
    key_mask: torch.Tensor | None = None
    """(B, N) of all tokens, see :func:`key_padding_mask`."""
    rotary_by_head: Rotary | None = None
    """(cos, sin) of all tokens, each (1 or B, N, H, D), in place of ``rotary`` where heads turn by other angles."""
    frames_in_block: int | None = None
    """With a block-causal mask, frames of a block: no query is to see a later block."""


class AttentionForm:
    """Self-attention over the tokens of the grid alone, beside a cross-attention: Wan's, SANA's, DiT's.

    Forms have no state. They expect ``to_q``, ``to_k``, ``to_v``, ``to_out``, optional ``norm_q`` and ``norm_k``, and
    ``heads``, as diffusers' ``Attention`` and its relatives have them.
    """

    rotary_argument: ClassVar[str] = "rotary_emb"
    """What the model's own processors call what is handed to them for RoPE."""
    has_extra: ClassVar[bool] = False
    """Whether there are extra tokens."""
    rope_by_head: ClassVar[bool] = False
    """Whether RoPE turns every head by other angles; it is then applied to what :meth:`project` gives, before φ."""

    idle: ClassVar[tuple[str, ...]] = ()
    """Attributes of an attention that it does not run while it is patched."""

    def heads(self, attn: Any) -> tuple[int, int]:
        """Heads of an attention and head dim."""
        return int(attn.heads), int(attn.inner_dim) // int(attn.heads)

    def query_projection(self, attn: Any) -> Any:
        """The linear layer that makes the queries of the attention's input."""
        return attn.to_q

    def output_projection(self, attn: Any) -> Any:
        """The linear layer behind an attention's heads; None in blocks where another layer projects them."""
        found = getattr(attn, "to_out", None)
        return found[0] if found is not None else None

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AttentionArguments:
        """What the attention's forward was called with, as a hook gets it."""
        given = {name: value for name, value in kwargs.items() if name in AttentionArguments._fields}
        told = next((kwargs[name] for name in _ROTARY_NAMES if kwargs.get(name) is not None), None)
        given |= {"rotary_emb": told} if told is not None else {}
        return AttentionArguments(*args, **given)

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

    def check_order(self, given: AttentionInput, config: MHLAConfig | None) -> None:
        """Raise unless a patch sees of later frames what the model lets it see, by default all of them.

        Args:
            given: input of the attention.
            config: of the patch; None of an attention that has none yet.
        """

    def rotary(self, attn: Any, arguments: AttentionArguments) -> Rotary | None:
        """RoPE of all tokens, (cos, sin), each (1 or B, N, 1, D); None for none.

        By default as it is handed over, or of (N, D) each. With :attr:`rope_by_head` each is (1 or B, N, H, D).
        """
        if arguments.rotary_emb is None or arguments.rotary_emb[0].ndim != 2:
            rotary: Rotary | None = arguments.rotary_emb
            return rotary
        cos, sin = (table[None, :, None] for table in arguments.rotary_emb)
        return cos, sin

    def extra(self, given: AttentionInput, tokens: int) -> tuple[int, int]:
        """How many tokens stand before and after those of the grid.

        Args:
            given: input of the attention.
            tokens: of the grid, as many as this process has.

        Raises:
            ValueError: the attention has other tokens than the grid.
        """
        count = given.hidden_states.shape[1]
        if count != tokens:
            raise ValueError(
                f"The token grid holds {tokens} tokens, but the attention got {count}. Was the processor made for "
                "another resolution, or are the tokens split over processes? transformer.enable_parallelism() is what "
                "tells MHLA of processes; calibration and what else looks into attentions runs on one, before that."
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
        """All linear layers that the attention runs."""
        fused, apart = ("to_qkv", "to_added_qkv"), ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
        names = (*(fused if attn.fused_projections else apart), "to_add_out")
        found = [getattr(attn, name, None) for name in names]
        return [module for module in (*found, self.output_projection(attn)) if module is not None]


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
