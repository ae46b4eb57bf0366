"""The same transformer with different self-attentions, all on one set of weights: what is timed beside each other."""

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from ..attention.layout import block_count
from ..config import MHLAConfig
from ..families import Family, Model, find_family, get_family
from ..patching import apply_mhla
from .shapes import SOFTMAX_BACKENDS, why_no_softmax
from .timing import Outcome, Variant

PLAIN = "plain linear"
HYBRID = "MHLA hybrid 2/3"
CONTENT = "MHLA, sparse, by content"
"""Beside MHLA the sparse branch, whose lists are chosen at every call."""
EARLIER = ("MHLA, exact tiles by content", "MHLA, exact tiles")
"""In results that ship: the sparse branch before this one, over boxes of the grid, by content and with lists given."""
COMPILED = " + torch.compile"
"""Ends the name of a candidate whose repeated blocks are compiled."""
LINEAR_KINDS = (PLAIN, "MHLA", HYBRID)
"""Patches; the hybrid keeps the model's own attention in every third layer."""
PATCHES = (*LINEAR_KINDS, CONTENT)
"""All of them; the sparse branch is for models whose own attention is softmax."""


@dataclass(frozen=True)
class Choice:
    """One self-attention to measure."""

    name: str
    kind: str
    """softmax, own, or one of ``PATCHES``."""
    baseline: bool
    blocks: int | None = None
    """M of the replaced layers; None for softmax."""
    backend: str | None = None
    """Of softmax attention: diffusers' name, where the family dispatches attention, or a key of ``SOFTMAX_BACKENDS``;
    None for the default.
    """
    absent: str | None = None
    """Why it cannot run here."""
    note: str = ""
    """What is to be known of its times."""


REST = Choice("without layers", "without layers", baseline=False)
"""What is left of a transformer when its layers hand on what they are given."""


