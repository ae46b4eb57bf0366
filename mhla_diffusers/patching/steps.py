"""Find the denoising step of a forward, from the scheduler of the running pipeline, on the host.

A step is one of the ``num_inference_steps`` of a pipeline's call; all forwards that a solver of second order makes in
it belong to it. The running pipeline is found on the stack: the method that runs belongs to an object with this
transformer and a scheduler, whichever pipeline that is. What a call measures lives in the frame of that method, so it
ends when the call does, also one that fails or is cancelled.
"""

import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..config import Step
from .call import Run

_RUN = "_mhla_run"
"""Name of the local variable of a running pipeline's method that holds its :class:`Run`."""


class Pipeline:
    """The pipeline or object with ``transformer`` and ``scheduler`` that a patch was applied to, held weakly."""

    def __init__(self, owner: Any) -> None:
        owner = None if isinstance(owner, nn.Module) or not hasattr(owner, "scheduler") else owner
        self.owner: Callable[[], Any] = lambda: owner
        """Returns the object; None if it is unknown or gone."""
        with suppress(TypeError):  # None, or a SimpleNamespace
            self.owner = weakref.ref(owner)
        self._runs: weakref.WeakKeyDictionary[Any, Run] = weakref.WeakKeyDictionary()
        """Scheduler → run, for loops outside of a pipeline's methods."""

    def __reduce__(self) -> Any:
        """Leave the pipeline out: some other one will call a copied or pickled transformer."""
        return Pipeline, (None,)

    def sampling(self, transformer: nn.Module, timestep: Any) -> tuple[Run, Step, Any] | None:
        """Return the call of a pipeline that a forward belongs to, its step and timesteps; None if no step is known."""
        frame, owner = _running_method(transformer)
        scheduler = getattr(self.owner() if owner is None else owner, "scheduler", None)
        step = step_of(scheduler, timestep)
        if step is None and frame is not None:  # the model got a copy of the loop's variable, as in Hunyuan-DiT
            step = step_of(scheduler, frame.f_locals.get("t"), frame.f_locals.get("timesteps"))
        if step is None or scheduler is None:
            return None
        runs: Any = self._runs if frame is None else frame.f_locals
        key = scheduler if frame is None else _RUN
        run: Run | None = runs.get(key)
        if run is None:
            run = runs[key] = Run()
        return run, step, scheduler.timesteps


def _running_method(transformer: nn.Module) -> tuple[FrameType | None, Any]:
    """Find the running pipeline: the outermost method on the stack whose object has a transformer and a scheduler."""
    frame: FrameType | None = sys._getframe(1)
    found, owner = None, None
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            this = frame.f_locals.get("self")
            if owner is None and not isinstance(this, nn.Module) and getattr(this, "scheduler", None) is not None:
                for name, value in getattr(this, "__dict__", {}).items():
                    if name.startswith(("transformer", "unet")) and getattr(value, "_orig_mod", value) is transformer:
                        owner = this
            if owner is not None and this is owner:
                found = frame
        frame = frame.f_back
    return found, owner


def step_of(scheduler: Any, timestep: Any, timesteps: Any = None) -> Step | None:
    """Return the step of the next forward by the scheduler's own count; None if it has none.

    Args:
        scheduler: whose timesteps are set; or None.
        timestep: argument of the forward. Where the scheduler does not count, as DDIM's, and this is a view of one of
            the timesteps, its place in memory gives the step, without reading the device.
        timesteps: that the loop runs over, if not the scheduler's own tensor.
    """
    timesteps = getattr(scheduler, "timesteps", None) if timesteps is None else timesteps
    if not isinstance(timesteps, torch.Tensor) or not len(timesteps):
        return None
    first = int(getattr(scheduler, "begin_index", None) or 0)
    if hasattr(scheduler, "step_index"):
        done = scheduler.step_index if scheduler.step_index is not None else first
    elif isinstance(timestep, torch.Tensor) and timestep.device == timesteps.device and (
        timestep.untyped_storage().data_ptr() == timesteps.untyped_storage().data_ptr()
    ):  # fmt: skip
        done = timestep.storage_offset() - timesteps.storage_offset()
    else:
        return None
    last = len(scheduler.timesteps) - 1
    if getattr(scheduler, "num_inference_steps", None) == last:
        last -= 1  # of SANA-Sprint's scheduler the last one is where the steps end
    order = int(getattr(scheduler, "order", 1))
    start = first // order
    step = Step(int(done) // order - start, last // order + 1 - start)
    return step if 0 <= step.index < step.count else None
