"""DeepSpeed's ZeRO, stage 2: gradients and optimizer state in parts over the processes, whole weights on each.

accelerate starts the processes; DeepSpeed's engine is made here, since accelerate makes it together with one optimizer,
while a run has a new optimizer in every stage. The engine clips and steps; checkpoints are those of every other run.
"""

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ..patching import mhla_layers
from .config import StageConfig, TrainingConfig
from .folders import Tensors
from .updates import Updates

_SWITCH = "ACCELERATE_USE_DEEPSPEED"
_STATE = ("step", "exp_avg", "exp_avg_sq")
"""Of AdamW, for each parameter."""


def zero_is_asked_for(config: TrainingConfig) -> bool:
    """Whether ``accelerate launch`` was told to use DeepSpeed.

    Raises:
        ValueError: with settings that training does not support.
        ImportError: DeepSpeed is missing or too old.
    """
    from accelerate.utils import compare_versions, is_deepspeed_available

    if os.environ.get(_SWITCH, "false").lower() != "true":
        return False
    supported = {
        "zero_stage": ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"),
        "offload_optimizer_device": ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none"),
        "offload_param_device": ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none"),
        "deepspeed_config_file": ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none"),
        "gradient_accumulation_steps": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None),
        "gradient_clipping": ("ACCELERATE_GRADIENT_CLIPPING", None),
    }
    for setting, (variable, value) in supported.items():
        found = os.environ.get(variable, value)
        if found != value:
            raise ValueError(
                f"{setting}: {found} of accelerate's configuration is not supported in training; "
                f"{'leave it out' if value is None else f'only {value} is'}. Use "
                "finetune/accelerate/deepspeed.yaml, or fsdp2.yaml for weights in parts as well. Accumulation and "
                "clipping are settings of the training configuration."
            )
    if config.optimizer == "adamw8bit":
        raise ValueError("optimizer=adamw8bit does not work on state in parts; set optimizer: adamw with DeepSpeed.")
    # older ones know nothing of a setting below, and would train otherwise without a word
    if not is_deepspeed_available() or compare_versions("deepspeed", "<", "0.19.8"):
        raise ImportError(
            "accelerate was told to use DeepSpeed, which is missing or older than 0.19.8: pip install "
            "mhla_diffusers[deepspeed], or use finetune/accelerate/fsdp2.yaml."
        )
    return True


@contextmanager
def hidden_from_accelerate() -> Iterator[None]:
    """Within the context an ``Accelerator`` is made as without DeepSpeed; with it, its autocast does nothing."""
    switch = os.environ.pop(_SWITCH, None)
    try:
        yield
    finally:
        if switch is not None:
            os.environ[_SWITCH] = switch


class ZeroUpdates(Updates):
    """Updates by DeepSpeed's engine."""

    parts = True

    def _prepare(self, config: TrainingConfig, stage: StageConfig) -> None:
        import deepspeed

        names = {parameter: name for name, parameter in self._trained.items()}
        groups = [group["params"] for group in self._optimizer.param_groups if group["params"]]
        self._names = [[names[parameter] for parameter in group] for group in groups]
        settings = {
            "train_micro_batch_size_per_gpu": config.batch_size,
            "gradient_accumulation_steps": config.gradient_accumulation,
            # any number of backward passes before a step: attention transfer has one per layer
            "managed_gradient_accumulation": False,
            "gradient_clipping": config.max_gradient_norm,
            # a bucket of 200 MB; DeepSpeed's own would take 2 GB
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 50_000_000},
        }
        self._engine, *_ = deepspeed.initialize(model=self._transformer, optimizer=self._optimizer, config=settings)
        # they measure time, and would keep the engine in memory
        self._engine.module_forward_pre_hook.remove()
        self._engine.module_forward_post_hook.remove()

    def forward(self) -> AbstractContextManager[None]:
        """See :class:`Updates`."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """See :class:`Updates`."""
        self._engine.backward(loss)

    def step(self, loss_is_finite: bool) -> tuple[float, bool]:
        """See :class:`Updates`; the norm is infinite if there was no update."""
        from deepspeed.utils import safe_set_full_fp32_param

        if not loss_is_finite:  # DeepSpeed looks at gradients alone
            self._engine.backward(math.nan * next(iter(self._trained.values())).sum())
        self._engine.step()
        stepped = self._engine.was_step_applied()
        if stepped:
            for layer in mhla_layers(self.model).values():
                layer.clip_mixing_()
                safe_set_full_fp32_param(layer.mixing, layer.mixing.detach())
        return float(self._engine.get_global_grad_norm()), stepped

    def state(self) -> Tensors:
        """See :class:`Updates`."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state, safe_get_full_optimizer_state

        tensors: Tensors = {}
        for flat, names in self._flat_parts():
            # DeepSpeed does it after the first step of the first group, when the others have no state yet
            lazy_init_hp_params_optimizer_state([self._trained[name] for name in names], flat, self._optimizer.state)
            for part, value in self._optimizer.state[flat].items():
                for name in names:
                    whole = value if part == "step" else safe_get_full_optimizer_state(self._trained[name], part)
                    if self._accelerator.is_main_process:
                        tensors[f"{name}/{part}"] = whole.cpu().clone()
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Tensors) -> None:
        """See :class:`Updates`; a parameter without state, since it took no gradients, gets zeros."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state, safe_set_full_optimizer_state

        for flat, names in self._flat_parts():
            saved = {part: [name for name in names if f"{name}/{part}" in tensors] for part in _STATE}
            for part, having in saved.items():
                if having:
                    whole = tensors[f"{having[0]}/{part}"]
                    self._optimizer.state[flat][part] = whole if part == "step" else torch.zeros_like(flat)
            lazy_init_hp_params_optimizer_state([self._trained[name] for name in names], flat, self._optimizer.state)
            for part in ("exp_avg", "exp_avg_sq"):
                for name in saved[part]:
                    whole = tensors[f"{name}/{part}"].to(flat.device)
                    safe_set_full_optimizer_state(self._trained[name], whole, part)

    def close(self) -> None:
        """See :class:`Updates`."""
        self._engine.destroy()
        del self._engine
        self._accelerator.free_memory()

    def _flat_parts(self) -> Iterator[tuple[torch.Tensor, list[str]]]:
        """For every parameter group, what the optimizer steps on this process, and the names of the parameters."""
        for group, names in zip(self._optimizer.param_groups, self._names, strict=True):
            yield group["params"][0], names
