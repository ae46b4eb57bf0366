"""The losses of a stage: attention transfer, distillation, and the loss that the model was trained with."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from ..families import NoisedBatch, get_family, predict
from ..patching import find_patched
from .config import StageConfig
from .roles import Losses, Roles, patched_attentions


def stage_losses(roles: Roles, stage: StageConfig, model: torch.nn.Module, batch: NoisedBatch) -> Losses:
    """Yield the weighted losses of a stage's objectives.

    The teacher runs once. Attention transfer then runs every MHLA layer on the input that the teacher's attention had,
    so at most one layer's graph is held, and no gradient flows between layers.

    Args:
        roles: with a teacher if an objective needs one.
        stage: its objectives.
        model: the student, possibly wrapped for training.
        batch: the input.
    """
    weights = stage.objectives
    target = None
    if roles.teacher is not None and stage.needs_teacher:
        attentions = patched_attentions(roles.student) if weights.transfer else {}
        with recorded(attentions) as calls, roles.autocast():
            target = roles.teacher.predict(batch, stage.guidance, roles.empty)
        grid = get_family(roles.student).token_grid(roles.student, batch.hidden_states)
        for name, attn in attentions.items():
            args, kwargs, expected = calls.pop(name)
            with roles.autocast(), find_patched(roles.student)["transformer"].on_grid(grid):
                transfer = attention_loss(attn(*args, **kwargs), expected) / len(attentions)
            # processes that split the tokens have equally many, so the average over them is the mean over all tokens
            loss = weights.transfer * transfer
            yield loss, {"loss": loss, "transfer": transfer}
    if stage.needs_prediction:
        parts = {}
        with roles.autocast():
            prediction = predict(model, batch)
            if weights.diffusion:
                parts["diffusion"] = roles.process.loss(prediction, batch).mean()
            if weights.distillation and target is not None:
                parts["distillation"] = (prediction.float() - target.float()).square().mean()
        loss = torch.stack([getattr(weights, name) * part for name, part in parts.items()]).sum()
        # a process that has a part of the tokens adds the gradient through these alone, and gradients are averaged
        yield roles.split * loss, {"loss": loss, **parts}


@contextmanager
def recorded(attentions: Mapping[str, Any]) -> Iterator[dict[str, tuple[Any, Any, Any]]]:
    """Yield the arguments, keyword arguments and output of the first call of every attention within the context."""
    calls: dict[str, tuple[Any, Any, Any]] = {}

    def record(name: str, attn: Any, args: Any, kwargs: Any, output: Any) -> None:
        calls.setdefault(name, (args, kwargs, output))  # guidance runs the teacher a second time

    with ExitStack() as hooks:
        for name, attn in attentions.items():
            hooks.enter_context(attn.register_forward_hook(partial(record, name), with_kwargs=True))
        yield calls


def attention_loss(output: Any, expected: Any) -> torch.Tensor:
    """Mean squared error of an attention's output: one tensor, or one for the grid and one for the context."""
    if isinstance(output, torch.Tensor):
        return (output.float() - expected.float()).square().mean()
    losses = torch.stack([attention_loss(found, wanted) for found, wanted in zip(output, expected, strict=True)])
    sizes = [wanted.numel() for wanted in expected]
    return (losses * losses.new_tensor(sizes)).sum() / sum(sizes)
