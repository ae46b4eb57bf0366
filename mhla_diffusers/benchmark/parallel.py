"""Traffic between processes that share an attention, and estimated time of a long video.

``mhla bench parallel`` counts: it runs the real code of diffusers' and this package's attention with simulated
processes and tensors without values. ``mhla bench plan`` divides these counts by given rates.
"""

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..attention import initial_mixing, mhla_attention
from ..attention.parallel.place import Parallel
from ..config import MHLAConfig
from ..families import Model
from ..patching.parallel import parallel_of
from ..reporting import write_table
from .correctness import random_rotary
from .forecast import Question, count_forwards, total
from .models import Size, build_transformer, family_of_model
from .parts import ATTENTION, tensor_bytes
from .shapes import Shape
from .shapes import shape_of as shape_on

SOFTMAX, MHLA = "softmax", "MHLA"
Variant = tuple[str, bool]
"""One of the two, and whether by heads (Ulysses), not round a ring."""
VARIANTS: tuple[Variant, ...] = tuple((name, by_heads) for name in (SOFTMAX, MHLA) for by_heads in (False, True))
"""Of which tables have a column."""
_FACTORS: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda size: 2 * (size - 1) / size,
    "all-gather": lambda size: size - 1,
    "reduce-scatter": lambda size: (size - 1) / size,
    "all-to-all": lambda size: (size - 1) / size,
    "broadcast": lambda size: (size - 1) / size,
    "send": lambda size: 1,
}
"""Kind of collective → what a process of so many sends, in sizes of what it brings."""
_SEND_NOTHING = ("waittensor", "wraptensorautograd", "barrier", "monitoredbarrier", "recv")


class Traffic(TorchDispatchMode):
    """Within the context the bytes of every collective of this thread are added up, forward and backward.

    What is told is what an algorithm sends that wastes no bandwidth, of P processes, for each of them: of an all-reduce
    2 (P - 1) / P of the tensor, of an all-gather P - 1 times the own part, of a reduce-scatter (P - 1) / P of what is
    brought, of an all-to-all the rows that others are due to get. ``tests/parallel/test_traffic.py`` compares
    this with the bytes that pass gloo's loopback device. PyTorch's own ``CommDebugMode`` counts calls and no bytes.

    Raises:
        NotImplementedError: on a collective that is none of these.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.groups: dict[str, float] = {}
        """Name of a process group → bytes that this process sends in it."""
        self.delivered = 0
        """Bytes of the tensors that collectives make; those that fill tensors which are given do not count."""

    @property
    def bytes(self) -> int:
        """That this process sends in all."""
        return round(sum(self.groups.values()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name: str = func._schema.name.split("::")[1].replace("_", "")
        is_collective = func.namespace in ("_c10d_functional", "_c10d_functional_autograd", "c10d")
        if is_collective and not name.startswith(_SEND_NOTHING):
            given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | (kwargs or {})
            group = _group(given)
            self.groups[group.group_name] = self.groups.get(group.group_name, 0.0) + _sent(func, given, group)
            self.delivered += 0 if func._schema.is_mutable else tensor_bytes(output)
        return output


def _sent(func: Any, given: Mapping[str, Any], group: ProcessGroup) -> float:
    """Bytes that this process sends in a collective with these arguments."""
    name = func._schema.name.split("::")[1].replace("_", "")
    kind = next((kind for kind in _FACTORS if name.startswith(kind.replace("-", ""))), None)
    if kind is None:
        kinds = ", ".join(_FACTORS)
        raise NotImplementedError(f"What {func} sends is not counted; collectives of these kinds are: {kinds}.")
    brought = next(
        given[one] for one in ("input", "inputs", "input_tensor", "input_tensors", "tensors") if one in given
    )
    rows, tensors = list(given.get("input_split_sizes") or ()), tree_leaves(brought)
    if kind == "all-to-all" and rows:  # in one tensor, so many rows for each process
        return tensor_bytes(brought) * (sum(rows) - rows[group.rank()]) // max(1, sum(rows))
    if kind == "all-to-all" and len(tensors) > 1:  # a tensor for each
        return tensor_bytes(brought) - tensor_bytes(tensors[group.rank()])
    return _FACTORS[kind](group.size()) * tensor_bytes(brought)


def _group(given: Mapping[str, Any]) -> ProcessGroup:
    """Of an operator, which has its name or itself, perhaps as TorchScript wraps it."""
    group = given.get("group_name", given.get("process_group"))
    if isinstance(group, str):
        found: ProcessGroup = cast(Any, dist.distributed_c10d)._resolve_process_group(group)
        return found
    return group if isinstance(group, ProcessGroup) else ProcessGroup.unbox(group)


# ---- the processes, really there or pretended -----------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How many processes share an attention, and how."""

    ring: int = 1
    """Processes that keep their tokens."""
    ulysses: int = 1
    """Processes that exchange tokens for heads."""

    @property
    def processes(self) -> int:
        """All of them."""
        return self.ring * self.ulysses

    def __str__(self) -> str:
        named = (("ring", self.ring), ("Ulysses", self.ulysses))
        return " x ".join(f"{name} {count}" for name, count in named if count > 1) or "alone"


