"""Adapt the attention of a tiny pipeline: the same for the demo and for the comparisons in ``finetune/``.

Every variant starts from the same trained weights, sees the same data and noise, and is measured on the same held-out
scenes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from ..config import MHLAConfig, is_automatic
from ..families import DiffusionProcess, NoisedBatch, get_family
from ..patching import apply_mhla, mhla_layers
from ..tiny import TinyPipeline, load_tiny
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
from ..training.latents.data import stack_samples
from ..training.validation import Sampler, validation_loss

DIFFUSION = ObjectiveWeights(diffusion=1.0)
"""The loss that the model was trained with, alone."""
_FLOW_SHIFT = 3.0
"""As the tiny pipelines were trained; DiT has none."""


@dataclass(frozen=True)
class Recipe:
    """How long a variant adapts, and with which losses."""

    steps: int
    """Updates end to end."""
    transfer_steps: int = 0
    """Cheap updates of attention transfer that come first."""
    objectives: ObjectiveWeights = ObjectiveWeights(diffusion=1.0, distillation=1.0)
    """Of the updates end to end."""
    learning_rate: float = 5e-4
    """Of the updates end to end."""
    mixing_learning_rate: float = 5e-3
    scheduler: Literal["constant", "cosine"] = "cosine"
    """Of the updates end to end."""
    trainable: Trainable = "all"
    """What the updates end to end train."""

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """Stages of the training loop."""
        mixing = self.mixing_learning_rate
        end_to_end = StageConfig(
            self.steps, self.learning_rate, self.trainable, self.objectives, mixing, scheduler=self.scheduler
        )
        if not self.transfer_steps:
            return (end_to_end,)
        transfer = ObjectiveWeights(transfer=1.0)
        return StageConfig(self.transfer_steps, 2e-3, "attention", transfer, mixing), end_to_end


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
        # layers that were chosen automatically stand in the layers' own configuration
        patch = next((layer.config for layer in mhla_layers(pipe).values()), None)
        train_or_go_on(pipe.transformer, self.data, self.config(recipe, patch, output), sampler)
        pipe.transformer.to(self.device).eval()

    def held_out_losses(self, pipe: Any) -> list[float]:
        """The training loss of every held-out sample."""
        # any configuration without a patch will do: only the data's split, the seed and the timesteps are read
        settings = self.config(Recipe(1, objectives=DIFFUSION), None, Path())
        transformer, device, count = pipe.transformer, torch.device(self.device), self.held_out
        given = (transformer, self.data, _process(transformer), settings, device)
        return [float(validation_loss(*given, index, count)) for index in range(count)]

    def batch(self, transformer: Any, samples: Sequence[int], quantiles: torch.Tensor) -> NoisedBatch:
        """Some samples with always the same noise.

        Args:
            transformer: that the batch is for.
            samples: indices.
            quantiles: (B,) of the training distribution of timesteps.
        """
        conditioning = {
            name: tensor.to(self.device)
            for name, tensor in stack_samples([self.data[index] for index in samples]).items()
        }
        latents = conditioning.pop("latents")
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0)).to(self.device)
        return _process(transformer).make_batch(latents, noise, quantiles.to(self.device), conditioning)


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


def _process(transformer: Any) -> DiffusionProcess:
    return get_family(transformer).process(transformer, _FLOW_SHIFT)
