"""What else has been put into a transformer that a patch must know of: step caches, and weights that are elsewhere."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn


class StepCache(NamedTuple):
    """What skips blocks of a transformer in some denoising steps and reuses what they did in an earlier one."""

    name: str
    by_content: bool
    """Whether it decides by the tokens that it sees, and not by the number of the step."""
    way_out: str
    """The call that takes it away."""


_STEP_CACHES = {
    hook: StepCache(name, by_content, "transformer.disable_cache()")
    for hook, name, by_content in (
        ("fbc_leader_block_hook", "First Block Cache", True),
        ("sea_cache_leader_block", "SeaCache", True),
        ("mag_cache_leader_block_hook", "MagCache", False),
        ("taylorseer_cache", "TaylorSeer", False),
        ("pyramid_attention_broadcast", "Pyramid Attention Broadcast", False),
        ("faster_cache_block", "FasterCache", False),
    )
}
"""Name of a hook of diffusers → its cache."""
_CACHE_DIT = StepCache("cache-dit", True, "cache_dit.disable_cache(pipe)")


def _hooks(transformer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name of every hook of diffusers on a module of the transformer, with the hook."""
    for module in transformer.modules():
        registry: Any = getattr(module, "_diffusers_hook", None)
        if registry is not None:
            yield from registry.hooks.items()


def step_cache(transformer: nn.Module) -> StepCache | None:
    """The step cache that is enabled, by diffusers or cache-dit; None without one."""
    if getattr(transformer, "_is_cached", False):
        return _CACHE_DIT
    return next((_STEP_CACHES[name] for name, _ in _hooks(transformer) if name in _STEP_CACHES), None)


def refuse_step_cache(transformer: nn.Module, what: str) -> None:
    """Raise if a step cache is enabled, under which some forwards do not run every attention.

    Args:
        transformer: the model.
        what: that needs every attention of every forward, for the error.

    Raises:
        ValueError: naming the cache and how to take it away.
    """
    cache = step_cache(transformer)
    if cache is not None:
        raise ValueError(
            f"{cache.name} is enabled on this {type(transformer).__name__} and skips attentions in some steps, and "
            f"{what} needs all of them. Call {cache.way_out} before, and enable it again afterwards."
        )


def is_group_offloaded(transformer: nn.Module) -> bool:
    """Whether diffusers' group offloading is enabled."""
    return any(name == "group_offloading" for name, _ in _hooks(transformer))


def refuse_weights_on_disk(transformer: nn.Module, purpose: str) -> None:
    """Raise if group offloading keeps weights in files, so that those in memory are neither read nor kept.

    Args:
        transformer: the model.
        purpose: what was to be done with the weights, for the error.

    Raises:
        ValueError: naming the folder and the way out.
    """
    groups = (hook.group for name, hook in _hooks(transformer) if name == "group_offloading")
    folder = next((group.offload_to_disk_path for group in groups if group.offload_to_disk_path), None)
    if folder is not None:
        raise ValueError(
            f"The weights of this {type(transformer).__name__} are in files, offload_to_disk_path={folder!r}: "
            f"{purpose} before enable_group_offload(), or load the model again with from_pretrained()."
        )