@dataclass(frozen=True)
class World:
    """Arguments that describe the processes to an attention."""

    config: Any
    """diffusers' ``ParallelConfig``."""
    parallel: Parallel
    """The same in the words of :func:`mhla_diffusers.attention.mhla_attention`."""


def make_world(layout: Layout) -> World:
    """Of the default process group, which has been made and has as many processes."""
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig

    degrees = (layout.ring, layout.ulysses)
    mesh = dist.device_mesh.init_device_mesh("cpu", degrees, mesh_dim_names=("ring", "ulysses"))
    config = ParallelConfig(ContextParallelConfig(ring_degree=layout.ring, ulysses_degree=layout.ulysses))
    config.setup(dist.get_rank(), layout.processes, torch.device("cpu"), mesh=mesh)
    return World(config, cast(Parallel, parallel_of(config)))


@contextmanager
def pretended(layout: Layout, rank: int = 0) -> Iterator[World]:
    """Within the context this process is one of several that are not there: what it would send can be counted.

    With tensors on the meta device nothing is computed and nothing held, so that no size is too large.

    Raises:
        RuntimeError: it is one of several already.
    """
    # torch's own backend for such processes, which it has for tests
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("This process is one of several already; count in a process of its own, without torchrun.")
    dist.init_process_group("fake", rank=rank, world_size=layout.processes, store=FakeStore())
    try:
        yield make_world(layout)
    finally:
        dist.destroy_process_group()


# ---- one attention, and what is sent for it -------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnShare:
    """What one process has of an attention."""

    shape: Shape
    world: World
    tensors: dict[str, torch.Tensor]
    """Query, key and value, each (1, own tokens, H, D), and the mixing matrices (H, M, M) float32."""
    rotary: tuple[torch.Tensor, torch.Tensor] | None
    """(cos, sin), each (1, own tokens, 1, D), where the model has RoPE."""


def make_share(shape: Shape, world: World, device: torch.device, dtype: torch.dtype, backward: bool) -> OwnShare:
    """Random values of this process's tokens, a mixing matrix per head as patches have it, and RoPE.

    Raises:
        ValueError: the processes do not divide the tokens, or the heads.
    """
    first, count = world.parallel.own_share(shape.tokens)
    world.parallel.head_counts(shape.heads)
    size = (1, count, shape.heads, shape.head_dim)
    tensors = {name: torch.randn(size, device=device, dtype=dtype) for name in ("query", "key", "value")}
    tensors["mixing"] = initial_mixing(shape.blocks).to(device).repeat(shape.heads, 1, 1)
    rotary = None
    if shape.rope:
        cos, sin = random_rotary(shape, device)
        rotary = cos[:, first : first + count], sin[:, first : first + count]
    return OwnShare(shape, world, {name: x.requires_grad_(backward) for name, x in tensors.items()}, rotary)


