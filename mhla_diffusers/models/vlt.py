"""VLT, the vision transformer of the paper's Table 2b: two stages of MHLA on fine grids, two of softmax on coarse ones.

The layout is RAVLT's (Fan et al., CVPR 2025, arXiv 2411.07635, ``classfication/RALA.py`` of qhfan/RALA); choices that
the paper leaves open are documented in :class:`VLTConfig` and :class:`VLTAttention`.
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.vit.modeling_vit import eager_attention_forward
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..attention.rope import Rotary, rotated
from ..config import CausalConfig, MHLAConfig, PatchConfig, SparseConfig, kind_of
from ..families import AttentionInputs
from ..patching.layer import FLOAT32_PARAMETERS, Convolution, Gate, MHLALayer, SparseLayer
from ..settings import check, check_names

Grid = tuple[int, int]
"""Rows and columns of tokens."""

_ASKED = ("output_hidden_states", "output_attentions", "use_cache")
"""Arguments that transformers passes to every model; after a ``Trainer`` it also passes ``use_cache``."""


@strict
class VLTConfig(PreTrainedConfig):
    """Settings of VLT: RAVLT's layout with MHLA in its linear stages.

    ``VLTConfig.vlt_t()`` and ``VLTConfig.vlt_s()`` are the paper's two sizes. All but the head is as in RAVLT's public
    code. The head projects to 2,048 channels instead of 1,024, as in MAViT (Fan et al., ICCV 2025), the same layout
    otherwise: so parameters are the 16 M and 27 M of Table 2b instead of RAVLT's 15 M and 26 M.

    Settings of a stage in ``mhla`` are those of a patch: of :class:`mhla_diffusers.MHLAConfig`, or of
    :class:`mhla_diffusers.SparseConfig`. MHLA has the model's ``convolution`` and ``output_gate`` unless the stage sets
    its own, and ``clamp_blocks=True``. So::

        VLTConfig.vlt_t(mhla=[{"density": 0.1}, {"blocks": [4, 4]}, None, None])  # sparse attention in the first stage
        VLTConfig.vlt_t(mhla=[{"blocks": [1, 1]}, {"blocks": [1, 1]}, None, None])  # one block: plain linear attention
        VLTConfig.vlt_t(mhla=[None] * 4)  # softmax attention everywhere

    Raises:
        ValueError: lists of unlike length, channels that the heads do not divide, or settings of a stage that are
            unknown or have no meaning here: a causal order, a choice of layers, steps.
    """

    model_type = "mhla_vlt"

    num_channels: int = 3
    # one entry for every stage
    hidden_sizes: list[int] | tuple[int, ...] = (64, 128, 256, 512)
    depths: list[int] | tuple[int, ...] = (2, 2, 6, 2)
    num_attention_heads: list[int] | tuple[int, ...] = (1, 2, 4, 8)
    mhla: list[dict[str, Any] | None] | tuple[dict[str, Any] | None, ...] = (
        {"blocks": [7, 7]},
        {"blocks": [4, 4]},
        None,
        None,
    )
    """Attention of every stage: settings of a patch, or None for softmax attention. At 224 pixels the first two stages
    have 56 x 56 and 28 x 28 tokens, in 49 and 16 blocks (paper, Appendix E).
    """
    convolution: int | None = 5
    """Odd size of the depth-wise convolution of the values in every attention; None for none."""
    output_gate: bool = True
    """Whether SiLU of a projection of its input multiplies the output of every attention (paper, Tab. 12). RAVLT's gate
    has no SiLU."""
    rope_theta: float | int | None = 10000.0
    """Base of RoPE, half of whose channels rotate with the row and half with the column; None for no RoPE."""
    mlp_ratio: float | int = 3.5
    hidden_act: str = "gelu"
    head_size: int = 2048
    """Channels that the last stage is projected to before pooling."""
    drop_path_rate: float | int = 0.1
    """Part of the residuals that the last layer drops in training; earlier ones drop less, the first none."""
    layer_scale_init_value: float | int = 1.0
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        check_names([self.hidden_act], list(ACT2FN), "hidden_act")
        stages = len(self.depths)
        for name in ("hidden_sizes", "num_attention_heads", "mhla"):
            given = getattr(self, name)
            check(
                len(given) == stages,
                f"{name}={given} has {len(given)} entries and depths={self.depths} has {stages}; give one per stage.",
            )
        self.mhla = [None if settings is None else dict(settings) for settings in self.mhla]
        for stage, (size, heads) in enumerate(zip(self.hidden_sizes, self.num_attention_heads, strict=True)):
            check(
                size % heads == 0 and (self.rope_theta is None or size // heads % 4 == 0),
                f"Stage {stage} has hidden_sizes={size} and num_attention_heads={heads}: heads of a whole number of "
                "channels are allowed, and with RoPE a number that 4 divides.",
            )
            self.patch_config(stage)
        super().__post_init__(**kwargs)

    def patch_config(self, stage: int) -> PatchConfig | None:
        """Return the settings of a stage, counted from 0; None for softmax attention. ValueError if not allowed."""
        given = self.mhla[stage]
        if given is None:
            return None
        kind = kind_of(given)
        check(
            kind is not CausalConfig,
            f"mhla[{stage}] is causal MHLA, and pixels have no order in time; leave its settings out.",
        )
        usual = {"convolution": self.convolution, "output_gate": self.output_gate, "clamp_blocks": True}
        settings = kind(**(usual | given if kind is MHLAConfig else given))
        check(
            settings.layers == "all",
            f"mhla[{stage}] has layers={settings.layers!r}; every stage has an entry of its own, and None is softmax "
            "attention, so leave it out.",
        )
        check(
            not settings.asks_for_dense_steps,
            f"mhla[{stage}] has {settings.dense_words}; a classifier has no denoising steps, so leave it out.",
        )
        if isinstance(settings, MHLAConfig):
            check(
                len(settings.blocks) == 2,
                f"mhla[{stage}] has blocks={settings.blocks}; the tokens of an image lie on rows and columns, so give "
                "two counts, such as [7, 7].",
            )
        return settings

    @classmethod
    def vlt_t(cls, **settings: Any) -> "VLTConfig":
        """Return MHLA-VLT-T of the paper's Table 2b, for the 1,000 classes of ImageNet; settings override."""
        return cls(**({"num_labels": 1000} | settings))

    @classmethod
    def vlt_s(cls, **settings: Any) -> "VLTConfig":
        """Return MHLA-VLT-S, likewise."""
        size = {"hidden_sizes": (64, 128, 320, 512), "depths": (3, 5, 9, 3), "num_attention_heads": (1, 2, 5, 8)}
        return cls.vlt_t(**(size | {"drop_path_rate": 0.15} | settings))


