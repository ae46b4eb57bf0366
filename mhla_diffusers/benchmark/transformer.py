"""A whole model with random weights, a forward or a training step: softmax against linear attentions.

All variants of a model share one set of weights. A transformer of a family gets another self-attention by a patch; VLT,
the paper's classifier with MHLA built in, by its configuration.
"""

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from ..attention.layout import block_count
from ..config import SparseConfig
from ..families import Model, find_family, get_family, imported
from ..families.models import squares
from ..patching import apply_mhla
from ..settings import check_value
from .correctness import check_operation, check_patched
from .counts import count_forward
from .measure import Results, Row, Variant, free_bytes
from .models import (
    Size,
    build_transformer,
    cast_weights,
    family_of_model,
    make_forward_inputs,
    small_size,
    token_grid,
)
from .operation import PLAIN, SOFTMAX, SOFTMAX_BACKENDS, SPARSE, fastest_backend, why_no_softmax
from .shapes import shape_of

FORWARD, TRAINING_STEP = "forward", "training step"
MHLA = "MHLA"
HYBRID = "MHLA hybrid 2/3"
"""The model's own attention in every third layer."""
LINEAR_KINDS = (PLAIN, MHLA, HYBRID)
PATCHES = (*LINEAR_KINDS, SPARSE)
"""Attentions that are a patch; sparse attention is for models whose own attention is softmax."""
COMPILED = " + torch.compile"
"""Ends the name of a variant whose repeated blocks are compiled."""
WITHOUT = "without layers"
"""A transformer whose layers return their input; what is left when the time of layers is extrapolated."""


@dataclass(frozen=True)
class Choice:
    """One self-attention to measure a model with."""

    name: str
    kind: str
    """softmax, own, without layers, or one of ``PATCHES``."""
    baseline: bool = False
    blocks: int | None = None
    """M of the replaced layers; None for softmax."""
    backend: str | None = None
    """Backend of softmax attention: diffusers' name, where the family dispatches attention, or a key of
    ``SOFTMAX_BACKENDS``; None for the default."""
    absent: str | None = None
    """Why it cannot run here."""
    note: str = ""


def patch_settings(kind: str, blocks: tuple[int, ...]) -> dict[str, Any]:
    """Return arguments of :func:`apply_mhla` for one of ``PATCHES``; plain linear attention has one block."""
    if kind == SPARSE:
        return {"density": SparseConfig.density}
    return {"blocks": (1,) * len(blocks) if kind == PLAIN else blocks, "layers": "2/3" if kind == HYBRID else "all"}


def softmax_choices(
    tokens: int, heads: int, device: torch.device, *, baseline: bool, dispatched: bool = False
) -> list[Choice]:
    """List softmax attention as it comes, and through each backend.

    Args:
        tokens: of the attention with the most pairs.
        heads: of it, of all samples of the batch.
        device: where it runs.
        baseline: whether it is the attention to be faster than.
        dispatched: whether diffusers' backends reach the attentions; else each of PyTorch's is chosen.
    """
    choices = [Choice("softmax native", SOFTMAX, baseline)]
    names = list(SOFTMAX_BACKENDS)
    if dispatched:
        from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

        # but for other accelerators, packed sequences, and the default
        others = ("varlen", "npu", "xla")
        found = [backend.value for backend in AttentionBackendName]
        names = [name for name in found if name != "native" and not any(word in name for word in others)]
    for name in names:
        absent = why_no_softmax(name.removeprefix("_native_"), device, tokens, heads)
        if dispatched and name.endswith("_hub"):
            absent = "its kernels are downloaded from the Hub, and benchmarks download nothing"
        elif dispatched:
            try:
                with attention_backend(name):
                    pass
            except (RuntimeError, ValueError) as error:
                absent = str(error)
        is_exact = "sage" not in name  # which multiplies in 8 bits
        choices.append(Choice(f"softmax {name}", SOFTMAX, baseline and is_exact, backend=name, absent=absent))
    return choices


