"""Llama and what has its layers: ``LlamaForCausalLM`` and ``LlamaModel`` of transformers, language models.

Softmax self-attention over the tokens of a text, which is one axis, each seeing those before it. RoPE turns queries and
keys before they reach transformers' attention interface, where the patch takes its place, so the feature map acts after
it, and heads of grouped queries share keys and values, which MHLA repeats.
"""

from typing import Any

from torch import nn

from ..config import MHLAConfig
from .attention_classes import OwnAttention, why_too_old
from .base import Family
from .forms import AttentionForm


class LlamaForm(AttentionForm):
    """Llama's projections; the attention itself is run through transformers' attention interface."""

    def heads(self, attn: Any) -> tuple[int, int]:
        """Heads of the queries and head dim."""
        return int(attn.config.num_attention_heads), int(attn.head_dim)

    def query_projection(self, attn: Any) -> Any:
        """Llama's."""
        return attn.q_proj

    def projections(self, attn: Any) -> list[nn.Module]:
        """All linear layers that the attention runs."""
        return [attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj]


class LlamaFamily(Family):
    """Causal language models whose tokens are one axis."""

    name = "llama"
    library = "transformers"
    transformers = ("LlamaForCausalLM", "LlamaModel")
    axes = 1
    kind = "language"
    own_attention_is_causal = True
    block_lists = ("layers",)
    attentions = ("self_attn",)
    form = LlamaForm()
    # the paper's 2 048 tokens in 32 blocks
    default_config = MHLAConfig(blocks=(32,), block_length=64, causal="token", exact="own", rope="before")

    def blocks_of(self, transformer: Any) -> dict[str, Any]:
        """Decoder layers, by the names that they have in the model."""
        inside = getattr(transformer, "model", None)
        if inside is None:
            return super().blocks_of(transformer)
        return {f"model.{name}": block for name, block in super().blocks_of(inside).items()}

    def grid_of_arguments(self, transformer: Any, arguments: Any) -> tuple[int, ...]:
        """As many tokens as the text has."""
        ids = arguments.get("input_ids")
        return (int((ids if ids is not None else arguments["inputs_embeds"]).shape[1]),)

    def why_not_patched(self, transformer: Any, config: MHLAConfig) -> str | None:
        """A patch sees the past alone and asks for nothing that a language model has no place for."""
        kind = type(transformer).__name__
        if (why := why_too_old(kind)) is not None:
            return why
        if config.causal is None:
            return (
                f"{kind} predicts the next token, and a patch with causal=None would let every token see it. Set "
                "causal='token' with block_length, the tokens in a block: for 2,048 tokens blocks=(32,), "
                "block_length=64."
            )
        if config.causal == "block":
            return (
                f"causal='block' lets a token see the later ones of its block, which {kind} is to predict; set "
                "causal='token'."
            )
        if config.rope != "before":
            return (
                f"rope={config.rope!r} would need the tables of RoPE, but {kind} turns queries and keys before its "
                "attention gets them; set rope='before'."
            )
        if config.softmax_steps:
            return (
                f"softmax_steps={config.softmax_steps!r} counts denoising steps, which {kind} does not have; leave it "
                "at 0."
            )
        return None

    def self_attention_processor(self) -> Any:
        """What stands for the attention implementation that the model's configuration names."""
        return OwnAttention()

    def prepare(self, transformer: Any) -> None:
        """Lead its attentions through the interface, see :mod:`mhla_diffusers.families.with_interface`."""
        from .with_interface import give_interface

        give_interface(transformer, self.self_attentions(transformer).values())

    def restore(self, transformer: Any) -> None:
        """The implementation of before."""
        from .with_interface import take_interface

        take_interface(transformer, self.self_attentions(transformer).values())
