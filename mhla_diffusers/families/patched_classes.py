"""Subclasses that instances of a model's modules are switched to while it is patched.

Classes of diffusers and transformers never change. This module is imported when a model is patched.
"""

from functools import cache
from types import MethodType
from typing import Any

from diffusers.models.attention import AttentionModuleMixin

_BASE, _MIXIN = "_mhla_base", "_mhla_mixin"
"""Attributes of a subclass: the library's class, and the mixin."""


class _EqualToBase(type):
    """Class of the subclasses, equal to its base: ``from_pipe`` takes a component by ``type(x) in allowed``."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is vars(cls).get(_BASE)

    def __hash__(cls) -> int:
        return hash(vars(cls).get(_BASE, cls.__qualname__))


class _Patched:
    """A subclass that is made when it is needed, so it is pickled as its mixin and its base class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls, reduced = type(self), tuple(super().__reduce_ex__(protocol))
        return _unpickled, (getattr(cls, _MIXIN), getattr(cls, _BASE)), *reduced[2:]


@cache
def _subclass(mixin: Any, base: Any) -> Any:
    """Return a subclass that has the name and module of its base, which diffusers writes into ``config.json``."""
    facts = {"__module__": base.__module__, _BASE: base, _MIXIN: mixin}
    return _EqualToBase(base.__name__, (_Patched, mixin, base), facts)


def _unpickled(mixin: Any, base: Any) -> Any:
    cls = _subclass(mixin, base)
    return cls.__new__(cls)


def switch(module: Any, mixin: type) -> None:
    """Switch a module to a subclass of its class with the methods of a mixin."""
    base: Any = type(module)
    _set_class(module, _subclass(mixin, base))


def switch_back(module: Any) -> None:
    """Undo :func:`switch`; any other module is unchanged."""
    if _BASE in vars(type(module)):
        _set_class(module, getattr(type(module), _BASE))


def _set_class(module: Any, cls: Any) -> None:
    before: Any = type(module)
    module.__class__ = cls
    # accelerate, when it spreads a model over devices, keeps the original forward here and calls it
    kept = vars(module).get("_old_forward")
    if getattr(kept, "__func__", None) is before.forward:
        module._old_forward = MethodType(cls.forward, module)


class ProcessorMethods(AttentionModuleMixin):
    """Mixin for attentions that run a processor without a method to set another."""

    _supports_qkv_fusion = False
