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

from ..families import NoisedBatch, Sample, get_family
from .config import ContextParallel, StageConfig, TrainingConfig
from .critic import Critic, make_critic
from .distributed import Groups, parts_gathered, split
from .few_steps import Draws, FewStepObjective
from .objectives import Objectives, Place
from .teacher import Teacher
from .trainable import add_adapters, changed_names, set_trainable


@dataclass(frozen=True)
class StageEstimate:
    """One stage, for one process."""

    trainable: str
    trainable_parameters: int
    weight_bytes: int
    """All weights, trained ones in float32; with sharding this process's part and what is gathered at a time."""
    training_bytes: int
    """Gradients, both moments of AdamW, the moving average and the teacher's original values; or this process's
    part.
    """
    activation_bytes: int
    """Peak of forward and backward."""
    flops: int
    """Of one update: all forwards and backwards; only matrix products and attention count."""


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
            total, weights, training, activations = (f"{size / 2**30:.1f}" for size in (sum(parts), *parts))
            lines.append(
                f"stage {index}: trains {stage.trainable}, {stage.trainable_parameters:,} parameters; "
                f"{stage.flops / 1e12:,.1f} TFLOP per update and process; {total} GiB = {weights} weights + "
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
        Groups.of(config.context_parallel, 0, processes)
    for stage in config.stages:
        if stage.lora_rank is not None:
            add_adapters(transformer, stage.lora_rank, config.seed, stage.lora_layers)
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
    """Within the context, tokens are split over simulated processes, of which this is the first."""
    if degrees.processes == 1:
        yield
        return
    from diffusers.models.attention_dispatch import attention_backend
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if torch.distributed.is_initialized():
        raise ValueError("A dry run with context_parallel must be one process; start it without accelerate launch.")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=degrees.processes)
    try:
        split(transformer, degrees, torch.device("cpu"), Groups(0, 1, degrees.processes))
        # runs round a ring; keeps for backward what PyTorch's flash attention keeps
        with attention_backend("_native_flash"):
            yield
    finally:
        torch.distributed.destroy_process_group()


def _estimate_stage(
    transformer: Any, sample: Sample, config: TrainingConfig, stage: StageConfig, processes: int | None
) -> StageEstimate:
    family, few_steps = get_family(transformer), stage.few_steps
    critic = None if few_steps is None else make_critic(transformer, stage, few_steps, config.seed)
    taught = list(set_trainable(transformer, stage.trainable).values())
    trained = sum(parameter.numel() for parameter in taught)
    everything = sum(parameter.numel() for parameter in transformer.parameters())
    frozen_bytes, dtype = (2, torch.bfloat16) if config.precision == "bf16" else (4, torch.float32)
    of_critic = list(critic.parameters.values()) if critic is not None else []
    critics = sum(parameter.numel() for parameter in of_critic)
    if critic is not None and stage.trainable == "lora":
        everything -= critics
    teacher, kept = None, 0
    if stage.needs_teacher:
        kept = Teacher(transformer, changed_names(transformer, config.stages)).extra_parameters
        teacher = Teacher(transformer, ())
    shares, gathered = (1, 0) if processes is None else (processes, _gathered_bytes(transformer, frozen_bytes))
    for parameter in (*transformer.parameters(), *of_critic):
        parameter.data = parameter.data.to(dtype)
    for parameter in of_critic:
        parameter.requires_grad_(True)

    parts = _parts_of_update(transformer, sample, config, stage, teacher, critic, processes is not None)
    # gradients are counted separately
    hooks = [parameter.register_post_accumulate_grad_hook(_drop_gradient) for parameter in (*taught, *of_critic)]
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
    copies = 1 + (config.ema_decay is not None)
    moments = 8 if config.optimizer == "adamw" else 2
    return StageEstimate(
        trainable=stage.trainable if few_steps is None else f"{stage.trainable} and a critic, in few steps",
        trainable_parameters=trained + critics,
        weight_bytes=(frozen_bytes * (everything - trained) + 4 * (trained + critics)) // shares + gathered,
        training_bytes=(4 * (copies * trained + critics + kept) + moments * (trained + critics)) // shares,
        activation_bytes=memory.peak,
        flops=int(flops * config.gradient_accumulation),
    )


