"""Settings of a training run: frozen, validated, read from YAML with ``key=value`` overrides."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ..config import PatchConfig, check, check_choice
from ..devices import precision_name
from ..families import Clip
from ..patching.few_step_scheduler import FewSteps
from .settings import as_plain, from_mapping, read_settings

Trainable = Literal["mhla", "attention", "all", "lora"]
"""What a stage trains: the MHLA layers' own parameters; the whole of the patched self-attentions; the whole
transformer; or LoRA with MHLA's own parameters in full."""

LoraLayers = Literal["attention", "blocks"]
"""Where LoRA is: on the projections of the patched self-attentions, or on every linear layer of the transformer's
blocks."""

OptimizerName = Literal["adamw", "adamw8bit"]


def _check_numbers(
    settings: object, positive: Sequence[str] = (), zero_or_more: Sequence[str] = (), path: str = ""
) -> None:
    """Raise unless settings are large enough and finite; None means left out."""
    for name in (*positive, *zero_or_more):
        value = getattr(settings, name)
        if value is not None:
            allowed = "positive" if name in positive else "zero or positive"
            check(value > 0 or (value == 0 and name in zero_or_more), f"{path}{name}={value} must be {allowed}.")
            check(value < math.inf, f"{path}{name}={value} must be finite.")


@dataclass(frozen=True)
class ObjectiveWeights:
    """Weights of the summed losses; a loss with weight 0 is not computed."""

    diffusion: float = 0.0
    """The model's original training loss."""
    distillation: float = 0.0
    """Mean squared error to the prediction of the unpatched model."""
    transfer: float = 0.0
    """Per layer, mean squared error between MHLA's output and the replaced attention's, on the unpatched model's
    activations."""

    def __post_init__(self) -> None:
        _check_numbers(self, zero_or_more=tuple(vars(self)), path="objectives.")
        check(any(vars(self).values()), f"objectives needs at least one positive weight of {', '.join(vars(self))}.")


@dataclass(frozen=True)
class FewStepsConfig:
    """Distribution matching: the model learns to sample in a few steps what its teacher samples in many.

    The teacher is the unpatched model. The critic, the unpatched model with a LoRA or a copy of it, learns the
    distribution of the student's samples; the student follows the difference of the two.
    """

    times: tuple[float, ...]
    """σ of the student's steps: from 1.0 downwards, 1 to 8 of them."""
    guidance: float = 3.0
    """Scale of the teacher's classifier-free guidance, which is distilled in; 1.0 for none. Self-Forcing has 3.0 for
    Wan (configs/self_forcing_dmd.yaml), less than one samples with."""
    critic_updates: int = 5
    """Updates of the critic per update of the student."""
    critic_warmup: int = 50
    """Updates in which the critic alone is trained, at the beginning."""
    critic_learning_rate: float | None = None
    """Constant learning rate of the critic; None for the stage's ``learning_rate``."""
    critic_rank: int | None = None
    """Rank of the critic's LoRA; None for the student's ``lora_rank``. Not allowed with ``trainable: all``."""

    def __post_init__(self) -> None:
        _check_numbers(
            self, ("critic_updates", "critic_learning_rate", "critic_rank"), ("critic_warmup",), "few_steps."
        )
        try:
            object.__setattr__(self, "times", FewSteps(self.times, self.guidance).times)
        except ValueError as error:
            raise ValueError(f"few_steps.{error}") from error

    @property
    def sampling(self) -> FewSteps:
        """How the result samples."""
        return FewSteps(self.times, self.guidance)


