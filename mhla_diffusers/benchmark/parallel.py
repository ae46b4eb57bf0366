"""One attention that several processes share: bytes that each sends, and time, softmax beside MHLA.

``torchrun --no-python --nproc_per_node 8 mhla bench parallel``
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..attention import initial_mixing, mhla_attention
from ..attention.parallel.place import Parallel
from ..patching.parallel import parallel_of
from ..settings import check_value
from .measure import Results, Row, measured_row, peak_bytes, refused_row, synchronize
from .operation import STAGES
from .shapes import Shape, random_rotary

SOFTMAX, MHLA = "softmax", "MHLA"
_FACTORS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda size: 2 * (size - 1) / size,
    "allgather": lambda size: size - 1,
    "reducescatter": lambda size: (size - 1) / size,
    "alltoall": lambda size: (size - 1) / size,
    "broadcast": lambda size: (size - 1) / size,
    "send": lambda size: 1,
}
"""Kind of collective → what a process of so many sends, in sizes of what it brings."""
_SEND_NOTHING = ("waittensor", "wraptensorautograd", "barrier", "monitoredbarrier", "recv")


class Traffic(TorchDispatchMode):
    """Within the context the bytes that this process sends in collectives are added up, forward and backward.

    Counted are the minimum bytes of bandwidth-optimal collectives of P processes: 2 (P - 1) / P of the tensor for an
    all-reduce, P - 1 times its own part for an all-gather, (P - 1) / P of what is brought for a reduce-scatter, the
    rows for others for an all-to-all. PyTorch's own ``CommDebugMode`` counts calls and no bytes.

    Raises:
        NotImplementedError: on a collective that is none of these.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0.0
        """That this process sends."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name: str = func._schema.name.split("::")[1].replace("_", "")
        is_collective = func.namespace in ("_c10d_functional", "_c10d_functional_autograd", "c10d")
        if is_collective and not name.startswith(_SEND_NOTHING):
            given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | (kwargs or {})
            self.bytes += _sent(name, given)
        return output


def _sent(name: str, given: Mapping[str, Any]) -> float:
    """Count the bytes that this process sends in a collective with these arguments."""
    kind = next((kind for kind in _FACTORS if name.startswith(kind)), None)
    if kind is None:
        raise NotImplementedError(
            f"What {name} sends is not counted; collectives of these kinds are: {', '.join(_FACTORS)}."
        )
    group = given.get("group_name", given.get("process_group"))
    if isinstance(group, str):
        group = cast(Any, dist.distributed_c10d)._resolve_process_group(group)
    elif not isinstance(group, ProcessGroup):  # as TorchScript wraps it
        group = ProcessGroup.unbox(group)
    names = ("input", "inputs", "input_tensor", "input_tensors", "tensors")
    tensors = tree_leaves(next(given[one] for one in names if one in given))
    size = sum(x.numel() * x.itemsize for x in tensors)
    rows = list(given.get("input_split_sizes") or ())
    if kind == "alltoall" and rows:  # in one tensor, so many rows for each process
        return size * (sum(rows) - rows[group.rank()]) / max(1, sum(rows))
    if kind == "alltoall" and len(tensors) > 1:  # a tensor for each
        return size - tensors[group.rank()].numel() * tensors[group.rank()].itemsize
    return _FACTORS[kind](group.size()) * size


def make_config(ring: int, ulysses: int, device_type: str = "cpu") -> Any:
    """Make diffusers' ``ParallelConfig`` for the default process group, which must be there.

    Args:
        ring: processes that keep their tokens.
        ulysses: processes that exchange tokens for heads; times ``ring`` all processes.
        device_type: cpu or cuda.
    """
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig

    mesh = dist.device_mesh.init_device_mesh(device_type, (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    config = ParallelConfig(ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses))
    config.setup(dist.get_rank(), ring * ulysses, torch.device(device_type), mesh=mesh)
    return config


def make_share(shape: Shape, config: Any, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Make the arguments of :func:`mhla_attention` for random values of this process's tokens.

    Query, key and value are (1, own tokens, H, D), with a mixing matrix per head as patches have it, and RoPE.

    Raises:
        ValueError: the processes do not divide the tokens, or the heads.
    """
    parallel = cast(Parallel, parallel_of(config))
    first, count = parallel.own_share(shape.tokens)
    parallel.head_counts(shape.heads)
    size = (1, count, shape.heads, shape.head_dim)
    share: dict[str, Any] = {name: torch.randn(size, device=device, dtype=dtype) for name in ("query", "key", "value")}
    share["mixing"] = initial_mixing(shape.blocks).to(device).repeat(shape.heads, 1, 1)
    if shape.rope:
        share["rotary"] = tuple(table[:, first : first + count] for table in random_rotary(shape, device))
    return {**share, "grid": shape.grid, "blocks": shape.blocks}