def _parts_of_update(
    transformer: Any,
    sample: Sample,
    config: TrainingConfig,
    stage: StageConfig,
    teacher: Teacher | None,
    critic: Critic | None,
    is_sharded: bool,
) -> list[tuple[float, Callable[[], object]]]:
    """What runs for one batch of an update, and how often on average; the first needs the most memory.

    Inputs have the type of the transformer's parameters.

    Raises:
        ValueError: a stage of neither objectives nor few steps, or few steps without teacher or critic.
    """
    dtype = next(transformer.parameters()).dtype
    process: Any = get_family(transformer).process(transformer, config.flow_shift)
    types = {name: dtype if x.is_floating_point() else x.dtype for name, x in sample.items()}
    types["latents"] = dtype  # of prompts alone they are zeros of one byte
    tensors = {
        name: torch.empty((config.batch_size, *x.shape), dtype=types[name], device="meta") for name, x in sample.items()
    }
    latents = tensors.pop("latents")
    empty = {name: x[0] for name, x in tensors.items()}
    batch: NoisedBatch = process.make_batch(latents, latents, torch.empty(len(latents), device="meta"), tensors)
    batch = replace(batch, hidden_states=batch.hidden_states.to(dtype))

    def backward(loss: torch.Tensor) -> None:
        loss.backward()

    if stage.objectives is not None:
        weights = stage.objectives
        summed = Objectives(
            weights, process, transformer, teacher, in_parts=is_sharded, guidance=stage.guidance, empty=empty
        )
        return [(1.0, partial(summed.backward, transformer, batch, Place(0, 0), backward))]
    if stage.few_steps is None or teacher is None or critic is None:
        raise ValueError("This stage has neither objectives nor few_steps.")
    few = FewStepObjective(stage.few_steps, process, transformer, teacher, critic, empty, seed=0)
    time, noise = torch.empty(len(latents), dtype=dtype, device="meta"), latents[:, : process.channels]
    draws = Draws(0, noise[None], time, noise, time, noise)  # in the first step, before which no other runs
    share, steps_before = 1 / stage.few_steps.critic_updates, (len(stage.few_steps.times) - 1) / 2
    return [
        (share, partial(few.update, batch, draws, True, backward)),
        (1 - share, partial(few.update, batch, draws, False, backward)),
        (steps_before, partial(few.samples, batch, noise[None])),
    ]


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _gathered_bytes(transformer: Any, frozen_bytes: int) -> int:
    """What FSDP2 holds unsharded in the backward pass.

    These are two parts, one prefetched while the other runs, the gradients of one, and the weights outside of blocks.
    """
    seen: set[int] = set()
    weights, gradients = [], []
    for part in parts_gathered(transformer):
        own = [parameter for parameter in part.parameters() if id(parameter) not in seen]
        seen |= {id(parameter) for parameter in own}
        taught = sum(4 * parameter.numel() for parameter in own if parameter.requires_grad)
        weights.append(taught + sum(frozen_bytes * x.numel() for x in own if not x.requires_grad))
        gradients.append(taught)
    *parts, rest = weights
    return sum(sorted(parts)[-2:]) + rest + max(gradients)


def _checkpointed(module: nn.Module, *args: Any) -> Any:
    """Gradient checkpointing as in diffusers, but a torch function mode also applies when a block is recomputed."""
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
        known = {storage._cdata for storage in _storages(args)}
        for storage in _storages(output):
            if storage._cdata not in self._followed and storage._cdata not in known:
                self._followed.add(storage._cdata)
                self._alive += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self._alive)
        return output

    def _free(self, key: int, size: int) -> None:
        self._followed.discard(key)
        self._alive -= size


def _storages(tensors: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(tensors)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]
