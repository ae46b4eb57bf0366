"""Settings of a training run: frozen, validated, read from YAML with ``key=value`` overrides."""

import re
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ..config import AnyPatch
from ..devices import precision_name
from ..errors import check
from ..files import read_text
from ..settings import Count, Flag, Number, Positive, PositiveInteger, Settings, read_yaml, settings
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


_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(min|h)")


def seconds_of(time: str) -> float:
    """Return the seconds of a time such as "30min" or "8h"."""
    number, unit = _TIME.fullmatch(time).groups()  # type: ignore[union-attr]  # settings were tested
    return float(number) * {"min": 60, "h": 3600}[unit]


def _check_time(value: str) -> str:
    check(
        _TIME.fullmatch(value) is not None and seconds_of(value) > 0,
        f'{value!r} must be a time such as "30min" or "8h".',
    )
    return value


def _precision(name: object) -> str:
    return precision_name(name, ("float32", "bfloat16"))


_Text = Annotated[str, Field(min_length=1)]
_Time = Annotated[str, AfterValidator(_check_time)]
_Weight = Annotated[Number, Field(ge=0)]


@settings()
class ObjectiveWeights(Settings):
    """Weights of the summed losses; a loss with weight 0 is not computed."""

    diffusion: _Weight = 0.0
    """The model's original training loss."""
    distillation: _Weight = 0.0
    """Mean squared error to the prediction of the unpatched model."""
    transfer: _Weight = 0.0
    """Per layer, mean squared error between MHLA's output and the replaced attention's, on the unpatched model's
    activations."""

    def __post_init__(self) -> None:
        check(any(vars(self).values()), f"at least one weight of {', '.join(vars(self))} must be positive.")


@settings()
class StageConfig(Settings):
    """One stage of training: the sum of some losses."""

    steps: PositiveInteger
    """Updates."""
    learning_rate: Positive
    trainable: Trainable
    objectives: ObjectiveWeights
    mixing_learning_rate: Positive | None = None
    """Learning rate of the mixing matrices and λ; None for ``learning_rate``."""
    lora_rank: PositiveInteger | None = None
    """Rank of LoRA; required with ``trainable: lora``, not allowed otherwise."""
    lora_layers: LoraLayers = "attention"
    """Where LoRA is."""
    scheduler: Literal["constant", "cosine"] = "constant"
    warmup_steps: Count = 0
    guidance: Annotated[Number, Field(ge=1)] = 1.0
    """Scale of the teacher's classifier-free guidance in ``distillation``, which distils it in; 1.0 for none."""

    def __post_init__(self) -> None:
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


@settings()
class ValidationConfig(Settings):
    """The loss on held-out samples, at fixed timesteps and with fixed noise, and pictures or videos from prompts."""

    samples: Count = 0
    """Number of samples at the end of the data that are held out; 0 for no validation."""
    every: PositiveInteger = 100
    """Steps between validations; one also runs before the first step and after the last."""
    timesteps: PositiveInteger = 4
    """Timesteps per sample, at equally spaced quantiles of the training distribution."""
    prompts: tuple[str, ...] = ()
    """Prompts (classes for DiT) to generate from at every validation; the rest of the pipeline stays on the device."""
    inference_steps: PositiveInteger = 20
    """Sampler steps for ``prompts``."""


@settings()
class TrainingConfig(Settings):
    """A training run.

    Raises:
        ValueError: if a value is not allowed, or fields contradict each other.
    """

    output: _Text
    """Folder for checkpoints, metrics and the result."""
    stages: Annotated[tuple[StageConfig, ...], Field(min_length=1)]
    model: _Text | None = None
    """Hub id or folder of the pipeline to adapt; None if the caller passes the transformer."""
    component: _Text = "transformer"
    """Which transformer of the pipeline; Wan 2.2 A14B has a ``transformer_2`` as well."""
    patch: _Text | AnyPatch | None = None
    """Name of a patch, path of a patch YAML, or settings; or a saved patch to begin with, such as another run's result,
    with its weights and LoRA; None for no patch."""
    data: _Text | None = None
    """Folder of latents, or of videos or images with captions (or webdataset's tar shards, or a YAML file of several
    sources), which are encoded first; None if the caller passes the data."""
    clip: Clips | None = None
    """What to cut out of videos or images in ``data``; None for what the YAML file says, or the model's own clip."""
    seed: Count = 0
    batch_size: PositiveInteger = 1
    """Samples per process and forward; with ``context_parallel`` per group of processes."""
    gradient_accumulation: PositiveInteger = 1
    """Forwards per update."""
    precision: Annotated[Literal["no", "bf16"], BeforeValidator(_precision)] = "no"
    """bf16, or bfloat16, keeps frozen weights in bfloat16 and trained ones in float32, and computes under autocast."""
    base_dtype: BaseType | None = None
    """Type that the weights of all linear layers of the blocks are kept in under LoRA; None for that of ``precision``,
    in which they compute in any case."""
    optimizer: OptimizerName = "adamw"
    """adamw8bit needs torchao, schedulefree the library of that name."""
    weight_decay: _Weight = 0.0
    """Weight decay of the optimizer; the mixing matrices are never decayed."""
    max_gradient_norm: Positive = 1.0
    ema_decay: Annotated[Number, Field(gt=0, lt=1)] | None = None
    """Decay of the moving average of the trained weights, which is then validated and exported."""
    gradient_checkpointing: Flag = False
    context_parallel: PositiveInteger = 1
    """Launched processes that share a batch and split its tokens, by diffusers' Ulysses; 1 for one each."""
    flow_shift: Positive = 3.0
    """Shift of the timesteps of flow matching (Wan, SANA)."""
    prompt_dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Fraction of samples whose prompt is replaced by the empty one, for classifier-free guidance."""
    workers: Count = 0
    """Processes that prefetch data."""
    checkpoint_every: PositiveInteger = 500
    keep_checkpoints: PositiveInteger = 2
    export_every: PositiveInteger | _Time | None = None
    """Updates, or time such as "30min", between exports of the weights so far into ``exports/step-…``; None for the
    result alone."""
    time_limit: _Time | None = None
    """Time after which the run writes a checkpoint and stops, counted from its start or resumption; None for none."""
    max_skipped: PositiveInteger = 10
    """Maximum consecutive updates that may be skipped because loss or gradient is not finite."""
    tracker: Literal["tensorboard", "wandb"] | None = None
    validation: ValidationConfig = field(default_factory=ValidationConfig)

    def __post_init__(self) -> None:
        adapters = {(stage.lora_rank, stage.lora_layers) for stage in self.stages if stage.lora_rank is not None}
        check(
            len(adapters) <= 1,
            f"All LoRA stages train the same adapter, so they need one lora_rank and lora_layers; got {adapters}.",
        )
        for index, stage in enumerate(self.stages):
            check(
                not adapters or stage.trainable in ("mhla", "lora"),
                f"stages.{index}: trainable={stage.trainable!r} changes the weights that LoRA adds to; "
                "a run with LoRA may have stages of trainable=mhla and trainable=lora.",
            )
            weights = stage.objectives
            # an unpatched model can learn its own guidance
            compares = weights.transfer > 0 or (weights.distillation > 0 and stage.guidance == 1)
            check(
                self.patch is not None or not compares,
                f"stages.{index}: distillation and transfer compare with the unpatched model and need a patch; "
                "set patch, or train with objectives.diffusion alone.",
            )
            check(
                self.patch is not None or stage.trainable in ("attention", "all"),
                f"stages.{index}: trainable={stage.trainable!r} trains MHLA layers, so it needs a patch; "
                "set patch, or use trainable: attention or all.",
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
