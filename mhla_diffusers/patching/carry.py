"""Carry: what a patched attention loses at a dense step is added at the steps that follow.

The inputs of a denoising loop change slowly, and so does the error of a patched attention. At a dense step s₀ every
patched attention computes both outputs and keeps their difference R = dense - patched, (B, N, C). At a later step s it
returns patched + f^(s - s₀) R. The fading f is measured per attention and sample at the next dense step s₁: of the old
difference the share a = <R₁, R₀> / <R₀, R₀> is left, so that f = a^(1 / (s₁ - s₀)). Where the old difference has not
lasted, ‖R₁ - a R₀‖ > 0.9 ‖R₁‖, nothing is added until the next dense step. Steps are counted, not forwards, so that a
step cache may skip some.

Differences are those of whole attentions, behind the output projection: at a dense step the model's own processor
runs, with the backend that the user has set, bit for bit as before the patch.

Everything belongs to one denoising run in one thread (:class:`DenoisingRun`): a new call of a pipeline, other shapes,
another order of steps, and a forward that fails begin afresh.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

from ..config import CarryType, PatchConfig, Step
from .context import current

FIRST_FADING = 0.95
"""Fading per step before a second dense step has shown it (studies/fidelity)."""
_MOST_AT_A_TIME = 2**24
"""Numbers of a difference that are computed at a time, so that float32 takes little memory beside the model."""
_LEAST_LEFT = 0.05
"""Smallest part of an old difference that is taken to be left in a new one."""
_LASTS = 0.9
"""Part of the norm of a new difference that the old one may leave unexplained; beyond it, nothing is added."""


def carried_bytes(tokens: int, channels: int, kept: CarryType) -> int:
    """Return what the difference of one attention takes, of one sample and half of the guidance."""
    return tokens * (channels + 4 if kept == "int8" else 2 * channels)


@dataclass
class Difference:
    """What one attention lost at a dense step, for one of the tensors that it returns.

    Attributes:
        values: (B, N, C) int8, or bfloat16.
        scale: (B, N, 1) float32 of int8 values; None otherwise.
        step: index of the dense step.
        fading: per step, float32 (B, 1, 1) on the device.
        weight: 1, or 0 of samples whose difference has not lasted, float32 (B, 1, 1) on the device.
    """

    values: torch.Tensor
    scale: torch.Tensor | None
    step: int
    fading: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def shown(
        cls,
        dense: torch.Tensor,
        patched: torch.Tensor,
        step: int,
        before: "Difference | None",
        kept: CarryType,
        split: distributed.ProcessGroup | None = None,
    ) -> "Difference":
        """Return the difference of a dense step, computed in float32, some tokens at a time.

        Args:
            dense: output of the attention as before the patch, (B, N, C).
            patched: that of the patched one.
            step: index of the step.
            before: the difference of the dense step before this one.
            kept: how it is kept.
            split: the processes over which the tokens are split; None for one process.
        """
        samples, tokens, channels = dense.shape
        is_known = before is not None and before.fits(dense) and before.step < step
        values = torch.empty_like(dense, dtype=getattr(torch, kept), memory_format=torch.contiguous_format)
        scale = dense.new_empty((samples, tokens, 1), dtype=torch.float32) if kept == "int8" else None
        sums = dense.new_zeros((3, samples, 1, 1), dtype=torch.float32)
        some = max(1, _MOST_AT_A_TIME // (samples * channels))
        for start in range(0, tokens, some):
            at = slice(start, start + some)
            new = dense[:, at].float() - patched[:, at].float()
            if scale is None:
                values[:, at] = new
            else:
                scale[:, at] = new.abs().amax(-1, keepdim=True) / 127
                values[:, at] = (new / scale[:, at].clamp_min(1e-30)).round_()
            if is_known and before is not None:
                old = before.expanded(at, dense.device)
                sums += torch.stack([(x * y).sum((1, 2), True) for x, y in ((new, new), (new, old), (old, old))])
        fading, weight = torch.full_like(sums[0], FIRST_FADING), torch.ones_like(sums[0])
        if is_known and before is not None:
            if split is not None:
                distributed.all_reduce(sums, group=split)
            norm, product, old_norm = sums
            left = (product / old_norm.clamp_min(1e-30)).clamp(_LEAST_LEFT, 1)
            fading = left ** (1 / (step - before.step))
            weight = (norm - 2 * left * product + left.square() * old_norm <= _LASTS**2 * norm).float()
        return cls(values, scale, step, fading, weight)

    def fits(self, output: torch.Tensor) -> bool:
        """Whether it is of an output of this shape."""
        return self.values.shape == output.shape

    def expanded(self, at: slice, device: torch.device) -> torch.Tensor:
        """(B, n, C) float32 of some tokens."""
        values = self.values[:, at].to(device, torch.float32)
        return values if self.scale is None else values * self.scale[:, at].to(device)

    def add_to(self, output: torch.Tensor, values: torch.Tensor, step: int) -> torch.Tensor:
        """Add the faded difference to an output of a later step, in place, and return it.

        Args:
            output: (B, N, C).
            values: those of the difference, on the device of the output.
            step: index of the step.
        """
        # a solver may look back at a sigma of an earlier step
        factor = self.weight * self.fading ** max(0, step - self.step)
        return output.addcmul_(values, factor if self.scale is None else factor * self.scale)


_streams: dict[torch.device, Any] = {}
"""What differences are read on from the machine's memory."""
Key = tuple[int, int]
"""Number of a layer, and which of the tensors that its attention returns."""


