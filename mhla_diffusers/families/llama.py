"""Llama and models with its layers: ``LlamaForCausalLM`` and ``LlamaModel`` of transformers.

Causal softmax self-attention over the tokens of a text, which is one axis without extra tokens. RoPE rotates queries
and keys before they reach transformers' attention interface, where the patch acts, so the feature map comes after RoPE.
Grouped queries share keys and values, which MHLA repeats. Default blocks are the paper's, 2,048 tokens in 32.
"""

from collections.abc import Mapping
from typing import Any

from ..config import CausalConfig, PatchConfig
from .family import NEEDS_CAUSAL, Attention, Family, Forward
from .of_transformers import PROCESSOR, TransformersAdapter, why_not_here


class _Attention(Attention):
    def blocks_of(self, transformer: Any) -> dict[str, Any]:
        """Return the decoder layers, by their names in the model."""
        inside = getattr(transformer, "model", None)
        if inside is None:
            return super().blocks_of(transformer)
        return {f"model.{name}": block for name, block in super().blocks_of(inside).items()}

    def why_not_patched(self, transformer: Any, config: PatchConfig) -> str | None:
        """Refuse patches that are not token-causal, and settings that language models cannot follow."""
        kind = type(transformer).__name__
        if not isinstance(config, CausalConfig):
            return (
                f"{kind} predicts the next token, and {config.attention} would let every token see it. Its attention "
                f"is causal, so it needs {NEEDS_CAUSAL}"
            )
        if config.causal == "block":
            return (
                f"causal='block' lets a token see the later ones of its block, which {kind} is to predict; set "
                "causal='token'."
            )
        if config.rope != "before":
            return (
                f"rope={config.rope!r} would need the tables of RoPE, but {kind} rotates queries and keys before its "
                "attention gets them; set rope='before'."
            )
        return why_not_here(transformer, config)

    def prepare(self, transformer: Any) -> None:
        """Route its attentions through the interface."""
        from .llama_interface import give_interface

        give_interface(transformer, self.self_attentions(transformer).values())

    def restore(self, transformer: Any) -> None:
        """Restore the original implementation."""
        from .llama_interface import take_interface

        take_interface(transformer, self.self_attentions(transformer).values())


class _Forward(Forward):
    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the number of tokens of the text."""
        ids = arguments.get("input_ids")
        return (int((ids if ids is not None else arguments["inputs_embeds"]).shape[1]),)


LLAMA = Family(
    name="llama",
    transformers=("LlamaForCausalLM", "LlamaModel"),
    attention=_Attention(
        block_lists=("layers",), attentions=("self_attn",), adapter=TransformersAdapter(), processor=PROCESSOR
    ),
    forward=_Forward(axes=1, latents_name="input_ids"),
    library="transformers",
    kind="language",
    mhla_blocks=(32,),
    causal=CausalConfig(blocks=(32,), block_length=64, causal="token", rope="before"),
)
