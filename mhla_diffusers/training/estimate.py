"""Estimate the memory and FLOPs of a run from shapes: the model is built on the meta device, without values."""

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ..families import NoisedBatch, Sample, get_family, trained_family
from ..reporting import scaled
from .config import OptimizerName, StageConfig, TrainingConfig
from .distributed import check_groups, check_sharded, gathered_parts, split_tokens
from .objectives import stage_losses
from .roles import Roles, linears_of_blocks, prepare_for_training, trainable_names


@dataclass(frozen=True)
class StageEstimate:
    """One stage, for one process."""

    trainable: str
    trainable_parameters: int
    weight_bytes: int
    """All weights, trained ones in float32; with sharding this process's part and what is gathered at a time; with
    ``base_dtype`` also those of one block as they are converted to compute."""
    training_bytes: int
    """Gradients, the optimizer's state, the moving average, the teacher's original values; or this process's part."""
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
        check_sharded(config)
        check_groups(config.context_parallel, processes)
    changed = prepare_for_training(transformer, config)
    # all in the type that autocast computes in; what is kept in float32 is counted as such below
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    for parameter in transformer.parameters():
        parameter.data = parameter.data.to(dtype)
    with _first_of_a_group(transformer, config.context_parallel), _fused_attention():
        batch = _batch(
            sample, trained_family(transformer).training.process(transformer, config.flow_shift), config, dtype
        )
        roles = Roles.of(transformer, config, changed, {name: x[0] for name, x in batch.conditioning.items()})
        stages = tuple(_estimate_stage(roles, batch, config, stage, processes) for stage in config.stages)
    latents = torch.empty(1, *sample["latents"].shape, device="meta")
    return Estimate(
        parameters=sum(parameter.numel() for parameter in transformer.parameters()),
        latents=tuple(sample["latents"].shape),
        tokens=math.prod(get_family(transformer).token_grid(transformer, latents)),
        stages=stages,
        processes=processes,
        split=config.context_parallel,
    )


@contextmanager
def _first_of_a_group(transformer: Any, size: int) -> Iterator[None]:
    """Context in which tokens are split over simulated processes; this one is the first."""
    if size == 1:
        yield
        return
    from diffusers.models.attention_dispatch import attention_backend
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        split_tokens(transformer, size, torch.device("cpu"), groups=1)
        # keeps for backward what PyTorch's flash attention keeps
        with attention_backend("_native_flash"):
            yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Context in which softmax attention on the meta device is a fused kernel, also when a block is recomputed.

    PyTorch would materialise all scores there, since it asks a device for its kernels, and this one has none.
    """

    def fused(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, scale: Any = None, **_: Any) -> Any:
        attend = torch.ops.aten._scaled_dot_product_efficient_attention
        return attend(query, key, value, attn_mask, torch.is_grad_enabled(), *args[:2], scale=scale)[0]

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", fused, "AutogradMeta")
        yield


def _estimate_stage(
    roles: Roles, batch: NoisedBatch, config: TrainingConfig, stage: StageConfig, processes: int | None
) -> StageEstimate:
    """Run the forwards and backwards of one update, and count what is held beside them from shapes."""
    transformer = roles.student
    names = trainable_names(transformer, stage.trainable)
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(name in names)
    updated = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    trained = sum(x.numel() for x in updated)
    frozen = sum(x.numel() for x in transformer.parameters()) - trained
    frozen_bytes = 2 if config.precision == "bf16" else 4
    shares, gathered = (1, 0) if processes is None else (processes, _gathered_bytes(transformer, frozen_bytes))

    def run() -> None:
        for loss, _ in stage_losses(roles, stage, transformer, batch):
            loss.backward()

    # gradients are counted separately
    hooks = [x.register_post_accumulate_grad_hook(lambda given: setattr(given, "grad", None)) for x in updated]
    with FlopCounterMode(display=False) as counter:
        run()
    # separately, because PyTorch's counter keeps checkpointed activations alive
    with _PeakMemory() as memory:
        run()
    for hook in hooks:
        hook.remove()
    state = sum(_state_bytes(config.optimizer, x) for x in updated)
    saved = _bytes_of_quantization(transformer, frozen_bytes) if config.base_dtype is not None else 0
    averaged = trained if config.ema_decay is not None else 0
    originals = 0 if roles.teacher is None else roles.teacher.extra_parameters
    return StageEstimate(
        trainable=stage.trainable,
        trainable_parameters=trained,
        weight_bytes=(frozen_bytes * frozen + 4 * trained) // shares + gathered - saved,
        training_bytes=(4 * trained + state + 4 * (averaged + originals)) // shares,
        activation_bytes=memory.peak,
        flops=counter.get_total_flops() * config.gradient_accumulation,
    )


def _state_bytes(optimizer: OptimizerName, parameter: torch.Tensor) -> int:
    """Count the bytes that an optimizer keeps of a parameter."""
    count = parameter.numel()
    if optimizer == "adamw8bit" and count >= 4096 and count % 256 == 0:
        return 2 * (count + 4 * count // 256)  # a scale per 256 values of both moments
    if optimizer == "adafactor":  # a mean per row and per column of the last two axes
        return 4 * (count if parameter.ndim < 2 else count // parameter.shape[-1] + count // parameter.shape[-2])
    return 8 * count  # two moments, or one and the weights that are averaged


def _bytes_of_quantization(transformer: nn.Module, frozen_bytes: int) -> int:
    """Count the bytes that ``base_dtype`` saves: weights of one byte, with float32 scales per output channel.

    Those of one block are held converted as well, since its backward pass reads them.
    """
    blocks: dict[str, int] = dict.fromkeys(get_family(transformer).blocks_of(transformer), 0)
    saved = 0
    for place, linear in linears_of_blocks(transformer).items():
        saved += (frozen_bytes - 1) * linear.weight.numel() - 4 * linear.out_features
        blocks[next(name for name in blocks if place.startswith(f"{name}."))] += linear.weight.numel()
    return saved - frozen_bytes * max(blocks.values())


def _batch(sample: Sample, process: Any, config: TrainingConfig, dtype: torch.dtype) -> NoisedBatch:
    """Make a batch of such samples without values; floating-point inputs have the type of the weights."""
    types = {name: dtype if x.is_floating_point() else x.dtype for name, x in sample.items()}
    size = config.batch_size
    tensors = {name: torch.empty((size, *x.shape), dtype=types[name], device="meta") for name, x in sample.items()}
    latents = tensors.pop("latents")
    batch: NoisedBatch = process.make_batch(latents, latents, torch.empty(size, device="meta"), tensors)
    return replace(batch, hidden_states=batch.hidden_states.to(dtype))


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


class _PeakMemory(TorchDispatchMode):
    """Tracks the bytes of tensors that are allocated and freed.

    A mode, because the meta device has no allocator to ask, and hooks of autograd see neither what lives only within a
    forward nor what a backward pass allocates.
    """

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
