"""What the vision transformers of transformers have in common: ViT, DeiT, DINOv2, SigLIP's vision tower.

Softmax self-attention over the patches of a picture, which are the (height, width) token grid. Class, distillation and
register tokens stand before the grid and outside of it: they attend, and are attended to, with softmax. Positions are
added to the tokens once; they are interpolated for other sizes by transformers itself.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..config import MHLAConfig
from .adapters import AttentionArguments, AttentionInput, Projected, finite, key_padding_mask, lowered
from .attention_classes import give_classes, take_classes
from .of_transformers import TransformersAdapter, TransformersFamily
from .sizes import Clip
from .structure import Sample


class VisionAdapter(TransformersAdapter):
    """Self-attention over the patches alone."""

    def heads(self, attn: Any) -> tuple[int, int]:
        """Heads of an attention and head dim."""
        count = attn.num_attention_heads if hasattr(attn, "num_attention_heads") else attn.num_heads
        return int(count), int(attn.head_dim)

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AttentionArguments:
        """Tokens and mask, of which the mask may come by place."""
        named = {**dict(zip(("hidden_states", "attention_mask"), args, strict=False)), **kwargs}
        return AttentionArguments(named["hidden_states"], attention_mask=named.get("attention_mask"))

    def read(self, attn: Any, arguments: AttentionArguments) -> AttentionInput:
        """Tokens, and which of them take part.

        Raises:
            ValueError: a mask that differs between queries, or of another kind than a tensor.
        """
        hidden_states, mask = arguments.hidden_states, arguments.attention_mask
        if mask is None:
            return AttentionInput(hidden_states)
        return AttentionInput(hidden_states, key_mask=_key_mask(mask, *hidden_states.shape[:2]))

    def project(self, attn: Any, given: AttentionInput) -> Projected:
        """Query, key and value of all tokens."""
        heads, _ = self.heads(attn)
        query, key, value = (
            projection(given.hidden_states).unflatten(-1, (heads, -1))
            for projection in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        return lowered((query, key, value))

    def project_output(self, attn: Any, output: torch.Tensor, given: AttentionInput) -> Any:
        """The projected output, and None for the weights."""
        return finite(self.output_projection(attn)(output.flatten(2))), None


class PrefixedAdapter(VisionAdapter):
    """Self-attention over the patches and the tokens before them."""

    has_extra = True

    def extra(self, given: AttentionInput, tokens: int) -> tuple[int, int]:
        """All tokens that are more than the patches stand before these."""
        count = given.hidden_states.shape[1]
        return (count - tokens, 0) if count > tokens else super().extra(given, tokens)


def _key_mask(mask: Any, batch: int, tokens: int) -> torch.Tensor:
    """The (B, N) mask of what transformers makes of one: (B, N), (B, 1, 1, N), or (B, 1, N, N) with equal rows."""
    if not isinstance(mask, torch.Tensor):
        raise ValueError(
            f"MHLA honours masks that are tensors and got a {type(mask).__name__}, which transformers makes for its "
            "implementation 'flex_attention'; load the model with attn_implementation='sdpa'."
        )
    if tuple(mask.shape) == (batch, 1, tokens, tokens):
        differs = (mask != mask[:, :, :1]).any()
        message = (
            "MHLA honours a mask that says which tokens take part, the same for every query, and this one differs "
            "between queries: keep softmax attention in this layer with layers=[...]."
        )
        if torch.compiler.is_compiling():
            torch._assert_async(~differs, message)
        elif bool(differs):
            raise ValueError(message)
        mask = mask[:, :, :1]
    return key_padding_mask(mask, batch, tokens)


class VisionFamily(TransformersFamily):
    """Vision models of transformers, whose tokens are the patches of one picture."""

    axes = 2
    kind = "vision"
    forward_names = ("pixel_values",)
    # the paper's 16 blocks; of 196 tokens uniform blocks of 64 would be too few to choose among
    default_config = MHLAConfig(blocks=(4, 4), mixing_per_head=True, sparse="content", block_size=16)
    default_clip = Clip(frames=1, fps=1.0, sizes=((224, 224),))
    feed_forwards = ("mlp",)
    trunk_names: ClassVar[tuple[str, ...]] = ()
    """Attributes of a model with a head in which the model without it lies; absent ones are passed."""
    layers_path: ClassVar[str] = "layers"
    """Of the blocks, in the trunk."""

    def build(self, name: str, settings: Mapping[str, Any]) -> Any:
        """A model with fresh weights; settings are those of its configuration class."""
        made = self.transformer_class(name)
        return made(made.config_class(**settings))

    def trunk(self, transformer: Any) -> Any:
        """The model without its head."""
        found = (getattr(transformer, name, None) for name in self.trunk_names)
        return next((module for module in found if isinstance(module, nn.Module)), transformer)

    def blocks_of(self, transformer: Any) -> dict[str, Any]:
        """Layers, by the names that they have in the model."""
        trunk = self.trunk(transformer)
        inside = next((f"{name}." for name, module in transformer.named_children() if module is trunk), "")
        layers = trunk.get_submodule(self.layers_path)
        return {f"{inside}{self.layers_path}.{index}": block for index, block in enumerate(layers)}

    def named_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the trunk's forward by name.

        Raises:
            ValueError: no pixels.
        """
        arguments = super().named_arguments(args, kwargs)
        if not isinstance(arguments.get("pixel_values"), torch.Tensor):
            raise ValueError("pixel_values=None: give the model pictures, (batch, channels, height, width).")
        return arguments

    def token_grid(self, transformer: Any, latents: torch.Tensor) -> tuple[int, ...]:
        """Patches of pixels (B, C, H, W)."""
        return super().token_grid(self.trunk(transformer), latents)

    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Patches of the pixels."""
        return self.token_grid(transformer, arguments["pixel_values"])

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """Pixels (B, C, H, W) in the place of latents; a picture has no time."""
        return {"pixel_values": latents, **conditioning}

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """Nothing: the pixels are all that the model is given."""
        return {}

    def channels(self, transformer: Any) -> int:
        """Of the pixels."""
        return int(transformer.num_channels)

    def spatial_stride(self, pipe: Any) -> int:
        """There is no autoencoder."""
        return 1

    def why_not_fitting(self, kind: str, config: MHLAConfig) -> str | None:
        """A picture has no order."""
        if config.causal is not None:
            return f"causal={config.causal!r} orders tokens, and the patches of {kind} have no order; leave it at None."
        return None

    def prepare(self, transformer: Any) -> None:
        """Give its attentions a place for a processor."""
        from .vision_attentions import CLASSES

        give_classes(self.self_attentions(transformer).values(), CLASSES)

    def restore(self, transformer: Any) -> None:
        """The classes of before."""
        from .vision_attentions import CLASSES

        take_classes(self.self_attentions(transformer).values(), CLASSES)
