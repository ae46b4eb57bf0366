"""Settings of a training run: frozen, validated, read from YAML with ``key=value`` overrides."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictFloat

from ..config import READ_PATCH, PatchConfig
from ..errors import check
from ..files import read_text
from ..settings import Count, Positive, PositiveInteger, Seed, Settings, read_yaml

Trainable = Literal["mhla", "attention", "all", "lora"]
"""What is trained: the MHLA layers' own parameters; the whole of the patched self-attentions; the whole transformer; or
LoRA with MHLA's own parameters in full."""

LoraLayers = Literal["attention", "blocks"]
"""Where LoRA is: on the projections of the patched self-attentions, or on every linear layer of the blocks."""

OptimizerName = Literal["adamw", "adamw8bit", "adafactor", "schedule-free"]
"""AdamW and Adafactor of PyTorch, torchao's AdamW with moments in 8 bits, and schedulefree's AdamW, which averages the
weights in place of a falling learning rate."""

BaseType = Literal["int8", "nf4"]
"""Type of frozen weights: torchao's, with one scale per output channel, or bitsandbytes' of 4 bits."""

MAY_CHANGE = (
    *("output", "steps", "learning_rate", "mixing_learning_rate", "scheduler", "warmup_steps", "max_gradient_norm"),
    *("batch_size", "gradient_accumulation", "gradient_checkpointing", "workers", "max_skipped"),
    *("checkpoint_every", "keep_checkpoints", "tracker", "validation"),
)
"""Settings that may differ when a run is resumed; samples per update and held-out samples are compared besides."""


_Text = Annotated[str, Field(min_length=1)]
_Weight = Annotated[StrictFloat, Field(ge=0)]


class ObjectiveWeights(Settings):
    """Weights of the summed losses; a loss with weight 0 is not computed."""

    diffusion: _Weight = 0.0
    """The model's original training loss."""
    distillation: _Weight = 0.0
    """Mean squared error to the prediction of the unpatched model."""
    transfer: _Weight = 0.0
    """Per layer, mean squared error between the patched attention's output and the replaced one's, on the unpatched
    model's activations. Goes with no other loss."""

    def _check(self) -> None:
        check(any(vars(self).values()), f"at least one weight of {', '.join(vars(self))} must be positive.")
        check(
            not self.transfer or not (self.diffusion or self.distillation),
            "transfer cannot be combined with other objectives; train it in its own run, then start the next run "
            "from its result: patch: outputs/transfer/result.",
        )


class ValidationConfig(Settings):
    """The loss on held-out samples, with fixed noise, and pictures or videos from prompts."""

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


class TrainingConfig(Settings):
    """A training run; ValueError if a value is not allowed, or fields contradict each other."""

    output: _Text
    """Folder for checkpoints, metrics and the result."""
    steps: PositiveInteger
    """Updates."""
    learning_rate: Positive
    trainable: Trainable
    objectives: ObjectiveWeights
    model: _Text | None = None
    """Hub id or folder of the pipeline to adapt; None if the caller passes the transformer."""
    component: _Text = "transformer"
    """Which transformer of the pipeline; Wan 2.2 A14B has a ``transformer_2`` as well."""
    patch: Annotated[_Text | PatchConfig | None, READ_PATCH] = None
    """Name or YAML file of a patch, or settings; or a saved patch to begin with, such as another run's result."""
    data: _Text | Annotated[dict[_Text, Positive], Field(min_length=1)] | None = None
    """Folder of latents, of ``mhla encode`` or ``mhla synthesize``, or folders with their shares of the samples drawn;
    None if the caller passes the data."""
    seed: Seed = 0
    mixing_learning_rate: Positive | None = None
    """Learning rate of the mixing matrices and λ; None for ``learning_rate``."""
    lora_rank: PositiveInteger | None = None
    """Rank of LoRA; required with ``trainable: lora``, not allowed otherwise."""
    lora_layers: LoraLayers = "attention"
    scheduler: Literal["constant", "cosine"] = "constant"
    warmup_steps: Count = 0
    batch_size: PositiveInteger = 1
    """Samples per process and forward."""
    gradient_accumulation: PositiveInteger = 1
    """Forwards per update."""
    precision: Literal["no", "bf16"] = "no"
    """bf16 keeps frozen weights in bfloat16 and trained ones in float32, and computes under autocast."""
    base_dtype: BaseType | None = None
    """Type that the blocks' linear layers are kept in under LoRA; they compute in that of ``precision``."""
    optimizer: OptimizerName = "adamw"
    weight_decay: _Weight = 0.0
    """Not of the mixing matrices."""
    max_gradient_norm: Positive = 1.0
    ema_decay: Annotated[StrictFloat, Field(gt=0, lt=1)] | None = None
    """Decay of the moving average of the trained weights, which is then validated and exported."""
    gradient_checkpointing: StrictBool = False
    flow_shift: Positive = 3.0
    """Shift of the timesteps of flow matching (Wan, SANA)."""
    prompt_dropout: Annotated[StrictFloat, Field(ge=0, lt=1)] = 0.0
    """Fraction of samples whose prompt is replaced by the empty one, for classifier-free guidance."""
    workers: Count = 0
    """Processes that prefetch data."""
    checkpoint_every: PositiveInteger = 500
    keep_checkpoints: PositiveInteger = 2
    max_skipped: PositiveInteger = 10
    """Maximum consecutive updates that may be skipped because loss or gradient is not finite."""
    tracker: Literal["tensorboard", "wandb"] | None = None
    validation: ValidationConfig = ValidationConfig()

    def _check(self) -> None:
        rank, kind = self.lora_rank, self.trainable
        check(
            (kind == "lora") == (rank is not None) and (rank is not None or self.lora_layers == "attention"),
            f"trainable=lora needs lora_rank, and lora_rank and lora_layers need trainable=lora; got trainable="
            f"{kind!r}, lora_rank={rank}, lora_layers={self.lora_layers!r}.",
        )
        check(
            self.patch is not None or not self.needs_teacher,
            "distillation and transfer compare with the unpatched model and need a patch; "
            "set patch, or train with objectives.diffusion alone.",
        )
        check(
            self.patch is not None or kind in ("attention", "all"),
            f"trainable={kind!r} trains MHLA layers, so it needs a patch; set patch, or train attention or all.",
        )
        check(
            self.base_dtype is None or (kind in ("mhla", "lora") and self.gradient_checkpointing),
            f"base_dtype={self.base_dtype!r} needs frozen weights and gradient checkpointing; set trainable: lora or "
            "mhla, and gradient_checkpointing: true.",
        )
        check(
            self.optimizer != "schedule-free" or (self.ema_decay is None and self.scheduler == "constant"),
            f"optimizer='schedule-free' averages the weights itself, at a constant rate; remove ema_decay="
            f"{self.ema_decay} and scheduler={self.scheduler!r}.",
        )

    @property
    def needs_teacher(self) -> bool:
        """Whether the unpatched model's outputs are needed."""
        return self.objectives.distillation > 0 or self.objectives.transfer > 0

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> "TrainingConfig":
        """Read a YAML file, changed by ``key=value`` with dotted keys, for example ``validation.samples=8``."""
        return read_yaml(cls, read_text(Path(path)), path, overrides)
