"""Context parallelism: groups of processes that each spread the tokens of their batches over their processes.

diffusers' own hooks split the tokens before the first block and gather them after the last one.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..families import classes_that_are_split, get_family
from ..patching import mhla_layers
from .config import ContextParallel, TrainingConfig
from .latents.data import TrainingData
from .trainable import patched_attentions


@dataclass(frozen=True)
class Groups:
    """The groups of a run's processes, as one process sees them. Processes of a group follow each other."""

    rank: int
    """The group that this process is in."""
    count: int
    """How many there are, each of which has batches of its own."""
    size: int
    """Processes of a group; 1 without context parallelism."""

    @classmethod
    def of(cls, degrees: ContextParallel, process: int, processes: int) -> "Groups":
        """Groups of all processes of a run.

        Args:
            degrees: how a group is made up.
            process: index of this one.
            processes: how many there are.

        Raises:
            ValueError: they are not whole groups.
        """
        size = degrees.processes
        if processes % size:
            raise ValueError(
                f"context_parallel: {{ring: {degrees.ring}, ulysses: {degrees.ulysses}}} spreads a batch over groups "
                f"of {size} processes, which {processes} processes cannot be made of; launch a multiple of {size}, "
                f"for example accelerate launch --config_file finetune/accelerate/fsdp2.yaml --num_processes {size} …, "
                "or choose other degrees."
            )
        return cls(process // size, processes // size, size)


def check_splits(transformer: Any, data: TrainingData, config: TrainingConfig) -> None:
    """Raise unless the tokens of transformer and data can be spread as configured; values are not looked at.

    Raises:
        ValueError: a transformer of which diffusers does not tell how tokens are split, or that is split already;
            heads or tokens that the processes do not divide; softmax attention that cannot go round a ring.
    """
    if getattr(transformer, "_parallel_config", None) is not None:
        raise ValueError(
            "transformer.enable_parallelism() was called before training, which then would weigh gradients wrongly; "
            "leave it to training, with context_parallel: {ring: …, ulysses: …} in the configuration."
        )
    degrees = config.context_parallel
    if degrees.processes == 1:
        return
    if getattr(transformer, "_cp_plan", None) is None:
        raise ValueError(
            f"diffusers does not tell how the tokens of {type(transformer).__name__} are split over processes "
            f"(_cp_plan), so context_parallel cannot be set for it; it does for {', '.join(classes_that_are_split())}."
        )
    family = get_family(transformer)
    heads = {int(attn.heads) for attn in family.self_attentions(transformer).values()}
    for count in sorted(heads):
        if count % degrees.ulysses:
            allowed = [degree for degree in range(2, count + 1) if count % degree == 0]
            raise ValueError(
                f"context_parallel.ulysses={degrees.ulysses} does not divide the {count} heads of this transformer; "
                f"allowed is one of {', '.join(map(str, allowed))}, with context_parallel.ring for the rest."
            )
    for shape in sorted(set(data.shapes)):
        grid = family.token_grid(transformer, torch.empty(1, *shape, device="meta"))
        _check_divides(math.prod(grid), degrees, f"latents of shape {shape} make {math.prod(grid)} tokens")
    layers = mhla_layers(transformer).values()
    text = data[0].get("encoder_hidden_states") if any(layer.adapter.has_extra for layer in layers) else None
    if text is not None:
        _check_divides(len(text), degrees, f"the text, which self-attention attends to as well, is {len(text)} tokens")
    if degrees.ring > 1 and (config.needs_teacher or _keeps_softmax(transformer)):
        _check_softmax_goes_round(transformer)
    if degrees.ring > 1 and config.gradient_checkpointing and _keeps_softmax(transformer) and config.needs_prediction:
        raise ValueError(
            "gradient_checkpointing: true does not go with softmax attention that is trained round a ring "
            "(context_parallel.ring > 1): diffusers' backward pass reads what was recomputed more than once. Use "
            "context_parallel.ulysses alone, a patch of all layers, or gradient_checkpointing: false."
        )


def _check_divides(tokens: int, degrees: ContextParallel, what: str) -> None:
    # shares of other lengths would weigh the tokens of attention transfer's means unequally
    size = degrees.processes
    if tokens % size:
        raise ValueError(
            f"context_parallel spreads tokens over {size} processes evenly, but {what}; use a number of processes "
            f"that divides it, such as {math.gcd(tokens, size)}, or another size or number of frames."
        )


def _keeps_softmax(transformer: Any) -> bool:
    attentions = get_family(transformer).self_attentions(transformer)
    return not mhla_layers(transformer) or len(patched_attentions(transformer)) < len(attentions)


def _check_softmax_goes_round(transformer: Any) -> None:
    """Ask the backend of softmax attention whether it gives its log-sum-exp; only PyTorch's default one may not."""
    from diffusers.models import attention_dispatch
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    chosen = {getattr(attn.processor, "_attention_backend", None) for attn in patched_attentions(transformer).values()}
    active, _ = _AttentionBackendRegistry.get_active_backend()
    if AttentionBackendName.NATIVE not in {active if name is None else AttentionBackendName(name) for name in chosen}:
        return
    x = torch.zeros(1, 1, 1, 8)
    try:
        attention_dispatch._native_attention_forward_op(None, x, x, x, None, 0.0, False, None, False, True, False)
    except ValueError as error:
        raise ValueError(
            "Softmax attention, that of the teacher and of layers without a patch, cannot go round a ring "
            f"(context_parallel.ring > 1) with PyTorch's default backend: {error} Use context_parallel.ulysses alone, "
            "or a backend that gives its log-sum-exp, by the environment variable "
            "DIFFUSERS_ATTN_BACKEND=_native_cudnn or =flash, with precision: bf16."
        ) from error


def split(transformer: Any, degrees: ContextParallel, device: torch.device, groups: Groups) -> None:
    """Have a transformer spread the tokens of every forward over the processes of its group, in place.

    Args:
        transformer: in parts or not.
        degrees: how a group is made up.
        device: of the kind that processes send from.
        groups: of all processes.
    """
    from diffusers import ContextParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    _lower_norms(transformer)
    # ranks of a group are neighbours, and heads are exchanged between the nearest, which send the most
    mesh = init_device_mesh(
        device.type,
        (groups.count, degrees.ring, degrees.ulysses),
        mesh_dim_names=("group", "ring", "ulysses"),
    )
    settings = ContextParallelConfig(ring_degree=degrees.ring, ulysses_degree=degrees.ulysses, mesh=mesh)
    with _one_device() if device.type == "cpu" else nullcontext():
        transformer.enable_parallelism(config=settings)


def _lower_norms(transformer: Any) -> None:
    """Have the norms of query and key give the type that they are given.

    Under autocast a GPU norms in float32. PyTorch's attention lowers that again; diffusers' split softmax attention
    hands query, key and value on to kernels as they are, which then are of two types, in the backward pass as well.
    """
    for attn in get_family(transformer).self_attentions(transformer).values():
        for norm in (getattr(attn, "norm_q", None), getattr(attn, "norm_k", None)):
            if norm is not None:
                norm.register_forward_hook(_as_given)


def _as_given(norm: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    return output.to(args[0].dtype)


@contextmanager
def _one_device() -> Iterator[None]:
    """For diffusers, which divides a process's rank by the number of accelerators, of which a CPU has none."""
    counting = torch.accelerator.device_count
    torch.accelerator.device_count = lambda: 1
    try:
        yield
    finally:
        torch.accelerator.device_count = counting
