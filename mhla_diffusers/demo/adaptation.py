"""The attentions that are compared on a tiny pipeline, and how each is adapted and its held-out loss measured.

Every variant starts from the same trained weights, sees the same data and noise, and is measured on the same held-out
scenes: the same for the demo, for the patches that ship (``tools/adapt_tiny.py``) and for the scripts in
``studies/``.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from ..config import MHLAConfig, is_automatic
from ..families import DiffusionProcess, NoisedBatch, Sample, get_family
from ..generation.pipelines import family_named
from ..patching import apply_mhla, load_mhla, mhla_layers
from ..tiny import TinyPipeline, load_tiny
from ..tiny.digits import Split, compose, load_digits, to_rgb
from ..training import (
    InMemoryData,
    ObjectiveWeights,
    StageConfig,
    TrainingConfig,
    TrainingResult,
    ValidationConfig,
    read_metrics,
    train,
)
from ..training.config import Trainable
from ..training.latents.data import NoisedBatches, stack_samples
from ..training.validation import Sampler, validation_loss

DIFFUSION = ObjectiveWeights(diffusion=1.0)
"""The loss that the model was trained with, alone."""
TRANSFER_STEPS = 100
END_TO_END_STEPS = 300
ADAPTED_CONTROL, ADAPTED_RECORD = "control.safetensors", "adaptation.json"
"""Files of ``tools/adapt_tiny.py``: the control's weights that differ, and how a patch was made."""
_FLOW_SHIFT = 3.0
"""As the tiny pipelines were trained; DiT has none."""
_BATCH = 16
"""Scenes that are encoded at a time."""


@dataclass(frozen=True)
class Variant:
    """One attention."""

    name: str
    """As tables have it."""
    short: str
    """What comes after ``tiny-<family>-`` in the name that it ships under."""
    patch: MHLAConfig | None
    """None for the control: the pipeline's own attention."""


@dataclass(frozen=True)
class Recipe:
    """How long a variant adapts, and with which losses. All but ``transfer_steps`` is of the updates end to end."""

    steps: int
    transfer_steps: int = 0
    """Cheap updates of attention transfer that come first."""
    objectives: ObjectiveWeights = ObjectiveWeights(diffusion=1.0, distillation=1.0)
    learning_rate: float = 5e-4
    mixing_learning_rate: float = 5e-3
    scheduler: Literal["constant", "cosine"] = "cosine"
    trainable: Trainable = "all"

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """Stages of the training loop."""
        mixing = self.mixing_learning_rate
        end_to_end = StageConfig(
            self.steps,
            self.learning_rate,
            self.trainable,
            self.objectives,
            mixing_learning_rate=mixing,
            scheduler=self.scheduler,
        )
        if not self.transfer_steps:
            return (end_to_end,)
        transfer = ObjectiveWeights(transfer=1.0)
        first = StageConfig(self.transfer_steps, 2e-3, "attention", transfer, mixing_learning_rate=mixing)
        return first, end_to_end


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
    return [
        Variant("softmax", "control", None),
        Variant("plain linear", "linear", MHLAConfig(blocks=one_block, mixing_learnable=False, mixing_clip=False)),
        Variant("MHLA", "mhla", mhla),
        Variant("MHLA hybrid 2/3", "hybrid", mhla.replace(layers="2/3")),
        Variant("MHLA, block-sparse", "exact", mhla.replace(mixing_per_head=True, **sparse)),
    ]


def streamed_variant(tiny: TinyPipeline) -> Variant | None:
    """The attention that generates a few frames after others, which no row of the table can be compared with.

    Two rows of blocks: the own frames, and all that came before, which ``beyond="relative"`` makes one. So a clip of
    the usual length, which has three frame blocks, shows it what a longer one is made of. None of pictures.
    """
    if not tiny.is_video:
        return None
    causal = MHLAConfig(
        (2, *tiny.blocks[1:]),
        mixing_per_head=True,
        sparse="own",
        causal="block",
        block_length=3,
        beyond="relative",
    )
    return Variant("MHLA, causal", "causal", causal)


def recipe_of(variant: Variant, tiny: TinyPipeline) -> Recipe:
    """The recipe of ``finetune/configs/tiny-*.yaml``: attention transfer, then distillation, of the attention alone.

    A control has nothing to learn from itself, so it is trained on with the loss that it was trained with; so is MHLA
    in place of linear attention, which is to become better than what it replaces. A causal patch learns from the data
    as well: the teacher sees later frames, and was never trained on frames with separate times.
    """
    if variant.patch is not None and variant.patch.causal is not None:
        return Recipe(TRANSFER_STEPS + END_TO_END_STEPS, objectives=DIFFUSION, trainable="attention")
    if variant.patch is None or family_named(tiny.family).own_attention != "softmax":
        steps = TRANSFER_STEPS + END_TO_END_STEPS
        return Recipe(steps, objectives=DIFFUSION, learning_rate=2e-4, trainable="attention")
    distillation = ObjectiveWeights(distillation=1.0)
    return Recipe(END_TO_END_STEPS, TRANSFER_STEPS, objectives=distillation, trainable="attention")


def load_variant(tiny: TinyPipeline, variant: Variant, device: str) -> Any:
    """The pipeline with an adapted patch that ships, or the control."""
    pipe = load_tiny(tiny.family, device, control=variant.patch is None)
    if variant.patch is not None:
        load_mhla(pipe, f"tiny-{tiny.family}-{variant.short}")
    return pipe


