"""Classifiers with random weights by name, and kinds of attention."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...config import MHLAConfig, check_names
from ...patching import apply_mhla

Variant = Mapping[str, Any] | str
"""Settings of a patch, of a VLT those of its configuration instead, or "softmax"."""
SOFTMAX = "softmax"
FRESH = ("vit", "pooled-vit", "deit-t", "deit-s", "vlt", "vlt-t", "vlt-s")
"""Models with random weights; any other name is a model of the Hub, or a folder."""


def fresh_model(name: str, settings: Mapping[str, Any], variant: Variant, classes: int, size: int) -> Any:
    """A classifier with random weights, from torch's seed.

    Args:
        name: one of ``FRESH``.
        settings: of its configuration class, beside those of its name.
        variant: kind of attention.
        classes: that it tells apart.
        size: height and width of pictures in pixels.

    Raises:
        ValueError: settings that the configuration or MHLA does not have, or values that are not allowed.
    """
    if name.startswith("vlt"):
        return _vlt(name, settings, variant, classes)
    return as_variant(_vit(name, settings, classes, size), variant)


def as_variant(model: Any, variant: Variant) -> Any:
    """A model with softmax attention, changed to attend in another way."""
    return model if isinstance(variant, str) else apply_mhla(model, MHLAConfig.from_dict(variant))


def _vit(name: str, settings: Mapping[str, Any], classes: int, size: int) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    from ...models import PooledViTConfig, PooledViTForImageClassification

    _check_settings(settings, ViTConfig, "settings.")
    makers: dict[str, tuple[Any, Any]] = {
        "vit": (ViTForImageClassification, ViTConfig),
        "pooled-vit": (PooledViTForImageClassification, PooledViTConfig),
        "deit-t": (PooledViTForImageClassification, PooledViTConfig.deit_t),
        "deit-s": (PooledViTForImageClassification, PooledViTConfig.deit_s),
    }
    kind, make = makers[name]
    return kind(make(**{**settings, "num_labels": classes, "image_size": size}))


def _vlt(name: str, settings: Mapping[str, Any], variant: Variant, classes: int) -> Any:
    """A VLT, whose kinds of attention are settings of its own."""
    from ...models import VLTConfig, VLTForImageClassification

    own = {} if isinstance(variant, str) else variant
    for named, path in ((settings, "settings."), (own, "variants.")):
        _check_settings(named, VLTConfig, path)
    make = {"vlt": VLTConfig, "vlt-t": VLTConfig.vlt_t, "vlt-s": VLTConfig.vlt_s}[name]
    given = {**settings, **own, "num_labels": classes}
    if variant == SOFTMAX:
        given["mhla"] = [None] * len(make(**given).depths)
    return VLTForImageClassification(make(**given))


def _check_settings(settings: Mapping[str, Any], kind: Any, path: str) -> None:
    """Raise unless a configuration class of transformers, which takes any name, has these settings of its own."""
    from transformers import PreTrainedConfig

    known = {entry.name for entry in fields(kind)} - {entry.name for entry in fields(PreTrainedConfig)}
    check_names(settings, sorted(known - {"image_size"}), "setting", path)