def rotary_of_grid(grid: Grid, head_dim: int, theta: float, device: torch.device) -> Rotary:
    """Return RoPE of an image: the first half of a head's channels rotates with the row, the second with the column.

    Frequencies fall from 1 to 1 / ``theta``, that included, within each half, as in RAVLT.

    Returns:
        (cos, sin), each float32 (1, N, 1, D).
    """
    frequencies = theta ** -torch.linspace(0, 1, head_dim // 4, device=device)
    rows, columns = (torch.arange(size, device=device, dtype=torch.float32) for size in grid)
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)
    angles = (places[:, :, None] * frequencies).flatten(1).repeat_interleave(2, dim=-1)[None, :, None]
    return angles.cos(), angles.sin()


class VLTAttention(nn.Module):
    """MHLA, sparse attention or softmax attention between projections; the first two are built in as ``mhla``.

    RAVLT's rank augmentation, by which it weighs keys, is gone. RAVLT adds the convolution of the values before the
    gate; here it comes after the gate, as in :class:`MHLALayer`.
    """

    is_causal = False

    def __init__(self, config: VLTConfig, stage: int) -> None:
        super().__init__()
        size, self.heads = config.hidden_sizes[stage], config.num_attention_heads[stage]
        self.config, self.head_dim = config, size // self.heads
        self.q_proj = nn.Linear(size, size)
        self.k_proj = nn.Linear(size, size)
        self.v_proj = nn.Linear(size, size)
        self.o_proj = nn.Linear(size, size)
        settings = config.patch_config(stage)
        self.mhla: MHLALayer | SparseLayer | None = None
        self.gate: Gate | None = None
        self.convolution: Convolution | None = None
        if isinstance(settings, MHLAConfig):  # with a gate and a convolution of its own
            self.mhla = MHLALayer(settings, self.heads, self.head_dim, size)
            return
        if isinstance(settings, SparseConfig):
            self.mhla = SparseLayer(settings, self.heads, self.head_dim)
        if config.output_gate:
            self.gate = Gate(size, size)
        if config.convolution is not None:
            self.convolution = Convolution(size, config.convolution, 2)

    def forward(self, hidden_states: torch.Tensor, grid: Grid, rotary: Rotary | None) -> torch.Tensor:
        """Project, attend and project: (B, N, hidden size), before and after."""
        query, key, value = (
            projection(hidden_states).unflatten(-1, (self.heads, -1))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.mhla is not None:
            output = self.mhla(AttentionInputs(query, key, value, hidden_states, grid, rotary=rotary))
        else:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
            by_head = (x.transpose(1, 2) for x in (rotated(query, rotary), rotated(key, rotary), value))
            output, _ = attend(self, *by_head, None, dropout=0.0, scaling=self.head_dim**-0.5)
        if self.gate is not None:
            output = output * nn.functional.silu(self.gate(hidden_states)).unflatten(-1, (self.heads, -1))
        if self.convolution is not None:
            output = output + self.convolution(value.flatten(2), grid).unflatten(-1, (self.heads, -1))
        return self.o_proj(output.flatten(2))


class FeedForward(nn.Module):
    """Two projections, with a residual depth-wise convolution of 3 x 3 between them."""

    def __init__(self, config: VLTConfig, size: int) -> None:
        super().__init__()
        inner = int(config.mlp_ratio * size)
        self.fc1 = nn.Linear(size, inner)
        self.convolution = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.fc2 = nn.Linear(inner, size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, rows, columns, hidden size), before and after."""
        inner = self.activation(self.fc1(hidden_states)).movedim(-1, 1)
        return self.fc2((inner + self.convolution(inner)).movedim(1, -1))


class DropPath(nn.Module):
    """Stochastic depth (Huang et al., 2016): in training a sample loses the residual with this probability."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        """Drop residuals (B, ...); those kept are scaled up, so that the mean stays."""
        if not self.training or self.rate == 0:
            return residual
        kept = torch.rand(len(residual), device=residual.device) >= self.rate
        return residual * (kept / (1 - self.rate)).to(residual.dtype).view(-1, *(1,) * (residual.ndim - 1))

    def extra_repr(self) -> str:
        """Return the rate, for ``print(model)``."""
        return f"rate={self.rate:.3f}"


class VLTLayer(GradientCheckpointingLayer):
    """Conditional positional encoding (Chu et al., arXiv 2102.10882), attention and feed-forward, each residual."""

    def __init__(self, config: VLTConfig, stage: int, drop_path: float) -> None:
        super().__init__()
        size = config.hidden_sizes[stage]
        self.position = nn.Conv2d(size, size, 3, padding=1, groups=size)
        self.norm1 = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.attn = VLTAttention(config, stage)
        self.norm2 = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config, size)
        self.scale1 = nn.Parameter(torch.full((size,), float(config.layer_scale_init_value)))
        self.scale2 = nn.Parameter(torch.full((size,), float(config.layer_scale_init_value)))
        self.drop_path = DropPath(drop_path)

    def forward(self, hidden_states: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """(B, rows, columns, hidden size), before and after."""
        hidden_states = hidden_states + self.position(hidden_states.movedim(-1, 1)).movedim(1, -1)
        grid = hidden_states.shape[1], hidden_states.shape[2]
        attended = self.attn(self.norm1(hidden_states).flatten(1, 2), grid, rotary).unflatten(1, grid)
        hidden_states = hidden_states + self.drop_path(self.scale1 * attended)
        return hidden_states + self.drop_path(self.scale2 * self.feed_forward(self.norm2(hidden_states)))


class VLTStage(nn.Module):
    """Halving of the resolution, by a stem to a quarter in the first stage, and layers."""

    def __init__(self, config: VLTConfig, stage: int) -> None:
        super().__init__()
        size = config.hidden_sizes[stage]
        self.head_dim, self.theta = size // config.num_attention_heads[stage], config.rope_theta
        stem = [config.num_channels, size // 2, size // 2, size // 2, size]
        widths, strides = (stem, [2, 1, 1, 2]) if stage == 0 else ([config.hidden_sizes[stage - 1], size], [2])
        parts: list[nn.Module] = []
        for before, after, stride in zip(widths, widths[1:], strides, strict=False):
            parts += [nn.GELU()] if parts else []
            parts += [nn.Conv2d(before, after, 3, stride, padding=1), nn.BatchNorm2d(after)]
        self.downsample = nn.Sequential(*parts)
        rates = torch.linspace(0, config.drop_path_rate, sum(config.depths), device="cpu").tolist()
        first = sum(config.depths[:stage])
        self.layers = nn.ModuleList(
            VLTLayer(config, stage, rate) for rate in rates[first : first + config.depths[stage]]
        )

    def forward(self, feature_map: torch.Tensor) -> torch.Tensor:
        """Run the stage: (B, channels, height, width) of the stage before, or of the pixels, to this stage's."""
        hidden_states = self.downsample(feature_map).movedim(1, -1)
        grid = hidden_states.shape[1], hidden_states.shape[2]
        rotary = None
        if self.theta is not None:
            rotary = rotary_of_grid(grid, self.head_dim, self.theta, hidden_states.device)
        for layer in self.layers:
            hidden_states = layer(hidden_states, rotary)
        return hidden_states.movedim(-1, 1)


class VLTPreTrainedModel(PreTrainedModel):
    """Base of the models below: how weights begin, and what transformers may do with them."""

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
        fresh: nn.Module | None = None  # with the same settings, to take the weights of
        if isinstance(module, VLTLayer):
            init.constant_(module.scale1, self.config.layer_scale_init_value)
            init.constant_(module.scale2, self.config.layer_scale_init_value)
        elif isinstance(module, MHLALayer):
            fresh = MHLALayer(module.config, module.heads, module.head_dim, module.heads * module.head_dim)
        elif isinstance(module, Gate):
            fresh = Gate(*reversed(module.weight.shape))
        elif isinstance(module, Convolution):
            channels, _, size, *others = module.weight.shape
            fresh = Convolution(channels, size, 1 + len(others))
        if fresh is not None:
            found = dict(module.named_parameters(recurse=False))
            for name, value in fresh.named_parameters(recurse=False):
                init.copy_(found[name], value)


class VLTModel(VLTPreTrainedModel):
    """Stages and the pooling over what the last one is projected to."""

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
            ValueError: other arguments, or ``output_attentions``.
        """
        check_names(kwargs, _ASKED, "argument of VLT")
        check(
            not kwargs.get("output_attentions", self.config.output_attentions),
            "output_attentions=True asks for softmax weights, which MHLA does not compute; leave it out. weights() of "
            "one of mhla_layers(model) returns MHLA's weight of every key.",
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

    Its MHLA is built in: :func:`mhla_diffusers.mhla_layers` and
    :func:`mhla_diffusers.patching.register_mixing_clip` find it, ``save_pretrained`` and ``from_pretrained`` keep it,
    and it cannot be removed.

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
            **kwargs: of :meth:`VLTModel.forward`, which raises for others.
        """
        outputs = self.vlt(pixel_values, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss: Any = None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config, num_items_in_batch=num_items_in_batch)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