@torch.no_grad()
def digit_latents(pipe: Any, tiny: TinyPipeline, samples: int, held_out: int, seed: int = 0) -> InMemoryData:
    """Random scenes as the transformer sees them: latents and conditioning, for :func:`mhla_diffusers.training.train`.

    Args:
        pipe: the tiny pipeline, or one that is still to be trained, whose autoencoder and text encoder encode.
        tiny: its description.
        samples: scenes of training digits.
        held_out: scenes of held-out digits, which come last.
        seed: the same seed gives the same scenes.
    """
    family = get_family(pipe.transformer)
    prompts: dict[str, Sample] = {}

    def encode(prompt: str) -> Sample:
        if prompt not in prompts:
            conditioning = family.encode_prompt(pipe, prompt, tiny.call_settings)
            prompts[prompt] = {name: tensor.cpu() for name, tensor in conditioning.items()}
        return prompts[prompt]

    encoded: list[Sample] = []
    splits: tuple[tuple[Split, int], ...] = (("train", samples), ("held-out", held_out))
    for split, count in splits:
        chance, digits = random.Random(f"{seed} {split}"), load_digits(split)
        for start in range(0, count, _BATCH):
            scenes = [tiny.random_scene(chance) for _ in range(min(_BATCH, count - start))]
            pictures = [compose(scene, digits, tiny.digit_size, chance.randrange(2**32)) for scene in scenes]
            pixels = torch.stack([to_rgb(picture) for picture in pictures])
            latents = family.encode_pixels(pipe, pixels.to(pipe.vae.device)).cpu()
            for scene, own in zip(scenes, latents, strict=True):
                encoded.append({"latents": own, **encode(tiny.prompt(scene))})
    return InMemoryData(encoded, empty=encode(""))


@dataclass(frozen=True)
class Adaptation:
    """What the variants of a comparison have in common."""

    tiny: TinyPipeline
    data: InMemoryData
    held_out: int
    """Samples at the end of the data that are not trained on."""
    seed: int
    """Of training."""
    validate_every: int
    """Updates between two looks at the held-out loss."""
    batch_size: int
    """Samples per update."""
    device: str = "cpu"
    """Where variants are measured; the training loop chooses its own device."""

    def patched(self, patch: MHLAConfig | None, calibration: Callable[[Any], object] | None = None) -> Any:
        """A fresh pipeline, patched.

        Args:
            patch: settings; None for the pipeline as it ships.
            calibration: for a patch that chooses layers or has a sparse branch: runs the pipeline on typical inputs, on
                which λ and β are fitted. Without it the training loop fits those that are learned.
        """
        pipe = load_tiny(self.tiny.family, self.device)
        if patch is not None:
            is_open = is_automatic(patch.layers) or patch.sparse != "none"
            apply_mhla(pipe, patch, calibration=partial(calibration, pipe) if calibration and is_open else None)
        return pipe

    def config(self, recipe: Recipe, patch: MHLAConfig | None, output: Path) -> TrainingConfig:
        """Settings of the training loop."""
        return TrainingConfig(
            output=str(output),
            patch=patch,
            stages=recipe.stages,
            seed=self.seed,
            batch_size=self.batch_size,
            flow_shift=_FLOW_SHIFT,
            prompt_dropout=0.1,
            checkpoint_every=100,
            keep_checkpoints=1,
            validation=ValidationConfig(self.held_out, every=self.validate_every),
        )

    def adapt(self, pipe: Any, recipe: Recipe, output: Path, sampler: Sampler | None = None) -> None:
        """Train a pipeline's transformer in place, from the last checkpoint where a run was interrupted.

        Args:
            pipe: what :meth:`patched` gave.
            recipe: how.
            output: folder of the run.
            sampler: called whenever the held-out loss was measured, with the transformer and a folder.
        """
        # automatically chosen layers are recorded in the layers' own configuration
        patch = next((layer.config for layer in mhla_layers(pipe).values()), None)
        train_or_go_on(pipe.transformer, self.data, self.config(recipe, patch, output), sampler)
        pipe.transformer.to(self.device).eval()

    def held_out_losses(self, pipe: Any) -> list[float]:
        """The training loss of every held-out sample."""
        # any configuration without a patch will do: only the data's split, the seed and the timesteps are read
        settings = self.config(Recipe(1, objectives=DIFFUSION), None, Path())
        process, device, count = _process(pipe.transformer), torch.device(self.device), self.held_out
        parts = [NoisedBatches(self.data, process, settings, device, index, count) for index in range(count)]
        return [float(validation_loss(pipe.transformer, part)) for part in parts]

    def batch(self, transformer: Any, samples: Sequence[int], quantiles: torch.Tensor) -> NoisedBatch:
        """Some samples of the data with always the same noise, at (B,) quantiles of the distribution of timesteps."""
        conditioning = {
            name: tensor.to(self.device)
            for name, tensor in stack_samples([self.data[index] for index in samples]).items()
        }
        latents = conditioning.pop("latents")
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0)).to(self.device)
        return _process(transformer).make_batch(latents, noise, quantiles.to(self.device), conditioning)


def _process(transformer: Any) -> DiffusionProcess:
    return get_family(transformer).process(transformer, _FLOW_SHIFT)


def train_or_go_on(
    transformer: Any, data: InMemoryData, config: TrainingConfig, sampler: Sampler | None = None
) -> TrainingResult:
    """Train, from the last checkpoint where the folder holds a run that was interrupted."""
    resume = "latest" if Path(config.output, "checkpoints").is_dir() else None
    return train(transformer, data, config, resume=resume, sampler=sampler)


def held_out_curve(run: Path) -> list[tuple[int, float]]:
    """(updates done, held-out loss) of a run of the training loop, read from its folder."""
    records = read_metrics(run / "metrics.jsonl")
    return [(record["step"], record["validation_loss"]) for record in records if "validation_loss" in record]
