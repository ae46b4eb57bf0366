"""A model at one size, and the self-attentions that it is measured with.

All variants of a model share one set of weights. A transformer of a family gets another self-attention by a patch; VLT,
the paper's classifier with MHLA built in, by its configuration.
"""

import copy
import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.attention import sdpa_kernel

from ..attention.layout import block_count
from ..config import MHLAConfig
from ..families import Family, Model, find_family, get_family, imported
from ..patching import apply_mhla
from .correctness import check_operation, check_patched
from .models import Size, build_transformer, cast_weights, make_forward_inputs, parse_size, small_size
from .operation import fastest_backend
from .parts import count_parts, tensor_bytes
from .results import COMPILED, CONTENT, HYBRID, PLAIN, Recorder, Row
from .shapes import SOFTMAX_BACKENDS, Cost, shape_of, why_no_softmax
from .timing import Absent, Outcome, Variant

if TYPE_CHECKING:
    from ..models import VLTConfig, VLTForImageClassification

LINEAR_KINDS = (PLAIN, "MHLA", HYBRID)
"""Patches; the hybrid keeps the model's own attention in every third layer."""
PATCHES = (*LINEAR_KINDS, CONTENT)
"""All of them; the sparse branch is for models whose own attention is softmax."""


# ---- the self-attentions to measure ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """One self-attention to measure."""

    name: str
    kind: str
    """softmax, own, or one of ``PATCHES``."""
    baseline: bool = False
    blocks: int | None = None
    """M of the replaced layers; None for softmax."""
    backend: str | None = None
    """Of softmax attention: diffusers' name, where the family dispatches attention, or a key of ``SOFTMAX_BACKENDS``;
    None for the default.
    """
    absent: str | None = None
    """Why it cannot run here."""
    note: str = ""
    """Remark on its times."""


REST = Choice("without layers", "without layers")
"""A transformer whose layers return their input."""


