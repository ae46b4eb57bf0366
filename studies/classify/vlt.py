"""VLT, the vision transformer of the paper's Table 2b: two stages of MHLA on fine grids, two of softmax on coarse ones.

The layout is RAVLT's (Fan et al., CVPR 2025, arXiv 2411.07635, ``classfication/RALA.py`` of qhfan/RALA). The head
projects to 2,048 channels instead of 1,024, as in MAViT (Fan et al., ICCV 2025), the same layout otherwise. So
parameters are the 16 M and 27 M of Table 2b instead of RAVLT's 15 M and 26 M.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from mhla_diffusers.attention import initial_mixing, mhla_attention

Grid = tuple[int, int]
Rotary = tuple[torch.Tensor, torch.Tensor]
UNIT_GATE = 1.2784645427610738
"""The number whose SiLU is 1, so that a fresh gate changes nothing."""


def rotary_of(grid: Grid, head_dim: int, device: torch.device) -> Rotary:
    """Return RoPE of an image: the first half of a head's channels rotates with the row, the second with the column.

    Frequencies fall from 1 to 1 / 10,000, that included, within each half, as in RAVLT.

    Returns:
        (cos, sin), each float32 (1, N, 1, D).
    """
    frequencies = 1e4 ** -torch.linspace(0, 1, head_dim // 4, device=device)
    rows, columns = (torch.arange(size, device=device, dtype=torch.float32) for size in grid)
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)
    angles = (places[:, :, None] * frequencies).flatten(1).repeat_interleave(2, dim=-1)[None, :, None]
    return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate neighbouring channels of (B, N, H, D)."""
    cos, sin = rotary
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return x * cos + turned * sin


