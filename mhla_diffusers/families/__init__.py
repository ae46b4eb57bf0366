"""The model families that can be patched, one file each, and the table of them."""

import copyreg
import re
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from ..attention.rope import Rotary
from ..moved import where_it_went
from .adapters import AttentionAdapter, AttentionInputs, JointAdapter
from .allegro import ALLEGRO
from .anyflow import ANYFLOW
from .attentions import Attention, imported, usual_processor
from .auraflow import AURAFLOW
from .chroma import CHROMA
from .chronoedit import CHRONOEDIT
from .cogvideox import COGVIDEOX
from .cogview4 import COGVIEW4
from .dit import DIT
from .easyanimate import EASYANIMATE
from .family import Family
from .flux import FLUX
from .flux2 import FLUX2
from .flux3 import FLUX3
from .forward import Condition, Forward, Sample
from .framepack import FRAMEPACK
from .helios import HELIOS
from .hunyuan_dit import HUNYUAN_DIT
from .hunyuan_image import HUNYUAN_IMAGE
from .hunyuan_video import HUNYUAN_VIDEO
from .hunyuan_video15 import HUNYUAN_VIDEO15
from .ideogram4 import IDEOGRAM4
from .kandinsky5 import KANDINSKY5
from .kandinsky6 import KANDINSKY6
from .krea2 import KREA2
from .latte import LATTE
from .longcat import LONGCAT_IMAGE
from .ltx import LTX
from .ltx2 import LTX2
from .lumina2 import LUMINA2
from .minimax_h3 import MINIMAX_H3
from .mochi import MOCHI
from .models import Clip, Model
from .pixart import PIXART
from .processes import DiffusionProcess, FlowMatching, LearnedVarianceDDPM, NoisedBatch
from .qwenimage import QWENIMAGE
from .refused import by_grid, why_refused
from .sana import SANA
from .sana_video import SANA_VIDEO
from .sd3 import SD3
from .skyreels_v2 import SKYREELS_V2
from .training import Training
from .wan import WAN
from .wan_animate import WAN_ANIMATE
from .z_image import Z_IMAGE

_SHIPPED = (
    ALLEGRO, ANYFLOW, AURAFLOW, CHROMA, CHRONOEDIT, COGVIDEOX, COGVIEW4, DIT, EASYANIMATE, FLUX, FLUX2, FLUX3,
    FRAMEPACK, HELIOS, HUNYUAN_DIT, HUNYUAN_IMAGE, HUNYUAN_VIDEO, HUNYUAN_VIDEO15, IDEOGRAM4, KANDINSKY5, KANDINSKY6,
    KREA2, LATTE, LONGCAT_IMAGE, LTX, LTX2, LUMINA2, MINIMAX_H3, MOCHI, PIXART, QWENIMAGE, SANA, SANA_VIDEO, SD3,
    SKYREELS_V2, WAN, WAN_ANIMATE, Z_IMAGE,
)  # fmt: skip
_FAMILIES: dict[str, Family] = {family.name: family for family in _SHIPPED}

_KIND_OF_CLASS = re.compile("Transformer|Model|PreTrained|For[A-Z]|Backbone|Loaders|Mixin")
"""Where the name of a class continues with its kind."""


def register_family(family: Family) -> None:
    """Make a family known to ``apply_mhla``, in the place of an earlier version for the same transformers.

    Raises:
        ValueError: not a :class:`Family`, names that are not in a tuple, or a family of this name for other
            transformers.
    """
    if not isinstance(family, Family):
        raise ValueError(
            f"family={family!r} must be a mhla_diffusers.families.Family; see docs/add-a-model.md for one."
        )
    for name, value in (("transformers", family.transformers), ("block_lists", family.attention.block_lists)):
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
    """Return the family of a transformer, by the name of its class or of a base class, or None.

    A model whose class of that name is not of the family's library, such as a copy of diffusers' class on the Hub,
    belongs to the family if it has the attentions.

    Args:
        transformer: a model, its class, the name of its class, or the name of the family.
    """
    if isinstance(transformer, str):
        named = (family for family in families() if transformer in family.transformers)
        return _FAMILIES.get(transformer) or next(named, None)
    found = _families_by_name(transformer)
    return next((family for family, is_own in found if is_own or not _lacking(family, transformer)), None)


def _families_by_name(transformer: Any) -> list[tuple[Family, bool]]:
    """Return families with the name of a model's class or a base class; those of whose library it is stand first."""
    found = {
        family.name: (family, cls.__module__.split(".")[0] == family.library.split(".")[0])
        for cls in reversed(_class_of(transformer).__mro__)
        for family in families()
        if cls.__name__ in family.transformers
    }
    return sorted(found.values(), key=lambda one: not one[1])


def _lacking(family: Family, transformer: Any) -> str:
    """Return what a model with the name of a family's lacks of its attentions; empty for nothing, and for a class."""
    if isinstance(transformer, type):
        return ""
    where = family.attention
    try:
        attentions = where.self_attentions(transformer)
        for attn in attentions.values():
            adapter = where.adapter_of(attn)
            adapter.heads(attn), *(getattr(attn, name) for name in (adapter.inputs[0], "processor"))
    except AttributeError as error:
        return str(error)
    return "" if attentions else f"no {' or '.join(where.attentions)} in {' or '.join(where.block_lists)}"


