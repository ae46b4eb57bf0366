"""What VLT is built of: stem, downsampling, attention, feed-forward, layer and stage."""

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.vit.modeling_vit import eager_attention_forward

from ..attention.rope import Rotary, rotary_table, rotated
from ..patching.gate_and_convolution import Convolution, Gate
from ..patching.layer import MHLALayer
from .vlt_config import VLTConfig

Grid = tuple[int, int]
"""Rows and columns of tokens."""


def rotary_of_grid(grid: Grid, head_dim: int, theta: float, device: torch.device) -> Rotary:
    """RoPE of an image: the first half of a head's channels turns with the row, the second with the column.

    Frequencies fall from 1 to 1 / ``theta``, that included, within each half, as in RAVLT.

    Returns:
        (cos, sin), each float32 (1, N, 1, D).
    """
    frequencies = theta ** -torch.linspace(0, 1, head_dim // 4, device=device)
    rows, columns = (torch.arange(size, device=device, dtype=torch.float32) for size in grid)
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)
    angles = (places[:, :, None] * frequencies).flatten(1).repeat_interleave(2, dim=-1)[None, :, None]
    return angles.cos(), angles.sin()


class SoftmaxAttention(nn.Module):
    """Softmax attention with the gate and the convolution that :class:`MHLALayer` has, and called like it.

    Args:
        config: settings of the model.
        heads: H.
        head_dim: D.
    """

    is_causal = False

    def __init__(self, config: VLTConfig, heads: int, head_dim: int) -> None:
        super().__init__()
        self.config, self.heads, self.head_dim = config, heads, head_dim
        size = heads * head_dim
        self.gate = Gate(size, size) if config.output_gate else None
        self.convolution = Convolution(size, config.convolution, 2) if config.convolution is not None else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        hidden_states: torch.Tensor,
        grid: Grid,
        rotary: Rotary | None,
    ) -> torch.Tensor:
        """(B, N, H, D) of query, key and value, before and after; ``hidden_states`` are the input of the attention."""
        table = rotary_table(rotary) if rotary is not None else None
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        by_head = (x.transpose(1, 2) for x in (rotated(query, table), rotated(key, table), value))
        output, _ = attend(self, *by_head, None, dropout=0.0, scaling=self.head_dim**-0.5)
        if self.gate is not None:
            output = output * nn.functional.silu(self.gate(hidden_states)).unflatten(-1, (self.heads, -1))
        if self.convolution is not None:
            output = output + self.convolution.of_tokens(value.flatten(2), grid).unflatten(-1, (self.heads, -1))
        return output


class VLTAttention(nn.Module):
    """Projections around :class:`MHLALayer`, built in as ``mhla``, or around softmax attention.

    RAVLT's rank augmentation, by which it weighs keys, is gone. RAVLT adds the convolution of the values before the
    gate, and MHLA after it.

    Args:
        config: settings of the model.
        stage: from 0.
    """

    def __init__(self, config: VLTConfig, stage: int) -> None:
        super().__init__()
        size, self.heads = config.hidden_sizes[stage], config.num_attention_heads[stage]
        self.q_proj = nn.Linear(size, size)
        self.k_proj = nn.Linear(size, size)
        self.v_proj = nn.Linear(size, size)
        self.o_proj = nn.Linear(size, size)
        self.has_rotary = config.rope_theta is not None
        settings = config.mhla_config(stage)
        if settings is None:
            self.softmax = SoftmaxAttention(config, self.heads, size // self.heads)
        else:
            self.mhla = MHLALayer(settings, self.heads, size // self.heads, size)
            self.mhla.rotary_axes = (size // self.heads // 2,) * 2 if self.has_rotary else None

    def forward(self, hidden_states: torch.Tensor, grid: Grid, rotary: Rotary | None) -> torch.Tensor:
        """(B, N, hidden size), before and after."""
        query, key, value = (
            projection(hidden_states).unflatten(-1, (self.heads, -1))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attend = self.mhla if hasattr(self, "mhla") else self.softmax
        return self.o_proj(attend(query, key, value, hidden_states, grid, rotary).flatten(2))


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
        """(B, ...); what is kept is scaled up, so that the mean stays."""
        if not self.training or self.rate == 0:
            return residual
        kept = torch.rand(len(residual), device=residual.device) >= self.rate
        return residual * (kept / (1 - self.rate)).to(residual.dtype).view(-1, *(1,) * (residual.ndim - 1))

    def extra_repr(self) -> str:
        """The rate, for ``print(model)``."""
        return f"rate={self.rate:.3f}"


class VLTLayer(GradientCheckpointingLayer):
    """Conditional positional encoding (Chu et al., arXiv 2102.10882), attention and feed-forward, each residual.

    Args:
        config: settings of the model.
        stage: from 0.
        drop_path: part of the samples whose residuals are dropped in training.
    """

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
    """Halving of the resolution, by a stem to a quarter in the first stage, and layers.

    Args:
        config: settings of the model.
        stage: from 0.
    """

    def __init__(self, config: VLTConfig, stage: int) -> None:
        super().__init__()
        size = config.hidden_sizes[stage]
        self.head_dim, self.theta = size // config.num_attention_heads[stage], config.rope_theta
        if stage == 0:
            self.downsample = _stem(config.num_channels, size)
        else:
            self.downsample = nn.Sequential(*_convolution(config.hidden_sizes[stage - 1], size, 2))
        rates = torch.linspace(0, config.drop_path_rate, sum(config.depths), device="cpu").tolist()
        before = sum(config.depths[:stage])
        self.layers = nn.ModuleList(
            VLTLayer(config, stage, rate) for rate in rates[before : before + config.depths[stage]]
        )

    def forward(self, feature_map: torch.Tensor) -> torch.Tensor:
        """(B, channels, height, width) of the stage before, or of the pixels, to that of this stage."""
        hidden_states = self.downsample(feature_map).movedim(1, -1)
        grid = hidden_states.shape[1], hidden_states.shape[2]
        rotary = None
        if self.theta is not None:
            rotary = rotary_of_grid(grid, self.head_dim, self.theta, hidden_states.device)
        for layer in self.layers:
            hidden_states = layer(hidden_states, rotary)
        return hidden_states.movedim(-1, 1)


def _convolution(channels: int, size: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, size, 3, stride, padding=1), nn.BatchNorm2d(size)]


def _stem(channels: int, size: int) -> nn.Sequential:
    half = size // 2
    parts: list[Any] = _convolution(channels, half, 2)
    for size_after, stride in ((half, 1), (half, 1), (size, 2)):
        parts += [nn.GELU(), *_convolution(half, size_after, stride)]
    return nn.Sequential(*parts)