# ---- a model at one size --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A transformer of a family at one size, which a patch gives another self-attention.

    Raises:
        ValueError: no layers, or more than the model has.
    """

    model: Any
    """Which, a :class:`mhla_diffusers.families.Model`."""
    size: Size
    layers: int | None
    """Build only so many; None for all."""
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_value("layers", self.layers, int | None, at_least=1, at_most=self.model.layers)

    @property
    def is_cut(self) -> bool:
        """Whether times must be extrapolated to the whole model."""
        return self.layers is not None and self.layers < self.model.layers

    @property
    def tokens(self) -> int:
        """N."""
        return math.prod(token_grid(self.model, self.size))

    def build(self, device: torch.device | None = None) -> Any:
        """The model, on the device of the case or on another."""
        return build_transformer(self.model, self.size, self.layers, device or self.device, self.dtype)

    def inputs(self, model: Any, size: Size | None = None) -> dict[str, Any]:
        """Arguments of the forward, on the model's device."""
        return make_forward_inputs(self.model, model, size or self.size, model.device, self.dtype)

    def choices(self) -> list[Choice]:
        """List all self-attentions that the model can be measured with, its own first."""
        family, grid, blocks = family_of_model(self.model), token_grid(self.model, self.size), self.model.blocks
        softmax_is_own, count = family.own_attention == SOFTMAX, math.prod(blocks)
        own = [] if softmax_is_own else [Choice(f"own {family.own_attention}", "own", baseline=True, blocks=1)]
        softmax = softmax_choices(
            self.tokens,
            self.model.heads * self.size.batch,
            self.device,
            baseline=softmax_is_own,
            dispatched=family.dispatches_attention,
        )
        cut = None
        if self.is_cut and int(self.layers or 0) % 3:
            cut = (
                f"{self.layers} of {self.model.layers} layers cannot stand for two of every three; use a multiple of 3"
            )
        patches = [
            Choice(PLAIN, PLAIN, blocks=1),
            Choice(MHLA, MHLA, blocks=count),
            Choice(HYBRID, HYBRID, blocks=count, absent=cut),
        ]
        if softmax_is_own:
            rule = SparseConfig().rule_on(grid)
            size = rule.key_block_size
            # of few blocks, one for every query block is more than the density that is asked for
            note = f"{rule.listed_on(grid):.1%} of the pairs of {block_count(grid, size)} blocks of {size} keys"
            patches.append(Choice(SPARSE, SPARSE, note=f"{note}, chosen at every call"))
        return [*own, *softmax, *patches, *([Choice(WITHOUT, WITHOUT)] if self.is_cut else [])]

    def flops(self, choice: Choice) -> int:
        """Count one forward of all samples."""
        change = None if choice.kind in PATCHES else partial(self._change, choice=choice)
        config = None
        if choice.kind in PATCHES:
            settings = patch_settings(choice.kind, self.model.blocks)
            config = family_of_model(self.model).complete(settings)
        return sum(count_forward(self.model, self.size, config, layers=self.layers, change=change).values())

    def check(self, model: Any) -> None:
        """Compare MHLA in the model, and sparse attention where it is measured, with the reference on a small input.

        Raises:
            IncorrectAttentionError: it is wrong here.
        """
        check_patched(self.variant(model, Choice(MHLA, MHLA)), self.inputs(model, small_size(self.model)))
        shape = shape_of(self.model, self.model.blocks, self.model.name)
        if shape.block_size is not None:
            backend = fastest_backend(shape, self.device, self.dtype)
            check_operation(shape, self.device, self.dtype, backend, sparse=True)

    def variant(self, model: Any, choice: Choice) -> Any:
        """Return the model with another self-attention; what weights both have, they share."""
        tensors = (*model.parameters(), *model.buffers())
        variant = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        self._change(variant, choice)
        return variant

    def layers_of(self, variant: Any) -> Iterable[Any]:
        """Return the repeated blocks, which are compiled one by one."""
        return get_family(variant).blocks_of(variant).values()

    def _change(self, variant: Any, choice: Choice) -> None:
        """Give a model the self-attention of a choice, in place."""
        family = get_family(variant)
        if choice.kind == WITHOUT:
            for block in family.blocks_of(variant).values():
                # DiT asks its first layer for the time embedding, so layers must stay
                block.forward = lambda hidden_states, *_, **__: hidden_states
        if choice.kind == SOFTMAX and family.own_attention != SOFTMAX:
            for attn in family.self_attentions(variant).values():
                attn.set_processor(imported(family.softmax_processor or family.processor)())
        if choice.kind in PATCHES:
            apply_mhla(variant, **patch_settings(choice.kind, self.model.blocks))
        if choice.backend is not None and family.dispatches_attention:
            from diffusers.models.attention_dispatch import attention_backend

            with attention_backend("native"):  # which restores what set_attention_backend changes for all models
                variant.set_attention_backend(choice.backend)


# ---- VLT ------------------------------------------------------------------------------------------------------------