@dataclass
class Candidate:
    """A transformer with one self-attention, on its way from a choice to a time."""

    choice: Choice
    compiled: bool
    model: Any
    """Shares its weights with all others; None if it cannot run here."""
    run: Variant
    """What is timed: why there is nothing, until a model is there and is given its inputs."""
    outcome: Outcome = Outcome("absent", reason="not measured")

    @property
    def name(self) -> str:
        """Of the variant in results."""
        return self.choice.name + COMPILED if self.compiled else self.choice.name

    @property
    def context(self) -> Callable[[], AbstractContextManager[object]]:
        """What the model must run in: the choice of PyTorch's backend, where diffusers does not pass it on."""
        family = find_family(self.model)
        if self.choice.backend is None or (family is not None and family.dispatches_attention):
            return nullcontext
        return partial(sdpa_kernel, [SOFTMAX_BACKENDS[self.choice.backend]])

    def forward(self, inputs: dict[str, Any]) -> Callable[[], object]:
        """One forward without gradients."""
        context = self.context

        @torch.no_grad()
        def run() -> object:
            with context():
                return self.model(**inputs)

        return run

    def training_step(self, inputs: dict[str, Any], optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """Forward, backward and optimizer step."""
        context = self.context

        def run() -> None:
            try:
                with context():
                    output = self.model(**inputs)[0]
                    output.float().square().mean().backward()
                optimizer.step()
            finally:
                optimizer.zero_grad(set_to_none=True)  # also after running out of memory

        return run


def why_not_compiled(choice: Choice) -> str | None:
    """Why a choice is not to be measured with its layers compiled; None if it is."""
    return "torch.compile chooses PyTorch's backend itself" if choice.backend in SOFTMAX_BACKENDS else None


def attention_choices(
    family: Family, model: Model, layers: int, grid: tuple[int, ...], batch: int, device: torch.device
) -> list[Choice]:
    """All self-attentions that a transformer can be measured with; the first is its own.

    Args:
        family: of the model.
        model: which.
        layers: so many are built.
        grid: of its tokens.
        batch: samples per forward.
        device: where it will run.
    """
    softmax_is_own = family.own_attention == "softmax"
    choices = [] if softmax_is_own else [Choice(f"own {family.own_attention}", "own", baseline=True, blocks=1)]
    tokens, heads = math.prod(grid), model.heads * batch
    choices += softmax_choices(tokens, heads, device, baseline=softmax_is_own, dispatched=family.dispatches_attention)
    count = math.prod(model.blocks)
    cut = f"{layers} of {model.layers} layers cannot stand for two of every three; --layers must be a multiple of 3"
    too_few = layers != model.layers and layers % 3 != 0
    choices += [
        Choice(PLAIN, PLAIN, baseline=False, blocks=1),
        Choice("MHLA", "MHLA", baseline=False, blocks=count),
        Choice(HYBRID, HYBRID, baseline=False, blocks=count, absent=cut if too_few else None),
    ]
    if not softmax_is_own:
        return choices
    config = family.default_config.replace(**patch_settings(CONTENT, model.blocks))
    return [*choices, Choice(CONTENT, CONTENT, baseline=False, blocks=count, note=content_note(config, grid))]


def softmax_choices(
    tokens: int, heads: int, device: torch.device, *, baseline: bool = True, dispatched: bool = False
) -> list[Choice]:
    """Softmax attention as it comes, and through each backend.

    Args:
        tokens: N, of the attention with the most pairs of tokens.
        heads: H of it, times the batch size.
        device: where it will run.
        baseline: whether softmax is the model's own attention.
        dispatched: whether diffusers' backends reach the attentions; else each of PyTorch's is chosen.
    """
    choices = [Choice("softmax native", "softmax", baseline)]
    for backend in _diffusers_backends() if dispatched else SOFTMAX_BACKENDS:
        absent = why_no_backend(backend) if dispatched else None
        absent = absent or why_no_softmax(backend.removeprefix("_native_"), device, tokens, heads)
        is_exact = "sage" not in backend  # which multiplies in 8 bits
        choices.append(Choice(f"softmax {backend}", "softmax", baseline and is_exact, backend=backend, absent=absent))
    return choices


def content_note(config: MHLAConfig, grid: tuple[int, ...]) -> str:
    """What is to be known of the times of the sparse branch.

    Args:
        config: of the patch.
        grid: token grid; of few blocks, one for every query block is more than the density.
    """
    blocks = block_count(grid, config.block_size)
    of_pairs = f"{config.listed_on(grid):.1%} of the pairs of {blocks} blocks of {config.block_size} tokens"
    return f"{of_pairs}, chosen at every call"


def why_no_backend(name: str) -> str | None:
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


def make_variant(transformer: Any, model: Model, choice: Choice) -> Any:
    """A transformer with another self-attention that shares all weights with ``transformer``."""
    family = get_family(transformer)
    tensors = (*transformer.parameters(), *transformer.buffers())
    variant = copy.deepcopy(transformer, {id(tensor): tensor for tensor in tensors})
    if choice == REST:
        for block in family.blocks_of(variant).values():
            block.forward = _hand_on  # DiT asks its first layer for the time embedding, so the layers must stay
    if choice.kind == "softmax" and family.own_attention != "softmax":
        for attn in family.self_attentions(variant).values():
            attn.set_processor(family.softmax_processor())
    if choice.kind in PATCHES:
        apply_mhla(variant, **patch_settings(choice.kind, model.blocks))
    if choice.backend is not None and family.dispatches_attention:
        from diffusers.models.attention_dispatch import attention_backend

        with attention_backend("native"):  # which restores what set_attention_backend changes for all models
            variant.set_attention_backend(choice.backend)
    return variant


def patch_settings(kind: str, blocks: tuple[int, ...]) -> dict[str, Any]:
    """Arguments of :func:`apply_mhla`.

    Args:
        kind: one of ``PATCHES``.
        blocks: block counts of MHLA; plain linear attention has one block.
    """
    if kind == CONTENT:
        return {"blocks": blocks, "sparse": "content"}
    layers = "2/3" if kind == HYBRID else "all"
    return {"blocks": (1,) * len(blocks) if kind == PLAIN else blocks, "layers": layers, "sparse": "none"}


def _hand_on(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_states
