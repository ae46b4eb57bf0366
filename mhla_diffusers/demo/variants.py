"""The attentions that the demo compares, and how a patched one is adapted."""

from dataclasses import dataclass
from pathlib import Path

from ..config import MHLAConfig
from ..training import ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig

BLOCKS: dict[str, tuple[int, ...]] = {"dit": (4, 4), "sana": (4, 4), "wan": (3, 4, 4)}
"""Block counts on the token grids 8x8 and 9x8x8."""


@dataclass(frozen=True)
class Variant:
    """One row of the demo's table."""

    name: str
    patch: MHLAConfig | None
    """None for the pipeline as it ships."""


def variants(family: str) -> list[Variant]:
    """The pipeline as it ships, then plain linear attention, MHLA, and MHLA in two thirds of the layers."""
    blocks = BLOCKS[family]
    one_block = (1,) * len(blocks)
    per_head = family == "wan"  # as the ready patches of the family have it
    return [
        Variant("own linear attention" if family == "sana" else "softmax", None),
        Variant("plain linear", MHLAConfig(blocks=one_block, mixing_learnable=False, mixing_clip=False)),
        Variant("MHLA", MHLAConfig(blocks=blocks, mixing_per_head=per_head)),
        Variant("MHLA hybrid 2/3", MHLAConfig(blocks=blocks, mixing_per_head=per_head, layers="2/3")),
    ]


def file_name(text: str) -> str:
    """A name of a scene or variant as a file can have it."""
    return text.replace(" ", "-").replace("/", "-")


def adaptation(family: str, patch: MHLAConfig, steps: int, held_out: int, output: Path, seed: int) -> TrainingConfig:
    """The recipe of ``finetune/configs/tiny-*.yaml``, shortened: attention transfer, then all weights end to end.

    SANA was trained with linear attention, which MHLA begins close to: there is no softmax attention to transfer from.
    """
    transfer = 0 if family == "sana" else steps // 4
    stages = [
        StageConfig(
            steps - transfer,
            5e-4,
            "all",
            ObjectiveWeights(diffusion=1.0, distillation=1.0),
            mixing_learning_rate=5e-3,
            scheduler="cosine",
        )
    ]
    if transfer:
        first = StageConfig(transfer, 2e-3, "attention", ObjectiveWeights(transfer=1.0), mixing_learning_rate=5e-3)
        stages.insert(0, first)
    return TrainingConfig(
        output=str(output),
        patch=patch,
        stages=tuple(stages),
        seed=seed,
        batch_size=4 if family == "wan" else 16,
        prompt_dropout=0.1,
        checkpoint_every=steps,
        validation=ValidationConfig(samples=held_out, every=max(1, steps // 5)),
    )
