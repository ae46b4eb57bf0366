"""One attention that several processes share: bytes that each sends, and time, softmax beside MHLA.

``torchrun --no-python --nproc_per_node 8 mhla bench parallel``
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from ..attention import initial_mixing, mhla_attention
from ..attention.parallel.place import Parallel
from ..patching.parallel import parallel_of
from .cases import Shape
from .measure import Results, Row, Runs, time_interleaved
from .operator import MHLA, SOFTMAX, STAGES


def sent_bytes(attention: str, shape: Shape, ring: int, ulysses: int, itemsize: int, *, backward: bool = False) -> int:
    """Return the minimum bytes that each process sends with bandwidth-optimal collectives, as docs/scale.md derives.

    Args:
        attention: ``SOFTMAX`` or ``MHLA``.
        shape: of the whole attention, whose tokens the processes divide.
        ring: processes that keep their tokens.
        ulysses: processes that exchange tokens for heads.
        itemsize: bytes per number of query, key and value; states and tables of RoPE are float32.
        backward: count the backward pass too.
    """
    own = shape.tokens * shape.heads * shape.head_dim / (ring * ulysses)  # numbers of a query that a process holds
    passes = 2 if backward else 1
    exchanged = 4 * itemsize * own * (ulysses - 1) / ulysses  # query, key, value and output
    if attention == SOFTMAX:
        gathered = 2 * itemsize * own * (ring - 1)  # keys and values, again in the backward pass
        # there their gradients go once round the ring in float32
        returned = 2 * 4 * own * ring if backward and ring > 1 else 0
        return round(passes * (exchanged + gathered) + returned)
    states = math.prod(shape.blocks) * shape.heads / ulysses * (shape.head_dim**2 + shape.head_dim)
    summed = 2 * 4 * states * (ring - 1) / ring
    tables = 2 * 4 * own / shape.heads * (ulysses - 1) if shape.rope else 0  # cosines and sines, without gradients
    return round(passes * (exchanged + summed) + tables)


def make_config(ring: int, ulysses: int, device_type: str = "cpu") -> Any:
    """Make diffusers' ``ParallelConfig`` for the default process group, which must exist.

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


def make_run(
    attention: str, shape: Shape, config: Any, device: torch.device, dtype: torch.dtype, *, backward: bool
) -> Callable[[], object]:
    """Return a forward of random values of this process's tokens, or one with all gradients.

    Args:
        attention: ``SOFTMAX``, as diffusers splits it, or ``MHLA``, with a mixing matrix per head and RoPE.
        shape: of the whole attention.
        config: of the processes.
        device: of this process.
        dtype: of query, key and value.
        backward: whether to differentiate by query, key, value and MHLA's mixing matrices.

    Raises:
        ValueError: the processes do not divide the tokens, or the heads.
    """
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    parallel = cast(Parallel, parallel_of(config))
    first, count = parallel.own_share(shape.tokens)
    parallel.head_counts(shape.heads)
    size = (1, count, shape.heads, shape.head_dim)
    inputs = [torch.randn(size, device=device, dtype=dtype) for _ in range(3)]
    function: Any = mhla_attention
    if attention == MHLA:
        rotary = shape.draw_rotary(device) if shape.rope else None
        options: dict[str, Any] = {"rotary": rotary and tuple(table[:, first : first + count] for table in rotary)}
        inputs.append(initial_mixing(shape.blocks).to(device).repeat(shape.heads, 1, 1))
        attend = partial(function, *inputs, shape.grid, shape.blocks, parallel=parallel, **options)
    else:
        # a ring needs a backend that gives the log-sum-exp
        backend = "native" if device.type == "cpu" else "_native_flash"
        attend = partial(dispatch_attention_fn, *inputs, backend=backend, parallel_config=config)
    if not backward:
        return torch.no_grad()(attend)
    leaves, upstream = [x.requires_grad_() for x in inputs], torch.ones_like(inputs[0])
    return lambda: torch.autograd.grad(attend(), leaves, upstream)


def benchmark_processes(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    rings: Sequence[int],
    repetitions: int,
    results: Results | None,
) -> None:
    """Time softmax and MHLA over all processes in turns, forward and backward; each process calls this.

    Args:
        shape: the attention.
        device: of this process.
        dtype: of query, key and value.
        rings: processes of a ring, one number after the other; the others exchange heads.
        repetitions: calls of each, after two to warm up.
        results: of the first process, which gets a row per attention, ring and pass; None in all others.

    Raises:
        ValueError: a ring that does not divide the processes.
    """
    processes = dist.get_world_size()
    for ring in rings:
        if ring < 1 or processes % ring:
            raise ValueError(f"ring={ring} must divide the {processes} processes.")
    runs: Runs = {}
    for ring, attention, stage in itertools.product(rings, (SOFTMAX, MHLA), STAGES):
        ulysses, backward = processes // ring, stage != "forward"
        degrees = " x ".join(f"{name} {size}" for name, size in (("ring", ring), ("Ulysses", ulysses)) if size > 1)
        case = f"{shape.name}, {processes} processes"
        row = Row(f"{attention}, {degrees}", case, stage, attention == SOFTMAX, tokens=shape.tokens)
        try:
            config = make_config(ring, ulysses, device.type)
            run = make_run(attention, shape, config, device, dtype, backward=backward)
        except (RuntimeError, ValueError) as error:  # the same one in all processes
            runs[row] = str(error)
        else:
            sent = sent_bytes(attention, shape, ring, ulysses, dtype.itemsize, backward=backward)
            runs[replace(row, sent_bytes=sent)] = run
    # all processes must make the same number of calls, so it cannot follow from measured times
    rows = time_interleaved(runs, device, seconds=1e9, least=repetitions, most=repetitions)
    if results is not None:
        results.add([row if row.status == "measured" else replace(row, sent_bytes=None) for row in rows])
