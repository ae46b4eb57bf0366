"""Denoising steps: which one a forward of a transformer belongs to, and the caches that skip some.

A step is one of the ``num_inference_steps`` of a pipeline's call, and all forwards that the scheduler's solver makes in
it belong to it: those of second order, such as Heun's, make two. The forward is found by diffusers' ``cache_context``,
where a pipeline calls it with a step as Wan's does, and otherwise by its timestep among those of the scheduler. Step
caches skip attentions in some of the steps.
"""

import weakref
from typing import Any

import torch
from torch import nn

from ..config import Step
from ..families import Family
from ..families.old_adapters import scheduler_timestep, time_of

_SAME = 1e-5
"""Relative difference up to which two timesteps are one, since some are scaled on their way to the transformer.

For a timestep in a lower type it is the rounding of that type.
"""

_NOT_ONE_GRAPH = (
    "softmax_steps, softmax_last and refresh choose by the timestep's value, which one graph of the whole transformer "
    "cannot read, and this pipeline does not state its step. Compile without fullgraph, or only the blocks, each with "
    "block.compile(fullgraph=True), or patch without them."
)


class DenoisingLoop:
    """The loop of the pipeline that calls a transformer, which is not kept alive.

    Args:
        family: of the transformer.
        pipe: the pipeline; None, or a transformer, where it is not known.
    """

    def __init__(self, family: Family, pipe: Any) -> None:
        self.family = family
        self._pipe = None if pipe is None or isinstance(pipe, nn.Module) else weakref.ref(pipe)
        self._timesteps: Any = None
        """The scheduler's, at the latest forward."""
        self._first = 0
        """Place of the first of them that a pipeline's call has come to."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the pipeline: some other one will call a copied or pickled transformer."""
        return {"family": self.family, "_pipe": None, "_timesteps": None, "_first": 0}

    @property
    def pipe(self) -> Any:
        """The pipeline; None if it is unknown or gone."""
        return None if self._pipe is None else self._pipe()

    @property
    def scheduler(self) -> Any:
        """Scheduler of the pipeline; None without a pipeline. Every call gives it new timesteps."""
        return getattr(self.pipe, "scheduler", None)

    def step_by_index(self, index: int, count: int) -> Step:
        """Return the step that a pipeline states, which may count the scheduler's timesteps and not the steps."""
        scheduler = self.scheduler
        timesteps = getattr(scheduler, "timesteps", None)
        if timesteps is None or len(timesteps) != count:
            return Step(index, count)
        return Step(_step_of(scheduler, index), _count_steps(scheduler))

    def step_by_timestep(self, transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        """Return the step of a forward by its timestep, which waits for the device; None if it is unknown."""
        timestep = time_of(self.family.name, self.family.named_arguments(transformer, args, kwargs))
        scheduler = self.scheduler
        timesteps = getattr(scheduler, "timesteps", None)
        if timestep is None or timesteps is None or not len(timesteps):
            return None
        given = torch.as_tensor(timestep)
        of_scheduler = scheduler_timestep(self.family.name, transformer, given.float().max())
        places = timesteps.to(of_scheduler.device).float()
        rounded, same = places, _SAME
        if given.is_floating_point():  # some pipelines round to the type of the latents before they scale
            rounded, same = places.to(given.dtype).float(), max(_SAME, torch.finfo(given.dtype).eps)
        torch._dynamo.graph_break(msg=_NOT_ONE_GRAPH)
        differences = (rounded - of_scheduler).abs()
        nearest = differences <= same * max(1.0, float(of_scheduler))
        if not bool(nearest.any()):
            return None
        forward = int(differences.argmin())
        # some timesteps are the same, or a low type rounds them so: which of them it is a scheduler knows that counts
        # the forwards that it has done or left out since its timesteps were made
        counted = getattr(scheduler, "counter", None)  # of PNDM
        if hasattr(scheduler, "step_index"):
            done = scheduler.step_index
            counted = int(done if done is not None else getattr(scheduler, "begin_index", None) or 0)
        if counted is not None and counted < len(places) and bool(nearest[counted]):
            forward = counted
        index = _step_of(scheduler, forward)
        # a call with a strength leaves the first timesteps out; every call makes the scheduler new ones
        if timesteps is not self._timesteps or index < self._first:
            self._timesteps, self._first = timesteps, index
        return Step(index - self._first, _count_steps(scheduler) - self._first)


def step_by_counting(scheduler: Any) -> Step | None:
    """Return the step of the next forward by the scheduler's own count; None of one that does not count."""
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None or not len(timesteps) or not hasattr(scheduler, "step_index"):
        return None
    done, first = scheduler.step_index, getattr(scheduler, "begin_index", None) or 0
    index = _step_of(scheduler, int(done if done is not None else first)) - _step_of(scheduler, int(first))
    count = _count_steps(scheduler) - _step_of(scheduler, int(first))
    return Step(index, count) if index < count else None


def _step_of(scheduler: Any, forward: int) -> int:
    """Return the step of ``num_inference_steps`` of a forward, by its place among the scheduler's timesteps."""
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


_STEP_CACHES = {
    "fbc_leader_block_hook": "First Block Cache",
    "sea_cache_leader_block": "SeaCache",
    "mag_cache_leader_block_hook": "MagCache",
    "taylorseer_cache": "TaylorSeer",
    "pyramid_attention_broadcast": "Pyramid Attention Broadcast",
    "faster_cache_block": "FasterCache",
}
"""Name of a hook of diffusers → its cache, which reuses in some denoising steps what blocks did in an earlier one."""
CACHES_BY_CONTENT = ("First Block Cache", "SeaCache", "cache-dit")
"""Those that decide by the tokens that they see, and not by the number of the step."""


def step_cache(transformer: nn.Module) -> tuple[str, str] | None:
    """Return the name of the step cache that is enabled and the call that takes it away; None without one."""
    if getattr(transformer, "_is_cached", False):
        return "cache-dit", "cache_dit.disable_cache(pipe)"
    for module in transformer.modules():
        registry: Any = getattr(module, "_diffusers_hook", None)
        for hook in () if registry is None else registry.hooks:
            if hook in _STEP_CACHES:
                return _STEP_CACHES[hook], "transformer.disable_cache()"
    return None


def forget_skipping(transformer: nn.Module) -> None:
    """Let a step cache that decides by content run every block of the next forwards, as in the first step of a call."""
    cache = step_cache(transformer)
    reset: Any = getattr(transformer, "_reset_stateful_cache", None)
    if reset is not None and cache is not None and cache[0] in CACHES_BY_CONTENT:
        reset()


def refuse_step_cache(transformer: nn.Module, what: str) -> None:
    """Raise if a step cache is enabled, under which some forwards do not run every attention.

    Args:
        transformer: the model.
        what: that needs every attention of every forward, for the error.

    Raises:
        ValueError: naming the cache and how to take it away.
    """
    if (cache := step_cache(transformer)) is not None:
        raise ValueError(
            f"{cache[0]} is enabled on this {type(transformer).__name__} and skips attentions in some steps, and "
            f"{what} needs all of them. Call {cache[1]} before, and enable it again afterwards."
        )