@dataclass(frozen=True)
class StageConfig:
    """One stage of training: either the sum of some losses, or few steps."""

    steps: int
    """Updates; in few steps each is one of the critic, and some are one of the student too."""
    learning_rate: float
    trainable: Trainable
    objectives: ObjectiveWeights | None = None
    mixing_learning_rate: float | None = None
    """Learning rate of the mixing matrices and λ; None for ``learning_rate``."""
    lora_rank: int | None = None
    """Rank of LoRA; required with ``trainable: lora``, not allowed otherwise."""
    lora_layers: LoraLayers = "attention"
    """Where LoRA is; few steps want it in all blocks."""
    few_steps: FewStepsConfig | None = None
    scheduler: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    guidance: float = 1.0
    """Scale of the teacher's classifier-free guidance in ``distillation``, which distils it in; 1.0 for none."""

    def __post_init__(self) -> None:
        _check_numbers(self, ("steps", "learning_rate", "mixing_learning_rate"))
        check_choice("trainable", self.trainable, get_args(Trainable))
        check_choice("lora_layers", self.lora_layers, get_args(LoraLayers))
        check_choice("scheduler", self.scheduler, ("constant", "cosine"))
        steps, warmup, rank, few_steps = self.steps, self.warmup_steps, self.lora_rank, self.few_steps
        check(0 <= warmup <= steps, f"warmup_steps={warmup} must be between 0 and the stage's steps={steps}.")
        check(
            (self.objectives is None) != (few_steps is None),
            "a stage needs either objectives, the weights of its losses, or few_steps.",
        )
        distils = self.objectives is not None and self.objectives.distillation > 0
        check(
            self.guidance == 1 or (1 < self.guidance < math.inf and distils),
            f"guidance={self.guidance} must be 1.0, or more with a positive weight of objectives.distillation; few "
            "steps have few_steps.guidance.",
        )
        if self.trainable == "lora":
            check(bool(rank and rank > 0), "trainable=lora needs a positive lora_rank.")
        else:
            given = f"lora_rank={rank}" if rank is not None else f"lora_layers={self.lora_layers!r}"
            check(
                rank is None and self.lora_layers == "attention",
                f"{given} is for trainable=lora, not for {self.trainable!r}.",
            )
        if few_steps is None:
            return
        check(
            self.trainable in ("lora", "all"),
            f"trainable={self.trainable!r} is not for few_steps; use lora, whose critic is a second LoRA, or all, "
            "whose critic is a copy of the model.",
        )
        check(
            self.trainable == "lora" or few_steps.critic_rank is None,
            f"few_steps.critic_rank={few_steps.critic_rank} is for trainable=lora; with trainable=all the critic is a "
            "copy of the model.",
        )
        first = few_steps.critic_warmup + few_steps.critic_updates
        check(
            steps >= first,
            f"steps={steps} end before the student's first update: critic_warmup={few_steps.critic_warmup} and "
            f"critic_updates={few_steps.critic_updates} come first; use at least {first}.",
        )

    @property
    def needs_teacher(self) -> bool:
        """Whether the unpatched model's outputs are needed."""
        weights = self.objectives
        return weights is None or weights.distillation > 0 or weights.transfer > 0

    @property
    def needs_prediction(self) -> bool:
        """Whether the patched model itself runs forward and backward."""
        weights = self.objectives
        return weights is None or weights.diffusion > 0 or weights.distillation > 0


@dataclass(frozen=True)
class ValidationConfig:
    """The loss on held-out samples, at fixed timesteps and with fixed noise, and pictures or videos from prompts."""

    samples: int = 0
    """Number of samples at the end of the data that are held out; 0 for no validation."""
    every: int = 100
    """Steps between validations; one also runs before the first step and after the last."""
    timesteps: int = 4
    """Timesteps per sample, at equally spaced quantiles of the training distribution."""
    prompts: tuple[str, ...] = ()
    """Prompts (classes for DiT) to generate from at every validation; the rest of the pipeline stays on the device."""
    inference_steps: int = 20
    """Sampler steps for ``prompts``."""


@dataclass(frozen=True)
class ContextParallel:
    """Number of processes that the tokens of a batch are split over: ``ring`` times ``ulysses`` form a group."""

    ring: int = 1
    """Processes that keep their tokens and exchange KV states, or keys and values for softmax attention."""
    ulysses: int = 1
    """Processes that exchange tokens for heads."""

    @property
    def processes(self) -> int:
        """Processes of a group."""
        return self.ring * self.ulysses