@dataclass
class Half:
    """The differences of one half of the guidance, of all attentions of a transformer.

    A pipeline may call its transformer several times per step, such as with and without the caption.
    """

    differences: dict[Key, Difference] = field(default_factory=dict)
    conditions: "weakref.ref[torch.Tensor] | None" = None
    """Conditions of the dense step, such as the caption. The reference dies if the pipeline makes new ones per step."""
    _ahead: dict[Key, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    """Values that are on their way to the device, with the event that ends it."""

    def check_conditions(self, conditions: object, is_dense: bool) -> None:
        """Forget everything if the differences are those of other conditions, as after the end of guidance."""
        given = conditions if isinstance(conditions, torch.Tensor) else None
        known = None if self.conditions is None else self.conditions()
        if known is not None and known is not given:
            self.clear()
        if is_dense:
            self.conditions = None if given is None else weakref.ref(given)

    def keep(self, key: Key, difference: Difference) -> None:
        """Keep a difference in place of the earlier one, which may be on its way to the device."""
        self.differences[key] = difference
        self._ahead.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self.differences.clear()
        self._ahead.clear()
        self.conditions = None

    def values_on(self, device: torch.device, key: Key) -> torch.Tensor:
        """Return the values of a difference on the device of its attention, and begin to read the next ones."""
        values = self.differences[key].values
        if values.device == device or device.type != "cuda":
            return values.to(device)
        copy, arrived = self._ahead.pop(key) if key in self._ahead else self._read(device, key)
        keys = list(self.differences)
        following = keys[(keys.index(key) + 1) % len(keys)]
        if following != key:
            self._ahead[following] = self._read(device, following)
        torch.cuda.current_stream(device).wait_event(arrived)
        copy.record_stream(torch.cuda.current_stream(device))
        return copy

    def _read(self, device: torch.device, key: Key) -> tuple[torch.Tensor, Any]:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        stream = _streams[device]
        with torch.cuda.stream(stream):
            copy = self.differences[key].values.to(device, non_blocking=True)
            return copy, stream.record_event()


class DenoisingRun:
    """One run of a denoising loop in one thread: what its dense steps have shown, and how far it is."""

    def __init__(self) -> None:
        self._halves: dict[tuple[str | None, int], Half] = {}
        self.step: Step | None = None
        """Step of the latest forward."""
        self._timesteps: object = None
        self._forwards: dict[str | None, int] = {}

    def half(self, step: Step, scheduler: Any, name: str | None) -> Half:
        """Return the half that the next forward belongs to.

        Args:
            step: of the forward.
            scheduler: of the pipeline that is known to call the transformer; None without one.
            name: that the pipeline gives its halves; by it and by their order within a step they are known.
        """
        latest, timesteps = self.step, getattr(scheduler, "timesteps", None)
        if latest is None or step.count != latest.count or step.index < latest.index:
            self.clear()
        elif step.index == latest.index:  # of a call that ended in this step, or of a solver that calls several times
            calls_once = name is not None and getattr(scheduler, "order", 1) == 1
            if name in self._forwards if calls_once else timesteps is not self._timesteps:
                self.clear()
        if self.step != step:
            self._forwards.clear()
        self.step, self._timesteps = step, timesteps
        order = self._forwards.get(name, 0)
        self._forwards[name] = order + 1
        return self._halves.setdefault((name, order), Half())

    def clear(self) -> None:
        """Forget everything, as after a forward that failed."""
        self._halves.clear()
        self._forwards.clear()
        self.step = self._timesteps = None


@dataclass(frozen=True)
class CarriedForward:
    """One forward within a run, as its attentions see it.

    Attributes:
        half: of the guidance, that the forward belongs to.
        step: of the forward.
        config: of the patch, which says how differences are kept and where.
    """

    half: Half
    step: Step
    config: PatchConfig

    def show(self, dense: torch.Tensor, patched: torch.Tensor, number: int, part: int) -> None:
        """Keep the difference of an attention of a dense step.

        Raises:
            torch.OutOfMemoryError: with the ways to need less.
        """
        refuse_gradients(dense, patched)
        before = self.half.differences.get((number, part))
        try:
            kept = self.config.carry_dtype
            shown = Difference.shown(dense, patched, self.step.index, before, kept, current().split)
            if self.config.carry_device == "cpu" and dense.is_cuda:
                values = torch.empty_like(shown.values, device="cpu", pin_memory=True)
                shown.values = values.copy_(shown.values)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                "The differences that dense steps show do not fit in the device's memory beside the model. "
                "carry_device='cpu' keeps them in the machine's, refresh=None (none in an engine) needs none, and in "
                f"diffusers describe(pipe, height=…, width=…) tells beforehand what they take. {error}"
            ) from error
        self.half.keep((number, part), shown)

    def add(self, output: torch.Tensor, number: int, part: int) -> torch.Tensor:
        """Add what the latest dense step has shown to the output of an attention, in place, and return it."""
        difference = self.half.differences.get((number, part))
        if difference is None or not difference.fits(output):
            return output
        refuse_gradients(output)
        values = self.half.values_on(output.device, (number, part))
        return difference.add_to(output, values, self.step.index)


