"""Settings of a training run: frozen, validated, read from YAML with ``key=value`` overrides."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..config import PatchConfig
from ..devices import precision_name
from ..files import read_text
from ..settings import Settings, allow, check, read_yaml
from .latents.clips import Clips

Trainable = Literal["mhla", "attention", "all", "lora"]
"""What a stage trains: the MHLA layers' own parameters; the whole of the patched self-attentions; the whole
transformer; or LoRA with MHLA's own parameters in full."""

LoraLayers = Literal["attention", "blocks"]
"""Where LoRA is: on the projections of the patched self-attentions, or on every linear layer of the transformer's
blocks."""

OptimizerName = Literal["adamw", "adamw8bit", "adafactor", "schedulefree"]
"""AdamW and Adafactor of PyTorch, torchao's AdamW with moments in 8 bits, and schedulefree's AdamW, which averages the
weights in place of a schedule that decays."""

BaseType = Literal["int8", "float8"]
"""Type of frozen weights by torchao, with one scale per output channel."""


_POSITIVE, _ZERO_OR_MORE, _FILLED = allow(above=0), allow(at_least=0), allow(is_filled=True)
_GUIDANCE = allow(at_least=1, words="a number: 1.0, which is none, or more")
_PATCH = allow(words="a name, a path, or settings such as blocks", is_filled=True)


_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(min|h)")


def seconds_of(time: str) -> float:
    """Return the seconds of a time such as "30min" or "8h"."""
    number, unit = _TIME.fullmatch(time).groups()  # type: ignore[union-attr]  # settings were tested
    return float(number) * {"min": 60, "h": 3600}[unit]


def _is_time(value: Any) -> bool:
    return isinstance(value, str) and _TIME.fullmatch(value) is not None and seconds_of(value) > 0


@dataclass(frozen=True)
class ObjectiveWeights(Settings):
    """Weights of the summed losses; a loss with weight 0 is not computed."""

    diffusion: float = field(default=0.0, metadata=_ZERO_OR_MORE)
    """The model's original training loss."""
    distillation: float = field(default=0.0, metadata=_ZERO_OR_MORE)
    """Mean squared error to the prediction of the unpatched model."""
    transfer: float = field(default=0.0, metadata=_ZERO_OR_MORE)
    """Per layer, mean squared error between MHLA's output and the replaced attention's, on the unpatched model's
    activations."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(any(vars(self).values()), f"at least one weight of {', '.join(vars(self))} must be positive.")


@dataclass(frozen=True)
class StageConfig(Settings):
    """One stage of training: the sum of some losses."""

    steps: int = field(metadata=_POSITIVE)
    """Updates."""
    learning_rate: float = field(metadata=_POSITIVE)
    trainable: Trainable
    objectives: ObjectiveWeights
    mixing_learning_rate: float | None = field(default=None, metadata=_POSITIVE)
    """Learning rate of the mixing matrices and λ; None for ``learning_rate``."""
    lora_rank: int | None = field(default=None, metadata=_POSITIVE)
    """Rank of LoRA; required with ``trainable: lora``, not allowed otherwise."""
    lora_layers: LoraLayers = "attention"
    """Where LoRA is."""
    scheduler: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = field(default=0, metadata=_ZERO_OR_MORE)
    guidance: float = field(default=1.0, metadata=_GUIDANCE)
    """Scale of the teacher's classifier-free guidance in ``distillation``, which distils it in; 1.0 for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        steps, warmup, rank = self.steps, self.warmup_steps, self.lora_rank
        check(warmup <= steps, f"warmup_steps={warmup} must be at most the stage's steps={steps}.")
        check(
            self.guidance == 1 or self.objectives.distillation > 0,
            f"guidance={self.guidance} must be 1.0 without a positive weight of objectives.distillation.",
        )
        check(
            (self.trainable == "lora") == (rank is not None) and (rank is not None or self.lora_layers == "attention"),
            f"trainable=lora needs lora_rank, and lora_rank and lora_layers need trainable=lora; got trainable="
            f"{self.trainable!r}, lora_rank={rank}, lora_layers={self.lora_layers!r}.",
        )

    def describe(self) -> str:
        """Say what the stage trains, and what its loss is, which cannot be compared with that of other objectives."""
        loss = " + ".join(f"{weight:g} {name}" for name, weight in vars(self.objectives).items() if weight)
        return f"trains {self.trainable}, loss = {loss}"

    @property
    def needs_teacher(self) -> bool:
        """Whether the unpatched model's outputs are needed."""
        return self.objectives.distillation > 0 or self.objectives.transfer > 0

    @property
    def needs_prediction(self) -> bool:
        """Whether the patched model itself runs forward and backward."""
        return self.objectives.diffusion > 0 or self.objectives.distillation > 0


