"""What length_study.py studies: the model and its training at two sizes, and the attentions in their order."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from mhla_diffusers import MHLAConfig

TEXT_DIM = 64
"""Channels of a caption's words."""


@dataclass(frozen=True)
class Size:
    """One size of the study."""

    pixels: int
    patch: int
    frames: int
    layers: int
    heads: int
    head_dim: int
    ffn_dim: int
    blocks: tuple[int, int, int]
    """Of MHLA on the token grid."""
    block_sizes: tuple[int, int, int]
    """Of the sparse branch; the second is that of the adapted rows, the third that of the row with larger blocks."""
    densities: tuple[float, ...]
    """The second and third are adapted."""
    curriculum: tuple[tuple[int, int, float], ...]
    """Frames of a clip, clips of an update, and part of the training time."""
    training_seconds: float
    """Of softmax, compilation included."""
    classifier: tuple[int, int]
    """Updates, and frames of each."""
    transfer_steps: int
    adapted_steps: int
    clips: int
    """That are generated for a row."""
    held_out: int
    """Clips of the held-out loss."""
    sampler_steps: int
    timing_seconds: float
    """Spent on timing a row."""
    compilation_seconds: float
    """That a graph's first call is given, until one has been timed."""
    precision: Literal["bfloat16", "float32"]
    compiler: str
    """Backend of torch.compile."""
    digits: int = 3

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens of a whole clip."""
        side = self.pixels // self.patch
        return self.frames, side, side

    @property
    def batch(self) -> int:
        """Whole clips of an update, and of every forward that measures or generates, so that both share a graph."""
        return self.curriculum[-1][1]


REAL = Size(
    pixels=128,
    patch=4,
    frames=12,
    layers=8,
    heads=6,
    head_dim=64,
    ffn_dim=1536,
    blocks=(4, 4, 4),
    block_sizes=(16, 64, 128),
    densities=(0.02, 0.05, 0.1, 0.15, 0.25),
    curriculum=((1, 32, 0.35), (4, 8, 0.3), (12, 4, 0.35)),
    training_seconds=360,
    classifier=(2000, 64),
    transfer_steps=60,
    adapted_steps=150,
    clips=24,
    held_out=16,
    sampler_steps=20,
    timing_seconds=0.5,
    compilation_seconds=60,
    precision="bfloat16",
    compiler="inductor",
)
TOY = Size(
    pixels=32,
    patch=4,
    frames=4,
    layers=2,
    heads=2,
    head_dim=16,
    ffn_dim=64,
    blocks=(2, 2, 2),
    block_sizes=(4, 8, 16),
    densities=(0.05, 0.1, 0.25),
    curriculum=((1, 8, 0.4), (2, 4, 0.3), (4, 2, 0.3)),
    training_seconds=20,
    classifier=(60, 32),
    transfer_steps=3,
    adapted_steps=5,
    clips=4,
    held_out=4,
    sampler_steps=4,
    timing_seconds=0.02,
    compilation_seconds=8,
    precision="float32",
    compiler="aot_eager",  # captures forward and backward as inductor does, and writes no C++ for a minute
)

LEARNING_RATES = {"from scratch": 1e-3, "softmax, trained on": 2e-4, "distillation": 5e-4}
"""The second and the third are those of tiny-wan's recipes, which also give attention transfer its own."""

Linear = Literal["none", "fresh", "calibrated", "off"]
"""The linear branch: there is no patch or no sparse branch to weigh it against, λ as it starts, λ calibrated, λ = 0."""
SOFTMAX = "softmax"


@dataclass(frozen=True)
class Row:
    """One attention."""

    name: str
    config: MHLAConfig | None = None
    """None for softmax."""
    linear: Linear = "none"
    boxes: bool = False
    """Whether blocks are boxes of the grid, one after the other, instead of runs along the Hilbert curve."""
    generated: bool = True
    """Whether clips are generated: for all rows it would take too long."""
    adapted: bool = False

    @property
    def is_compiled(self) -> bool:
        """Whether its blocks are compiled, which for all rows would take too long."""
        return self.adapted or self.name == SOFTMAX

    @property
    def file_name(self) -> str:
        """Without spaces, commas, percent signs, and the slash of a fraction, which would begin a folder."""
        kept = self.name.translate({ord(","): None, ord("%"): None, ord("("): None, ord(")"): None, ord("/"): "-"})
        return "-".join((f"{kept} adapted" if self.adapted else kept).split())


def rows_of(size: Size) -> list[Row]:
    """All rows in the order in which they are made: what matters most comes first."""
    mhla = MHLAConfig(size.blocks, mixing_per_head=True)
    plain = MHLAConfig((1, 1, 1), mixing_learnable=False, mixing_clip=False)
    _, usual, large = size.block_sizes

    def sparse(density: float, block_size: int = usual) -> MHLAConfig:
        return mhla.replace(sparse="content", density=density, block_size=block_size)

    first = [
        Row(SOFTMAX),
        Row("plain linear", plain),
        Row("MHLA", mhla, "calibrated"),
        *(Row(f"sparse {d:.0%}", sparse(d), "calibrated") for d in size.densities),
    ]
    low, high = size.densities[1:3]
    adapted = [
        Row("softmax, trained on"),
        Row(f"sparse {low:.0%}", sparse(low), "calibrated"),
        Row(f"sparse {low:.0%}, no linear branch", sparse(low), "off"),
        Row("MHLA", mhla, "calibrated"),
        Row(f"sparse {high:.0%}", sparse(high), "calibrated"),
        Row("plain linear", plain),
        Row(f"sparse {low:.0%}, blocks of {large}", sparse(low, large), "calibrated"),
        Row("MHLA hybrid 2/3", mhla.replace(layers="2/3"), "calibrated"),
    ]
    branches: dict[str, Linear] = {"": "calibrated", ", λ as it starts": "fresh", ", no linear branch": "off"}
    rest = [Row("MHLA, as it starts", mhla, generated=False)]
    for block_size in size.block_sizes:
        for boxes in (False, True):
            for density in size.densities:
                name = f"sparse {density:.0%}"
                name += f", blocks of {block_size}" if block_size != usual or boxes else ""
                name += ", box order" if boxes else ""
                for how, linear in branches.items():
                    rest.append(Row(name + how, sparse(density, block_size), linear, boxes, generated=False))
    known = {row.name for row in first}
    return [*first, *(replace(row, adapted=True) for row in adapted), *(row for row in rest if row.name not in known)]


def make_model(size: Size) -> Any:
    """The Wan transformer of diffusers on pixels."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, size.patch, size.patch),
        num_attention_heads=size.heads,
        attention_head_dim=size.head_dim,
        in_channels=3,
        out_channels=3,
        text_dim=TEXT_DIM,
        ffn_dim=size.ffn_dim,
        num_layers=size.layers,
    )
