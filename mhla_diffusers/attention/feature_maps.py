"""Feature maps: the φ of linear attention (paper, Eq. 2), applied to query and key.

A feature map takes float32 channels (..., D) and ``eps`` and returns (..., D); it may overwrite its input. It should
be positive wherever the attention is normalised, since the normaliser is a sum of its values.
"""

from collections.abc import Callable
from difflib import get_close_matches
from types import FunctionType

import torch

_LEAST_FEATURE = 1e-18
"""Whose square float32 still holds."""
FeatureMap = Callable[[torch.Tensor, float], torch.Tensor]


def relu(x: torch.Tensor, eps: float) -> torch.Tensor:
    """max(x, 0) + eps; ``eps`` keeps the normaliser of an all-negative query above zero."""
    return x.clamp_min_(0).add_(eps)


def elu_plus_one(x: torch.Tensor, eps: float) -> torch.Tensor:
    """elu(x) + 1 + eps (Katharopoulos et al. 2020)."""
    return torch.nn.functional.elu(x) + (1 + eps)


def softmax(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Softmax over the D channels (Shen et al. 2021), at least 1e-18 in place of ``eps``.

    A feature of float32 is 0 where a channel lies 104 below the largest. A query and keys whose large channels differ
    would have nothing in common then, and nothing to divide by.
    """
    return x.softmax(dim=-1).clamp_min(_LEAST_FEATURE)


def identity(x: torch.Tensor, eps: float) -> torch.Tensor:
    """X itself; signed, so use it with ``normalize=False``."""
    return x


_FEATURE_MAPS: dict[str, FeatureMap] = {
    "relu": relu,
    "elu+1": elu_plus_one,
    "softmax": softmax,
    "identity": identity,
}

_BUILT_IN = tuple(_FEATURE_MAPS)


def register_feature_map(name: str, feature_map: FeatureMap) -> None:
    """Make ``feature_map`` available under ``name`` to every configuration.

    A function that was defined again, as by a notebook cell that is run again, takes the place of its former self.

    Raises:
        ValueError: another function has the name.
    """
    if name in _FEATURE_MAPS and (name in _BUILT_IN or not _is_defined_again(_FEATURE_MAPS[name], feature_map)):
        raise ValueError(f"Feature map {name!r} is already registered; choose another name.")
    _FEATURE_MAPS[name] = feature_map


def _is_defined_again(known: FeatureMap, feature_map: FeatureMap) -> bool:
    if not (isinstance(known, FunctionType) and isinstance(feature_map, FunctionType)):
        return known is feature_map
    if known.__closure__ or feature_map.__closure__ or known.__defaults__ != feature_map.__defaults__:
        return known is feature_map  # what they compute does not stand in their code alone
    if feature_map.__name__ == "<lambda>":  # a name that all of them have
        return known.__code__ == feature_map.__code__
    return (known.__module__, known.__qualname__) == (feature_map.__module__, feature_map.__qualname__)


def feature_map_names() -> list[str]:
    """Names of the registered feature maps."""
    return list(_FEATURE_MAPS)


def get_feature_map(name: str) -> FeatureMap:
    """The feature map registered under ``name``.

    Raises:
        ValueError: if there is none; the message gives the nearest names.
    """
    if name not in _FEATURE_MAPS:
        names = get_close_matches(str(name), _FEATURE_MAPS, n=2, cutoff=0.4) or feature_map_names()
        raise ValueError(
            f"feature_map={name!r} is unknown; did you mean {' or '.join(map(repr, names))}? "
            f"Registered: {', '.join(feature_map_names())}; add one with register_feature_map()."
        )
    return _FEATURE_MAPS[name]