@dataclass(frozen=True)
class ValidationConfig(Settings):
    """The loss on held-out samples, at fixed timesteps and with fixed noise, and pictures or videos from prompts."""

    samples: int = field(default=0, metadata=_ZERO_OR_MORE)
    """Number of samples at the end of the data that are held out; 0 for no validation."""
    every: int = field(default=100, metadata=_POSITIVE)
    """Steps between validations; one also runs before the first step and after the last."""
    timesteps: int = field(default=4, metadata=_POSITIVE)
    """Timesteps per sample, at equally spaced quantiles of the training distribution."""
    prompts: tuple[str, ...] = ()
    """Prompts (classes for DiT) to generate from at every validation; the rest of the pipeline stays on the device."""
    inference_steps: int = field(default=20, metadata=_POSITIVE)
    """Sampler steps for ``prompts``."""


@dataclass(frozen=True)
class TrainingConfig(Settings):
    """A training run.

    Raises:
        ValueError: if a value is not allowed, or fields contradict each other.
    """

    output: str = field(metadata=_FILLED)
    """Folder for checkpoints, metrics and the result."""
    stages: tuple[StageConfig, ...] = field(metadata=_FILLED)
    model: str | None = field(default=None, metadata=_FILLED)
    """Hub id or folder of the pipeline to adapt; None if the caller passes the transformer."""
    component: str = field(default="transformer", metadata=_FILLED)
    """Which transformer of the pipeline; Wan 2.2 A14B has a ``transformer_2`` as well."""
    patch: str | PatchConfig | None = field(default=None, metadata=_PATCH)
    """Name of a patch, path of a patch YAML, or settings; or a saved patch to begin with, such as another run's result,
    with its weights and LoRA; None for no patch."""
    data: str | None = field(default=None, metadata=_FILLED)
    """Folder of latents, or of videos or images with captions (or webdataset's tar shards, or a YAML file of several
    sources), which are encoded first; None if the caller passes the data."""
    clip: Clips | None = None
    """What to cut out of videos or images in ``data``; None for what the YAML file says, or the model's own clip."""
    seed: int = field(default=0, metadata=_ZERO_OR_MORE)
    batch_size: int = field(default=1, metadata=_POSITIVE)
    """Samples per process and forward; with ``context_parallel`` per group of processes."""
    gradient_accumulation: int = field(default=1, metadata=_POSITIVE)
    """Forwards per update."""
    precision: Literal["no", "bf16"] = field(
        default="no", metadata=allow(convert=lambda name: precision_name(name, ("float32", "bfloat16")))
    )
    """bf16, or bfloat16, keeps frozen weights in bfloat16 and trained ones in float32, and computes under autocast."""
    base_dtype: BaseType | None = None
    """Type that the weights of all linear layers of the blocks are kept in under LoRA; None for that of ``precision``,
    in which they compute in any case."""
    optimizer: OptimizerName = "adamw"
    """adamw8bit needs torchao, schedulefree the library of that name."""
    weight_decay: float = field(default=0.0, metadata=_ZERO_OR_MORE)
    """Weight decay of the optimizer; the mixing matrices are never decayed."""
    max_gradient_norm: float = field(default=1.0, metadata=_POSITIVE)
    ema_decay: float | None = field(default=None, metadata=allow(above=0, below=1))
    """Decay of the moving average of the trained weights, which is then validated and exported."""
    gradient_checkpointing: bool = False
    context_parallel: int = field(default=1, metadata=_POSITIVE)
    """Launched processes that share a batch and split its tokens, by diffusers' Ulysses; 1 for one each."""
    flow_shift: float = field(default=3.0, metadata=_POSITIVE)
    """Shift of the timesteps of flow matching (Wan, SANA)."""
    prompt_dropout: float = field(default=0.0, metadata=allow(at_least=0, below=1))
    """Fraction of samples whose prompt is replaced by the empty one, for classifier-free guidance."""
    workers: int = field(default=0, metadata=_ZERO_OR_MORE)
    """Processes that prefetch data."""
    checkpoint_every: int = field(default=500, metadata=_POSITIVE)
    keep_checkpoints: int = field(default=2, metadata=_POSITIVE)
    export_every: int | str | None = field(
        default=None,
        metadata=allow(
            words='a number of updates, at least 1, or a time such as "30min" or "8h"',
            test=lambda value: value >= 1 if isinstance(value, int) else _is_time(value),
        ),
    )
    """Updates, or time such as "30min", between exports of the weights so far into ``exports/step-…``; None for the
    result alone."""
    time_limit: str | None = field(default=None, metadata=allow(words='a time such as "30min" or "8h"', test=_is_time))
    """Time after which the run writes a checkpoint and stops, counted from its start or resumption; None for none."""
    max_skipped: int = field(default=10, metadata=_POSITIVE)
    """Maximum consecutive updates that may be skipped because loss or gradient is not finite."""
    tracker: Literal["tensorboard", "wandb"] | None = None
    validation: ValidationConfig = field(default_factory=ValidationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        adapters = {(stage.lora_rank, stage.lora_layers) for stage in self.stages if stage.lora_rank is not None}
        check(
            len(adapters) <= 1,
            f"All LoRA stages train the same adapter, so they need one lora_rank and lora_layers; got {adapters}.",
        )
        for index, stage in enumerate(self.stages):
            check(
                not adapters or stage.trainable in ("mhla", "lora"),
                f"trainable={stage.trainable!r} changes the weights that LoRA adds to; "
                "a run with LoRA may have stages of trainable=mhla and trainable=lora.",
                "stages",
                index,
            )
            weights = stage.objectives
            # an unpatched model can learn its own guidance
            compares = weights.transfer > 0 or (weights.distillation > 0 and stage.guidance == 1)
            check(
                self.patch is not None or not compares,
                "distillation and transfer compare with the unpatched model and need a patch; "
                "set patch, or train with objectives.diffusion alone.",
                "stages",
                index,
            )
            check(
                self.patch is not None or stage.trainable in ("attention", "all"),
                f"trainable={stage.trainable!r} trains MHLA layers, so it needs a patch; "
                "set patch, or use trainable: attention or all.",
                "stages",
                index,
            )
        check(
            self.base_dtype is None or all(stage.trainable in ("mhla", "lora") for stage in self.stages),
            f"base_dtype={self.base_dtype!r} is for weights that no stage trains; use trainable: lora or mhla.",
        )
        check(
            self.base_dtype is None or self.gradient_checkpointing,
            f"base_dtype={self.base_dtype!r} needs gradient_checkpointing: true; otherwise the backward pass keeps "
            "every weight as it was converted to compute, and nothing is saved.",
        )
        averages = {"ema_decay": self.ema_decay is not None}
        averages |= {"scheduler: cosine": any(stage.scheduler == "cosine" for stage in self.stages)}
        for name, is_set in averages.items():
            check(
                self.optimizer != "schedulefree" or not is_set,
                f"optimizer=schedulefree averages the weights at a constant rate and does not go with {name}; remove "
                "one of the two.",
            )

    @property
    def total_steps(self) -> int:
        """Updates of all stages."""
        return self.end_of(len(self.stages) - 1)

    def end_of(self, stage: int) -> int:
        """Return the updates of all stages up to the end of one, by its index."""
        return sum(stage.steps for stage in self.stages[: stage + 1])

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> "TrainingConfig":
        """Read a file.

        Args:
            path: the YAML file.
            overrides: ``key=value`` with dotted keys, for example ``stages.0.steps=100``; values are YAML.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: as :meth:`read`, or a malformed file or override, or another script's configuration.
        """
        return read_yaml(cls, read_text(Path(path)), path, overrides)
