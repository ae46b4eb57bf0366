"""Which denoising step a forward of a transformer belongs to, and in which of them its patch rests.

A step is one of the ``num_inference_steps`` of a pipeline's call, and all forwards that the scheduler's solver makes in
it belong to it: those of second order, such as Heun's, make two. The forward is found by diffusers' ``cache_context``,
where a pipeline tells it as Wan's does, and of any other by its timestep among those of the scheduler.
"""

import logging
import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..families import Family
from .token_grid import attend_as_before

logger = logging.getLogger(__name__)

_CACHE_CONTEXT = "cache_context"
"""Method of diffusers' ``CacheMixin`` that a pipeline enters around every forward."""
_SAME = 1e-5
"""Relative difference up to which two timesteps are one, since some are scaled on their way to the transformer.

Of one that is told in a lower type it is the rounding of that type.
"""


@dataclass(frozen=True)
class Step:
    """One step of a denoising loop."""

    index: int
    """From 0."""
    count: int
    """Of all steps."""

    def is_among_first(self, steps: int | float) -> bool:
        """Whether it is one of the first ``steps``, a number or, as a float, a fraction of all, rounded up."""
        return self.index < (steps if isinstance(steps, int) else math.ceil(steps * self.count - 1e-9))


class _Loop:
    """What a thread's pipeline has told of the forward that comes."""

    step: Step | None = None
    rests: bool = False
    """Whether the patch rests in it: worked out outside of the transformer, since a compiled one would be compiled anew
    for every number of a step.
    """
    patch_runs_always: bool = False


class _Thread(threading.local):
    """One :class:`_Loop` per thread, an object of its own since torch.compile follows no context variables."""

    def __init__(self) -> None:
        self.loop = _Loop()


_THREAD = _Thread()


@contextmanager
def patch_in_every_step() -> Iterator[None]:
    """Within the context patches of this thread do not rest, for forwards that are no part of a denoising loop."""
    loop = _THREAD.loop
    before, loop.patch_runs_always = loop.patch_runs_always, True
    try:
        yield
    finally:
        loop.patch_runs_always = before


