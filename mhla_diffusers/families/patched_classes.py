"""Classes that instances of a model's modules are switched to while it is patched.

Classes of diffusers and transformers never change. This module is imported when a model is patched.

Attentions of transformers get a processor, like those of diffusers. Vision models run it in their forward. Llama uses
transformers' attention interface: a patched model's implementation is named ``mhla+`` and the original name, for
example ``mhla+sdpa``. transformers then calls :func:`attend` for every layer. It runs the layer's processor; layers
without one use the implementation after the ``+``.
"""

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from diffusers.models import attention_processor
from diffusers.models.attention import AttentionMixin, AttentionModuleMixin
from diffusers.models.transformers import (
    dit_transformer_2d,
    latte_transformer_3d,
    transformer_cogview4,
    transformer_lumina2,
    transformer_mochi,
    transformer_z_image,
)
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deit import modeling_deit
from transformers.models.dinov2 import modeling_dinov2
from transformers.models.dinov2_with_registers import modeling_dinov2_with_registers
from transformers.models.llama import modeling_llama
from transformers.models.siglip import modeling_siglip
from transformers.models.vit import modeling_vit

PREFIX = "mhla+"
"""Prefix of the names of implementations."""
_CONFIG_BEFORE = "_mhla_config_before"
"""Attribute of a patched model: its original configuration, which other models may share."""
_IMPLEMENTATION = "_attn_implementation_internal"
"""Where a configuration keeps the name of the implementation."""


class DiTTransformer2DModel(AttentionMixin, dit_transformer_2d.DiTTransformer2DModel):
    """A patched DiT; everything else is inherited.

    Has the name of the base class, because diffusers writes it into ``config.json``.
    """


class CogView4Transformer2DModel(AttentionMixin, transformer_cogview4.CogView4Transformer2DModel):
    """A patched CogView4 transformer, named like :class:`DiTTransformer2DModel`."""


class LatteTransformer3DModel(AttentionMixin, latte_transformer_3d.LatteTransformer3DModel):
    """A patched Latte transformer, named like :class:`DiTTransformer2DModel`."""


class Lumina2Transformer2DModel(AttentionMixin, transformer_lumina2.Lumina2Transformer2DModel):
    """A patched Lumina 2 transformer, named like :class:`DiTTransformer2DModel`."""


class MochiTransformer3DModel(AttentionMixin, transformer_mochi.MochiTransformer3DModel):
    """A patched Mochi transformer, named like :class:`DiTTransformer2DModel`."""


class ZImageTransformer2DModel(AttentionMixin, transformer_z_image.ZImageTransformer2DModel):
    """A patched Z-Image transformer, named like :class:`DiTTransformer2DModel`."""


_WITH_METHODS = {
    kind.__bases__[1]: kind
    for kind in (
        CogView4Transformer2DModel,
        DiTTransformer2DModel,
        LatteTransformer3DModel,
        Lumina2Transformer2DModel,
        MochiTransformer3DModel,
        ZImageTransformer2DModel,
    )
}
"""diffusers' class → its subclass with the methods."""


def give_processor_methods(transformer: Any, attentions: Iterable[Any] = ()) -> None:
    """Switch an instance of one of these classes, and its attentions, to the subclasses with the methods.

    Others are unchanged.
    """
    give_classes(attentions)
    own = type(transformer)
    if own in _WITH_METHODS:
        transformer.__class__ = _WITH_METHODS[own]
        # what diffusers writes into model_index.json; the class keeps its own, so that pickle finds it
        transformer.__dict__["__module__"] = own.__module__


def take_processor_methods(transformer: Any, attentions: Iterable[Any] = ()) -> None:
    """The inverse of :func:`give_processor_methods`."""
    take_classes(attentions)
    own = next((own for own, kind in _WITH_METHODS.items() if kind is type(transformer)), None)
    if own is not None:
        transformer.__class__ = own
        del transformer.__dict__["__module__"]


class OwnAttention:
    """Placeholder for "no processor": the layer runs its original forward."""


_OWN = OwnAttention()


class WithProcessor:
    """Mixin for transformers' attentions in a patched model."""

    processor: Any = _OWN

    def set_processor(self, processor: Any) -> None:
        """As in diffusers' attentions; :class:`OwnAttention` removes the processor."""
        if not isinstance(processor, OwnAttention):
            self.processor = processor
        elif "processor" in vars(self):
            del self.processor

    def get_processor(self) -> Any:
        """As in diffusers' attentions."""
        return self.processor

    @property
    def has_processor(self) -> bool:
        """Whether a processor is set."""
        return not isinstance(self.processor, OwnAttention)


