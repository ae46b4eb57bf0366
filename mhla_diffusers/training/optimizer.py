"""AdamW with a learning rate of its own for the mixing matrices, its schedule, and its state as tensors by name."""

from typing import Any

import torch
from torch import nn

from .config import OptimizerName, StageConfig, TrainingConfig
from .run_folder import Tensors
from .sharding import gathered, placed_like


def optimizer_class(name: OptimizerName) -> type[torch.optim.Optimizer]:
    """The class behind a name in the configuration.

    ``adamw8bit`` keeps both moments in 8 bits, in blocks of 256 values, but for parameters of less than 4096 values.
    It was tried on a CPU only.

    Raises:
        ImportError: bitsandbytes is missing.
    """
    if name == "adamw":
        return torch.optim.AdamW
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ImportError(
            "optimizer=adamw8bit needs bitsandbytes: pip install mhla_diffusers[adamw8bit], or set optimizer: adamw."
        ) from error
    chosen: type[torch.optim.Optimizer] = AdamW8bit
    return chosen


def make_optimizer(
    trained: dict[str, nn.Parameter], stage: StageConfig, config: TrainingConfig
) -> torch.optim.Optimizer:
    """An optimizer of two parameter groups: the mixing matrices and far field weights are the second.

    Args:
        trained: parameters by name.
        stage: has the learning rates.
        config: has kind and weight decay.

    Raises:
        ImportError: see :func:`optimizer_class`.
    """
    of_mixing = (".mhla.mixing", ".mhla.far_field_log_weight")
    mixing = [parameter for name, parameter in trained.items() if name.endswith(of_mixing)]
    rest = [parameter for name, parameter in trained.items() if not name.endswith(of_mixing)]
    mixing_rate = stage.mixing_learning_rate or stage.learning_rate
    groups: list[dict[str, Any]] = [
        {"params": rest, "lr": stage.learning_rate, "initial_lr": stage.learning_rate},
        {"params": mixing, "lr": mixing_rate, "initial_lr": mixing_rate, "weight_decay": 0.0},
    ]
    make: Any = optimizer_class(config.optimizer)
    optimizer: torch.optim.Optimizer = make(groups, weight_decay=config.weight_decay)
    return optimizer


def make_schedule(
    optimizer: torch.optim.Optimizer, stage: StageConfig, first_step: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm-up, then what the stage says.

    Args:
        optimizer: of the stage.
        stage: settings of the stage.
        first_step: updates of this stage that an earlier run did.
    """
    from diffusers.optimization import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

    last = first_step - 1
    schedule: torch.optim.lr_scheduler.LambdaLR
    if stage.scheduler == "cosine":
        schedule = get_cosine_schedule_with_warmup(optimizer, stage.warmup_steps, stage.steps, last_epoch=last)
    else:
        schedule = get_constant_schedule_with_warmup(optimizer, stage.warmup_steps, last_epoch=last)
    return schedule


def optimizer_state(optimizer: torch.optim.Optimizer, trained: dict[str, nn.Parameter]) -> Tensors:
    """Its state, "<parameter>/<part>" → tensor on the CPU; of a sharded model as :func:`gathered` says."""
    return {
        f"{name}/{part}": _saved(part, value)
        for name, parameter in trained.items()
        for part, value in optimizer.state[parameter].items()
    }


@torch.no_grad()
def load_optimizer_state(optimizer: torch.optim.Optimizer, trained: dict[str, nn.Parameter], tensors: Tensors) -> None:
    """The inverse of :func:`optimizer_state`."""
    for key, value in tensors.items():
        name, _, part = key.rpartition("/")
        parameter = trained[name]
        if part == "step":  # a float32 tensor for AdamW, a whole number for AdamW8bit
            optimizer.state[parameter][part] = value if value.is_floating_point() else int(value)
        else:
            optimizer.state[parameter][part] = placed_like(value, parameter)


def _saved(part: str, value: torch.Tensor | int) -> torch.Tensor:
    if isinstance(value, int):
        return torch.tensor(value)
    if part.startswith("qmap"):  # one table for all parameters, which safetensors would not write twice
        return gathered(value).clone()
    return gathered(value)
