"""The losses: attention transfer, distillation, and the loss that the model was trained with.

Each yields losses one graph at a time, (loss, parts): run the loss () backward before asking for the next. The parts,
each (), add up over the batch and go to the metrics.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..families import DiffusionProcess, NoisedBatch, Sample, get_family, predict
from ..patching import find_patched
from .config import ObjectiveWeights
from .data.batches import drop_prompts
from .weights import Original, patched_attentions

Losses = Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]


def transfer_losses(transformer: Any, original: Original, weight: float, batch: NoisedBatch) -> Losses:
    """Yield the loss of every patched attention, run on the input that the original attention had.

    The original model runs once, so at most one layer's graph is held, and no gradient flows between layers.
    """
    attentions, family = patched_attentions(transformer), get_family(transformer)
    with recorded(attentions) as calls, original.at_work():
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


def guided_prediction(
    transformer: Any, batch: NoisedBatch, guidance: float = 1.0, empty: Sample | None = None
) -> torch.Tensor:
    """Predict with classifier-free guidance on the channels of the noise: (B, output channels, ...).

    ``empty`` is the conditioning of the empty prompt, without a batch axis. Without it, or with a guidance
    of 1, there is no guidance.
    """
    conditional = predict(transformer, batch)
    if guidance == 1 or empty is None:
        return conditional
    device = batch.noise.device
    everywhere = torch.ones(len(batch.noise), dtype=torch.bool, device=device)
    without = drop_prompts(batch.conditioning, {name: x.to(device) for name, x in empty.items()}, everywhere)
    free = predict(transformer, replace(batch, conditioning=without))
    noised = min(conditional.shape[1], batch.noise.shape[1])
    guided = (free + guidance * (conditional - free))[:, :noised]
    return torch.cat([guided, conditional[:, noised:]], dim=1)


@contextmanager
def recorded(attentions: Mapping[str, Any]) -> Iterator[dict[str, tuple[Any, Any, Any]]]:
    """Yield the arguments, keyword arguments and output of the last call of every attention within the context."""
    calls: dict[str, tuple[Any, Any, Any]] = {}

    def record(name: str, attn: Any, args: Any, kwargs: Any, output: Any) -> None:
        calls[name] = (args, kwargs, output)

    with ExitStack() as hooks:
        for name, attn in attentions.items():
            hooks.enter_context(attn.register_forward_hook(partial(record, name), with_kwargs=True))
        yield calls


def attention_error(output: Any, expected: Any) -> torch.Tensor:
    """Mean squared error of an attention's output: one tensor, or one for the grid and one for the context."""
    if isinstance(output, torch.Tensor):
        return (output.float() - expected.float()).square().mean()
    errors = torch.stack([attention_error(found, wanted) for found, wanted in zip(output, expected, strict=True)])
    sizes = [wanted.numel() for wanted in expected]
    return (errors * errors.new_tensor(sizes)).sum() / sum(sizes)
