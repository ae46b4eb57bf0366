"""Step caches of diffusers: hooks that take a denoising step from the steps before it instead of computing it."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
from torch import nn

from ..families import get_family
from ..patching import find_transformers

CACHES: dict[str, float] = {"firstblock": 0.05, "taylorseer": 5, "magcache": 0.06}
"""Name → its one setting, with diffusers' default: the change of the first block's output below which the other blocks
are skipped; the steps from one computed step to the next; the error that skipped steps may add up to.
"""


def parse_cache(text: str) -> tuple[str, float]:
    """A cache and its setting: ``firstblock``, or ``firstblock=0.1``.

    Raises:
        ValueError: an unknown cache, or a setting that it does not take.
    """
    name, _, given = text.partition("=")
    if name not in CACHES:
        raise ValueError(
            f"cache={text!r} is unknown; allowed: {', '.join(CACHES)}, each also with its threshold or, for "
            "taylorseer, interval, such as firstblock=0.1."
        )
    try:
        setting = float(given) if given else CACHES[name]
    except ValueError:
        raise ValueError(f"cache={text!r}: {given!r} is no number; write {name}={CACHES[name]}.") from None
    if setting <= 0 or (name == "taylorseer" and setting != int(setting)):
        kind = "a whole number of steps" if name == "taylorseer" else "a threshold"
        raise ValueError(f"cache={text!r}: {given} must be {kind} above 0, such as {name}={CACHES[name]}.")
    return name, setting


@contextmanager
def cached(pipe: Any, configs: Mapping[str, Any]) -> Iterator[None]:
    """Within the context the pipeline's transformers have a step cache.

    Args:
        pipe: the pipeline.
        configs: component name → diffusers' configuration, from :func:`cache_configs`.
    """
    transformers: dict[str, Any] = find_transformers(pipe)
    try:
        for name, config in configs.items():
            transformers[name].enable_cache(config)
        yield
    finally:
        for transformer in transformers.values():
            if transformer.is_cache_enabled:
                transformer.disable_cache()


def cache_configs(pipe: Any, text: str, dtype: torch.dtype, run: Callable[[], object]) -> dict[str, Any]:
    """Component name → the configuration of its step cache.

    Args:
        pipe: the pipeline, with the attention and the weights that it will be called with.
        text: see :func:`parse_cache`.
        dtype: in which TaylorSeer keeps what it extrapolates.
        run: calls the pipeline; MagCache is calibrated on one call.

    Raises:
        ValueError: a transformer that diffusers cannot cache like this.
    """
    from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig

    name, setting = parse_cache(text)
    transformers: dict[str, Any] = find_transformers(pipe)
    for transformer in transformers.values():
        if not hasattr(transformer, "enable_cache"):
            raise ValueError(f"cache={text!r}: diffusers has no step caches for {type(transformer).__name__}.")
    if name == "firstblock":
        return dict.fromkeys(transformers, FirstBlockCacheConfig(threshold=setting))
    if name == "magcache":
        ratios = _magnitude_ratios(pipe, run)
        return {
            part: MagCacheConfig(threshold=setting, num_inference_steps=len(found), mag_ratios=found)
            for part, found in ratios.items()
        }
    for transformer in transformers.values():
        if not hasattr(transformer, "proj_out"):
            raise ValueError(
                f"cache={text!r} extrapolates the output of proj_out, which {type(transformer).__name__} has not."
            )
    # The output alone is extrapolated and all blocks are skipped. diffusers' other form keeps the output of every
    # attention, too much for a video, and looks for attentions by names that Wan's do not have: it would do nothing.
    config = TaylorSeerCacheConfig(cache_interval=int(setting), taylor_factors_dtype=dtype, use_lite_mode=True)
    return dict.fromkeys(transformers, config)


@contextmanager
def counted(pipe: Any) -> Iterator[list[bool]]:
    """Within the context a list gets an entry per forward of a transformer: whether its last block was computed."""
    forwards: list[bool] = []
    handles = []
    for transformer in find_transformers(pipe).values():
        *_, last = get_family(transformer).blocks_of(transformer).values()
        # a skipped block is called, and answers without its layers
        layers = [module for module in last.modules() if isinstance(module, nn.Linear)]
        handles.append(transformer.register_forward_pre_hook(lambda *_: forwards.append(False)))
        handles += [layer.register_forward_pre_hook(lambda *_: forwards.__setitem__(-1, True)) for layer in layers]
    try:
        yield forwards
    finally:
        for handle in handles:
            handle.remove()


def _magnitude_ratios(pipe: Any, run: Callable[[], object]) -> dict[str, list[float]]:
    """What MagCache needs of a model: how much longer the residual of all blocks is than in the step before.

    A value per step, the mean over the forwards with and without the prompt.

    Returns:
        Component name → ratios of the steps that it ran in.

    Raises:
        ValueError: a transformer whose blocks diffusers does not know.
    """
    from diffusers import MagCacheConfig
    from diffusers.hooks.mag_cache import _MAG_CACHE_LEADER_BLOCK_HOOK

    found: dict[str, dict[str, list[float]]] = {}
    # diffusers prints the ratios after as many steps as it is told of: never
    config = MagCacheConfig(calibrate=True, num_inference_steps=sys.maxsize)
    transformers: dict[str, Any] = find_transformers(pipe)
    with cached(pipe, dict.fromkeys(transformers, config)):
        handles = []
        for name, transformer in transformers.items():
            registries = [
                module._diffusers_hook for module in transformer.modules() if hasattr(module, "_diffusers_hook")
            ]
            hooks = [hook for one in registries if (hook := one.get_hook(_MAG_CACHE_LEADER_BLOCK_HOOK)) is not None]
            if not hooks:
                raise ValueError(f"cache='magcache': diffusers knows no blocks of {type(transformer).__name__}.")
            states = hooks[0].state_manager._state_cache

            # the pipeline forgets the states at the end of its call
            def note(*_: Any, name: str = name, states: dict[str, Any] = states) -> None:
                found[name] = {context: state.calibration_ratios for context, state in states.items()}

            handles.append(transformer.register_forward_hook(note))
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
    return {name: [fmean(step) for step in zip(*of.values(), strict=True)] for name, of in found.items()}
