"""Estimate the memory and FLOPs of a run from shapes: the model is built on the meta device, without values."""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ..families import NoisedBatch, Sample, get_family, trained_family
from ..reporting import scaled
from .config import ContextParallel, StageConfig, TrainingConfig
from .distributed import check_groups, gathered_parts, split_tokens
from .few_steps import DistributionMatching
from .objectives import Losses, stage_losses
from .roles import Critic, Roles, Teacher, add_lora, make_trainable, trainable_names


@dataclass(frozen=True)
class StageEstimate:
    """One stage, for one process."""

    trainable: str
    trainable_parameters: int
    weight_bytes: int
    """All weights, trained ones in float32; with sharding this process's part and what is gathered at a time."""
    training_bytes: int
    """Gradients, AdamW's moments, the moving average and the teacher's original values; or this process's part."""
    activation_bytes: int
    """Peak of forward and backward."""
    flops: int
    """FLOPs of one update: all forwards and backwards; only matrix products and attention count."""


@dataclass(frozen=True)
class Estimate:
    """A run."""

    parameters: int
    latents: tuple[int, ...]
    tokens: int
    """Per sample."""
    stages: tuple[StageEstimate, ...]
    processes: int | None = None
    """Processes that everything but activations is sharded over; None without sharding."""
    split: int = 1
    """Processes that the tokens of a batch are split over."""

    def __str__(self) -> str:
        lines = [f"{self.parameters:,} parameters; latents {'x'.join(map(str, self.latents))}, {self.tokens:,} tokens"]
        if self.split > 1:
            lines[0] += f", {self.tokens // self.split:,} on each of {self.split} processes"
        if self.processes is not None:
            lines[0] += f"; sharded over {self.processes} processes"
        for index, stage in enumerate(self.stages):
            parts = (stage.weight_bytes, stage.training_bytes, stage.activation_bytes)
            total, weights, training, activations = (scaled(size, 1024, "B") for size in (sum(parts), *parts))
            lines.append(
                f"stage {index}: trains {stage.trainable}, {stage.trainable_parameters:,} parameters; "
                f"{scaled(stage.flops, 1000, 'FLOP')} per update and process; {total} = {weights} weights + "
                f"{training} gradients, optimizer, averages and teacher + {activations} activations"
            )
        return "\n".join(lines)


def estimate(transformer: Any, sample: Sample, config: TrainingConfig, processes: int | None = None) -> Estimate:
    """Estimate what training needs on every process, with PyTorch's memory-efficient softmax attention.

    With context parallelism it simulates the first process of a group, whose collectives have shapes but send nothing.
    It is a guide: memory of the allocator, of libraries and of MHLA's fused kernels is not included.

    Args:
        transformer: on the meta device, patched if the configuration has a patch; do not use it afterwards.
        sample: with the shapes of the training samples, on any device.
        config: settings.
        processes: that FSDP2 shards weights, gradients and optimizer state over; None for no sharding.
    """
    if processes is not None:
        check_groups(config.context_parallel, processes)
    for stage in config.stages:
        if stage.lora_rank is not None:
            add_lora(transformer, stage.lora_rank, config.seed, stage.lora_layers)
    transformer.train()
    if config.gradient_checkpointing:
        transformer.enable_gradient_checkpointing(_checkpointed)
    latents = torch.empty(1, *sample["latents"].shape, device="meta")
    with _first_of_a_group(transformer, config.context_parallel):
        stages = tuple(_estimate_stage(transformer, sample, config, stage, processes) for stage in config.stages)
    return Estimate(
        parameters=sum(parameter.numel() for parameter in transformer.parameters()),
        latents=tuple(sample["latents"].shape),
        tokens=math.prod(get_family(transformer).token_grid(transformer, latents)),
        stages=stages,
        processes=processes,
        split=config.context_parallel.processes,
    )


@contextmanager
def _first_of_a_group(transformer: Any, degrees: ContextParallel) -> Iterator[None]:
    """Context in which tokens are split over simulated processes; this one is the first."""
    if degrees.processes == 1:
        yield
        return
    from diffusers.models.attention_dispatch import attention_backend
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if torch.distributed.is_initialized():
        raise ValueError("A dry run with context_parallel must be one process; start it without accelerate launch.")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=degrees.processes)
    try:
        split_tokens(transformer, degrees, torch.device("cpu"), groups=1)
        # runs round a ring; keeps for backward what PyTorch's flash attention keeps
        with attention_backend("_native_flash"):
            yield
    finally:
        torch.distributed.destroy_process_group()


