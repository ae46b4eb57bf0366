"""The unpatched model as a teacher: the same transformer with the patch disabled."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..patching import is_patched, mhla_disabled
from .trainable import adapters_disabled, is_lora


@contextmanager
def unpatched(transformer: nn.Module) -> Iterator[None]:
    """Context in which a transformer attends without its patch, if it has one."""
    if not is_patched(transformer):
        yield
        return
    with mhla_disabled(transformer):
        yield


class Teacher:
    """Turns a patched transformer into the original model within a context.

    Weights that no stage changes are shared. For weights that change, except MHLA's and LoRA's own, the original values
    are kept on the device of the parameters and swapped in while the teacher runs. So create the teacher before
    anything is trained or loaded.

    Args:
        transformer: a patched transformer with the original weights.
        changing: names of the parameters that training changes.
    """

    def __init__(self, transformer: nn.Module, changing: Iterable[str]) -> None:
        self._transformer = transformer
        shared = {name for name in changing if ".mhla." not in name and not is_lora(name)}
        self._originals = {
            name: parameter.detach().clone() for name, parameter in transformer.named_parameters() if name in shared
        }
        self._processors: dict[str, Any] = {}

    @property
    def extra_parameters(self) -> int:
        """Number of original values kept."""
        return sum(original.numel() for original in self._originals.values())

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within the context the transformer is the teacher; nothing takes gradients."""
        attentions = self._transformer.named_modules()
        self._processors = {name: module.processor for name, module in attentions if hasattr(module, "mhla")}
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(unpatched(self._transformer))
            stack.enter_context(adapters_disabled(self._transformer))
            stack.enter_context(self._swapped(""))
            yield

    @contextmanager
    def student_attention(self, name: str) -> Iterator[None]:
        """While the teacher runs: one self-attention uses the student's weights and takes gradients."""
        attn: Any = self._transformer.get_submodule(name)
        teacher_processor = attn.processor
        switched = [layer for layer in attn.modules() if getattr(layer, "_disable_adapters", False)]
        with torch.enable_grad(), self._swapped(f"{name}."):
            attn.set_processor(self._processors[name])
            for layer in switched:
                layer._disable_adapters = False
            try:
                yield
            finally:
                for layer in switched:
                    layer._disable_adapters = True
                attn.set_processor(teacher_processor)

    @contextmanager
    def _swapped(self, prefix: str) -> Iterator[None]:
        """Swap original and trained values, and swap back."""
        self._swap(prefix)
        try:
            yield
        finally:
            self._swap(prefix)

    @torch.no_grad()
    def _swap(self, prefix: str) -> None:
        for name, parameter in self._transformer.named_parameters():
            if name in self._originals and name.startswith(prefix):
                original = self._originals[name].to(parameter.dtype)
                if isinstance(parameter, DTensor):
                    self._originals[name] = parameter.detach().clone()
                    parameter.copy_(original)
                else:  # without writing, because a student's forward may still wait for its backward pass
                    self._originals[name], parameter.data = parameter.data, original