class StepHooks:
    """Forward pre-hook of a patched transformer: in the first denoising steps its attentions run as before the patch.

    Args:
        family: of the transformer.
        softmax_steps: how many, see :class:`mhla_diffusers.MHLAConfig`.
        pipe: pipeline that calls the transformer; None if only the transformer is known.
    """

    def __init__(self, family: Family, softmax_steps: int | float, pipe: Any) -> None:
        self.family = family
        self.softmax_steps = softmax_steps
        self.call_from(pipe)
        self._has_warned = False
        self._loop: tuple[Any, int] = (None, 0)
        """Timesteps of the scheduler, and the place of the first one that a pipeline's call has come to."""
        self._handle: RemovableHandle | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For a copy or a pickle of the transformer, which some other pipeline will call."""
        return {**vars(self), "_pipe": None, "_loop": (None, 0)}

    def call_from(self, pipe: Any) -> None:
        """Say which pipeline calls the transformer; it is not kept alive."""
        self._pipe = weakref.ref(pipe) if pipe is not None else None

    def install(self, transformer: nn.Module) -> None:
        """Put the hook on a transformer."""
        self._handle = transformer.register_forward_pre_hook(self, with_kwargs=True)
        if hasattr(type(transformer), _CACHE_CONTEXT):
            setattr(transformer, _CACHE_CONTEXT, _Listening(transformer, self))

    def remove(self, transformer: nn.Module) -> None:
        """Take it away."""
        if self._handle is not None:
            self._handle.remove()
        if isinstance(vars(transformer).get(_CACHE_CONTEXT), _Listening):
            delattr(transformer, _CACHE_CONTEXT)

    def __call__(self, transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before every forward; in training mode the patch never rests."""
        loop = _THREAD.loop
        if not self.softmax_steps or transformer.training or loop.patch_runs_always:
            return
        if isinstance(self.softmax_steps, float) and self.softmax_steps == 1:  # whichever step it is
            attend_as_before(True)
            return
        if loop.step is not None:
            attend_as_before(loop.rests)
            return
        step = self.step(transformer, args, kwargs)
        if step is not None:
            attend_as_before(step.is_among_first(self.softmax_steps))
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "softmax_steps=%s has no effect on a forward of %s that nothing tells its denoising step: MHLA runs. "
                "Give the pipeline that calls it to apply_mhla(), load_mhla() or change_mhla(), or enter "
                'transformer.cache_context("cond", step_index=…, num_inference_steps=…) around it.',
                self.softmax_steps,
                type(transformer).__name__,
            )

    def step(self, transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        """The step of a forward with these arguments; None if nothing tells.

        Where the pipeline does not say it to ``cache_context``, the timestep is read, for which a device is waited.
        """
        told = _THREAD.loop.step
        if told is not None:
            return told
        timestep = self.family.named_arguments(args, kwargs).get(self.family.timestep_name)
        pipe = self._pipe() if self._pipe is not None else None
        scheduler = getattr(pipe, "scheduler", None)
        timesteps = getattr(scheduler, "timesteps", None)
        if timestep is None or timesteps is None or not len(timesteps):
            return None
        given = torch.as_tensor(timestep)
        of_scheduler = self.family.scheduler_timestep(transformer, given.float().max())
        places = timesteps.to(of_scheduler.device).float()
        as_told, same = places, _SAME
        if given.is_floating_point():  # some pipelines round to the type of the latents before they scale
            as_told, same = places.to(given.dtype).float(), max(_SAME, torch.finfo(given.dtype).eps)
        differences = (as_told - of_scheduler).abs()
        nearest = differences <= same * max(1.0, float(of_scheduler))
        if not bool(nearest.any()):
            return None
        forward = int(differences.argmin())
        # some timesteps are the same, or a low type rounds them so: which of them it is a scheduler that counts knows
        counted = _counted(scheduler)
        if counted is not None and counted < len(places) and bool(nearest[counted]):
            forward = counted
        index = _step_of(scheduler, forward)
        # a call with a strength leaves the first timesteps out; every call makes the scheduler new ones
        if timesteps is not self._loop[0] or index < self._loop[1]:
            self._loop = (timesteps, index)
        return Step(index - self._loop[1], _count_steps(scheduler) - self._loop[1])

    def told_step(self, index: int, count: int) -> Step:
        """The step that a pipeline tells, which may have numbered the scheduler's timesteps and not the steps."""
        scheduler = getattr(self._pipe() if self._pipe is not None else None, "scheduler", None)
        timesteps = getattr(scheduler, "timesteps", None)
        if timesteps is None or len(timesteps) != count:
            return Step(index, count)
        return Step(_step_of(scheduler, index), _count_steps(scheduler))


def _counted(scheduler: Any) -> int | None:
    """Forwards that a scheduler has done or left out since its timesteps were made; None if it counts none."""
    if not hasattr(scheduler, "step_index"):
        return getattr(scheduler, "counter", None)  # of PNDM
    done = scheduler.step_index
    return int(done if done is not None else getattr(scheduler, "begin_index", None) or 0)


def _step_of(scheduler: Any, forward: int) -> int:
    """The step of ``num_inference_steps`` that a forward belongs to, by its place among the scheduler's timesteps."""
    runge_kutta = getattr(scheduler, "prk_timesteps", None)
    if runge_kutta is None:
        return forward // int(getattr(scheduler, "order", 1))
    # PNDM begins with steps of four forwards each, or with one of two
    if not len(runge_kutta):
        return max(0, forward - 1)
    return forward // 4 if forward < len(runge_kutta) else forward - len(runge_kutta) * 3 // 4


def _count_steps(scheduler: Any) -> int:
    timesteps = len(scheduler.timesteps)
    if getattr(scheduler, "num_inference_steps", None) == timesteps - 1 and not hasattr(scheduler, "prk_timesteps"):
        timesteps -= 1  # of SANA-Sprint's scheduler the last one is where the steps end
    return _step_of(scheduler, timesteps - 1) + 1


class _Listening:
    """A transformer's ``cache_context`` that notes the step that it is told."""

    def __init__(self, transformer: nn.Module, hooks: StepHooks) -> None:
        self._transformer = transformer
        self._hooks = hooks

    def __call__(self, name: str, **fields: Any) -> AbstractContextManager[None]:
        """Of diffusers; what it is told goes on to it."""
        return self._noted(name, fields)

    @contextmanager
    def _noted(self, name: str, fields: dict[str, Any]) -> Iterator[None]:
        index, count = fields.get("step_index"), fields.get("num_inference_steps")
        loop = _THREAD.loop
        before = loop.step, loop.rests
        loop.step = self._hooks.told_step(int(index), int(count)) if index is not None and count is not None else None
        loop.rests = loop.step is not None and loop.step.is_among_first(self._hooks.softmax_steps)
        transformer: Any = self._transformer
        try:
            with getattr(type(transformer), _CACHE_CONTEXT)(transformer, name, **fields):
                yield
        finally:
            loop.step, loop.rests = before