def attend(attention: str, share: Mapping[str, Any], config: Any) -> torch.Tensor:
    """Attend by diffusers' softmax or by MHLA with this process's tokens: (1, own tokens, H, D)."""
    if attention == MHLA:
        return mhla_attention(**share, parallel=parallel_of(config))
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    inputs = [share[name] for name in ("query", "key", "value")]
    # a ring needs a backend that gives the log-sum-exp
    backend = "native" if inputs[0].device.type == "cpu" else "_native_flash"
    return dispatch_attention_fn(*inputs, backend=backend, parallel_config=config)


def benchmark_parallel(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    rings: Sequence[int],
    repetitions: int,
    results: Results | None,
) -> None:
    """Count and time softmax and MHLA over all processes in turns, forward and backward; each process calls this.

    Args:
        shape: the attention.
        device: of this process.
        dtype: of query, key and value.
        rings: processes of a ring, one number after the other; the others exchange heads.
        repetitions: calls of each, after two to warm up.
        results: of the first process, which gets a row per attention, ring and pass; None in all others.

    Raises:
        ValueError: a ring that does not divide the processes, or no repetitions.
    """
    processes = dist.get_world_size()
    for ring in rings:
        if ring < 1 or processes % ring:
            raise ValueError(f"ring={ring} must divide the {processes} processes.")
    check_value("repetitions", repetitions, int, above=0)
    runs: dict[tuple[str, str], Callable[[], object]] = {}
    rows: dict[tuple[str, str], Row] = {}
    for ring, attention, stage in itertools.product(rings, (SOFTMAX, MHLA), STAGES):
        degrees = (("ring", ring), ("Ulysses", processes // ring))
        layout = " x ".join(f"{name} {size}" for name, size in degrees if size > 1)
        key = f"{attention}, {layout}", stage
        try:
            config = make_config(ring, processes // ring, device.type)
            run = _make_run(attention, make_share(shape, config, device, dtype), config, stage)
            with Traffic() as traffic:
                run()
        except (RuntimeError, ValueError) as error:  # the same one in all processes
            rows[key] = refused_row(key[0], error)
        else:
            runs[key] = run
            rows[key] = Row(key[0], sent_bytes=round(traffic.bytes), peak_bytes=peak_bytes(run, device))
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(repetitions):
        for key, run in runs.items():
            synchronize(device)
            dist.barrier()
            start = time.perf_counter()
            run()
            synchronize(device)
            seconds[key].append(time.perf_counter() - start)
    if results is None:
        return
    for key, values in seconds.items():
        timed = measured_row(key[0], values, rows[key].peak_bytes)
        rows[key] = replace(timed, sent_bytes=rows[key].sent_bytes)
    case = f"{shape.name}, {processes} processes"
    for (name, stage), row in rows.items():
        is_softmax = name.startswith(SOFTMAX)
        rows[name, stage] = replace(row, case=case, stage=stage, baseline=is_softmax, tokens=shape.tokens)
    results.add(list(rows.values()))


def _make_run(attention: str, share: Mapping[str, Any], config: Any, stage: str) -> Callable[[], object]:
    """Return a forward, or one with the gradients of query, key, value and MHLA's mixing matrices."""
    if stage == "forward":
        return torch.no_grad()(partial(attend, attention, share, config))
    names = ("query", "key", "value", *(("mixing",) if attention == MHLA else ()))
    leaves = [share[name].requires_grad_() for name in names]
    upstream = torch.ones_like(leaves[0])
    return lambda: torch.autograd.grad(attend(attention, share, config), leaves, upstream)
