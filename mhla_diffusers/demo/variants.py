"""The attentions that are compared on a tiny pipeline: their settings, the names they ship under, and their recipes."""

from dataclasses import dataclass

from ..config import MHLAConfig
from ..generation.pipelines import family_named
from ..tiny import TinyPipeline
from ..training import ObjectiveWeights
from .adaptation import DIFFUSION, Recipe

TRANSFER_STEPS = 100
END_TO_END_STEPS = 300
_STREAMED_ROWS, _STREAMED_FRAMES = 2, 3


@dataclass(frozen=True)
class Variant:
    """One attention."""

    name: str
    """As tables have it."""
    short: str
    """What comes after ``tiny-<family>-`` in the name that it ships under."""
    patch: MHLAConfig | None
    """None for the control: the pipeline's own attention."""


def variants(tiny: TinyPipeline) -> list[Variant]:
    """The control first: the pipeline's own attention, trained on for as long as the others are adapted.

    SANA's own attention is plain linear already, which leaves MHLA to be compared with it.
    """
    own = family_named(tiny.family).own_attention
    mhla = MHLAConfig(blocks=tiny.blocks, mixing_per_head=tiny.mixing_per_head)
    if own != "softmax":
        return [Variant(f"own {own} attention", "control", None), Variant("MHLA", "mhla", mhla)]
    one_block = (1,) * len(tiny.blocks)
    sparse = {"sparse": "content", "block_size": tiny.block_size, "fit_pooled_bias": False}
    exact = mhla.replace(mixing_per_head=True, **sparse)
    return [
        Variant("softmax", "control", None),
        Variant("plain linear", "linear", MHLAConfig(blocks=one_block, mixing_learnable=False, mixing_clip=False)),
        Variant("MHLA", "mhla", mhla),
        Variant("MHLA hybrid 2/3", "hybrid", mhla.replace(layers="2/3")),
        Variant("MHLA, block-sparse", "exact", exact),
    ]


def streamed_variant(tiny: TinyPipeline) -> Variant | None:
    """The attention that generates a few frames after others, which no row of the table can be compared with.

    Two rows of blocks: the own frames, and all that came before, which ``beyond="relative"`` makes one. So a clip of
    the usual length, which has three frame blocks, shows it what a longer one is made of. None of pictures.
    """
    if not tiny.is_video:
        return None
    causal = MHLAConfig(
        (_STREAMED_ROWS, *tiny.blocks[1:]),
        mixing_per_head=True,
        sparse="own",
        causal="block",
        block_length=_STREAMED_FRAMES,
        beyond="relative",
    )
    return Variant("MHLA, causal", "causal", causal)


def recipe_of(variant: Variant, tiny: TinyPipeline) -> Recipe:
    """The recipe of ``finetune/configs/tiny-*.yaml``: attention transfer, then distillation, of the attention alone.

    A control has nothing to learn from itself, so it is trained on with the loss that it was trained with; so is MHLA
    in place of linear attention, which is to become better than what it replaces. A causal patch learns from the data
    as well: the teacher sees later frames, and was never shown frames with times of their own.
    """
    if variant.patch is not None and variant.patch.causal is not None:
        return Recipe(TRANSFER_STEPS + END_TO_END_STEPS, objectives=DIFFUSION, trainable="attention")
    if variant.patch is None or family_named(tiny.family).own_attention != "softmax":
        steps = TRANSFER_STEPS + END_TO_END_STEPS
        return Recipe(steps, objectives=DIFFUSION, learning_rate=2e-4, trainable="attention")
    distillation = ObjectiveWeights(distillation=1.0)
    return Recipe(END_TO_END_STEPS, TRANSFER_STEPS, objectives=distillation, trainable="attention")
