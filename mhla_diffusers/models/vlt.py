"""VLT, the vision transformer of the paper's Table 2b: two stages of MHLA on fine grids, two of softmax on coarse ones.

The layout is RAVLT's (Fan et al., CVPR 2025, arXiv 2411.07635, ``classfication/RALA.py`` of qhfan/RALA); what was
chosen where the paper leaves a choice stands in :class:`VLTConfig` and :class:`VLTAttention`.
"""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..config import check, check_names
from ..patching.gate_and_convolution import Convolution, Gate
from ..patching.layer import FLOAT32_PARAMETERS, MHLALayer
from .vlt_config import VLTConfig
from .vlt_parts import VLTLayer, VLTStage


class VLTPreTrainedModel(PreTrainedModel):
    """What the models below share: how weights begin, and what transformers may do with them."""

    config: VLTConfig
    base_model_prefix = "vlt"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["VLTLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": VLTStage}
    _keep_in_fp32_modules_strict = list(FLOAT32_PARAMETERS)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, VLTLayer):
            init.constant_(module.scale1, self.config.layer_scale_init_value)
            init.constant_(module.scale2, self.config.layer_scale_init_value)
        elif (fresh := _fresh(module)) is not None:
            found = dict(module.named_parameters(recurse=False))
            for name, value in fresh.named_parameters(recurse=False):
                init.copy_(found[name], value)


_ASKED = ("output_hidden_states", "output_attentions", "use_cache")
"""What transformers lets every model be asked for; after a ``Trainer`` it hands on ``use_cache`` itself."""


def _fresh(module: nn.Module) -> nn.Module | None:
    """A fresh module of MHLA with the settings of another, to take weights of; None for what belongs to no MHLA."""
    if isinstance(module, MHLALayer):
        return MHLALayer(module.config, module.heads, module.head_dim, module.heads * module.head_dim)
    if isinstance(module, Gate):
        inner_size, hidden_size = module.weight.shape
        return Gate(hidden_size, inner_size)
    if isinstance(module, Convolution):
        channels, _, size, *others = module.weight.shape
        return Convolution(channels, size, 1 + len(others))
    return None


class VLTModel(VLTPreTrainedModel):
    """Stages and the pooling over what the last one is projected to.

    Args:
        config: settings.
    """

    def __init__(self, config: VLTConfig) -> None:
        super().__init__(config)
        self.stages = nn.ModuleList(VLTStage(config, stage) for stage in range(len(config.depths)))
        self.projection = nn.Conv2d(config.hidden_sizes[-1], config.head_size, 1)
        self.norm = nn.BatchNorm2d(config.head_size)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> BaseModelOutputWithPooling:
        """Look at images of any height and width.

        Args:
            pixel_values: (B, channels, height, width).
            **kwargs: transformers' ``output_hidden_states`` and ``return_dict``.

        Returns:
            ``last_hidden_state`` (B, hidden size, rows, columns), the feature map of the last stage, at 1 / 32 of the
            resolution; ``pooler_output`` (B, head size); ``hidden_states``, if asked for, the pixels and
            the feature maps of all stages.

        Raises:
            ValueError: other arguments, or a wish for weights of the attention.
        """
        check_names(kwargs, _ASKED, "argument of VLT")
        check(
            not kwargs.get("output_attentions", self.config.output_attentions),
            "output_attentions=True asks for weights of softmax, which MHLA does not make; leave it out. weights() of "
            "one of mhla_layers(model) tells what MHLA gives to every key.",
        )
        # the blocks depend on the sizes, so torch.compile should make one graph per resolution rather than try symbols
        if torch.compiler.is_compiling():
            for axis in (2, 3):
                torch._dynamo.mark_static(pixel_values, axis)
        feature_map = pixel_values.to(self.projection.weight.dtype)
        for stage in self.stages:
            feature_map = stage(feature_map)
        pooled = nn.functional.silu(self.norm(self.projection(feature_map))).mean(dim=(2, 3))
        return BaseModelOutputWithPooling(last_hidden_state=feature_map, pooler_output=pooled)


class VLTForImageClassification(VLTPreTrainedModel):
    """VLT with a classifier.

    Its MHLA is built in: :func:`mhla_diffusers.mhla_layers` and :func:`mhla_diffusers.register_mixing_clip` find it,
    ``save_pretrained`` and ``from_pretrained`` carry it, and it cannot be removed.

    Args:
        config: settings, such as ``VLTConfig.vlt_t(num_labels=10)``.
    """

    def __init__(self, config: VLTConfig) -> None:
        super().__init__(config)
        self.vlt = VLTModel(config)
        self.classifier = nn.Linear(config.head_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Classify images of any height and width.

        Args:
            pixel_values: (B, channels, height, width).
            labels: (B,) classes, for the loss of transformers' image classifiers.
            num_items_in_batch: labels of a whole step, which the loss is divided by; None for those of this batch.
            **kwargs: of :meth:`VLTModel.forward`.

        Raises:
            ValueError: as :meth:`VLTModel.forward`.
        """
        outputs = self.vlt(pixel_values, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss: Any = None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config, num_items_in_batch=num_items_in_batch)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