def _estimate_stage(
    transformer: Any, sample: Sample, config: TrainingConfig, stage: StageConfig, processes: int | None
) -> StageEstimate:
    family, is_lora = trained_family(transformer), stage.trainable == "lora"
    critic = None if stage.few_steps is None else Critic(transformer, stage, config.seed)
    critics = [] if critic is None else [*critic.parameters.values()]
    names = trainable_names(transformer, stage.trainable)
    trained_weights = [*make_trainable(transformer, names).values()]
    trained, of_critic = (sum(x.numel() for x in part) for part in (trained_weights, critics))
    everything = sum(x.numel() for x in transformer.parameters()) - (of_critic if is_lora else 0)
    frozen_bytes, dtype = (2, torch.bfloat16) if config.precision == "bf16" else (4, torch.float32)
    changed = trainable_names(transformer, *(each.trainable for each in config.stages))
    kept = Teacher(transformer, changed).extra_parameters if stage.needs_teacher else 0
    shares, gathered = (1, 0) if processes is None else (processes, _gathered_bytes(transformer, frozen_bytes))
    for parameter in (*transformer.parameters(), *critics):
        parameter.data = parameter.data.to(dtype)
    for parameter in critics:
        parameter.requires_grad_(True)
    process: Any = family.process(transformer, config.flow_shift)
    batch = _batch(sample, process, config.batch_size, dtype)
    empty = {name: x[0] for name, x in batch.conditioning.items()}
    teacher = Teacher(transformer, ()) if stage.needs_teacher else None
    parts = _parts_of_update(Roles(transformer, process, teacher, critic, empty), stage, batch)
    # gradients are counted separately
    hooks = [
        x.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        for x in (*trained_weights, *critics)
    ]
    flops = 0.0
    for share, run in parts:
        with FlopCounterMode(display=False) as counter, family.without_values(), _FusedAttention():
            run()
        flops += share * counter.get_total_flops()
    # separately, because PyTorch's counter keeps checkpointed activations alive
    with _PeakMemory() as memory, family.without_values(), _FusedAttention():
        parts[0][1]()
    for hook in hooks:
        hook.remove()
    copies, moments = 1 + (config.ema_decay is not None), 8 if config.optimizer == "adamw" else 2
    return StageEstimate(
        trainable=stage.trainable if critic is None else f"{stage.trainable} and a critic, in few steps",
        trainable_parameters=trained + of_critic,
        weight_bytes=(frozen_bytes * (everything - trained) + 4 * (trained + of_critic)) // shares + gathered,
        training_bytes=(4 * (copies * trained + of_critic + kept) + moments * (trained + of_critic)) // shares,
        activation_bytes=memory.peak,
        flops=int(flops * config.gradient_accumulation),
    )


def _batch(sample: Sample, process: Any, size: int, dtype: torch.dtype) -> NoisedBatch:
    """Make a batch of such samples without values; floating-point inputs have the type of the weights."""
    types = {name: dtype if x.is_floating_point() else x.dtype for name, x in sample.items()}
    types["latents"] = dtype  # of prompts alone they are zeros of one byte
    tensors = {name: torch.empty((size, *x.shape), dtype=types[name], device="meta") for name, x in sample.items()}
    latents = tensors.pop("latents")
    batch: NoisedBatch = process.make_batch(latents, latents, torch.empty(size, device="meta"), tensors)
    return replace(batch, hidden_states=batch.hidden_states.to(dtype))


def _parts_of_update(roles: Roles, stage: StageConfig, batch: NoisedBatch) -> list[tuple[float, Callable[[], object]]]:
    """List what runs for one batch of an update, and how often on average; the first needs the most memory."""

    def run(losses: Callable[[], Losses]) -> None:
        for loss, _ in losses():
            loss.backward()

    if stage.few_steps is None:
        return [(1.0, partial(run, partial(stage_losses, roles, stage, roles.student, batch)))]
    matching = DistributionMatching(roles, stage.few_steps, seed=0)
    noise, times = batch.latents[:, : roles.process.channels], batch.time.new_empty(2, len(batch.time))
    first = [noise, noise, noise]  # the student's first step, before which no other runs, and both noises
    share, steps_before = 1 / stage.few_steps.critic_updates, (len(stage.few_steps.times) - 1) / 2
    return [
        (share, partial(run, partial(matching.losses_at, batch, first, times.to(noise.dtype), True))),
        (1 - share, partial(run, partial(matching.losses_at, batch, first, times.to(noise.dtype), False))),
        (steps_before, partial(matching.samples, batch, [noise])),
    ]


def _gathered_bytes(transformer: Any, frozen_bytes: int) -> int:
    """Count the bytes that FSDP2 holds unsharded in the backward pass.

    These are two parts, one prefetched while the other runs, the gradients of one, and the weights outside of blocks.
    """
    seen: set[int] = set()
    weights, gradients = [], []
    for part in gathered_parts(transformer):
        own = [parameter for parameter in part.parameters() if id(parameter) not in seen]
        seen |= {id(parameter) for parameter in own}
        trained = sum(4 * parameter.numel() for parameter in own if parameter.requires_grad)
        weights.append(trained + sum(frozen_bytes * x.numel() for x in own if not x.requires_grad))
        gradients.append(trained)
    *parts, rest = weights
    return sum(sorted(parts)[-2:]) + rest + max(gradients)


def _checkpointed(module: nn.Module, *args: Any) -> Any:
    """Checkpoint as diffusers does, but apply the torch function mode when a block is recomputed too."""
    return checkpoint(
        module.__call__, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _FusedAttention())
    )


class _FusedAttention(TorchFunctionMode):
    """Softmax attention as the fused GPU kernel; on the meta device PyTorch would materialise all scores."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention or options.get("attn_mask") is not None:
            return func(*args, **options)
        inputs = [*args, *(options[name] for name in ("query", "key", "value") if name in options)]
        return torch.ops.aten._scaled_dot_product_flash_attention(*inputs)[0]


class _PeakMemory(TorchDispatchMode):
    """Tracks the bytes of tensors that are allocated and freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._alive = 0
        self._followed: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs, outputs = (
            [leaf.untyped_storage() for leaf in torch.utils._pytree.tree_leaves(x) if isinstance(leaf, torch.Tensor)]
            for x in (args, output)
        )
        known = {storage._cdata for storage in inputs}
        for storage in outputs:
            if storage._cdata not in self._followed and storage._cdata not in known:
                self._followed.add(storage._cdata)
                self._alive += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self._alive)
        return output

    def _free(self, key: int, size: int) -> None:
        self._followed.discard(key)
        self._alive -= size
