"""The attentions that are compared on a tiny pipeline, how each adapts, and its held-out loss.

Every variant starts from the same trained weights, sees the same data and noise, and is measured on the same held-out
scenes: in the studies, and in ``tools/adapt_tiny.py``, which makes the patches that ship.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from mhla_diffusers import MHLAConfig, SparseConfig, apply_mhla, load_mhla
from mhla_diffusers.config import NOTHING_DENSE, LinearConfig, PatchConfig
from mhla_diffusers.families import Sample, trained_family
from mhla_diffusers.generation.pipelines import family_named
from mhla_diffusers.patching import find_patched
from mhla_diffusers.tiny import load_tiny
from mhla_diffusers.training import (
    InMemoryData,
    ObjectiveWeights,
    TrainingConfig,
    ValidationConfig,
    begin_with,
    read_metrics,
    train,
)
from mhla_diffusers.training.data.batches import NoisedBatches
from mhla_diffusers.training.validation import validation_loss
from studies.adaptation.digits import DigitPipeline, Split, load_digits, to_rgb

DIFFUSION = ObjectiveWeights(diffusion=1.0)
"""The loss that the tiny pipelines were trained with, alone."""
TRANSFER_STEPS, END_TO_END_STEPS = 100, 300
TRANSFER_RUN = "transfer"
"""Folder of the run of attention transfer inside that of the run that begins with its result."""
ADAPTED_CONTROL, ADAPTED_RECORD = "control.safetensors", "adaptation.json"
"""Files of ``tools/adapt_tiny.py``: the control's weights that differ, and how a patch was made."""
_FLOW_SHIFT = 3.0
"""The shift that the tiny pipelines were trained with; DiT has none."""
_BATCH = 16
"""Scenes that are encoded at a time."""


@dataclass(frozen=True)
class Variant:
    """One attention."""

    name: str
    """Name in tables."""
    short: str
    """End of the name ``tiny-<family>-<short>`` that it ships under."""
    patch: PatchConfig | None
    """None for the control: the pipeline's own attention."""


def variants(tiny: DigitPipeline) -> list[Variant]:
    """Return the control, trained on for as long as the others are adapted, and then the patches.

    SANA's own attention is plain linear already, which leaves MHLA to be compared with it.
    """
    own = family_named(tiny.family).computes
    mhla = MHLAConfig(blocks=tiny.blocks, mixing_per_head=tiny.mixing_per_head)
    if own != "softmax":
        return [Variant(f"own {own} attention", "control", None), Variant("MHLA", "mhla", mhla)]
    one_block = (1,) * len(tiny.blocks)
    return [
        Variant("softmax", "control", None),
        Variant("plain linear", "linear", MHLAConfig(blocks=one_block, mixing_learnable=False, mixing_clip=False)),
        Variant("MHLA", "mhla", mhla),
        Variant("MHLA hybrid 2/3", "hybrid", mhla.replace(layers="2/3")),
        Variant("sparse, 5 %", "sparse", SparseConfig(density=0.05, block_size=tiny.block_size, **NOTHING_DENSE)),
    ]


def runs_of(variant: Variant, tiny: DigitPipeline) -> tuple[dict[str, Any], ...]:
    """Return the settings of ``finetune/configs/tiny-*.yaml``: transfer, then distillation, of the attention alone.

    A control has nothing to learn from itself, so it is trained on with the loss that it was trained with; so is MHLA
    in place of linear attention, which is to become better than what it replaces.
    """
    common: dict[str, Any] = {"trainable": "attention"}
    if isinstance(variant.patch, LinearConfig):
        common["mixing_learning_rate"] = 5e-3
    if variant.patch is None or family_named(tiny.family).computes != "softmax":
        steps = TRANSFER_STEPS + END_TO_END_STEPS
        return ({**common, "steps": steps, "learning_rate": 2e-4, "objectives": DIFFUSION, "scheduler": "cosine"},)
    transfer = {"steps": TRANSFER_STEPS, "learning_rate": 2e-3, "objectives": ObjectiveWeights(transfer=1.0)}
    distillation = {"steps": END_TO_END_STEPS, "learning_rate": 5e-4, "objectives": ObjectiveWeights(distillation=1.0)}
    return {**common, **transfer}, {**common, **distillation, "scheduler": "cosine"}


def control_file(tiny: DigitPipeline) -> Path:
    """Return the file of the control: the weights that differ from the pipeline's, in float16."""
    return Path(__file__).with_name(f"tiny-{tiny.name}-{ADAPTED_CONTROL}")


def load_control(transformer: nn.Module, file: Path) -> None:
    """Load the weights of a control into the transformer of its tiny pipeline."""
    transformer.load_state_dict({**transformer.state_dict(), **load_file(file)})


def load_variant(tiny: DigitPipeline, variant: Variant) -> Any:
    """Load the pipeline with an adapted patch that ships, or as the control."""
    pipe = load_tiny(tiny.name)
    if variant.patch is None:
        load_control(pipe.transformer, control_file(tiny))
        return pipe
    return load_mhla(pipe, f"tiny-{tiny.name}-{variant.short}")