def attend(attention: str, share: OwnShare) -> torch.Tensor:
    """The output of softmax, by diffusers, or of MHLA for this process's tokens, (1, own tokens, H, D)."""
    if attention == MHLA:
        shape = share.shape
        given: dict[str, Any] = {**share.tensors, "grid": shape.grid, "blocks": shape.blocks}
        if share.rotary is not None:
            given |= {"rotary": share.rotary}
        return mhla_attention(**given, parallel=share.world.parallel)
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    inputs = [share.tensors[name] for name in ("query", "key", "value")]
    # the backend with a log-sum-exp, which a ring needs, that has shapes without a GPU
    backend = "native" if inputs[0].device.type == "cpu" else "_native_flash"
    return dispatch_attention_fn(*inputs, backend=backend, parallel_config=share.world.config)


@dataclass(frozen=True)
class Sent:
    """Bytes of one attention, of one process."""

    ring: int
    """That it sends to processes of its ring."""
    ulysses: int
    """That it sends to processes with which it exchanges tokens for heads."""
    delivered: int
    """Of what collectives deliver to it."""

    @property
    def bytes(self) -> int:
        """All that it sends."""
        return self.ring + self.ulysses


@cache
def sent(attention: str, shape: Shape, layout: Layout, backward: bool) -> Sent:
    """What the process in the middle sends for one attention in bfloat16, of which shapes alone are computed.

    Raises:
        ValueError: the processes do not divide the tokens and both degrees are more than one, or not the heads.
    """
    with warnings.catch_warnings(), pretended(layout, layout.processes // 2) as world:
        # diffusers' ring calls a collective by a name that PyTorch has deprecated
        warnings.filterwarnings("ignore", message=".*all_gather_tensor.*is deprecated", category=FutureWarning)
        if shape.tokens % layout.processes and layout.ulysses == 1:
            # shares differ by a token, as with ring_anything=True, and softmax is given as many as the longest has
            world = replace(world, parallel=replace(world.parallel, anything=True))
        share = make_share(shape, world, torch.device("meta"), torch.bfloat16, backward)
        with Traffic() as traffic:
            output = attend(attention, share)
            if backward:
                output.backward(torch.empty_like(output))
        groups = (world.parallel.ring, world.parallel.ulysses)
        of_ring, of_heads = (round(traffic.groups.get(one.name, 0)) if one.size > 1 else 0 for one in groups)
    return Sent(of_ring, of_heads, traffic.delivered)


def name_of(variant: Variant) -> str:
    """As tables call it."""
    return f"{variant[0]}, {'Ulysses' if variant[1] else 'ring'}"


def shape_of(model: Model, size: Size) -> Shape:
    """The self-attention of a model at a size, with the block counts that it is measured with."""
    question = Question(model, size, family_of_model(model).default_config)
    return shape_on(model, question.grid, f"{model.name}-{size}")


def count(shape: Shape, processes: int) -> dict[Variant, tuple[int, int]]:
    """Variant → bytes of a forward, and of forward and backward; heads that are not divided are not exchanged.

    Raises:
        ValueError: the processes do not divide the tokens.
    """
    return {
        variant: (_sent_by(variant, shape, processes, False), _sent_by(variant, shape, processes, True))
        for variant in VARIANTS
        if not variant[1] or shape.heads % processes == 0
    }


def _sent_by(variant: Variant, shape: Shape, processes: int, backward: bool) -> int:
    layout = Layout(ulysses=processes) if variant[1] else Layout(ring=processes)
    return sent(variant[0], shape, layout, backward).bytes


def crossing(shape: Shape, processes: int, rival: Variant, backward: bool) -> int | None:
    """From how many tokens on MHLA round a ring sends less than a rival, by halving over the frames; None for none.

    Its bytes do not grow with the frames, of which there are as many as blocks at least, and a million tokens at most.
    """

    def at(frames: int) -> Shape:
        return replace(shape, grid=(frames, *shape.grid[1:]))

    def less(frames: int) -> bool:
        own, other = (_sent_by(one, at(frames), processes, backward) for one in ((MHLA, False), rival))
        return own < other

    low = high = shape.blocks[0]
    while not less(high):  # sizes far beyond the crossing take long to count
        if at(high).tokens > 2**20:
            return None
        low, high = high + 1, 2 * high
    return at(low + bisect_left(range(low, high), True, key=less)).tokens


def write_sent(found: Iterable[tuple[Model, Shape, int, Mapping[Variant, tuple[int, int]]]], folder: Path) -> str:
    """Bytes that one process sends, as ``sent.md`` and ``sent.csv``; the Markdown is returned."""
    rows = []
    for model, shape, processes, sizes in found:
        for index, name in enumerate(("forward", "forward+backward")):
            cells = (f"{sizes[variant][index] / 1e6:,.1f}" if variant in sizes else "-" for variant in VARIANTS)
            rows.append((model.name, str(processes), f"{shape.tokens:,}", name, *cells))
    header = ("model", "processes", "tokens", "pass", *(f"{name_of(variant)}, MB" for variant in VARIANTS))
    return write_table(header, rows, folder, "sent")


def crossings(model: Model, size: Size, processes: int) -> list[tuple[str, ...]]:
    """Rows of :func:`write_crossings` of a model of videos, at a height and width."""
    rows, shape = [], shape_of(model, size)
    for rival in ((SOFTMAX, False), (SOFTMAX, True)):
        if not rival[1] or shape.heads % processes == 0:
            tokens = (crossing(shape, processes, rival, backward) for backward in (False, True))
            cells = ("none looked at" if one is None else f"{one:,}" for one in tokens)
            rows.append((model.name, str(processes), name_of(rival), *cells))
    return rows


def write_crossings(rows: Sequence[tuple[str, ...]], folder: Path) -> str:
    """From which N on MHLA round a ring sends less than softmax, as ``crossings.md`` and ``crossings.csv``."""
    header = ("model", "processes", "softmax", "less from, forward", "less from, forward+backward")
    return write_table(header, rows, folder, "crossings")


# ---- the plan: what is counted, over what is stated -----------------------------------------------------------------


@dataclass(frozen=True)
class Machines:
    """Assumed numbers, not measured.

    Raises:
        ValueError: a number that is not allowed.
    """

    tflops: float = 989.0
    """TFLOP/s of a GPU; the default is dense bfloat16 in NVIDIA's data sheet of the H100 SXM."""
    utilisation: float = 0.4
    """Part of it that is reached, arithmetic of all kinds taken together; the default is near the 38 to 43 % that "The
    Llama 3 Herd of Models" (2024), Table 4, tells of training on H100s."""
    nvlink: float = 450.0
    """GB/s that a GPU sends within its machine; the default is one direction of the data sheet's 900 GB/s."""
    infiniband: float = 50.0
    """GB/s that a GPU sends to other machines; the default is one NDR port of 400 Gbit/s for each GPU."""
    gpus_per_machine: int = 8

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name}={value} must be positive.")
        if self.utilisation > 1:
            raise ValueError(f"utilisation={self.utilisation} is a part of tflops, so at most 1.")

    def __str__(self) -> str:
        return (
            f"Stated, not measured: a GPU computes at {self.utilisation:.0%} of {self.tflops:g} TFLOP/s and sends "
            f"{self.nvlink:g} GB/s within a machine of {self.gpus_per_machine}, {self.infiniband:g} GB/s to others; "
            "it does not send while it computes."
        )

    def compute_seconds(self, flops: float) -> float:
        """Of one GPU."""
        return flops / (self.tflops * 1e12 * self.utilisation)

    def sending_seconds(self, layout: Layout, ring_bytes: int, ulysses_bytes: int) -> float:
        """Of one GPU; a group of processes of which one is in another machine is as slow as what joins the machines.

        Processes that exchange heads are neighbours, so they are in one machine where it holds a multiple of them.
        """
        beside = layout.ulysses <= self.gpus_per_machine and self.gpus_per_machine % layout.ulysses == 0
        ring_rate = self.nvlink if layout.processes <= self.gpus_per_machine else self.infiniband
        heads_rate = self.nvlink if beside else self.infiniband
        return ring_bytes / (ring_rate * 1e9) + ulysses_bytes / (heads_rate * 1e9)


