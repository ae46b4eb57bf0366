"""What a stage minimises: what every objective does, and the losses of attention transfer, distillation, diffusion."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from ..attention.precision import without_autocast
from ..families import DiffusionProcess, NoisedBatch, Sample, get_family, predict
from ..patching import call_context
from ..patching.parallel import parallel_of
from .config import ObjectiveWeights
from .latents.data import drop_prompts
from .teacher import Teacher
from .trainable import patched_attentions
from .validation import HeldOut, validation_loss

Backward = Callable[[torch.Tensor], None]
"""Accumulates the gradients of a loss."""


@dataclass(frozen=True)
class Place:
    """Where a batch is in a run; random numbers follow from it."""

    update: int
    """Updates done before, over all stages."""
    sample: int
    """Position of its first sample among those of all processes and forwards of the update."""


class Objective(Protocol):
    """What a stage minimises."""

    @property
    def critics(self) -> dict[str, nn.Parameter]:
        """Parameters, by name, of a second model that is trained beside the first; empty without one."""

    def is_models_turn(self, update: int) -> bool:
        """Whether this update changes the model, and not a second one alone."""

    def backward(
        self, model: nn.Module, batch: NoisedBatch, place: Place, backward: Backward
    ) -> dict[str, torch.Tensor]:
        """Run one batch forward and backward.

        Args:
            model: the transformer, possibly wrapped for training.
            batch: what to run on.
            place: of the batch.
            backward: accumulates the gradients of a weighted loss or a part of it.

        Returns:
            The loss, under ``loss``, and its parts, the same ones for all batches of an update: float32 () without
            gradient.
        """

    def held_out_loss(self, model: nn.Module, held_out: HeldOut) -> torch.Tensor:
        """Sum of a loss of a process's held-out samples: float64 ()."""


@dataclass(frozen=True)
class Objectives:
    """The weighted sum of some losses."""

    weights: ObjectiveWeights
    process: DiffusionProcess
    """How the family was trained."""
    transformer: nn.Module
    """The model, unwrapped."""
    teacher: Teacher | None
    """Teacher of the model; None if no objective needs it."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context of the forwards."""
    processes: int = 1
    """Processes that split the tokens of a batch."""
    in_parts: bool = False
    """Whether the transformer is sharded."""
    guidance: float = 1.0
    """Of the teacher, in distillation."""
    empty: Sample | None = None
    """Conditioning of the empty prompt, which guidance needs."""

    @property
    def critics(self) -> dict[str, nn.Parameter]:
        """None: one model is trained."""
        return {}

    def is_models_turn(self, update: int) -> bool:
        """In every update."""
        return True

    def backward(
        self, model: nn.Module, batch: NoisedBatch, place: Place, backward: Backward
    ) -> dict[str, torch.Tensor]:
        """Run one batch forward and backward, as :meth:`Objective.backward` says; wherever it is.

        If tokens are split, each process of a group adds the gradient through its own tokens, and gradients are then
        averaged over all processes. So the loss of the gathered prediction is multiplied by the size of the group.
        Attention transfer needs no factor: it takes the mean over a process's own tokens, and all processes have
        equally many, so the average over processes is the mean over all tokens.
        """
        weights, target = self.weights, None
        diffusion = distillation = transfer = torch.zeros((), device=batch.latents.device)
        if self.teacher is not None and weights.need_teacher:
            with self.autocast():
                if weights.transfer:
                    transfer, target = self._transfer(self.teacher, batch, backward)
                else:
                    target = teacher_prediction(self.transformer, self.teacher, batch)
                if self.empty is not None and self.guidance != 1:
                    target = guided(target, self.transformer, self.teacher, batch, self.guidance, self.empty)
        if weights.need_prediction:
            with self.autocast():
                prediction = predict(model, batch)
            if weights.diffusion:
                diffusion = self.process.loss(prediction, batch).mean()
            if target is not None and weights.distillation:
                distillation = distillation_loss(prediction, target)
            backward(self.processes * (weights.diffusion * diffusion + weights.distillation * distillation))
        diffusion, distillation, transfer = diffusion.detach(), distillation.detach(), transfer.detach()
        parts = {"diffusion": diffusion, "distillation": distillation, "transfer": transfer}
        parts = {name: loss for name, loss in parts.items() if getattr(weights, name)}
        return {"loss": torch.stack([getattr(weights, name) * x for name, x in parts.items()]).sum(), **parts}

    def held_out_loss(self, model: nn.Module, held_out: HeldOut) -> torch.Tensor:
        """Sum of the losses that the model was trained with: float64 ()."""
        return validation_loss(model, self.process, held_out)

    def _transfer(self, teacher: Teacher, batch: NoisedBatch, backward: Backward) -> tuple[torch.Tensor, torch.Tensor]:
        def weighted(loss: torch.Tensor) -> None:
            with without_autocast(loss.device):  # gradients in the types of the forward, as without transfer
                backward(self.weights.transfer * loss)

        return transfer_attention(self.transformer, teacher, batch, weighted, self.in_parts)