_TINY_VLT = {
    "preset": "vlt_t",
    "hidden_sizes": (8, 16, 16, 24),
    "depths": (1, 1, 1, 1),
    "num_attention_heads": (1, 2, 2, 3),
    "mhla": ({"blocks": [2, 2]}, {"blocks": [2, 2]}, None, None),
    "head_size": 32,
    "num_labels": 5,
}
_VLT, _SIDES = "VLTForImageClassification", squares(224, 384, 512, 1024, 2048)
CLASSIFIERS = {
    model.name: model
    for model in (
        Model("vlt-t", _VLT, 1, 64, 12, (7, 7), _SIDES, {"preset": "vlt_t"}, stride=4, patch=1),
        Model("vlt-s", _VLT, 1, 64, 20, (7, 7), _SIDES, {"preset": "vlt_s"}, stride=4, patch=1),
        Model("tiny-vlt", _VLT, 1, 8, 4, (2, 2), squares(64), _TINY_VLT, stride=4, patch=1),
    )
}
"""Classifiers of the paper; heads, blocks and tokens are the first stage's, which has the most. The preset is a method
of ``VLTConfig``, and the other settings are its arguments.
"""


@dataclass(frozen=True)
class ClassifierCase(Case):
    """VLT at one size of pictures: its attention is a setting, so every variant is a model of its own.

    Raises:
        ValueError: a number of layers, since they differ.
    """

    def __post_init__(self) -> None:
        if self.layers is not None:
            raise ValueError(
                f"layers={self.layers}: the layers of {self.model.name} differ, so it is measured whole; leave "
                "--layers out."
            )

    def config(self, kind: str) -> Any:
        """Return its ``VLTConfig`` with a kind of attention in the stages that have MHLA."""
        from ..models import VLTConfig

        settings = dict(self.model.settings)
        make = getattr(VLTConfig, settings.pop("preset"))
        changes = {PLAIN: {"blocks": [1, 1]}, SPARSE: {"density": SparseConfig.density}}
        own = make(**settings).mhla
        mhla = [None if stage is None or kind == SOFTMAX else changes.get(kind, dict(stage)) for stage in own]
        return make(**(settings | {"mhla": mhla}))

    def build(self, device: torch.device | None = None, kind: str = MHLA) -> Any:
        """Build a model with seeded random weights and a kind of attention, in eval mode.

        Mixing matrices stay float32, as where ``from_pretrained`` casts.
        """
        from ..models import VLTForImageClassification

        torch.manual_seed(0)
        with device or self.device:
            model = VLTForImageClassification(self.config(kind))
        named = chain(model.named_parameters(), model.named_buffers())
        cast_weights(named, self.dtype, model._keep_in_fp32_modules_strict)
        return model.eval()

    def inputs(self, model: Any, size: Size | None = None) -> dict[str, Any]:
        """Draw pictures, on the model's device."""
        chosen = size or self.size
        shape = chosen.batch, model.config.num_channels, chosen.height, chosen.width
        return {"pixel_values": torch.randn(shape, device=model.device, dtype=self.dtype), "return_dict": False}

    def choices(self) -> list[Choice]:
        """List softmax and linear attentions of the stages that have MHLA; the others always keep softmax."""
        blocks = [math.prod(own["blocks"]) for own in self.config(MHLA).mhla if own is not None]
        others = f"{' and '.join(map(str, blocks))} blocks in the first stages, softmax in the others"
        return [
            *softmax_choices(self.tokens, self.model.heads * self.size.batch, self.device, baseline=True),
            Choice(PLAIN, PLAIN, blocks=1, note="in the stages that have MHLA, softmax in the others"),
            Choice(MHLA, MHLA, blocks=blocks[0], note=others),
            Choice(SPARSE, SPARSE, note="lists chosen at every call"),
        ]

    def flops(self, choice: Choice) -> int:
        """Count by :func:`mhla_diffusers.models.counts.count`."""
        from ..models.counts import count

        counts = count(self.build(torch.device("meta"), choice.kind), self.size.height, self.size.width)
        return 2 * self.size.batch * (counts.weight_macs + counts.attention_macs)

    def check(self, model: Any) -> None:
        """Compare MHLA of a fresh model with the reference, on 16 x 16 and 8 x 8 tokens in the stages that have it."""
        check_patched(self.variant(model, Choice(MHLA, MHLA)), self.inputs(model, Size(64, 64, None)))

    def variant(self, model: Any, choice: Choice) -> Any:
        """Return a model with another attention, which shares the weights that both have."""
        variant = self.build(model.device, choice.kind)
        own = variant.state_dict()
        shared = {
            name: tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
            if name in own and tensor.shape == own[name].shape
        }
        variant.load_state_dict(shared, strict=False, assign=True)
        return variant

    def layers_of(self, variant: Any) -> Iterable[Any]:
        """Return the layers of all stages."""
        return chain.from_iterable(stage.layers for stage in variant.vlt.stages)


# ---- mhla bench transformer -----------------------------------------------------------------------------------------


