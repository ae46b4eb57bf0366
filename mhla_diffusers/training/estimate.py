"""What a run will need, told from shapes alone: the model is built on the meta device and has no values."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..families import get_family
from .config import StageConfig, TrainingConfig
from .latents.data import Sample
from ..families.processes import DiffusionProcess
from .objectives import diffusion_loss, distillation_loss, teacher_prediction, transfer_attention
from .teacher import Teacher
from .trainable import add_adapters, changed_names, set_trainable


@dataclass(frozen=True)
class StageEstimate:
    """One stage, for one process."""

    trainable: str
    trainable_parameters: int
    weight_bytes: int
    """All weights, those that train in float32."""
    training_bytes: int
    """Gradients, both moments of AdamW, the moving average and the teacher's original values."""
    activation_bytes: int
    """The most that is alive at one moment of forward and backward."""
    flops: int
    """Of one update: all forwards and backwards, matrix products and attention alone."""

    @property
    def total_bytes(self) -> int:
        """All of the above."""
        return self.weight_bytes + self.training_bytes + self.activation_bytes


@dataclass(frozen=True)
class Estimate:
    """A run."""

    parameters: int
    latents: tuple[int, ...]
    tokens: int
    """Per sample."""
    stages: tuple[StageEstimate, ...]

    def __str__(self) -> str:
        lines = [f"{self.parameters:,} parameters; latents {'x'.join(map(str, self.latents))}, {self.tokens:,} tokens"]
        for index, stage in enumerate(self.stages):
            gib = {
                name: getattr(stage, f"{name}_bytes") / 2**30 for name in ("weight", "training", "activation", "total")
            }
            lines.append(
                f"stage {index}: trains {stage.trainable}, {stage.trainable_parameters:,} parameters; "
                f"{stage.flops / 1e12:,.1f} TFLOP per update and process; {gib['total']:.1f} GiB = "
                f"{gib['weight']:.1f} weights + {gib['training']:.1f} gradients, optimizer, averages and teacher + "
                f"{gib['activation']:.1f} activations"
            )
        return "\n".join(lines)


def estimate(transformer: Any, sample: Sample, config: TrainingConfig) -> Estimate:
    """What training will need on every process, without sharding, for PyTorch's memory-efficient softmax attention.

    Memory of the allocator, of the libraries and of MHLA's fused kernels is not in it, so take it for a guide.

    Args:
        transformer: on the meta device, patched where the configuration has a patch; it is not to be used afterwards.
        sample: with the shapes of the training samples, on any device.
        config: settings.
    """
    for stage in config.stages:
        if stage.lora_rank is not None:
            add_adapters(transformer, stage.lora_rank, config.seed)
    transformer.train()
    if config.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    latents = torch.empty(config.batch_size, *sample["latents"].shape, device="meta")
    return Estimate(
        parameters=sum(parameter.numel() for parameter in transformer.parameters()),
        latents=tuple(sample["latents"].shape),
        tokens=torch.Size(get_family(transformer).token_grid(transformer, latents)).numel(),
        stages=tuple(_estimate_stage(transformer, sample, config, stage) for stage in config.stages),
    )


def _estimate_stage(transformer: Any, sample: Sample, config: TrainingConfig, stage: StageConfig) -> StageEstimate:
    trained = sum(parameter.numel() for parameter in set_trainable(transformer, stage.trainable).values())
    everything = sum(parameter.numel() for parameter in transformer.parameters())
    frozen_bytes = 2 if config.precision == "bf16" else 4
    moments = 8 if config.optimizer == "adamw" else 2
    kept = 0
    if stage.objectives.need_teacher:
        kept = Teacher(transformer, changed_names(transformer, config.stages)).extra_parameters
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    for parameter in transformer.parameters():
        parameter.data = parameter.data.to(dtype)
    flops, activations = _measure(transformer, sample, config, stage, dtype)
    return StageEstimate(
        trainable=stage.trainable,
        trainable_parameters=trained,
        weight_bytes=frozen_bytes * (everything - trained) + 4 * trained,
        training_bytes=4 * ((1 + (config.ema_decay is not None)) * trained + kept) + moments * trained,
        activation_bytes=activations,
        flops=flops * config.gradient_accumulation,
    )


def _measure(
    transformer: Any, sample: Sample, config: TrainingConfig, stage: StageConfig, dtype: torch.dtype
) -> tuple[int, int]:
    """FLOPs and the most bytes alive in one forward and backward."""
    process = get_family(transformer).process(transformer, config.flow_shift)
    batch_of: Mapping[str, torch.Tensor] = {
        name: torch.empty(
            (config.batch_size, *x.shape), dtype=dtype if x.is_floating_point() else x.dtype, device="meta"
        )
        for name, x in sample.items()
    }
    costs = _Costs()
    with ExitStack() as stack:
        stack.enter_context(_gradients_dropped(transformer))
        stack.enter_context(_fused_attention())
        stack.enter_context(costs)
        _forward_and_backward(transformer, process, batch_of, stage, dtype)
    return costs.flops, costs.peak


def _forward_and_backward(
    transformer: nn.Module,
    process: DiffusionProcess,
    sample: Mapping[str, torch.Tensor],
    stage: StageConfig,
    dtype: torch.dtype,
) -> None:
    conditioning = {name: tensor for name, tensor in sample.items() if name != "latents"}
    latents = sample["latents"]
    quantile = torch.empty(len(latents), device="meta")
    batch = process.make_batch(latents, latents, quantile, conditioning)
    batch = type(batch)(**{**vars(batch), "hidden_states": batch.hidden_states.to(dtype)})
    weights = stage.objectives
    teacher = Teacher(transformer, ()) if weights.need_teacher else None
    target = None
    if weights.transfer and teacher is not None:
        _, target = transfer_attention(transformer, teacher, batch, lambda loss: loss.backward())
    elif weights.distillation and teacher is not None:
        target = teacher_prediction(transformer, teacher, batch)
    if weights.need_prediction:
        prediction = batch.predict(transformer)
        loss = diffusion_loss(process, prediction, batch) if weights.diffusion else prediction.new_zeros(())
        if weights.distillation and target is not None:
            loss = loss + distillation_loss(prediction, target)
        loss.backward()


@contextmanager
def _gradients_dropped(transformer: nn.Module) -> Iterator[None]:
    """Within the context parameters do not keep their gradients, which are counted by themselves."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    handles = [parameter.register_post_accumulate_grad_hook(drop) for parameter in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Softmax attention as the fused kernel that a GPU runs; on the meta device PyTorch would write out all scores.

    The function itself is exchanged, since a torch function mode is not in force when checkpointed blocks run again.
    """
    original = nn.functional.scaled_dot_product_attention

    def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if args or options.get("attn_mask") is not None:
            return original(query, key, value, *args, **options)
        output: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
        return output

    nn.functional.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


class _Costs(TorchDispatchMode):
    """Counts FLOPs, and follows the bytes of the tensors that are made and freed.

    PyTorch's ``FlopCounterMode`` keeps checkpointed activations alive, so only its formulas are used.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.peak = 0
        self._alive = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=output))
        known = {
            x.untyped_storage()._cdata for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)
        }
        for tensor in torch.utils._pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage(), known)
        self.peak = max(self.peak, self._alive)
        return output

    def _follow(self, storage: Any, known: set[int]) -> None:
        key = storage._cdata
        if key in self._storages or key in known:
            return
        self._storages.add(key)
        self._alive += storage.nbytes()
        weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self._alive -= size