@torch.no_grad()
def digit_latents(pipe: Any, tiny: DigitPipeline, samples: int, held_out: int, seed: int = 0) -> InMemoryData:
    """Encode random scenes as latents and conditioning; the ``held_out`` ones of held-out digits come last.

    ``pipe`` is the tiny pipeline, or one that is still to be trained, whose autoencoder and text encoder encode.
    """
    family = trained_family(pipe.transformer)
    prompts: dict[str, Sample] = {}

    def encode(prompt: str) -> Sample:
        if prompt not in prompts:
            conditioning = family.training.encode_prompt(pipe, prompt, tiny.call_settings)
            prompts[prompt] = {name: tensor.cpu() for name, tensor in conditioning.items()}
        return prompts[prompt]

    encoded: list[Sample] = []
    splits: tuple[tuple[Split, int], ...] = (("train", samples), ("held-out", held_out))
    for split, count in splits:
        chance, digits = random.Random(f"{seed} {split}"), load_digits(split)
        for start in range(0, count, _BATCH):
            scenes = [tiny.random_scene(chance) for _ in range(min(_BATCH, count - start))]
            pictures = [tiny.draw(scene, digits, chance.randrange(2**32)) for scene in scenes]
            pixels = torch.stack([to_rgb(picture) for picture in pictures])
            latents = family.training.encode_pixels(pipe, pixels.to(pipe.vae.device)).cpu()
            for scene, own in zip(scenes, latents, strict=True):
                encoded.append({"latents": own, **encode(tiny.prompt(scene))})
    return InMemoryData(encoded, empty=encode(""))


class Adaptation:
    """What the variants of a comparison have in common: data, held-out data, and settings of the training loop.

    The held-out loss is measured after every ``validate_every`` updates.
    """

    def __init__(
        self, tiny: DigitPipeline, samples: int, held_out: int, seed: int = 1, validate_every: int = 1
    ) -> None:
        self.tiny, self.held_out, self.seed, self.validate_every = tiny, held_out, seed, validate_every
        self.data = digit_latents(load_tiny(tiny.name), tiny, samples, held_out, seed)

    def patched(self, patch: PatchConfig | None) -> Any:
        """Return a fresh pipeline, patched; unpatched for None."""
        pipe = load_tiny(self.tiny.name)
        return pipe if patch is None else apply_mhla(pipe, patch)

    def config(self, patch: str | PatchConfig | None, output: Path, **changes: Any) -> TrainingConfig:
        """Return the settings of a run; the changes add to those that all runs have in common, or replace some."""
        settings: dict[str, Any] = {
            "seed": self.seed,
            "batch_size": self.tiny.batch_size,
            "flow_shift": _FLOW_SHIFT,
            "prompt_dropout": 0.1,
            "checkpoint_every": 100,
            "keep_checkpoints": 1,
            "validation": ValidationConfig(samples=self.held_out, every=self.validate_every),
        }
        return TrainingConfig(output=str(output), patch=patch, **{**settings, **changes})

    def adapt(self, pipe: Any, runs: Sequence[dict[str, Any]], output: Path, **changes: Any) -> None:
        """Train the transformer of a pipeline of :meth:`patched`, from its last checkpoint if interrupted.

        ``runs`` has the settings of the run, or of attention transfer and of the run that begins with its result;
        ``output`` is the folder of the last run, which holds that of the first; ``changes`` are as of :meth:`config`.
        """
        patch: str | PatchConfig | None = next((patched.config for patched in find_patched(pipe).values()), None)
        *first, last = runs
        for settings in first:
            folder = output / TRANSFER_RUN
            if not (folder / "result").is_dir():
                config = self.config(patch, folder, **{**settings, **changes})
                train(pipe.transformer, self.data, config, resume="latest")
            patch = str(folder / "result")
            pipe.transformer = begin_with(folder / "result", load_tiny(self.tiny.name).transformer)
        config = self.config(patch, output, **{**last, **changes})
        train(pipe.transformer, self.data, config, resume="latest")
        pipe.transformer.to("cpu").eval()

    def held_out_losses(self, pipe: Any) -> list[float]:
        """Return the training loss of every held-out sample."""
        transformer, count = pipe.transformer, self.held_out
        process = trained_family(transformer).training.process(transformer, _FLOW_SHIFT)
        # only the data's split, the seed and the timesteps of the settings are read
        settings = self.config(None, Path(), steps=1, learning_rate=1e-4, trainable="all", objectives=DIFFUSION)
        cpu = torch.device("cpu")
        parts = [NoisedBatches(self.data, process, settings, cpu, index, count) for index in range(count)]
        return [float(validation_loss(transformer, part)) for part in parts]


def held_out_curve(run: Path) -> list[tuple[int, float]]:
    """Return (updates done, held-out loss) of a run, after those of the attention transfer that its folder holds."""
    curve: dict[int, float] = {}
    for file in (run / TRANSFER_RUN / "metrics.jsonl", run / "metrics.jsonl"):
        if file.is_file():
            begin = max(curve, default=0)
            found = [record for record in read_metrics(file) if "validation_loss" in record]
            curve |= {begin + record["step"]: record["validation_loss"] for record in found}
    return list(curve.items())