@dataclass(frozen=True)
class TrainingConfig:
    """A training run.

    Raises:
        ValueError: if a value is not allowed, or fields contradict each other.
    """

    output: str
    """Folder for checkpoints, metrics and the result."""
    stages: tuple[StageConfig, ...]
    model: str | None = None
    """Hub id or folder of the pipeline to adapt; None if the caller passes the transformer."""
    component: str = "transformer"
    """Which transformer of the pipeline; Wan 2.2 A14B has a ``transformer_2`` as well."""
    patch: str | PatchConfig | None = None
    """Name of a patch, path of a patch YAML or of a saved patch to start from, or settings; None for no patch."""
    data: str | None = None
    """Folder of latents, or of videos or images with captions (or webdataset's tar shards), which are encoded first;
    None if the caller passes the data."""
    clip: Clip | None = None
    """Frames, rate and size to cut out of videos or images in ``data``; None for the family's default."""
    seed: int = 0
    batch_size: int = 1
    """Samples per process and forward; with ``context_parallel`` per group of processes."""
    gradient_accumulation: int = 1
    """Forwards per update."""
    precision: Literal["no", "bf16"] = "no"
    """bf16, or bfloat16, keeps frozen weights in bfloat16 and trained ones in float32, and computes under autocast."""
    optimizer: OptimizerName = "adamw"
    """adamw8bit keeps AdamW's moments in 8 bits and needs bitsandbytes."""
    weight_decay: float = 0.0
    """Weight decay of AdamW; the mixing matrices are never decayed."""
    max_gradient_norm: float = 1.0
    ema_decay: float | None = None
    """Decay of the moving average of the trained weights, which is then validated and exported."""
    gradient_checkpointing: bool = False
    context_parallel: ContextParallel = field(default_factory=ContextParallel)
    """Groups of the launched processes that share a batch."""
    flow_shift: float = 3.0
    """Shift of the timesteps of flow matching (Wan, SANA)."""
    prompt_dropout: float = 0.0
    """Fraction of samples whose prompt is replaced by the empty one, for classifier-free guidance."""
    workers: int = 0
    """Processes that prefetch data."""
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    max_skipped: int = 10
    """Maximum consecutive updates that may be skipped because loss or gradient is not finite."""
    tracker: Literal["tensorboard", "wandb"] | None = None
    validation: ValidationConfig = field(default_factory=ValidationConfig)

    def __post_init__(self) -> None:
        positive = ("batch_size", "gradient_accumulation", "max_gradient_norm", "flow_shift", "checkpoint_every")
        _check_numbers(self, (*positive, "keep_checkpoints", "max_skipped"), ("weight_decay", "workers", "seed"))
        _check_numbers(self.validation, ("every", "inference_steps", "timesteps"), ("samples",), "validation.")
        _check_numbers(self.context_parallel, ("ring", "ulysses"), path="context_parallel.")
        for name in ("output", "model", "component", "patch", "data"):
            value = getattr(self, name)
            check(
                value != "",
                f"{name}='' is empty; give a name or a path{'' if name == 'output' else ', or leave it out'}.",
            )
        check_choice("optimizer", self.optimizer, get_args(OptimizerName))
        object.__setattr__(self, "precision", precision_name(self.precision, ("float32", "bfloat16")))
        check_choice("tracker", self.tracker, ("tensorboard", "wandb", None))
        check(0 <= self.prompt_dropout < 1, f"prompt_dropout={self.prompt_dropout} must be in [0, 1).")
        decay = self.ema_decay
        check(decay is None or 0 < decay < 1, f"ema_decay={decay} must be in (0, 1), or null for no moving average.")
        check(bool(self.stages), "stages must hold at least one stage.")
        ranks = {stage.lora_rank for stage in self.stages if stage.lora_rank is not None}
        check(len(ranks) <= 1, f"All LoRA stages train the same adapter, so they need one lora_rank; got {ranks}.")
        places = {stage.lora_layers for stage in self.stages if stage.lora_rank is not None}
        check(len(places) <= 1, f"All LoRA stages train the same adapter, so they need one lora_layers; got {places}.")
        for index, stage in enumerate(self.stages):
            check(
                not ranks or stage.trainable in ("mhla", "lora"),
                f"stages.{index}: trainable={stage.trainable!r} changes the weights that LoRA adds to; "
                "a run with LoRA may have stages of trainable=mhla and trainable=lora.",
            )
            weights = stage.objectives
            # an unpatched model can learn its own guidance
            compares = weights is not None and (
                weights.transfer > 0 or (weights.distillation > 0 and stage.guidance == 1)
            )
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
                stage.few_steps is None or index == len(self.stages) - 1,
                f"stages.{index}: few_steps must be the last stage, because the model then samples in its times alone.",
            )
        check(
            self.few_steps is None or self.context_parallel.processes == 1,
            "context_parallel cannot be set with few_steps; train on one device, or on several with ddp.yaml.",
        )

    @property
    def few_steps(self) -> FewStepsConfig | None:
        """Few steps of the last stage; None without."""
        return self.stages[-1].few_steps

    @property
    def total_steps(self) -> int:
        """Updates of all stages."""
        return self.end_of(len(self.stages) - 1)

    def end_of(self, stage: int) -> int:
        """Return the updates of all stages up to the end of one, by its index."""
        return sum(stage.steps for stage in self.stages[: stage + 1])

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON and YAML can hold them."""
        return dict(as_plain(self))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "TrainingConfig":
        """Read what :meth:`to_dict` returns; a float may be text, since YAML reads ``1e-4`` so."""
        return from_mapping(cls, settings)

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> "TrainingConfig":
        """Read a file.

        Args:
            path: the YAML file.
            overrides: ``key=value`` with dotted keys, for example ``stages.0.steps=100``; values are YAML.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: as :meth:`from_dict`, or a malformed file or override, or another script's configuration.
        """
        return read_settings(cls, Path(path), overrides)
