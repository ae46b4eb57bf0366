"""``attn.mhla``, the submodule of a patched attention that holds MHLA's parameters."""

from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from ..attention import (
    MHLACall,
    attend,
    clip_mixing_,
    extend_mixing,
    initial_mixing,
    reference_weights,
    resize_mixing,
)
from ..attention.split import attend_split
from ..config import CausalConfig, LinearConfig, MHLAConfig
from ..families import AttentionAdapter, AttentionInputs, Family

OFFLOADED = "The weights of this model are offloaded; patch it before you enable offloading."
FLOAT32_PARAMETERS = ("mixing", "linear_log_weight")
"""Parameters of a layer that stay in float32 in any precision of the attention."""

_UNIT_GATE = 1.2784645427610738
"""The number whose SiLU is 1, so that a fresh gate changes nothing."""
_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


class Gate(nn.Module):
    """Projection to (B, N, H * D); not an ``nn.Linear``, which layerwise casting would store in 8 bits."""

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inner_size, hidden_size, dtype=torch.float32))
        self.bias = nn.Parameter(torch.full((inner_size,), _UNIT_GATE, dtype=torch.float32))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Project."""
        return functional.linear(hidden_states, self.weight, self.bias)


class Convolution(nn.Module):
    """Depth-wise convolution of the values (B, N, H * D) over the token grid, with a kernel of odd size."""

    def __init__(self, channels: int, size: int, axes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, *(size,) * axes, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(channels, dtype=torch.float32))

    def forward(self, values: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """Convolve."""
        size, on_grid = self.weight.shape[-1], values.unflatten(1, grid).movedim(-1, 1)
        convolve = _CONVOLUTIONS[len(grid)]
        return convolve(on_grid, self.weight, self.bias, padding=size // 2, groups=values.shape[-1]).flatten(2).mT


class MHLALayer(nn.Module):
    """MHLA: mixing matrix and, where configured, λ, output norm, gate (fresh 1) and convolution (fresh 0)."""

    def __init__(
        self, config: LinearConfig, heads: int, head_dim: int, hidden_size: int, adapter: AttentionAdapter | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.adapter = adapter if adapter is not None else AttentionAdapter()
        self.heads = heads
        self.head_dim = head_dim
        self.original_processor: Any = None
        """The processor that this layer replaces; None if diffusers' own ``set_attn_processor`` dropped it."""
        mixing = initial_mixing(config.blocks, config.mixing_init)
        mixing = mixing.repeat(heads, 1, 1) if config.mixing_per_head else mixing
        self.mixing = nn.Parameter(mixing, requires_grad=config.mixing_learnable)
        self.linear_log_weight: nn.Parameter | None = None
        """Log of λ, (H,); of layers that attend to the own block with softmax."""
        if isinstance(config, CausalConfig) and config.own == "softmax":
            self.linear_log_weight = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.output_norm = nn.Parameter(torch.ones(head_dim, dtype=torch.float32)) if config.output_norm else None
        self.gate = Gate(hidden_size, heads * head_dim) if config.output_gate else None
        self.convolution: Convolution | None = None
        if isinstance(config, MHLAConfig) and config.convolution is not None:
            self.convolution = Convolution(heads * head_dim, config.convolution, len(config.blocks))

    def forward(
        self, inputs: AttentionInputs, *, backend: str = "auto", split: ProcessGroup | None = None
    ) -> torch.Tensor:
        """Attend, by default in one process; return (B, N, H, D), before the output projection of the attention."""
        call = self.call(inputs)
        if split is not None:
            if self.convolution is not None:
                size = self.convolution.weight.shape[-1]
                raise ValueError(
                    f"convolution={size} does not work under context parallelism, because neighbouring tokens are in "
                    "other processes. Use one process, or patch without a convolution."
                )
            return attend_split(call, split, backend)
        output = attend(call, backend)
        if self.convolution is None:
            return output
        added = self.convolution(inputs.value.flatten(2), inputs.grid)
        return output + added.unflatten(-1, (-1, self.head_dim))

    @torch.no_grad()
    def weights(self, inputs: AttentionInputs) -> torch.Tensor:
        """Return the effective attention matrix, before norm and gate: float64 (B, H, N, N), one row per query."""
        return reference_weights(self.call(inputs))

    def call(self, inputs: AttentionInputs) -> MHLACall:
        """Return the call of MHLA with the weights and settings of this layer."""
        config, grid, gate = self.config, inputs.grid, None
        weight = None if self.linear_log_weight is None else self.linear_log_weight.exp()  # λ
        if self.gate is not None:
            gate = self.gate(inputs.hidden_states).unflatten(-1, (self.heads, -1))
        mixing: torch.Tensor = self.mixing
        causal = config.causal if isinstance(config, CausalConfig) else None
        call_grid, blocks = config.layout_on(grid)
        if blocks != config.blocks:
            # in every forward, about 1% of the time at most: one that is kept would miss changes through .data
            if causal is not None:
                mixing = extend_mixing(mixing, config.blocks, blocks[0])
            else:
                mixing = resize_mixing(mixing, config.blocks, blocks)
        if weight is not None or (isinstance(config, CausalConfig) and config.needs_positive_mixing):
            # sums are weighed against softmax by their logarithm; an optimizer without the clip goes below 0
            mixing = mixing.clamp_min(0)
        return MHLACall(
            query=inputs.query,
            key=inputs.key,
            value=inputs.value,
            mixing=mixing,
            grid=call_grid,
            blocks=blocks,
            feature_map=config.feature_map,
            rope=config.rope,
            normalize=config.normalize,
            eps=config.eps,
            rotary=inputs.rotary,
            key_mask=inputs.key_mask,
            output_norm=self.output_norm,
            output_gate=gate,
            linear_weight=weight,
            causal=causal,
        )

    @torch.no_grad()
    def clip_mixing_(self) -> None:
        """Clip the mixing matrix into (0, 1), unless the configuration turns clipping off."""
        if self.config.mixing_clip:
            clip_mixing_(self.mixing)