class _VisionAttention(WithProcessor):
    """Runs its processor if it has one, else the inherited forward."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the inherited forward.

        Returns:
            (B, N, hidden size), and weights if an attention that is not replaced returns them.

        Raises:
            ValueError: attention dropout, ``output_attentions``, or what the processor refuses.
        """
        inherited: Any = super()
        if not self.has_processor:
            return inherited.forward(hidden_states, attention_mask, **kwargs)
        own: Any = self
        dropout = own.dropout if isinstance(own, modeling_siglip.SiglipAttention) else own.attention_dropout
        asked = kwargs.get("output_attentions", own.config.output_attentions)
        refuse_weights(dropout if own.training else 0.0, bool(asked))
        return self.processor(self, hidden_states, attention_mask=attention_mask)


class ViTAttention(_VisionAttention, modeling_vit.ViTAttention):
    """Of ViT, and of DeiT with average pooling."""


class DeiTAttention(_VisionAttention, modeling_deit.DeiTAttention):
    """Of DeiT."""


class Dinov2Attention(_VisionAttention, modeling_dinov2.Dinov2Attention):
    """Of DINOv2."""


class Dinov2WithRegistersAttention(_VisionAttention, modeling_dinov2_with_registers.Dinov2WithRegistersAttention):
    """Of DINOv2 with registers."""


class SiglipAttention(_VisionAttention, modeling_siglip.SiglipAttention):
    """Of SigLIP's vision tower."""


class MochiAttention(AttentionModuleMixin, attention_processor.MochiAttention):
    """Of Mochi, which runs a processor without a method to set another."""

    _supports_qkv_fusion = False


class LlamaAttention(WithProcessor, modeling_llama.LlamaAttention):
    """An attention of a patched Llama; has the name of its base class and inherits everything else."""

    own_function = staticmethod(modeling_llama.eager_attention_forward)
    """What transformers calls "eager"."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the implementation for a model that another process pickled."""
        super().__setstate__(state)
        implementation = str(self.config._attn_implementation)
        if implementation.startswith(PREFIX):
            _registered(implementation.removeprefix(PREFIX))

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As the base class, which passes further arguments to :func:`attend`.

        Raises:
            ValueError: another implementation has been set since the patch.
        """
        if not str(self.config._attn_implementation).startswith(PREFIX):
            if self.has_processor:
                raise ValueError(
                    f"This model is patched with MHLA, but its attention implementation has been set to "
                    f"{self.config._attn_implementation!r} since, so MHLA would not run. Call remove_mhla(), set the "
                    "implementation, and patch again; or leave the implementation as the patch has it."
                )
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        kwargs |= {"layer_input": hidden_states, "cache": past_key_values}
        return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)


CLASSES: dict[type, type] = {
    modeling_llama.LlamaAttention: LlamaAttention,
    modeling_vit.ViTAttention: ViTAttention,
    modeling_deit.DeiTAttention: DeiTAttention,
    modeling_dinov2.Dinov2Attention: Dinov2Attention,
    modeling_dinov2_with_registers.Dinov2WithRegistersAttention: Dinov2WithRegistersAttention,
    modeling_siglip.SiglipAttention: SiglipAttention,
    attention_processor.MochiAttention: MochiAttention,
}
"""Class of transformers or diffusers → its subclass with a processor that can be set."""


def give_classes(attentions: Iterable[Any], classes: Mapping[type, type] | None = None) -> None:
    """Switch attentions to the classes with a processor, by default those of :data:`CLASSES`."""
    classes = CLASSES if classes is None else classes
    for attn in attentions:
        before = type(attn)
        attn.__class__ = classes.get(before, before)
        # accelerate, when it spreads a model over devices, keeps the original forward here and calls it
        kept = vars(attn).get("_old_forward")
        if getattr(kept, "__func__", None) is before.forward:
            attn._old_forward = MethodType(type(attn).forward, attn)


def take_classes(attentions: Iterable[Any]) -> None:
    """The inverse of :func:`give_classes`."""
    give_classes(attentions, {kind: base for base, kind in CLASSES.items()})


def refuse_weights(dropout: float, asked: bool) -> None:
    """Raise if a call needs softmax weights, which MHLA does not compute.

    Args:
        dropout: of the weights, in this call.
        asked: whether the caller asks for the weights.

    Raises:
        ValueError: with what to do instead.
    """
    if dropout:
        raise ValueError(
            f"attention_dropout={dropout} drops softmax weights, which MHLA does not compute; set it to 0 in the "
            "configuration before the model is created (some call it attention_probs_dropout_prob), or in the layers "
            "of an existing model, attn.attention_dropout (attn.dropout of SigLIP)."
        )
    if asked:
        raise ValueError(
            "output_attentions=True asks for softmax weights, which MHLA does not compute. Leave it out, or call "
            "within mhla_disabled(model); weights() of one of mhla_layers(model) returns MHLA's weight of every key."
        )


def _registered(replaced: str) -> str:
    """Register the patched implementation for an original one, and return its name."""
    name = PREFIX + replaced
    AttentionInterface.register(name, partial(attend, replaced=replaced))
    AttentionMaskInterface.register(name, partial(checked_mask, replaced=replaced))
    return name


def give_interface(transformer: Any, attentions: Iterable[Any]) -> None:
    """Switch a model's attentions to their patched classes, and name the implementation in a copied configuration."""
    before = transformer.config
    name = _registered(str(before._attn_implementation))
    give_classes(attentions)
    own = copy.copy(before)
    own._attn_implementation = name
    _give_config(transformer, before, own)
    setattr(transformer, _CONFIG_BEFORE, before)