def get_family(transformer: Any) -> Family:
    """Return the family of a transformer, as :func:`find_family`; ValueError if there is none."""
    family = find_family(transformer)
    if family is None and hasattr(transformer, "components"):
        raise ValueError(f"{type(transformer).__name__} is a pipeline; give its transformer, such as pipe.transformer.")
    if family is None:
        kind = transformer if isinstance(transformer, str) else _class_of(transformer)
        name = repr(kind) if isinstance(kind, str) else kind.__name__
        if gone := where_it_went(kind if isinstance(kind, str) else kind.__name__):
            raise ValueError(f"{name} is not a family of the package any more.{gone}")
        for named, _ in [] if isinstance(kind, str) else _families_by_name(transformer):
            raise ValueError(
                f"This {name} is of {kind.__module__}, has the name of a class of {named.library} and not its "
                f"attentions ({_lacking(named, transformer)}); load it with {named.library}, or add a family with "
                "register_family() (docs/add-a-model.md)."
            )
        raise ValueError(f"{name} has no family; {supported_instead(kind)}")
    return family


# a model that is copied or pickled with its patch keeps its family, known by name
copyreg.pickle(Family, lambda family: (get_family, (family.name,)))


def trained_family(transformer: Any) -> Family:
    """Return the family of a transformer to encode for, train or call; ValueError if it cannot be used so."""
    family = get_family(transformer)
    _ = family.training  # raises for one that is not trained
    return family


def _class_of(model: Any) -> type:
    return model if isinstance(model, type) else type(model)


def supported_instead(kind: str | type) -> str:
    """Explain that a class is not supported: why it is refused, or the nearest family and the pages on models.

    Args:
        kind: the class, or its name.
    """
    if (reason := why_refused(kind)) is not None:
        return f"{reason}."
    if (arguments := by_grid(kind)) is not None:
        return f"patch it by its grid: apply_mhla(pipe, {arguments})."
    import diffusers

    def stem(name: str) -> str:
        """Return the model in a class name: "Flux" of FluxTransformer2DModel and of FluxTransformer2DLoadersMixin."""
        return _KIND_OF_CLASS.split(name)[0]

    # the most similar supported class: by the names of base classes, else by the start of its own
    found = getattr(diffusers, kind, None) if isinstance(kind, str) else kind
    own = stem(kind if isinstance(kind, str) else kind.__name__)
    owners = {transformer: family for family in families() for transformer in family.transformers}
    stems = {stem(transformer): transformer for transformer in reversed(owners)}
    bases = [stem(cls.__name__) for cls in getattr(found, "__mro__", ())[1:]]
    near = [one for one in bases if one in stems]
    near += sorted((one for one in stems if own.startswith(one)), key=len, reverse=True)
    # alike from the start: all images end in "Image", which says nothing of their model
    near += get_close_matches(own, [one for one in stems if one[:3] == own[:3]], n=1)
    nearest = f"the nearest family is {owners[stems[near[0]]].name!r} ({stems[near[0]]}). " if near else ""
    return (
        f'{nearest}{"T" if nearest else "t"}he page "Models" of the documentation (docs/models.md) lists what is '
        'supported, and "Add a model" (docs/add-a-model.md) shows how to add a family with register_family(). Without '
        "one, apply_mhla(model, grid=...) runs sparse attention."
    )


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile`` or data parallelism."""
    from accelerate.utils import extract_model_from_parallel

    inside: nn.Module = extract_model_from_parallel(module, keep_torch_compile=False)
    return inside


def arguments_of(transformer: nn.Module, batch: NoisedBatch) -> dict[str, Any]:
    """Return the arguments of a transformer's forward for a batch."""
    family = get_family(transformer)
    return family.forward.arguments(transformer, batch.hidden_states, batch.timestep, batch.conditioning)


def predict(model: nn.Module, batch: NoisedBatch) -> torch.Tensor:
    """Return the prediction of a transformer, possibly wrapped for training, for a batch: (B, output channels, ...)."""
    transformer = unwrapped(model)
    output = model(**arguments_of(transformer, batch), return_dict=False)[0]
    return get_family(transformer).training.prediction(transformer, output, batch.hidden_states)


def cross_attention_processor(attn: Any, family: Family | None = None) -> Any:
    """Return a processor equivalent to diffusers' own for a cross-attention of the class ``Attention``.

    Without a family, which the module does not know, every family is asked whether it recognises the module.
    """
    family = family or next((one for one in families() if one.attention.recognises_cross(attn)), None)
    return usual_processor(attn, "" if family is None else family.attention.cross_processor)


def grid_of_attention(attn: Any, rotary: Rotary | None) -> tuple[int, ...] | None:
    """Return the token grid that the RoPE tables of a self-attention imply; may read them from the device.

    The module does not know its model, so every family is asked whether it recognises the module.
    """
    grids = (family.attention.grid_of(attn, rotary) for family in families()) if rotary is not None else ()
    return next((grid for grid in grids if grid is not None), None)


def family_of_attention(attn: Any) -> Family | None:
    """Return the family of a self-attention module, or None if no family recognises it."""
    return next((family for family in families() if family.attention.recognises(attn)), None)


__all__ = [
    "Attention",
    "AttentionAdapter",
    "AttentionInputs",
    "Clip",
    "Condition",
    "DiffusionProcess",
    "Family",
    "FlowMatching",
    "Forward",
    "LearnedVarianceDDPM",
    "JointAdapter",
    "Model",
    "NoisedBatch",
    "Sample",
    "Training",
    "arguments_of",
    "cross_attention_processor",
    "families",
    "family_of_attention",
    "find_family",
    "get_family",
    "grid_of_attention",
    "imported",
    "predict",
    "register_family",
    "supported_instead",
    "trained_family",
    "unwrapped",
    "why_refused",
]
