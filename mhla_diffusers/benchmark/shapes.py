"""Attentions of real models, as ``mhla bench op`` measures them."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """An attention by itself."""

    name: str
    grid: tuple[int, ...]
    """Tokens per axis."""
    blocks: tuple[int, ...]
    heads: int
    head_dim: int

    @property
    def tokens(self) -> int:
        """N."""
        return math.prod(self.grid)


def _wan(name: str, height: int, width: int, heads: int) -> Shape:
    """81 frames: 21 of latents; VAE stride 8, patches of 2."""
    return Shape(name, (21, height // 16, width // 16), (7, 3, 5), heads, 128)


def _image(name: str, side: int, heads: int, head_dim: int) -> Shape:
    return Shape(name, (side, side), (4, 4), heads, head_dim)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", (4, 6, 6), (2, 2, 3), 2, 16),
        _wan("wan2.1-1.3b-480p", 480, 800, 12),
        _wan("wan2.1-1.3b-720p", 720, 1280, 12),
        _wan("wan2.1-14b-480p", 480, 800, 40),
        _wan("wan2.1-14b-720p", 720, 1280, 40),
        _image("sana-1.6b-1024px", 32, 70, 32),
        _image("sana-1.6b-2048px", 64, 70, 32),
        _image("sana-1.6b-4096px", 128, 70, 32),
        _image("dit-xl-2-512px", 32, 16, 72),
        _image("dit-xl-2-1024px", 64, 16, 72),
        _image("dit-xl-2-2048px", 128, 16, 72),
    )
}
"""480p is 480x800 here, the paper's setting (Sec. 5.3); tiny is for trying the command out."""

CPU_SHAPES = ("dit-xl-2-512px",)
"""What is measured on a CPU unless other shapes are asked for."""


def choose_shapes(names: list[str] | None, device_type: str) -> list[Shape]:
    """Shapes by name; for None all on a GPU and a small one on a CPU.

    Raises:
        ValueError: unknown name.
    """
    if not names:
        names = list(CPU_SHAPES) if device_type == "cpu" else [name for name in SHAPES if name != "tiny"]
    for name in names:
        if name not in SHAPES:
            raise ValueError(f"Unknown shape {name!r}; allowed: {', '.join(SHAPES)}.")
    return [SHAPES[name] for name in names]