SETTINGS_OF_PARAMETERS = ("blocks", "causal", "own", "block_length", "mixing_per_head", "mixing_init",
                          "mixing_learnable", "output_norm", "output_gate", "convolution")  # fmt: skip
"""Settings on which the parameters of a layer depend."""


def make_layer(attn: Any, config: LinearConfig, family: Family | None) -> MHLALayer:
    """Make a fresh layer that fits an attention of a family, or of an unknown one (None), on its device.

    Mixing matrix and λ are float32; gate, norm and convolution take the type that the attention computes in. ValueError
    for offloaded weights.
    """
    adapter = family.mhla if family is not None and family.mhla is not None else AttentionAdapter()
    projection, heads, head_dim = attn.to_q, int(attn.heads), int(attn.inner_dim) // int(attn.heads)
    if hasattr(projection, "_hf_hook") and any(weight.is_meta for weight in attn.parameters()):
        raise ValueError(OFFLOADED)
    tensors = [*attn.parameters(), *attn.buffers()]
    # the type that the attention computes in: that of its weights, or what a layer says whose weights are quantised
    hooks = getattr(projection, "_diffusers_hook", None)
    casting = hooks.get_hook("layerwise_casting") if hooks is not None else None
    weight = next((tensor for tensor in tensors if tensor.is_floating_point() and tensor.dtype.itemsize > 1), None)
    if casting is not None:
        dtype = casting.compute_dtype
    else:
        dtype = weight.dtype if weight is not None else getattr(projection, "compute_dtype", None) or torch.float32
    # in any mode and on any default device, the weights of a patch are real ones that can be trained
    with torch.inference_mode(False), torch.device("cpu"):
        layer = MHLALayer(config, heads, head_dim, int(projection.in_features), adapter)
        if tensors:
            layer.to(device=tensors[0].device)
            for name, parameter in layer.named_parameters():
                if name not in FLOAT32_PARAMETERS:
                    parameter.data = parameter.data.to(dtype)
    return layer.train(attn.training)