class VLTAttention(nn.Module):
    """MHLA or softmax attention between projections, with a gate, and a convolution of the values after it.

    RAVLT's rank augmentation, by which it weighs keys, is gone. RAVLT adds the convolution before the gate, which has
    no SiLU there.

    Args:
        width: channels of a token.
        heads: of D channels, a multiple of 4.
        blocks: of MHLA; None for softmax.
    """

    def __init__(self, width: int, heads: int, blocks: Grid | None) -> None:
        super().__init__()
        self.heads, self.blocks = heads, blocks
        self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.gate = (nn.Linear(width, width) for _ in range(5))
        nn.init.zeros_(self.gate.weight)
        nn.init.constant_(self.gate.bias, UNIT_GATE)
        self.convolution = nn.Conv2d(width, width, 5, padding=2, groups=width)
        nn.init.zeros_(self.convolution.weight)
        nn.init.zeros_(self.convolution.bias)
        self.mixing = None if blocks is None else nn.Parameter(initial_mixing(blocks))

    def forward(self, tokens: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """(B, rows, columns, width), before and after."""
        grid = tokens.shape[1], tokens.shape[2]
        flat = tokens.flatten(1, 2)
        query, key, value = (to(flat).unflatten(-1, (self.heads, -1)) for to in (self.q_proj, self.k_proj, self.v_proj))
        if self.mixing is not None and self.blocks is not None:
            output = mhla_attention(query, key, value, self.mixing, grid, self.blocks, rotary=rotary)
        else:
            by_head = (x.transpose(1, 2) for x in (rotated(query, rotary), rotated(key, rotary), value))
            output = functional.scaled_dot_product_attention(*by_head).transpose(1, 2)
        gated = output.flatten(2) * functional.silu(self.gate(flat))
        local = self.convolution(value.flatten(2).unflatten(1, grid).movedim(-1, 1)).flatten(2).mT
        return self.o_proj(gated + local).unflatten(1, grid)


class FeedForward(nn.Module):
    """Two projections, with a residual depth-wise convolution of 3 x 3 between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = int(3.5 * width)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.convolution = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, rows, columns, width), before and after."""
        inner = functional.gelu(self.fc1(tokens)).movedim(-1, 1)
        return self.fc2((inner + self.convolution(inner)).movedim(1, -1))


class VLTLayer(nn.Module):
    """Conditional positional encoding (Chu et al., arXiv 2102.10882), attention and feed-forward, each residual."""

    def __init__(self, width: int, heads: int, blocks: Grid | None) -> None:
        super().__init__()
        self.position = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = VLTAttention(width, heads, blocks)
        self.feed_forward = FeedForward(width)
        self.scale1, self.scale2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))

    def forward(self, tokens: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """(B, rows, columns, width), before and after."""
        tokens = tokens + self.position(tokens.movedim(-1, 1)).movedim(1, -1)
        tokens = tokens + self.scale1 * self.attn(self.norm1(tokens), rotary)
        return tokens + self.scale2 * self.feed_forward(self.norm2(tokens))


class VLTStage(nn.Module):
    """Convolutions that halve the resolution, the first stage's to a quarter, and layers."""

    def __init__(self, before: int, width: int, depth: int, heads: int, blocks: Grid | None) -> None:
        super().__init__()
        is_first = before == 3
        widths = [before, width // 2, width // 2, width // 2, width] if is_first else [before, width]
        parts: list[nn.Module] = []
        for taken, made, stride in zip(widths, widths[1:], [2, 1, 1, 2] if is_first else [2], strict=False):
            parts += [nn.GELU()] if parts else []
            parts += [nn.Conv2d(taken, made, 3, stride, padding=1), nn.BatchNorm2d(made)]
        self.downsample, self.head_dim = nn.Sequential(*parts), width // heads
        self.layers = nn.ModuleList(VLTLayer(width, heads, blocks) for _ in range(depth))

    def forward(self, feature_map: torch.Tensor) -> torch.Tensor:
        """(B, channels, height, width) of the stage before, or pixels, to this stage's feature map."""
        tokens = self.downsample(feature_map).movedim(1, -1)
        rotary = rotary_of((tokens.shape[1], tokens.shape[2]), self.head_dim, tokens.device)
        for layer in self.layers:
            tokens = layer(tokens, rotary)
        return tokens.movedim(-1, 1)


class VLT(nn.Module):
    """Four stages, a projection, pooling and a classifier; takes images of any height and width.

    At 224 pixels the stages have 56 x 56, 28 x 28, 14 x 14 and 7 x 7 tokens, the first two in 49 and 16 MHLA blocks
    (paper, Appendix E).

    Args:
        widths: channels of every stage.
        depths: layers of every stage.
        heads: of every stage.
        blocks: of MHLA in every stage; None for softmax.
        head: channels that the last stage is projected to before pooling.
        classes: how many are told apart.
    """

    def __init__(
        self,
        widths: Sequence[int],
        depths: Sequence[int],
        heads: Sequence[int],
        blocks: Sequence[Grid | None] = ((7, 7), (4, 4), None, None),
        head: int = 2048,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        stages = zip((3, *widths), widths, depths, heads, blocks, strict=False)
        self.stages = nn.ModuleList(VLTStage(*stage) for stage in stages)
        self.projection, self.norm = nn.Conv2d(widths[-1], head, 1), nn.BatchNorm2d(head)
        self.classifier = nn.Linear(head, classes)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Classify (B, 3, height, width); return logits (B, classes)."""
        feature_map = pixel_values
        for stage in self.stages:
            feature_map = stage(feature_map)
        pooled = functional.silu(self.norm(self.projection(feature_map))).mean(dim=(2, 3))
        return self.classifier(pooled)


def vlt_t() -> VLT:
    """Return MHLA-VLT-T of Table 2b."""
    return VLT((64, 128, 256, 512), (2, 2, 6, 2), (1, 2, 4, 8))


def vlt_s() -> VLT:
    """Return MHLA-VLT-S of Table 2b."""
    return VLT((64, 128, 320, 512), (3, 5, 9, 3), (1, 2, 5, 8))
