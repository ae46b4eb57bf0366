"""Feature maps: the φ of linear attention (paper, Eq. 2), applied to query and key.

A feature map takes float32 channels (..., D) and ``eps`` and returns (..., D); it may overwrite its input. It should
be positive wherever the attention is normalised, since the normaliser is a sum of its values.
"""

from collections.abc import Callable

import torch

from ..errors import check_choice

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

    A query and keys whose large channels differ would else have nothing to divide by.
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
    """Make ``feature_map`` available under ``name`` to every configuration, in place of an earlier one of that name.

    Raises:
        ValueError: the name is that of a built-in feature map.
    """
    if name in _BUILT_IN:
        raise ValueError(f"Feature map {name!r} is built in; choose another name.")
    _FEATURE_MAPS[name] = feature_map


def feature_map_names() -> list[str]:
    """Names of the registered feature maps."""
    return list(_FEATURE_MAPS)


def get_feature_map(name: str) -> FeatureMap:
    """The feature map registered under ``name``.

    Raises:
        ValueError: if there is none; the message gives the nearest names.
    """
    check_choice("feature_map", name, feature_map_names())
    return _FEATURE_MAPS[name]