def teacher_prediction(transformer: nn.Module, teacher: Teacher, batch: NoisedBatch) -> torch.Tensor:
    """The unpatched model's output: (B, output channels, ...)."""
    with teacher.at_work():
        return predict(transformer, batch)


def guided(
    prediction: torch.Tensor, transformer: nn.Module, teacher: Teacher, batch: NoisedBatch, scale: float, empty: Sample
) -> torch.Tensor:
    """The unpatched model's output with classifier-free guidance: (B, output channels, ...).

    Args:
        prediction: its output for the batch, of which channels beside those of the noise are kept.
        transformer: the model.
        teacher: of it.
        batch: what it ran on.
        scale: of guidance.
        empty: conditioning of the empty prompt, without a batch axis.
    """
    everywhere = torch.ones(len(batch.noise), dtype=torch.bool, device=batch.noise.device)
    there = {name: x.to(batch.noise.device) for name, x in empty.items()}
    without = replace(batch, conditioning=drop_prompts(batch.conditioning, there, everywhere))
    free = teacher_prediction(transformer, teacher, without)
    noised = min(prediction.shape[1], batch.noise.shape[1])
    both = (free + scale * (prediction - free))[:, :noised]
    return torch.cat([both, prediction[:, noised:]], dim=1)


def distillation_loss(prediction: torch.Tensor, teacher_output: torch.Tensor) -> torch.Tensor:
    """Mean squared error to the unpatched model's prediction, all output channels: float32 ()."""
    return (prediction.float() - teacher_output.float()).square().mean()


def attention_loss(output: Any, expected: Any) -> torch.Tensor:
    """Mean squared error of an attention's output: one tensor, or one for the grid and one for the context."""
    if isinstance(output, torch.Tensor):
        return (output.float() - expected.float()).square().mean()
    losses = torch.stack([attention_loss(found, wanted) for found, wanted in zip(output, expected, strict=True)])
    sizes = [wanted.numel() for wanted in expected]
    return (losses * losses.new_tensor(sizes)).sum() / sum(sizes)


def transfer_attention(
    transformer: nn.Module, teacher: Teacher, batch: NoisedBatch, backward: Backward, in_parts: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention transfer, and the teacher's prediction.

    The teacher runs once without gradients. After each patched self-attention of the teacher, MHLA runs on the same
    input, and ``backward`` gets the mean squared error of the two outputs, divided by the number of layers. So at most
    one layer's activations are held, and no gradient flows between layers.

    In the forward of a sharded transformer, a backward pass would reshard the weights that the teacher is using. So
    with ``in_parts`` the teacher finishes first, and inputs and outputs of all layers are held until MHLA has run.

    Returns:
        The mean over layers of the mean squared error, float32 () without gradient, and the teacher's output.
    """
    attentions = patched_attentions(transformer)
    total = torch.zeros((), device=batch.latents.device)
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}

    def compare(output: Any, expected: Any) -> None:
        nonlocal total
        loss = attention_loss(output, expected) / len(attentions)
        backward(loss)
        total = total + loss.detach()

    def hook_of(name: str) -> Callable[..., None]:
        def hook(attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if in_parts:
                calls[name] = args, kwargs, output
                return
            with teacher.student_attention(name):
                compare(attn.forward(*args, **kwargs), output)

        return hook

    with _hooks(attentions, hook_of):
        prediction = teacher_prediction(transformer, teacher, batch)
    if in_parts:
        grid = get_family(transformer).token_grid(transformer, batch.hidden_states)
        parallel = parallel_of(getattr(transformer, "_parallel_config", None))
        for name, attn in attentions.items():
            args, kwargs, output = calls.pop(name)
            with call_context(grid=grid, parallel=parallel):
                found = attn(*args, **kwargs)
            compare(found, output)
    return total, prediction


@contextmanager
def _hooks(attentions: dict[str, Any], make: Callable[[str], Callable[..., None]]) -> Iterator[None]:
    handles = [attn.register_forward_hook(make(name), with_kwargs=True) for name, attn in attentions.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