def benchmark_transformer(
    case: Case, results: Results, *, train: bool = False, checkpointing: bool = False, compile: bool = False
) -> None:
    """Check the patched attention, then time a forward, or a training step, of all variants in turns.

    Args:
        case: the model at a size.
        results: gets a row per variant.
        train: time forward, backward and optimizer step; all weights train.
        checkpointing: compute activations again in the backward pass instead of keeping them.
        compile: time every variant with its repeated blocks compiled as well.

    Raises:
        IncorrectAttentionError: the patched attention is wrong here; then nothing is timed.
    """
    stage = TRAINING_STEP if train else FORWARD
    name = f"{case.model.name} {case.size}"
    what: dict[str, Any] = {"case": name, "stage": stage, "tokens": case.tokens, "batch": case.size.batch}
    weights = list(case.build(torch.device("meta")).parameters())
    # weights, gradients and both moments of AdamW
    needed, free = (4 if train else 1) * sum(x.numel() * x.itemsize for x in weights), free_bytes(case.device)
    if needed > free:  # asked beforehand, as Linux ends a process that tries
        reason = f"the weights need {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free"
        results.add([Row("all", status="out of memory", reason=reason, **what)])
        return
    model = case.build()
    case.check(model)
    inputs = case.inputs(model)
    models: list[Any] = []
    variants: list[Variant] = []
    choices = case.choices()
    kinds = {choice.kind: choice for choice in reversed(choices) if choice.absent is None and choice.kind != WITHOUT}
    flops = {kind: (3 if train else 1) * case.flops(choice) for kind, choice in kinds.items()}
    for choice in choices:
        for compiled in (False, True) if compile and choice.kind != WITHOUT else (False,):
            absent = choice.absent
            if compiled and choice.backend in SOFTMAX_BACKENDS:
                absent = absent or "torch.compile chooses PyTorch's backend itself"
            run: Callable[[], object] | str = absent or ""
            if absent is None:
                models.append(case.variant(model, choice))
                if compiled:
                    for layer in case.layers_of(models[-1]):
                        layer.compile(dynamic=False)
                run = forward_of(models[-1], choice, inputs)
            name = choice.name + (COMPILED if compiled else "")
            variants.append(Variant(name, run, choice.baseline, flops.get(choice.kind), choice.blocks, choice.note))
    if train:
        parameters = {id(weight): weight for one in models for weight in one.parameters()}
        # a learning rate of 0 moves the same bytes and leaves every repetition the same weights
        optimizer = torch.optim.AdamW(list(parameters.values()), lr=0.0)
        for one in models:
            one.train()
            if checkpointing:  # by the method that diffusers gives its models, or transformers
                (getattr(one, "enable_gradient_checkpointing", None) or one.activation_checkpointing_enable)()
        variants = [
            one if isinstance(one.run, str) else replace(one, run=partial(_training_step, one.run, optimizer))
            for one in variants
        ]
    # every variant compiles the same code again; beyond the limit torch would silently stop compiling
    with torch.set_grad_enabled(train), torch._dynamo.config.patch(cache_size_limit=64):
        rows = results.measure(variants, **what)
    torch.compiler.reset()
    if case.is_cut:
        rows = [extrapolated(row, rows, case) for row in rows]
    results.add(rows)


def forward_of(model: Any, choice: Choice, inputs: dict[str, Any]) -> Callable[[], Any]:
    """Return the forward of a variant, with PyTorch's backend chosen where diffusers does not pass the choice on."""
    family = find_family(model)
    chosen = choice.backend is not None and not (family is not None and family.dispatches_attention)

    def forward() -> Any:
        with sdpa_kernel([SOFTMAX_BACKENDS[str(choice.backend)]]) if chosen else nullcontext():
            return model(**inputs)

    return forward


def _training_step(forward: Callable[[], Any], optimizer: torch.optim.Optimizer) -> None:
    try:
        forward()[0].float().square().mean().backward()
        optimizer.step()
    finally:
        optimizer.zero_grad(set_to_none=True)  # also after running out of memory


def extrapolated(row: Row, rows: Iterable[Row], case: Case) -> Row:
    """Add the time of all layers to a row, from its own and that of the model without layers, if both were measured."""
    if row.variant == WITHOUT:
        return replace(row, stage=f"{row.stage}, {WITHOUT}", batch=None)
    rest = next(other.median for other in rows if other.variant == WITHOUT)
    if row.median is None or rest is None:
        return row
    whole = rest + (row.median - rest) * case.model.layers / int(case.layers or 1)
    cut = f"{case.layers} of {case.model.layers} layers were timed"
    return replace(row, whole_seconds=whole, reason="; ".join(filter(None, (row.reason, cut))))
