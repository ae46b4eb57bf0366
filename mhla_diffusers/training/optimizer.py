"""The optimizer of a stage: parameter groups, learning rate schedule, and state as named tensors."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..errors import installing
from ..patching import MHLALayer, mhla_layers, register_mixing_clip
from .config import OptimizerName, StageConfig
from .distributed import gathered, placed_like

_PROGRESS = ("k", "weight_sum", "lr_max")
"""What schedule-free AdamW keeps in its groups: updates, the sum of their weights in the average, the highest rate."""
_MIXING = (".mhla.mixing", ".mhla.linear_log_weight")
"""Ends of the names of mixing matrices and λ, which may have a learning rate of their own."""


def optimizer_class(name: OptimizerName) -> type[Optimizer]:
    """Return the optimizer class by its name in the configuration; ImportError if its library is missing.

    ``adamw8bit`` keeps both moments in 8 bits, in blocks of 256 values, except for parameters with fewer than 4096
    values or not a multiple of 256. It compiles its update for every shape of a parameter, at the first one.
    """
    chosen: Any
    extra = {"adamw8bit": "quantize", "schedulefree": "schedulefree"}.get(name)
    try:
        if name == "adamw":
            chosen = torch.optim.AdamW
        elif name == "adafactor":
            chosen = torch.optim.Adafactor
        elif name == "adamw8bit":
            from torchao.optim import AdamW8bit

            chosen = AdamW8bit
        else:
            from schedulefree import AdamWScheduleFree

            chosen = AdamWScheduleFree
    except ImportError as error:
        raise ImportError(
            f"optimizer={name} needs a library; {installing(str(extra))}, or set optimizer: adamw."
        ) from error
    kind: type[Optimizer] = chosen
    return kind


def make_optimizer(
    model: nn.Module,
    trained: Mapping[str, nn.Parameter],
    *,
    learning_rate: float,
    mixing_learning_rate: float | None = None,
    weight_decay: float = 0.0,
    matrices_alone: bool = False,
    kind: OptimizerName = "adamw",
) -> Optimizer:
    """Make an optimizer for a patched or unpatched model.

    Mixing matrices never decay, and every step clips them to (0, 1).

    Args:
        model: owner of the parameters.
        trained: parameters by name.
        learning_rate: for all but mixing matrices and λ.
        mixing_learning_rate: for these; None for the same.
        weight_decay: for the others.
        matrices_alone: whether norms, biases and positional embeddings do not decay either.
        kind: see :func:`optimizer_class`.
    """
    # the first group stays even if empty, because its learning rate is recorded
    groups: list[dict[str, Any]] = [
        {"params": [], "lr": learning_rate, "weight_decay": weight_decay},
        {"params": [], "lr": learning_rate, "weight_decay": 0.0},
        {"params": [], "lr": mixing_learning_rate or learning_rate, "weight_decay": 0.0},
    ]
    for name, parameter in trained.items():
        decays = not matrices_alone or (name.endswith("weight") and parameter.ndim > 1)
        groups[2 if name.endswith(_MIXING) else 0 if decays else 1]["params"].append(parameter)
    make: Any = optimizer_class(kind)
    optimizer: Optimizer = make(
        [{**group, "initial_lr": group["lr"]} for group in groups if group["params"] or group is groups[0]]
    )
    if any(isinstance(layer, MHLALayer) for layer in mhla_layers(model).values()):
        register_mixing_clip(optimizer, model)
    if kind == "schedulefree":
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def make_schedule(optimizer: Optimizer, stage: StageConfig, first_step: int) -> LambdaLR:
    """Make the stage's schedule: warm-up, then constant or cosine, after the ``first_step`` updates already done."""
    warmup, steps = stage.warmup_steps, stage.steps

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        if stage.scheduler == "constant":
            return 1.0
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((step - warmup) / max(1, steps - warmup)))))

    return LambdaLR(optimizer, factor, last_epoch=first_step - 1)


def optimizer_state(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return its state, "<parameter>/<part>" → tensor on the CPU; for a sharded model as in :func:`gathered`."""
    state: dict[str, torch.Tensor] = {}
    for name, parameter in trained.items():
        for part, value in optimizer.state[parameter].items():
            if hasattr(value, "codes"):  # 8 bits; the table that decodes them is the same for all parameters
                state |= {f"{name}/{part}.{inner}": gathered(getattr(value, inner)) for inner in ("codes", "scale")}
            else:
                state[f"{name}/{part}"] = gathered(value)
    for number, group in enumerate(optimizer.param_groups):
        progress = {part: group[part] for part in _PROGRESS if part in group}
        state |= {f"{number}/{part}": torch.tensor(value, dtype=torch.float64) for part, value in progress.items()}
    return state


@torch.no_grad()
def load_optimizer_state(
    optimizer: Optimizer, trained: Mapping[str, nn.Parameter], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Load what :func:`optimizer_state` returned."""
    for key, value in tensors.items():
        name, _, part = key.rpartition("/")
        if part in _PROGRESS:
            group = optimizer.param_groups[int(name)]
            group[part] = type(group[part])(value.item())
            continue
        parameter, (part, _, inner) = trained[name], part.partition(".")
        state = optimizer.state[parameter]
        if inner:
            from torchao.optim.subclass_8bit import OptimState8bit

            if part not in state:
                state[part] = OptimState8bit.zeros(parameter.shape, part == "exp_avg", device=parameter.device)
            getattr(state[part], inner).copy_(value)
        else:  # PyTorch counts the updates in a tensor on the CPU
            state[part] = value if part == "step" else placed_like(value, parameter)
