"""The model families that can be patched, and how to look them up."""

from itertools import chain
from typing import Any

import torch
from torch import nn

from ..moved import where_it_went
from . import grids
from .calling import Calling
from .family import Counts, Family, part_of
from .grids import named_arguments
from .inputs import Condition, Inputs, Kwargs, Sample
from .mhla import AttentionAdapter, AttentionInputs, imported
from .models import Clip, Model
from .processes import DiffusionProcess, FlowMatching, LearnedVarianceDDPM, NoisedBatch
from .refused import why_refused
from .table import FAMILIES
from .training import Training

_FAMILIES: dict[str, Family] = {family.name: family for family in FAMILIES}


def register_family(family: Family) -> None:
    """Make a family known to ``apply_mhla``, in the place of an earlier version for the same transformers."""
    for name, value in (("transformers", family.transformers), ("block_lists", family.block_lists)):
        if not isinstance(value, tuple | list) or not all(isinstance(one, str) for one in value):
            raise ValueError(f"{name}={value!r} of {family.name!r} must be a tuple of names, such as ({value!r},).")
    before = _FAMILIES.get(family.name)
    if before is not None and before.transformers != family.transformers:
        raise ValueError(
            f"Family {family.name!r} is already registered for {', '.join(before.transformers)}; choose another name "
            f"for {', '.join(family.transformers)}."
        )
    _FAMILIES[family.name] = family


def families() -> list[Family]:
    """Return all registered families."""
    return list(_FAMILIES.values())


def find_family(transformer: Any) -> Family | None:
    """Return the family of a transformer, its class, class name or family name, or None.

    A class of a family's name from another library, such as a copy on the Hub, belongs to it if it has the attentions.
    """
    if isinstance(transformer, str):
        named = (family for family in families() if transformer in family.transformers)
        return _FAMILIES.get(transformer) or next(named, None)
    classes = _class_of(transformer).__mro__
    found = [(one, cls) for cls in classes for one in families() if cls.__name__ in one.transformers]
    own = (one for one, cls in found if cls.__module__.split(".")[0] == one.library.split(".")[0])
    alike = (one for one, _ in found if isinstance(transformer, type) or one.self_attentions(transformer))
    return next(chain(own, alike), None)


def get_family(transformer: Any) -> Family:
    """Return the family of a transformer, as :func:`find_family`; ValueError if there is none."""
    family = find_family(transformer)
    if family is None:
        kind = transformer if isinstance(transformer, str) else _class_of(transformer)
        name = kind if isinstance(kind, str) else kind.__name__
        raise ValueError(f"{name!r} has no family; {where_it_went(name) or supported_instead(kind)}")
    return family


def trained_family(transformer: Any) -> Family:
    """Return the family of a transformer for encoding, training or calling; ValueError if it supports none of these."""
    family = get_family(transformer)
    _ = family.training  # raises for one that is not trained
    return family


def _class_of(model: Any) -> type:
    return model if isinstance(model, type) else type(model)


def supported_instead(kind: str | type) -> str:
    """Explain that a class, or the name of one, is not supported, and how it can be patched without a family."""
    if (reason := why_refused(kind)) is not None:
        return f"{reason}."
    return (
        "patch it by its grid, apply_mhla(model, grid=...), or add a family with register_family(); docs/models.md "
        "shows both and lists the families."
    )


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile``, data parallelism or PEFT's wrapper."""
    from accelerate.utils import extract_model_from_parallel

    inside: Any = extract_model_from_parallel(module, keep_torch_compile=False)
    return inside.get_base_model() if hasattr(inside, "get_base_model") else inside


def arguments_of(transformer: nn.Module, batch: NoisedBatch) -> dict[str, Any]:
    """Return the arguments of a transformer's forward for a batch."""
    inputs = trained_family(transformer).training.inputs
    return inputs.arguments(transformer, batch.hidden_states, batch.timestep, batch.conditioning)


def predict(model: nn.Module, batch: NoisedBatch) -> torch.Tensor:
    """Return the prediction of a transformer, possibly wrapped for training, for a batch: (B, output channels, ...)."""
    transformer = unwrapped(model)
    output = model(**arguments_of(transformer, batch), return_dict=False)[0]
    return get_family(transformer).training.prediction(transformer, output, batch.hidden_states)


def family_of_attention(attn: Any) -> Family | None:
    """Return the family of a self-attention module, or None if no family recognises it."""
    return next((one for one in families() if one.mhla is not None and one.mhla.recognises(attn)), None)


__all__ = [
    "AttentionAdapter",
    "AttentionInputs",
    "Calling",
    "Clip",
    "Condition",
    "Counts",
    "DiffusionProcess",
    "Family",
    "FlowMatching",
    "Inputs",
    "Kwargs",
    "LearnedVarianceDDPM",
    "Model",
    "NoisedBatch",
    "Sample",
    "Training",
    "arguments_of",
    "families",
    "family_of_attention",
    "find_family",
    "get_family",
    "grids",
    "imported",
    "named_arguments",
    "part_of",
    "predict",
    "register_family",
    "supported_instead",
    "trained_family",
    "unwrapped",
    "why_refused",
]
