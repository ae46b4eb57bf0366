"""Sampling in a few steps: how a distilled patch samples, and the scheduler that its pipeline needs."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.configuration_utils import register_to_config

# diffusers looks for it in the module of a component's class, to know how to load it with a pipeline
from diffusers.schedulers.scheduling_utils import SchedulerMixin  # noqa: F401
from torch import nn

from .few_steps import FewSteps

logger = logging.getLogger(__name__)


class FewStepScheduler(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """Flow matching at given times, with fresh noise after every step but the last.

    A pipeline sets the number of steps, which must be that of the times, and some pass σ of their own, which are not
    used: those of the configuration are what the model was distilled to. Pipelines do not hand their generator on, so
    the noise is drawn, on the CPU, from a seed that the starting noise of each sample makes: the same generator gives
    the same sample, independent of its batch.

    Args:
        times: σ at which the model runs, from 1.0 downwards.
        guidance: scale of guidance that was distilled in; recorded alone.
        num_train_timesteps: timestep of σ = 1.
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self, times: Sequence[float] = (1.0, 0.9, 0.75, 0.5), guidance: float = 1.0, num_train_timesteps: int = 1000
    ) -> None:
        self.few_steps = FewSteps(times, guidance)  # type: ignore[arg-type]
        super().__init__(num_train_timesteps=num_train_timesteps, shift=1.0, stochastic_sampling=True)
        self._noise: list[torch.Generator] = []

    @classmethod
    def extract_init_dict(cls, config_dict: Mapping[str, Any], **options: Any) -> Any:
        """Do as diffusers, without a warning of settings of the class above, which a saved configuration holds too."""
        unused = cls._get_init_keys(FlowMatchEulerDiscreteScheduler) - cls._get_init_keys(cls)
        kept = {name: value for name, value in config_dict.items() if name not in unused}
        return super().extract_init_dict(kept, **options)

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: Sequence[float] | None = None,
        mu: float | None = None,
        timesteps: Sequence[float] | None = None,
    ) -> None:
        """Begin a sample.

        Args:
            num_inference_steps: must be the number of times; None for it.
            device: of the timesteps.
            sigmas: as many; their values are not used, see the class.
            mu: not used; times are not shifted.
            timesteps: not allowed.

        Raises:
            ValueError: another number of steps, or timesteps.
        """
        times = list(self.few_steps.times)
        asked = num_inference_steps if num_inference_steps is not None else None if sigmas is None else len(sigmas)
        if asked not in (None, len(times)) or timesteps is not None:
            what = f"timesteps={timesteps}" if timesteps is not None else f"num_inference_steps={asked}"
            raise ValueError(
                f"{what}: this model was distilled to {len(times)} steps at σ = {times}; allowed: "
                f"num_inference_steps={len(times)}. Where a patch brought this scheduler along, remove_mhla() brings "
                "back the one of before."
            )
        super().set_timesteps(sigmas=times, device=device)
        self._noise = []

    def step(self, model_output: torch.Tensor, timestep: Any, sample: torch.Tensor, **options: Any) -> Any:
        """Do as diffusers; without ``generator`` the noise follows from the starting noise, see the class."""
        if options.get("generator") is None:
            if not self._noise:
                for start in sample:
                    content = start.detach().flatten()[:256].float().cpu().numpy().tobytes()
                    seed = int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1
                    self._noise.append(torch.Generator().manual_seed(seed))
            options["generator"] = self._noise
        return super().step(model_output, timestep, sample, **options)


def few_steps_of(pipe: Any) -> FewSteps | None:
    """Return how a pipeline samples, if its model was distilled to a few steps."""
    scheduler = getattr(pipe, "scheduler", None)
    return scheduler.few_steps if isinstance(scheduler, FewStepScheduler) else None


def sample_in(pipe: Any, few_steps: FewSteps) -> Any:
    """Give a pipeline the scheduler of its distilled model; return its own, or None if it has that one already.

    A transformer has none: a message says what its pipeline needs.
    """
    if isinstance(pipe, nn.Module):
        logger.warning(
            "This model %s: set pipe.scheduler = FewStepScheduler(%s, %g), or load into the pipeline, which does.",
            few_steps,
            list(few_steps.times),
            few_steps.guidance,
        )
        return None
    if few_steps_of(pipe) == few_steps:
        return None
    before, pipe.scheduler = pipe.scheduler, FewStepScheduler(list(few_steps.times), few_steps.guidance)
    return before


def restore_scheduler(pipe: Any, few_steps: FewSteps, before: Any) -> None:
    """Undo :func:`sample_in`, unless the pipeline was given another scheduler since."""
    if before is not None and few_steps_of(pipe) == few_steps:
        pipe.scheduler = before
