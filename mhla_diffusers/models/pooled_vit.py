"""DeiT as the paper trains it (Appendix E): no class token, the mean over all tokens is classified."""

from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import DeiTForImageClassification, PreTrainedModel, ViTConfig, ViTForImageClassification
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput, ImageClassifierOutput
from transformers.models.vit.modeling_vit import ViTAttention, ViTLayer, ViTPatchEmbeddings
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..patching import is_patched


@strict
class PooledViTConfig(ViTConfig):
    """Settings of a ViT or DeiT without a class token, those of transformers' ViT; ``pooler_…`` have no effect."""

    model_type = "mhla_pooled_vit"

    @classmethod
    def deit_t(cls, **settings: Any) -> "PooledViTConfig":
        """Return DeiT-T/16 (Touvron et al., arXiv 2012.12877) for ImageNet at 224 pixels; settings override."""
        size = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
        return cls(**(size | {"layer_norm_eps": 1e-6, "num_labels": 1000} | settings))

    @classmethod
    def deit_s(cls, **settings: Any) -> "PooledViTConfig":
        """Return DeiT-S/16, likewise."""
        return cls.deit_t(**({"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536} | settings))


class PooledViTForImageClassification(PreTrainedModel):
    """A ViT without a class token, of transformers' own layers: patches, positions, layers, norm, mean, classifier.

    It attends with softmax. Its tokens are those of the grid alone.

    Args:
        config: settings, such as ``PooledViTConfig.deit_t(num_labels=10)``.
    """

    config: PooledViTConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["ViTLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": ViTLayer, "attentions": ViTAttention}
    _input_embed_layer = "patch_embeddings"

    def __init__(self, config: PooledViTConfig) -> None:
        super().__init__(config)
        self.patch_embeddings = ViTPatchEmbeddings(config)
        self.position_embeddings = nn.Parameter(torch.zeros(1, self.patch_embeddings.num_patches, config.hidden_size))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layers = nn.ModuleList(ViTLayer(config) for _ in range(config.num_hidden_layers))
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            init.trunc_normal_(self.position_embeddings, std=self.config.initializer_range)

    @classmethod
    def from_vit(
        cls, model: ViTForImageClassification | DeiTForImageClassification
    ) -> "PooledViTForImageClassification":
        """Return a model with the weights of transformers' ViT or DeiT, without its class and distillation tokens.

        What it predicts is another mean of other tokens, so it needs training; the weights are copies.

        Raises:
            ValueError: of another class, or with a patch.
        """
        if not isinstance(model, ViTForImageClassification | DeiTForImageClassification):
            raise ValueError(
                f"{type(model).__name__} cannot become a {cls.__name__}; allowed are ViTForImageClassification and "
                "DeiTForImageClassification, such as DeiTForImageClassification.from_pretrained(...)."
            )
        if is_patched(model):
            raise ValueError(
                "The model is patched, and from_vit does not take the patch over: remove_mhla() first, and "
                "apply_mhla() to what from_vit returns."
            )
        given = model.config.to_dict()
        settings = {name: value for name, value in given.items() if name not in ("architectures", "model_type")}
        pooled = cls(PooledViTConfig(**settings))
        base, embeddings = model.base_model, model.base_model.embeddings
        for own, theirs in (
            (pooled.patch_embeddings, embeddings.patch_embeddings),
            (pooled.layers, base.layers),
            (pooled.layernorm, base.layernorm),
            (pooled.classifier, model.classifier),
        ):
            own.load_state_dict(theirs.state_dict())
        patches = pooled.patch_embeddings.num_patches  # the last ones: tokens of other kinds stand before them
        with torch.no_grad():
            pooled.position_embeddings.copy_(embeddings.position_embeddings[:, -patches:])
        return pooled.to(model.device, model.dtype).train(model.training)

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Classify images.

        Args:
            pixel_values: (B, channels, height, width).
            labels: (B,) classes, for the loss of transformers' image classifiers.
            interpolate_pos_encoding: whether positions are interpolated to images of another size than the
                configuration's; sides may differ.
            attention_mask: (B, N), 1 for tokens that take part, in the attention and in the mean.
            **kwargs: transformers' ``output_hidden_states``, ``output_attentions`` and ``return_dict``, and those of
                the loss.

        Raises:
            ValueError: images of another size without ``interpolate_pos_encoding``.
        """
        outputs = self._encode(pixel_values, interpolate_pos_encoding, attention_mask, **kwargs)
        tokens = outputs.last_hidden_state
        if attention_mask is None:
            pooled = tokens.mean(dim=1)
        else:
            weights = attention_mask.to(tokens.dtype)[:, :, None]
            pooled = (tokens * weights).sum(dim=1) / weights.sum(dim=1)
        logits = self.classifier(pooled)
        loss: Any = None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def _encode(
        self,
        pixel_values: torch.Tensor,
        interpolate_pos_encoding: bool | None,
        attention_mask: torch.Tensor | None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Return the tokens after the last norm."""
        embedded = self.patch_embeddings(pixel_values.to(self.patch_embeddings.projection.weight.dtype))
        hidden_states = self.dropout(embedded + self._positions(pixel_values.shape[-2:], interpolate_pos_encoding))
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.layernorm(hidden_states))

    def _positions(self, size: Sequence[int], interpolate: bool | None) -> torch.Tensor:
        """Return the position embeddings of images of a size, (1, N, hidden size)."""
        patch, own = self.patch_embeddings.patch_size, self.patch_embeddings.image_size
        if tuple(size) == tuple(own):
            return self.position_embeddings
        if not interpolate:
            raise ValueError(
                f"The images have {size[0]} x {size[1]} pixels and the configuration's have {own[0]} x {own[1]}; give "
                "such images, or interpolate_pos_encoding=True."
            )
        on_grid = self.position_embeddings.unflatten(1, (own[0] // patch[0], own[1] // patch[1])).movedim(-1, 1)
        wanted = size[0] // patch[0], size[1] // patch[1]
        found = nn.functional.interpolate(on_grid, size=wanted, mode="bicubic", align_corners=False)
        return found.flatten(2).mT
