"""A vision transformer that classifies the mean over its tokens, as the paper trains DeiT (Appendix E), and its family.

The model is PyTorch and diffusers' ``Attention``. Registering the family is all that ``apply_mhla`` needs.
"""

from types import SimpleNamespace

import torch
from diffusers.models.attention_processor import Attention
from torch import nn

from mhla_diffusers import families


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and beside a residual."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads=heads, dim_head=width // heads, bias=True)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, N, width), before and after."""
        tokens = tokens + self.attn(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class PooledViT(nn.Module):
    """A vision transformer that averages its tokens instead of using a class token.

    Args:
        size: height and width of a picture in pixels.
        patch: of a patch.
        classes: how many are told apart.
        width: channels of a token.
        layers: how many.
        heads: of the attention; they divide ``width``.
        inner: channels within the feed-forward.
        spread: standard deviation of the initial weights.
    """

    def __init__(
        self, size: int, patch: int, classes: int, width: int, layers: int, heads: int, inner: int, spread: float = 0.02
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(patch_size=patch)  # from which the token grid is read
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.empty(1, (size // patch) ** 2, width))
        self.layers = nn.ModuleList(Layer(width, heads, inner) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.classifier = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.positions, std=spread)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=spread)
                nn.init.zeros_(module.bias)

    def forward(self, pixel_values: torch.Tensor, return_dict: bool = False) -> tuple[torch.Tensor]:
        """Classify (B, 3, size, size); return the logits (B, classes) in a tuple, as diffusers without a dict."""
        tokens = self.patches(pixel_values).flatten(2).mT + self.positions
        for layer in self.layers:
            tokens = layer(tokens)
        return (self.classifier(self.norm(tokens).mean(dim=1)),)


def deit(width: int, heads: int) -> PooledViT:
    """Return DeiT/16 (Touvron et al., arXiv 2012.12877) for ImageNet: T has a width of 192 and 3 heads, S 384 and 6."""
    return PooledViT(224, 16, 1000, width, layers=12, heads=heads, inner=4 * width)


families.register_family(
    families.Family(
        name="pooled-vit",
        transformers=("PooledViT",),
        block_lists=("layers",),
        grid=lambda model, arguments: families.grids.grid_of_size(model, arguments["pixel_values"].shape[2:]),
        latents_name="pixel_values",
        mhla=families.AttentionAdapter(),
    )
)
