"""Settings of VLT, the four-stage vision transformer of the paper's Table 2b."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig

from ..config import MHLAConfig, check, check_names

_HERE = {
    "causal": (None, "pixels have no order in time"),
    "layers": ("all", "a stage says for itself whether it has MHLA, and None is softmax attention"),
    "softmax_steps": (0, "a classifier has no denoising steps"),
}
"""Settings of a patch that say nothing here: name → value that they keep, and why."""


@strict
class VLTConfig(PreTrainedConfig):
    """Settings of VLT: RAVLT's layout (Fan et al., CVPR 2025, arXiv 2411.07635) with MHLA in its linear stages.

    ``VLTConfig.vlt_t()`` and ``VLTConfig.vlt_s()`` are the paper's two sizes. All but the head is as in RAVLT's public
    code. What the head projects to, 1,024 channels there, is 2,048 here: that of MAViT (Fan et al., ICCV 2025), which
    is the same layout otherwise. It is the one difference between the 15 M and 26 M parameters that Table 2b gives for
    RAVLT and the 16 M that it gives for MAViT and MHLA-VLT (27 M of S): 14.9 M becomes 16.5 M, and 25.6 M becomes
    27.2 M. ``python -m mhla_diffusers.models.counts`` counts.

    Settings of a stage in ``mhla`` are fields of :class:`mhla_diffusers.MHLAConfig`, beside which ``convolution`` and
    ``output_gate`` are those of the model unless a stage has its own, and ``clamp_blocks`` is True. So::

        sparse = {"blocks": [7, 7], "sparse": "content", "density": 0.1}
        VLTConfig.vlt_t(mhla=[sparse, {"blocks": [4, 4]}, None, None])
        VLTConfig.vlt_t(mhla=[{"blocks": [1, 1]}, {"blocks": [1, 1]}, None, None])  # one block: plain linear attention
        VLTConfig.vlt_t(mhla=[None] * 4)  # softmax attention everywhere

    Raises:
        ValueError: lists of unlike length, channels that the heads do not divide, settings of a stage that MHLA does
            not have, or of those a causal order, a choice of layers or steps.
    """

    model_type = "mhla_vlt"

    num_channels: int = 3
    hidden_sizes: list[int] | tuple[int, ...] = (64, 128, 256, 512)
    """Channels of every stage."""
    depths: list[int] | tuple[int, ...] = (2, 2, 6, 2)
    """Layers of every stage."""
    num_attention_heads: list[int] | tuple[int, ...] = (1, 2, 4, 8)
    """Heads of every stage."""
    mhla: list[dict[str, Any] | None] | tuple[dict[str, Any] | None, ...] = (
        {"blocks": [7, 7]},
        {"blocks": [4, 4]},
        None,
        None,
    )
    """MHLA of every stage: its settings, or None for softmax attention. At 224 pixels the first two have 56 x 56 and
    28 x 28 tokens, in 49 and 16 blocks (paper, Appendix E).
    """
    convolution: int | None = 5
    """Odd size of the depth-wise convolution of the values in every attention; None for none."""
    output_gate: bool = True
    """Whether SiLU of a projection of its input multiplies the output of every attention (paper, Tab. 12). RAVLT's gate
    has no SiLU."""
    rope_theta: float | int | None = 10000.0
    """Of RoPE, half of whose channels turn with the row and half with the column; None for no RoPE."""
    mlp_ratio: float | int = 3.5
    """Channels within a feed-forward, divided by those of the stage."""
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
        for stage in range(stages):
            size, heads = self.hidden_sizes[stage], self.num_attention_heads[stage]
            check(
                size % heads == 0 and (self.rope_theta is None or size // heads % 4 == 0),
                f"Stage {stage} has hidden_sizes={size} and num_attention_heads={heads}: heads of a whole number of "
                "channels are allowed, and with RoPE a number that 4 divides.",
            )
            self.mhla_config(stage)
        super().__post_init__(**kwargs)

    def mhla_config(self, stage: int) -> MHLAConfig | None:
        """Settings of the MHLA of a stage, counted from 0; None for softmax attention.

        Raises:
            ValueError: what is not allowed.
        """
        given = self.mhla[stage]
        if given is None:
            return None
        usual = {"convolution": self.convolution, "output_gate": self.output_gate, "clamp_blocks": True}
        settings = MHLAConfig.from_dict(usual | given)
        for name, (value, reason) in _HERE.items():
            found = getattr(settings, name)
            check(found == value, f"mhla[{stage}] has {name}={found!r}; {reason}, so leave it out.")
        check(
            len(settings.blocks) == 2,
            f"mhla[{stage}] has blocks={settings.blocks}; the tokens of an image lie on rows and columns, so give two "
            "counts, such as [7, 7].",
        )
        return settings

    @classmethod
    def vlt_t(cls, **settings: Any) -> "VLTConfig":
        """MHLA-VLT-T of the paper's Table 2b, for the 1,000 classes of ImageNet unless settings say otherwise."""
        return cls(**({"num_labels": 1000} | settings))

    @classmethod
    def vlt_s(cls, **settings: Any) -> "VLTConfig":
        """MHLA-VLT-S, likewise."""
        size = {
            "hidden_sizes": (64, 128, 320, 512),
            "depths": (3, 5, 9, 3),
            "num_attention_heads": (1, 2, 5, 8),
            "drop_path_rate": 0.15,
        }
        return cls.vlt_t(**(size | settings))