@dataclass(frozen=True)
class Planned:
    """One forward of one sample of all layers, on so many GPUs."""

    question: Question
    attention: str
    layout: Layout
    """Of those that diffusers allows the one that sends for the least time."""
    compute: float
    """Seconds."""
    sending: float
    """Seconds, as if nothing were computed meanwhile."""
    weight_bytes: int
    """All weights, which every GPU holds."""
    attention_bytes: int
    """Query, key, value and output of one attention, and what collectives deliver to it."""


def plan(
    model: Model, size: Size, gpus: Sequence[int], machines: Machines, config: MHLAConfig | None = None
) -> list[Planned]:
    """Softmax and a patch on every number of GPUs.

    Without settings of a patch it is MHLA in all layers with the model's block counts.

    Raises:
        ValueError: a number that is not allowed, or a patch that does not fit.
    """
    if min(gpus) < 1:
        raise ValueError(f"gpus={min(gpus)} must be at least 1.")
    every = MHLAConfig(blocks=model.blocks, mixing_per_head=True, layers="all", sparse="none", clamp_blocks=True)
    config = config or every
    for name, none in (("sparse", "none"), ("convolution", None)):
        if getattr(config, name) != none:
            raise ValueError(
                f"What a patch with {name}={getattr(config, name)!r} sends is not counted; the plan takes patches with "
                f"{name}={none!r}."
            )
    question = Question(model, size, config)
    unpatched, patched = count_forwards(question, torch.bfloat16)
    softmax, mhla = unpatched[ATTENTION].flops, patched[ATTENTION].flops
    others, part = total(unpatched).flops - softmax, question.layers / model.layers
    flops = {SOFTMAX: others + softmax, MHLA: others + part * mhla + (1 - part) * softmax}
    # the layers that are patched as the attention has it, and all others with softmax
    layers = {SOFTMAX: {SOFTMAX: model.layers}, MHLA: {MHLA: question.layers, SOFTMAX: model.layers - question.layers}}
    shape = replace(shape_of(model, size), blocks=config.blocks_on(question.grid))
    transformer = build_transformer(model, size, None, torch.device("meta"), torch.bfloat16)
    weights = tensor_bytes(list(transformer.parameters()))

    def on(attention: str, layout: Layout) -> Planned:
        own = -(-question.tokens // layout.processes)
        shared = {name: count for name, count in layers[attention].items() if count and layout.processes > 1}
        found = {name: sent(name, shape, layout, False) for name in shared}
        ring, ulysses = (sum(shared[name] * getattr(found[name], one) for name in found) for one in ("ring", "ulysses"))
        return Planned(
            question,
            attention,
            layout,
            compute=machines.compute_seconds(flops[attention] * own / question.tokens),
            sending=machines.sending_seconds(layout, ring, ulysses),
            weight_bytes=weights,
            attention_bytes=4 * own * shape.heads * shape.head_dim * torch.bfloat16.itemsize
            + max((one.delivered for one in found.values()), default=0),
        )

    return [
        min(
            (on(attention, layout) for layout in layouts_of(number, shape, machines.gpus_per_machine)),
            key=lambda one: one.sending,
        )
        for number in gpus
        for attention in (SOFTMAX, MHLA)
    ]


def layouts_of(gpus: int, shape: Shape, gpus_per_machine: int) -> list[Layout]:
    """Degrees that diffusers allows, exchanging heads within a machine alone.

    Tokens that the GPUs do not divide take a ring (``ring_anything=True``), which allows no other degree beside it.
    """
    if shape.tokens % gpus:
        return [Layout(ring=gpus)]
    degrees = (degree for degree in range(1, gpus + 1) if gpus % degree == 0 and shape.heads % degree == 0)
    return [Layout(gpus // degree, degree) for degree in degrees if degree <= gpus_per_machine]


def write_plan(found: Iterable[Planned], folder: Path) -> str:
    """Seconds of one forward and what a GPU holds, as ``plan.md`` and ``plan.csv``."""

    def seconds(value: float) -> str:
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    header = ("model", "frames", "GPUs", "attention", "shared by", "computing, s", "sending, s", "sending")
    rows = [
        (
            one.question.model.name,
            str(one.question.size.frames or 1),
            str(one.layout.processes),
            one.attention,
            str(one.layout),
            seconds(one.compute),
            seconds(one.sending),
            f"{one.sending / (one.compute + one.sending):.0%}",
            f"{one.weight_bytes / 1e9:.1f}",
            f"{one.attention_bytes / 1e9:.2f}",
        )
        for one in found
    ]
    return write_table((*header, "weights, GB", "one attention, GB"), rows, folder, "plan")