def refuse_gradients(*outputs: torch.Tensor) -> None:
    """Raise if gradients are wanted of outputs.

    Raises:
        ValueError: naming the setting that allows them.
    """
    if torch.is_grad_enabled() and any(output.requires_grad for output in outputs):
        raise ValueError(
            "What a dense step showed is carried without gradients, and this forward needs them. Sample within "
            "torch.no_grad(), or set carry=False, for example by change_mhla(pipe, carry=False)."
        )


# torch.compile calls these as they are: which step it is and what is kept stays out of its graphs


@torch.library.custom_op("mhla_diffusers::carry_show", mutates_args=())
def _show_operator(dense: torch.Tensor, patched: torch.Tensor, number: torch.Tensor, part: int) -> torch.Tensor:
    return _show(dense.clone(), patched, number, part)


@torch.library.custom_op("mhla_diffusers::carry_add", mutates_args=())
def _add_operator(output: torch.Tensor, number: torch.Tensor, part: int) -> torch.Tensor:
    return _add(output.clone(), number, part)


@_show_operator.register_fake
def _(dense: torch.Tensor, patched: torch.Tensor, number: torch.Tensor, part: int) -> torch.Tensor:
    return torch.empty_like(dense)


@_add_operator.register_fake
def _(output: torch.Tensor, number: torch.Tensor, part: int) -> torch.Tensor:
    return torch.empty_like(output)


def _show(dense: torch.Tensor, patched: torch.Tensor, number: torch.Tensor, part: int) -> torch.Tensor:
    if (carried := current().carried) is not None:
        carried.show(dense, patched, int(number), part)
    return dense


def _add(output: torch.Tensor, number: torch.Tensor, part: int) -> torch.Tensor:
    carried = current().carried
    return output if carried is None else carried.add(output, int(number), part)


Outputs = torch.Tensor | tuple[torch.Tensor, ...]


def show(dense: Outputs, patched: Outputs, number: torch.Tensor) -> Outputs:
    """Keep what an attention of this thread's forward loses, and return its dense output.

    Args:
        dense: (B, N, C) as before the patch; joint attention has one for each stream of tokens.
        patched: the same of the patched attention.
        number: of the layer, on the CPU.
    """
    one_show = _show_operator if torch.compiler.is_compiling() else _show
    if isinstance(dense, tuple):
        assert isinstance(patched, tuple)
        pairs = enumerate(zip(dense, patched, strict=True))
        return tuple(one_show(one, other, number, part) for part, (one, other) in pairs)
    assert isinstance(patched, torch.Tensor)
    shown: torch.Tensor = one_show(dense, patched, number, 0)
    return shown


def add(output: Outputs, number: torch.Tensor) -> Outputs:
    """Return an attention's output, which may be changed, with what the latest dense step of its run has shown."""
    one_add = _add_operator if torch.compiler.is_compiling() else _add
    if isinstance(output, tuple):
        return tuple(one_add(one, number, part) for part, one in enumerate(output))
    added: torch.Tensor = one_add(output, number, 0)
    return added