def take_interface(transformer: Any, attentions: Iterable[Any]) -> None:
    """The inverse of :func:`give_interface`."""
    take_classes(attentions)
    before, meanwhile = getattr(transformer, _CONFIG_BEFORE), transformer.config
    # keep settings that were changed meanwhile
    vars(before).update({name: value for name, value in vars(meanwhile).items() if name != _IMPLEMENTATION})
    if not meanwhile._attn_implementation.startswith(PREFIX):
        before._attn_implementation = meanwhile._attn_implementation
    _give_config(transformer, meanwhile, before)
    delattr(transformer, _CONFIG_BEFORE)


def _give_config(transformer: Any, before: Any, after: Any) -> None:
    for module in transformer.modules():
        if vars(module).get("config") is before:
            module.config = after


class CausalMask:
    """A checked causal mask without gaps, and the mask for layers that keep softmax attention.

    Patched layers need no mask: they are causal, and padding comes after all tokens. The mask of the other layers is
    made when the first of them needs it.
    """

    def __init__(self, replaced: str, arguments: dict[str, Any]) -> None:
        self.replaced = replaced
        self.arguments = arguments
        self._made: tuple[Any, ...] = ()

    def of_softmax(self) -> Any:
        """The mask that transformers makes for the original implementation."""
        if not self._made:
            make = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(self.replaced)
            self._made = (make(**self.arguments) if make is not None else None,)
        return self._made[0]


def checked_mask(*, replaced: str, **arguments: Any) -> CausalMask:
    """Called by transformers once per forward, see :class:`transformers.AttentionMaskInterface`.

    Raises:
        ValueError: padding on the left or in between, a mask that is more than causal, such as that of packed texts, or
            a cache that does not hold exactly the keys of the sequence.
    """
    past, own = arguments["q_offset"], arguments["q_length"]
    if isinstance(past, torch.Tensor) or arguments["kv_length"] != past + own or arguments["kv_offset"]:
        raise ValueError(
            "MHLA continues from the whole sequence, but this cache holds another number of keys, as a static or "
            "sliding cache does. Pass past_key_values=MHLACache(model) to generate(), or leave cache_implementation "
            "out."
        )
    # a compiled graph always gets the mask function of packed texts
    if arguments["mask_function"] is not causal_mask_function and not torch.compiler.is_compiling():
        raise ValueError(
            "Some tokens of this call may not see all earlier tokens, as when position_ids pack several texts into one "
            "row, and MHLA cannot split its blocks there. Give every text a row of its own, padded on "
            "the right."
        )
    padding = arguments["attention_mask"]
    if padding is not None:
        _check_padding(padding)
    return CausalMask(replaced, arguments)


def _check_padding(mask: torch.Tensor) -> None:
    """Raise unless all padding of a mask (B, N) is on the right."""
    has_gap = (mask[:, 1:] & ~mask[:, :-1]).any()
    message = (
        "attention_mask has padding on the left or between tokens, which would shift the blocks that MHLA splits a "
        "text into. Pad on the right to train or to score (tokenizer.padding_side = 'right'), and generate from "
        "prompts of one length together, or one by one."
    )
    if torch.compiler.is_compiling():
        torch._assert_async(~has_gap, message)
    elif bool(has_gap):
        raise ValueError(message)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    replaced: str,
    layer_input: torch.Tensor | None = None,
    cache: Any = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Called by transformers for every attention, see :class:`transformers.AttentionInterface`.

    Returns:
        (B, n, H, D), and weights if another implementation returns them.

    Raises:
        ValueError: a mask made by the caller, attention dropout, ``output_attentions``, or several texts packed into
            one row.
    """
    if not isinstance(attention_mask, CausalMask):
        raise ValueError(
            "A patched model makes its own masks, but got a mask of four axes or none; pass attention_mask with "
            "two axes, (batch, tokens), or leave it out."
        )
    if not module.has_processor:
        function = ALL_ATTENTION_FUNCTIONS.get_interface(replaced, module.own_function)
        mask, more = attention_mask.of_softmax(), {**kwargs, "dropout": dropout}
        attended: tuple[torch.Tensor, torch.Tensor | None] = function(module, query, key, value, mask, **more)
        return attended
    refuse_weights(dropout, bool(kwargs.get("output_attentions", module.config.output_attentions)))
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError("MHLA does not split rows of packed texts; give every text a row of its own.")
    output = module.processor.attend(
        module,
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        layer_input,
        cache,
    )
    return output, None