@dataclass(frozen=True)
class Candidate:
    """A model with one self-attention."""

    choice: Choice
    model: Any
    """Shares its weights with all others; None if it cannot run here."""
    compiled: bool = False
    absent: str | None = None
    """Why it cannot run."""

    @property
    def name(self) -> str:
        """Of the variant in results."""
        return self.choice.name + COMPILED if self.compiled else self.choice.name

    def run(self, inputs: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> Variant:
        """A forward without gradients, or with an optimizer a training step."""
        if self.absent is not None:
            return Absent(self.absent)
        family, backend = find_family(self.model), self.choice.backend
        # the choice of PyTorch's backend, where diffusers does not pass it on
        chosen = backend is not None and not (family is not None and family.dispatches_attention)

        def forward() -> Any:
            with sdpa_kernel([SOFTMAX_BACKENDS[str(backend)]]) if chosen else nullcontext():
                return self.model(**inputs)

        if optimizer is None:
            return torch.no_grad()(forward)

        def step() -> None:
            try:
                forward()[0].float().square().mean().backward()
                optimizer.step()
            finally:
                optimizer.zero_grad(set_to_none=True)  # also after running out of memory

        return step


def attention_choices(
    family: Family, model: Model, layers: int, grid: tuple[int, ...], batch: int, device: torch.device
) -> list[Choice]:
    """All self-attentions that so many layers of a transformer can be measured with; the first is its own."""
    softmax_is_own = family.own_attention == "softmax"
    choices = [] if softmax_is_own else [Choice(f"own {family.own_attention}", "own", baseline=True, blocks=1)]
    tokens, heads = math.prod(grid), model.heads * batch
    choices += softmax_choices(tokens, heads, device, baseline=softmax_is_own, dispatched=family.dispatches_attention)
    count = math.prod(model.blocks)
    cut = f"{layers} of {model.layers} layers cannot stand for two of every three; --layers must be a multiple of 3"
    too_few = layers != model.layers and layers % 3 != 0
    choices += [
        Choice(PLAIN, PLAIN, blocks=1),
        Choice("MHLA", "MHLA", blocks=count),
        Choice(HYBRID, HYBRID, blocks=count, absent=cut if too_few else None),
    ]
    if softmax_is_own:
        config = family.default_config.replace(**patch_settings(CONTENT, model.blocks))
        choices.append(Choice(CONTENT, CONTENT, blocks=count, note=content_note(config, grid)))
    return choices


def softmax_choices(
    tokens: int, heads: int, device: torch.device, *, baseline: bool = True, dispatched: bool = False
) -> list[Choice]:
    """Softmax attention as it comes, and through each backend.

    Tokens and heads are those of the attention with the most pairs, heads times the batch size. Where diffusers'
    backends do not reach the attentions (``dispatched``), each of PyTorch's is chosen.
    """
    choices = [Choice("softmax native", "softmax", baseline)]
    for backend in _diffusers_backends() if dispatched else SOFTMAX_BACKENDS:
        absent = _why_no_backend(backend) if dispatched else None
        absent = absent or why_no_softmax(backend.removeprefix("_native_"), device, tokens, heads)
        is_exact = "sage" not in backend  # which multiplies in 8 bits
        choices.append(Choice(f"softmax {backend}", "softmax", baseline and is_exact, backend=backend, absent=absent))
    return choices


def content_note(config: MHLAConfig, grid: tuple[int, ...]) -> str:
    """The density on a grid; of few blocks, one for every query block is more than the density that is asked for."""
    blocks = block_count(grid, config.block_size)
    of_pairs = f"{config.listed_on(grid):.1%} of the pairs of {blocks} blocks of {config.block_size} tokens"
    return f"{of_pairs}, chosen at every call"


def _why_no_backend(name: str) -> str | None:
    """Why one of diffusers' attention backends is not to be tried; None if it is."""
    from diffusers.models.attention_dispatch import attention_backend

    if name.endswith("_hub"):
        return "its kernels are downloaded from the Hub, and benchmarks download nothing"
    try:
        with attention_backend(name):
            return None
    except (RuntimeError, ValueError) as error:
        return str(error)


def _diffusers_backends() -> list[str]:
    """Names but for other accelerators, packed sequences, and the default, which is measured as softmax native."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    names = [backend.value for backend in AttentionBackendName]
    return [name for name in names if not any(word in name for word in ("varlen", "npu", "xla")) and name != "native"]


def patch_settings(kind: str, blocks: tuple[int, ...]) -> dict[str, Any]:
    """Arguments of :func:`apply_mhla` for one of ``PATCHES``; plain linear attention has one block."""
    if kind == CONTENT:
        return {"blocks": blocks, "sparse": "content"}
    layers = "2/3" if kind == HYBRID else "all"
    return {"blocks": (1,) * len(blocks) if kind == PLAIN else blocks, "layers": layers, "sparse": "none"}


def _hand_on(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_states


# ---- the case: a model at one size ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """What follows from the shapes of a case alone."""

    tokens: int
    weight_bytes: int
    choices: list[Choice]
    costs: dict[str, dict[str, Cost]]
    """Kind of attention → cost of every part of a forward."""

    def flops(self, kind: str) -> int | None:
        """Of a forward with a kind of attention; None where it cannot run."""
        return sum(cost.flops for cost in self.costs[kind].values()) if kind in self.costs else None


@dataclass(frozen=True)
class Case:
    """A transformer of a family at one size, which a patch gives another self-attention.

    Raises:
        ValueError: no layers, more than the model has, or any number of a model that is measured whole.
    """

    model: Any
    """Which: a :class:`Model`, or a :class:`Classifier`."""
    size: Size
    layers: int | None
    """Build only so many; None for all."""
    device: torch.device
    dtype: torch.dtype

    is_uniform: ClassVar[bool] = True
    """Whether the layers are all alike, so that the times of some tell the time of all, and its parts are known."""

    def __post_init__(self) -> None:
        if self.layers is None:
            return
        if not self.is_uniform:
            raise ValueError(
                f"layers={self.layers}: the layers of {self.model.name} differ, so it is measured whole; leave "
                "--layers out."
            )
        if not 1 <= self.layers <= self.all_layers:
            raise ValueError(
                f"layers={self.layers} must be from 1 to {self.all_layers}, the layers of {self.model.name}."
            )

    @property
    def all_layers(self) -> int:
        """Layers of the real model."""
        layers: int = self.model.layers
        return layers

    @property
    def is_cut(self) -> bool:
        """Whether times must be extrapolated to the whole model."""
        return self.layers is not None and self.layers < self.all_layers

    def build(self, device: torch.device | None = None) -> Any:
        """The model, on the device of the case or on another."""
        return build_transformer(self.model, self.size, self.layers, device or self.device, self.dtype)

    def inputs(self, model: Any, size: Size | None = None) -> dict[str, Any]:
        """Of the forward, on the model's device."""
        return make_forward_inputs(self.model, model, size or self.size, model.device, self.dtype)

    def count(self, only: Collection[str] | None = None) -> Counts:
        """Build the model on the meta device, where it costs nothing, and count it part by part.

        Args:
            only: names of self-attentions; all for None.
        """
        transformer = self.build(torch.device("meta"))
        inputs, family = self.inputs(transformer), get_family(transformer)
        grid, layers = family.grid_of_arguments(transformer, inputs), self.layers or self.all_layers
        choices = attention_choices(family, self.model, layers, grid, self.size.batch, self.device)
        choices = [choice for choice in choices if only is None or choice.name in only]
        costs: dict[str, dict[str, Cost]] = {}
        for choice in choices:
            if choice.absent is None and choice.kind not in costs:
                costs[choice.kind] = count_parts(self.variant(transformer, choice), inputs)
        return Counts(math.prod(grid), tensor_bytes(list(transformer.parameters())), choices, costs)

    def check(self, model: Any) -> None:
        """Compare MHLA in the model, and the sparse branch where it is measured, with the reference on a small input.

        Raises:
            IncorrectAttentionError: it is wrong here.
        """
        check_patched(self.variant(model, Choice("MHLA", "MHLA")), self.inputs(model, small_size(self.model)))
        shape = shape_of(self.model, self.model.blocks, self.model.name)
        if shape.block_size is not None:
            backend = fastest_backend(shape, self.device, self.dtype)
            check_operation(shape, self.device, self.dtype, backend, sparse=True)

    def variant(self, model: Any, choice: Choice) -> Any:
        """The model with another self-attention; what weights both have, they share."""
        family = get_family(model)
        tensors = (*model.parameters(), *model.buffers())
        variant = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        if choice == REST:
            for block in family.blocks_of(variant).values():
                block.forward = _hand_on  # DiT asks its first layer for the time embedding, so the layers must stay
        if choice.kind == "softmax" and family.own_attention != "softmax":
            for attn in family.self_attentions(variant).values():
                attn.set_processor(imported(family.softmax_processor or family.processor)())
        if choice.kind in PATCHES:
            apply_mhla(variant, **patch_settings(choice.kind, self.model.blocks))
        if choice.backend is not None and family.dispatches_attention:
            from diffusers.models.attention_dispatch import attention_backend

            with attention_backend("native"):  # which restores what set_attention_backend changes for all models
                variant.set_attention_backend(choice.backend)
        return variant

    def repeated(self, variant: Any) -> Iterable[Any]:
        """The layers, which are compiled one by one."""
        return get_family(variant).blocks_of(variant).values()

    def candidate(self, model: Any, choice: Choice, *, compiled: bool = False) -> Candidate:
        """A choice with the model that has it, or with the reason why there is none."""
        absent = choice.absent
        if absent is None and compiled and choice.backend in SOFTMAX_BACKENDS:
            absent = "torch.compile chooses PyTorch's backend itself"
        if absent is not None:
            return Candidate(choice, None, compiled, absent)
        variant = self.variant(model, choice)
        if compiled:
            for layer in self.repeated(variant):
                layer.compile(dynamic=False)
        return Candidate(choice, variant, compiled)

    def row(self, recorder: Recorder, outcome: Outcome, **what: Any) -> Row:
        """A row of this case."""
        return recorder.row(
            outcome,
            case=f"{self.model.name} {self.size}",
            model=self.model.name,
            frames=self.size.frames,
            height=self.size.height,
            width=self.size.width,
            batch=self.size.batch,
            **{"layers": self.layers or self.all_layers, "all_layers": self.all_layers} | what,
        )


# ---- VLT ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Classifier:
    """A configuration of VLT, and the sizes at which it is measured."""

    name: str
    preset: str
    """Method of ``VLTConfig`` that makes it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of it."""
    sides: tuple[int, ...] = (224, 384, 512, 1024, 2048)
    """Of squares, in pixels; the first alone on a CPU."""

    def config(self, **settings: Any) -> "VLTConfig":
        """Its configuration, with other settings where some are given."""
        from ..models import VLTConfig

        config: VLTConfig = getattr(VLTConfig, self.preset)(**(dict(self.settings) | settings))
        return config

    def choose_sizes(self, sizes: Collection[str] | None, device_type: str, batch: int = 1) -> list[Size]:
        """Sizes to measure it at: as asked for, such as "384x512", or its own, on a CPU the smallest of them.

        Raises:
            ValueError: a size that cannot be read or is too small, or no pictures.
        """
        own = self.sides[:1] if device_type == "cpu" else self.sides
        found = [Size(*parse_size(text), None, batch) for text in sizes or map(str, own)]
        for size in found:
            if min(size.height, size.width) < 32:  # of which the last stage makes one token
                raise ValueError(f"size={size.height}x{size.width} must be at least 32 pixels for {self.name}.")
        return found


_TINY = {
    "hidden_sizes": (8, 16, 16, 24),
    "depths": (1, 1, 1, 1),
    "num_attention_heads": (1, 2, 2, 3),
    "mhla": ({"blocks": [2, 2]}, {"blocks": [2, 2]}, None, None),
    "head_size": 32,
    "num_labels": 5,
}
CLASSIFIERS = {
    model.name: model
    for model in (
        Classifier("vlt-t", "vlt_t"),
        Classifier("vlt-s", "vlt_s"),
        Classifier("tiny-vlt", "vlt_t", _TINY, sides=(64,)),
    )
}


@dataclass(frozen=True)
class ClassifierCase(Case):
    """VLT at one size of pictures: its attention is a setting, so every variant is a model of its own."""

    model: Classifier
    is_uniform: ClassVar[bool] = False

    @property
    def all_layers(self) -> int:
        """Layers of all stages."""
        return sum(self.model.config().depths)

    def build(self, device: torch.device | None = None) -> "VLTForImageClassification":
        """The model with its own MHLA."""
        return self._build("MHLA", device or self.device)

    def inputs(self, model: Any, size: Size | None = None) -> dict[str, Any]:
        """Pictures, on the model's device."""
        chosen = size or self.size
        shape = chosen.batch, model.config.num_channels, chosen.height, chosen.width
        return {"pixel_values": torch.randn(shape, device=model.device, dtype=self.dtype), "return_dict": False}

    def count(self, only: Collection[str] | None = None) -> Counts:
        """Count the FLOPs of a forward and no bytes, see :func:`mhla_diffusers.models.counts.count`.

        Tokens, and the blocks of linear attentions, are the first stage's, whose grid is a quarter of the pixels.
        """
        from ..models.counts import count

        config, sides = self.model.config(), (self.size.height, self.size.width)
        tokens = math.prod(math.ceil(side / 4) for side in sides)
        blocks = [math.prod(own["blocks"]) for own in config.mhla if own is not None]
        others = f"{' and '.join(map(str, blocks))} blocks in the first stages, softmax in the others"
        choices = [
            *softmax_choices(tokens, config.num_attention_heads[0] * self.size.batch, self.device),
            Choice(PLAIN, PLAIN, blocks=1, note="in the stages that have MHLA, softmax in the others"),
            Choice("MHLA", "MHLA", blocks=blocks[0], note=others),
            Choice(CONTENT, CONTENT, blocks=blocks[0], note="lists chosen at every call"),
        ]
        choices = [choice for choice in choices if only is None or choice.name in only]
        costs, meta = {}, torch.device("meta")
        for kind in dict.fromkeys(choice.kind for choice in choices if choice.absent is None):
            counts = count(self._build(kind, meta), *sides)
            costs[kind] = {"all": Cost(2 * self.size.batch * (counts.weight_macs + counts.attention_macs), 0)}
        return Counts(tokens, tensor_bytes(list(self.build(meta).parameters())), choices, costs)

    def check(self, model: Any) -> None:
        """Compare MHLA of a fresh model with the reference, on 16 x 16 and 8 x 8 tokens in the stages that have it."""
        check_patched(self.variant(model, Choice("MHLA", "MHLA")), self.inputs(model, Size(64, 64, None)))

    def variant(self, model: Any, choice: Choice) -> "VLTForImageClassification":
        """A model with another attention, which shares the weights that both have."""
        variant = self._build(choice.kind, model.device)
        own = variant.state_dict()
        shared = {
            name: tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
            if name in own and tensor.shape == own[name].shape
        }
        variant.load_state_dict(shared, strict=False, assign=True)
        return variant

    def repeated(self, variant: Any) -> Iterable[Any]:
        """The layers of all stages."""
        return chain.from_iterable(stage.layers for stage in variant.vlt.stages)

    def _build(self, kind: str, device: torch.device) -> "VLTForImageClassification":
        """A model with seeded random weights and a kind of attention, in eval mode.

        Mixing matrices stay float32, as where ``from_pretrained`` casts.
        """
        from ..models import VLTForImageClassification

        settings: dict[str, dict[str, Any]] = {PLAIN: {"blocks": [1, 1]}, CONTENT: {"sparse": "content"}}
        more = settings.get(kind, {})
        own = self.model.config().mhla
        mhla = [None if stage is None or kind == "softmax" else dict(stage) | more for stage in own]
        torch.manual_seed(0)
        with device:
            model = VLTForImageClassification(self.model.config(mhla=mhla))
        kept = model._keep_in_fp32_modules_strict
        cast_weights(chain(model.named_parameters(), model.named_buffers()), self.dtype, kept)
        return model.eval()
