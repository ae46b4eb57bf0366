"""Classes that a model's modules become while it is patched, and are no longer once the patch is removed.

Only instances change, never a class of diffusers or transformers. Imported when a model is patched.

Attentions of transformers get a processor, as diffusers' have one. Those of vision models run it in their forward.
Llama's go through transformers' attention interface: a patched model names the implementation ``mhla+`` and the one
that it had, for example ``mhla+sdpa``. transformers then calls :func:`attend` for every layer, which asks the layer's
processor, and for layers that were not chosen goes on to the implementation behind the ``+``.
"""

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from diffusers.models.attention import AttentionMixin
from diffusers.models.transformers import dit_transformer_2d, latte_transformer_3d, transformer_z_image
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
"""Of the names of implementations."""
_CONFIG_BEFORE = "_mhla_config_before"
"""Attribute of a patched model: its own configuration, which other models may share."""
_IMPLEMENTATION = "_attn_implementation_internal"
"""Where a configuration keeps the name of the implementation."""


class DiTTransformer2DModel(AttentionMixin, dit_transformer_2d.DiTTransformer2DModel):
    """A patched DiT: everything else inherited.

    The name is that of the base class because diffusers writes it into ``config.json``.
    """


class LatteTransformer3DModel(AttentionMixin, latte_transformer_3d.LatteTransformer3DModel):
    """A patched Latte transformer, named as :class:`DiTTransformer2DModel` is."""


class ZImageTransformer2DModel(AttentionMixin, transformer_z_image.ZImageTransformer2DModel):
    """A patched Z-Image transformer, named as :class:`DiTTransformer2DModel` is."""


_WITH_METHODS = {
    kind.__bases__[1]: kind for kind in (DiTTransformer2DModel, LatteTransformer3DModel, ZImageTransformer2DModel)
}
"""diffusers' class → the one with the methods."""


def give_processor_methods(transformer: Any) -> None:
    """Make an instance of one of diffusers' classes one of that with the methods; any other stays what it is."""
    own = type(transformer)
    if own in _WITH_METHODS:
        transformer.__class__ = _WITH_METHODS[own]
        # what diffusers writes into model_index.json; the class keeps its own, so that pickle finds it
        transformer.__dict__["__module__"] = own.__module__


def take_processor_methods(transformer: Any) -> None:
    """The inverse of :func:`give_processor_methods`."""
    own = next((own for own, kind in _WITH_METHODS.items() if kind is type(transformer)), None)
    if own is not None:
        transformer.__class__ = own
        del transformer.__dict__["__module__"]


class OwnAttention:
    """Stands where no processor is: the layer does what its class of transformers does."""


_OWN = OwnAttention()


class WithProcessor:
    """Base class, beside one of transformers' attentions, of an attention of a patched model."""

    processor: Any = _OWN

    def set_processor(self, processor: Any) -> None:
        """As diffusers' attentions have it; :class:`OwnAttention` takes the processor away."""
        if not isinstance(processor, OwnAttention):
            self.processor = processor
        elif "processor" in vars(self):
            del self.processor

    def get_processor(self) -> Any:
        """As diffusers' attentions have it."""
        return self.processor

    @property
    def has_processor(self) -> bool:
        """Whether one has been set."""
        return not isinstance(self.processor, OwnAttention)


class _VisionAttention(WithProcessor):
    """Runs its processor, if it has one, and else what it inherits."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the class of transformers beside this one.

        Returns:
            (B, N, hidden size), and weights where an attention that is not replaced gives them.

        Raises:
            ValueError: dropout of weights of softmax, or a wish for them, and what the processor refuses.
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


class LlamaAttention(WithProcessor, modeling_llama.LlamaAttention):
    """An attention of a patched Llama: everything else inherited, and named as its base class."""

    own_function = staticmethod(modeling_llama.eager_attention_forward)
    """What transformers calls "eager"."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a model that another process has pickled."""
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
        """As the base class, which hands the further arguments on to :func:`attend`.

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
}
"""transformers' class → the one with a processor."""


def give_classes(attentions: Iterable[Any], classes: Mapping[type, type] | None = None) -> None:
    """Give attentions of a model of transformers a place for a processor, by default those of :data:`CLASSES`."""
    classes = CLASSES if classes is None else classes
    for attn in attentions:
        before = type(attn)
        attn.__class__ = classes.get(before, before)
        # accelerate, which spreads a model over devices, keeps the forward of before and calls it by this name
        kept = vars(attn).get("_old_forward")
        if getattr(kept, "__func__", None) is before.forward:
            attn._old_forward = MethodType(type(attn).forward, attn)


def take_classes(attentions: Iterable[Any]) -> None:
    """The inverse of :func:`give_classes`."""
    give_classes(attentions, {kind: base for base, kind in CLASSES.items()})


