"""The output gate and the convolution of an MHLA layer.

They are no ``nn.Linear`` and no ``nn.Conv3d``, by which diffusers' layerwise casting and quantisation know what to
store in fewer bits: MHLA's own weights are few, and stay in the type that they compute in.
"""

import torch
from torch import nn
from torch.nn import functional

_UNIT_GATE = 1.2784645427610738
"""The number whose SiLU is 1, so that a fresh gate changes nothing."""

_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


class Gate(nn.Module):
    """Projection of a layer's input, whose SiLU multiplies the output; fresh, it is 1.

    Args:
        hidden_size: channels of the input.
        inner_size: H * D.
    """

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inner_size, hidden_size))
        self.bias = nn.Parameter(torch.full((inner_size,), _UNIT_GATE))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, N, hidden size) to (B, N, H * D)."""
        return functional.linear(hidden_states, self.weight, self.bias)


class Convolution(nn.Module):
    """Depth-wise convolution of the values over the token grid; fresh, it is 0.

    Args:
        channels: H * D.
        size: odd kernel size.
        axes: of the token grid.
    """

    def __init__(self, channels: int, size: int, axes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, *(size,) * axes))
        self.bias = nn.Parameter(torch.zeros(channels))

    @property
    def reach(self) -> int:
        """How far the tokens that it adds to one are away, along every axis."""
        return self.weight.shape[-1] // 2

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """(B, H * D, *grid), before and after."""
        channels, _, size, *rest = self.weight.shape
        convolve = _CONVOLUTIONS[1 + len(rest)]
        output: torch.Tensor = convolve(values, self.weight, self.bias, padding=size // 2, groups=channels)
        return output

    def of_tokens(self, values: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """(B, N, H * D), before and after, of the tokens of a grid."""
        output: torch.Tensor = self(values.unflatten(1, grid).movedim(-1, 1))
        return output.flatten(2).mT
