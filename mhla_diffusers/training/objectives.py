"""The losses: attention transfer, distillation, and the loss that the model was trained with.

Each yields losses one graph at a time, (loss, parts): run the loss () backward before asking for the next. The parts,
each (), add up over the batch and go to the metrics.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ..families import DiffusionProcess, NoisedBatch, get_family, predict
from ..patching import find_patched
from .config import ObjectiveWeights
from .weights import Original, patched_attentions

Losses = Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]


def transfer_losses(transformer: Any, original: Original, weight: float, batch: NoisedBatch) -> Losses:
    """Yield the loss of every patched attention, run on the input that the original attention had.

    The original model runs once, so at most one layer's graph is held, and no gradient flows between layers.
    """
    attentions, family = patched_attentions(transformer), get_family(transformer)
    calls: dict[str, tuple[Any, Any, Any]] = {}

    def record(name: str, attn: Any, args: Any, kwargs: Any, output: Any) -> None:
        calls[name] = (args, kwargs, output)

    with ExitStack() as hooks, original.at_work():
        for name, attn in attentions.items():
            hooks.enter_context(attn.register_forward_hook(partial(record, name), with_kwargs=True))
        predict(transformer, batch)
    grid = family.token_grid(transformer, batch.hidden_states)
    for name, attn in attentions.items():
        args, kwargs, expected = calls.pop(name)
        with find_patched(transformer)["transformer"].on_grid(grid):
            error = attention_error(attn(*args, **kwargs), expected) / len(attentions)
        yield weight * error, {"loss": weight * error, "transfer": error}


def prediction_losses(
    model: Any,
    process: DiffusionProcess,
    weights: ObjectiveWeights,
    batch: NoisedBatch,
    target: torch.Tensor | None = None,
) -> Losses:
    """Yield the loss of the model's prediction: the diffusion loss, the squared error to a target, or their sum."""
    prediction, parts = predict(model, batch), {}
    if weights.diffusion:
        parts["diffusion"] = process.loss(prediction, batch).mean()
    if target is not None:
        parts["distillation"] = (prediction.float() - target.float()).square().mean()
    loss = torch.stack([getattr(weights, name) * part for name, part in parts.items()]).sum()
    yield loss, {"loss": loss, **parts}


def attention_error(output: Any, expected: Any) -> torch.Tensor:
    """Mean squared error of an attention's output: one tensor, or one for the grid and one for the context."""
    if isinstance(output, torch.Tensor):
        return (output.float() - expected.float()).square().mean()
    errors = torch.stack([attention_error(found, wanted) for found, wanted in zip(output, expected, strict=True)])
    sizes = [wanted.numel() for wanted in expected]
    return (errors * errors.new_tensor(sizes)).sum() / sum(sizes)