def refuse_weights(dropout: float, asked: bool) -> None:
    """Raise if a call needs weights of softmax, which MHLA does not make.

    Args:
        dropout: of weights, in this call.
        asked: whether the caller wants to see them.

    Raises:
        ValueError: naming the way out.
    """
    if dropout:
        raise ValueError(
            f"attention_dropout={dropout} drops weights of softmax, which MHLA does not make; set it to 0 in the "
            "configuration before the model is made (there attention_probs_dropout_prob of some), or in the layers of "
            "one that is made, attn.attention_dropout (attn.dropout of SigLIP)."
        )
    if asked:
        raise ValueError(
            "output_attentions=True asks for weights of softmax, which MHLA does not make. Leave it out, or call "
            "within mhla_disabled(model); weights() of one of mhla_layers(model) tells what MHLA gives to every key."
        )


def _registered(replaced: str) -> str:
    """Name under which transformers finds the implementation beside one that a model had."""
    name = PREFIX + replaced
    AttentionInterface.register(name, partial(attend, replaced=replaced))
    AttentionMaskInterface.register(name, partial(checked_mask, replaced=replaced))
    return name


def give_interface(transformer: Any, attentions: Iterable[Any]) -> None:
    """Make the attentions of a model such ones, and name the implementation for them in a configuration of its own."""
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
    # what was set meanwhile stays set
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
    """That the tokens of a call follow each other without gaps, and the mask for layers that attend with softmax.

    Patched layers need no mask: a query sees no later key, and padding stands behind all tokens. The other layers' is
    made when the first of them asks.
    """

    def __init__(self, replaced: str, arguments: dict[str, Any]) -> None:
        self.replaced = replaced
        self.arguments = arguments
        self._made: tuple[Any, ...] = ()

    def of_softmax(self) -> Any:
        """What transformers makes for the implementation that the model had."""
        if not self._made:
            make = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(self.replaced)
            self._made = (make(**self.arguments) if make is not None else None,)
        return self._made[0]


def checked_mask(*, replaced: str, **arguments: Any) -> CausalMask:
    """What transformers asks for once in every forward, see :class:`transformers.AttentionMaskInterface`.

    Raises:
        ValueError: padding on the left or in between, a mask that is not causal alone, such as that of packed texts, or
            a cache whose keys are not those of the sequence.
    """
    past, own = arguments["q_offset"], arguments["q_length"]
    if isinstance(past, torch.Tensor) or arguments["kv_length"] != past + own or arguments["kv_offset"]:
        raise ValueError(
            "MHLA goes on from all of a sequence, and this cache holds another number of keys, as a static or a "
            "sliding one does. Give generate() past_key_values=MHLACache(model), or leave its cache_implementation out."
        )
    # a compiled graph gets the mask function of packed texts whether they are packed or not
    if arguments["mask_function"] is not causal_mask_function and not torch.compiler.is_compiling():
        raise ValueError(
            "Some tokens of this call may not see all that come before them, as texts that are packed into one row by "
            "their position_ids, and blocks of MHLA cannot be cut there. Give every text a row of its own, padded on "
            "the right."
        )
    padding = arguments["attention_mask"]
    if padding is not None:
        _check_padding(padding)
    return CausalMask(replaced, arguments)


def _check_padding(mask: torch.Tensor) -> None:
    """Raise unless the tokens that take part, (B, N), come before all that do not."""
    has_gap = (mask[:, 1:] & ~mask[:, :-1]).any()
    message = (
        "attention_mask has padding on the left or between tokens, which would shift the blocks that MHLA cuts a text "
        "into. Pad on the right to train or to score (tokenizer.padding_side = 'right'), and generate from prompts of "
        "one length together, or one by one."
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
    """What transformers calls for an attention, see :class:`transformers.AttentionInterface`.

    Returns:
        (B, n, H, D), and weights where another implementation gives them.

    Raises:
        ValueError: a mask that the caller has made, dropout of weights, a wish for them, or texts that are packed into
            one row.
    """
    if not isinstance(attention_mask, CausalMask):
        raise ValueError(
            "A patched model makes its masks itself, and was given a ready one of four axes or none; give "
            "attention_mask of two axes, (batch, tokens), or leave it out."
        )
    if not module.has_processor:
        function = ALL_ATTENTION_FUNCTIONS.get_interface(replaced, module.own_function)
        mask, more = attention_mask.of_softmax(), {**kwargs, "dropout": dropout}
        attended: tuple[torch.Tensor, torch.Tensor | None] = function(module, query, key, value, mask, **more)
        return attended
    refuse_weights(dropout, bool(kwargs.get("output_attentions", module.config.output_attentions)))
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError("MHLA does not cut rows of packed texts; give every text a row of its own.")
    output = module.processor.attend(
        module,
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        layer_input,
        cache,
    )
    return output, None
