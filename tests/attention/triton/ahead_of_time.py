"""What the compiler makes of every kernel for GPUs that are not there: a line of JSON for each.

A program of its own, because a kernel is made either for the interpreter or for a GPU:

    python -m tests.attention.triton.ahead_of_time sm_90    registers, spills and shared memory
    python -m tests.attention.triton.ahead_of_time variants how many variants three resolutions compile
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from mhla_diffusers.attention.layout import Layout
from mhla_diffusers.attention.triton import choose, listed, pooled, prepare
from mhla_diffusers.attention.triton.features import Blocks, Features
from mhla_diffusers.attention.triton.read import Branches, Reading, query_gradient_launch, read_launch
from mhla_diffusers.attention.triton.states import key_gradient_launch, states_dtype, states_launch

INSTRUCTIONS = "wgmma.mma_async", "mma.sync", "tcgen05.mma", "cp.async.cg", "cp.async.ca", "ld.global", "ld.shared"
HALF, FLOAT = torch.bfloat16, torch.float32
WAN = {"tokens": 31_500, "heads": 12, "head_dim": 128, "dtype": HALF}
DIT = {"tokens": 1024, "heads": 16, "head_dim": 72, "dtype": HALF}
SINGLE = {"tokens": 1024, "heads": 70, "head_dim": 32, "dtype": FLOAT}
LINEAR = {
    "beside": WAN | {"count": 105, "sparse": True},
    "everything": WAN | {"count": 105, "rope": "after", "everything": True},
    "normaliser": WAN | {"count": 105, "rope": "after", "normaliser": True},
    "DiT": DIT | {"count": 16, "rope": "before", "everything": True},
    "float32": SINGLE | {"count": 16, "rope": "after"},
}
SOFTMAX = {
    "Wan": WAN | {"width": 25},
    "DiT": DIT | {"tokens": 16_384, "width": 13},
    "float32": SINGLE | {"tokens": 4096, "heads": 4, "width": 6},
    "masked": WAN | {"width": 25, "masked": True},
    "causal": WAN | {"width": 25, "causal": True},
}
ROWS = {"Wan": WAN, "DiT": DIT, "float32": SINGLE, "wide float32": WAN | {"dtype": FLOAT}}
CHOICES = {"Wan": WAN, "DiT": DIT | {"tokens": 4096}, "float32": SINGLE | {"tokens": 75_599}}
ONCE = {"beside", "everything", "Wan"}
"""What has every kernel once, with Wan's sizes."""
FLOAT32_TOO = {"sm_86", "gfx942"}
"""Whose tiles for float32 in the linear branch are others than an H100's, or have less memory."""


def empty(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def linear_launches(architecture, tokens, heads, head_dim, dtype, count, rope=None, **kinds):
    sparse, everything = kinds.get("sparse", False), kinds.get("everything", False)
    members = empty(tokens, dtype=torch.int32)
    blocks = Blocks(members, members, empty(count + 1, dtype=torch.int32), -(-tokens // count))
    angles = empty(1, tokens, 1, head_dim, dtype=FLOAT) if rope else None
    features = Features("relu", 1e-6, angles, rope == "before")
    rows = -(-tokens // 64) * 64
    query = empty(1, tokens, heads, head_dim, dtype=dtype)
    if sparse:
        query = empty(1, heads, rows, head_dim, dtype=dtype).transpose(1, 2)
    states = empty(1, heads, count, head_dim, head_dim, dtype=states_dtype(dtype))
    sums, lse = empty(1, heads, count, head_dim, dtype=FLOAT), empty(heads, rows, dtype=FLOAT)
    mask, of_rows = empty(1, tokens, dtype=FLOAT) if everything else None, empty(heads, rows, head_dim, dtype=dtype)
    branches = Branches(of_rows, lse, of_rows, lse, empty(heads, dtype=FLOAT)) if sparse else Branches()
    output = empty(1, tokens, heads, head_dim, dtype=dtype)
    norm, gate = (empty(head_dim, dtype=dtype), output) if everything else (None, None)
    reading = Reading(query, states, sums, blocks, features, branches, norm, gate)
    of_normaliser = empty(1, tokens, heads, 1, dtype=FLOAT) if kinds.get("normaliser") else None
    yield "states", states_launch(query, query, blocks, features, mask, True, None, architecture)
    yield "read", read_launch(reading, of_normaliser is not None, architecture)
    of_query = query_gradient_launch(reading, output, of_normaliser, architecture)
    yield "query_gradient", of_query
    of = of_query.arguments
    added = of["product_gradient"], blocks, features, None, True, of["product_normaliser_gradient"], architecture
    yield "states_gradient", states_launch(query, *added)
    yield "key_gradient", key_gradient_launch(states, sums, query, query, blocks, features, mask, architecture)


def softmax_launches(architecture, tokens, heads, head_dim, dtype, width, masked=False, causal=False):
    blocks = -(-tokens // 64)
    rows = empty(heads * blocks * 64, head_dim, dtype=dtype)
    row, counts = empty(len(rows), dtype=FLOAT), empty(heads * blocks, dtype=torch.int32)
    indices = empty(heads * blocks, width, dtype=torch.int32)
    bias = row if masked else None
    given = listed.Inputs(rows, rows, rows, counts, bias, indices, counts, 0.1, causal)
    yield "listed_forward", listed.forward_launch(given, rows, row, architecture)
    of_query, of_key = listed.backward_launches(given, rows, row, rows, row, (counts,) * 3, architecture)
    yield "listed_dq", of_query
    yield "listed_dkv", of_key
    if not causal:
        pairs = given._replace(indices=indices[::2], counts=counts[::2])
        yield "listed_forward of 128", listed.forward_launch(pairs, rows, row, architecture)
    if not masked and not causal:
        query, lse = rows.unflatten(0, (heads, -1)), row.unflatten(0, (heads, -1))
        key, words = (
            empty(heads, blocks, head_dim, dtype=dtype),
            empty(heads * blocks, -(-blocks // 32), dtype=torch.int32),
        )
        given = pooled.Inputs(query, key, key, empty(1, blocks, dtype=FLOAT), words, 0.1)
        yield "pooled_forward", pooled.forward_launch(given, query, lse, architecture)
        of_query, of_key = pooled.backward_launches(given, query, lse, query, lse, architecture)
        yield "pooled_dq", of_query
        yield "pooled_dkv", of_key


def prepare_launches(architecture, tokens, heads, head_dim, dtype):
    blocks = -(-tokens // 64)
    query, angles = empty(1, tokens, heads, head_dim, dtype=dtype), empty(1, tokens, 1, head_dim, dtype=FLOAT)
    tables = (empty(size, dtype=torch.int32) for size in (64 * blocks, blocks, tokens))
    layout = Layout(64, blocks - 8, *tables)
    rows, means = empty(heads, 64 * blocks, head_dim, dtype=dtype), empty(heads, blocks - 8, head_dim, dtype=dtype)
    yield "prepare", prepare.prepare_launch(query, query, query, angles, None, layout, architecture)
    gradients = rows, rows, rows, means, means
    about = angles, None, layout, query.shape, dtype, architecture
    yield "prepare_backward", prepare.prepare_backward_launch(gradients, *about)


def choose_launches(architecture, tokens, heads, head_dim, dtype):
    blocks = -(-tokens // 64)
    means, weight = empty(heads, blocks, head_dim, dtype=dtype), empty(1, blocks, dtype=FLOAT)
    sizes = 25, 8, head_dim**-0.5, blocks + 8
    launches, _ = choose.choose_launches(means, means, means, weight, *sizes, architecture)
    yield "score", launches[0]
    yield "select", launches[1]


OPERATORS = (
    (linear_launches, LINEAR),
    (softmax_launches, SOFTMAX),
    (prepare_launches, ROWS),
    (choose_launches, CHOICES),
)


def variant_of(launch, architecture):
    """The kernel as Triton specialises it at this launch; of two that share compiled code ``hash()`` is the same."""
    backend, kernel = make_backend(target_of(architecture)), launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**launch.arguments, **launch.options)
    _, signature, constants, attributes = kernel._pack_args(
        backend, launch.options, bound, specialization, launch.options
    )
    return ASTSource(kernel, signature, constants, attributes)


def target_of(architecture):
    if architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    return GPUTarget("hip", architecture, 64)


def report_of(launch, architecture):
    """Registers and stack of a thread, shared memory of a block, and what the text of PTX tells."""
    assert not triton.knobs.runtime.interpret, "the interpreter compiles nothing; unset TRITON_INTERPRET"
    source, target = variant_of(launch, architecture), target_of(architecture)
    compiled = triton.compile(source, target=target, options=dict(launch.options))
    report = {"shared_bytes": int(compiled.metadata.shared)}
    if "cubin" not in compiled.asm:
        numbers = {"registers": r"\.vgpr_count:\s*(\d+)", "stack_bytes": r"\.private_segment_fixed_size:\s*(\d+)"}
        text = compiled.asm["amdgcn"]
        return report | {name: int(re.search(pattern, text)[1]) for name, pattern in numbers.items()}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    stack = sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))
    text = compiled.asm["ptx"]
    narrow = text.count("ld.global") - text.count("ld.global.v4")
    report |= {"registers": int(re.search(r"REG:(\d+)", usage)[1]), "stack_bytes": stack}
    return report | {"loop": main_loop(text), "narrow_loads": narrow}


def main_loop(text):
    """How often each instruction stands in the longest loop with matrix products, of PTX."""
    lines = text.splitlines()
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"(\$\w+):", line))}
    ends = [(i, match[1]) for i, line in enumerate(lines) if (match := re.search(r"bra(?:\.uni)?\s+(\$\w+);", line))]
    loops = ["\n".join(lines[labels[label] : i]) for i, label in ends if labels[label] < i]
    counts = [{name: loop.count(f"{name}.") for name in INSTRUCTIONS if f"{name}." in loop} for loop in loops]
    return max(counts, key=lambda found: sum("mma" in name for name in found), default={})


def is_wanted(launches_of, name, architecture):
    """Everything for an H100, for others each kernel at least once."""
    if architecture == "sm_90" or name in ONCE:
        return True
    return launches_of is linear_launches and name == "float32" and architecture in FLOAT32_TOO


def report_all(architecture, linear_alone):
    for launches_of, problems in OPERATORS[:1] if linear_alone else OPERATORS:
        for name, sizes in problems.items():
            if is_wanted(launches_of, name, architecture):
                for kernel, launch in launches_of(architecture, **sizes):
                    report = {"kernel": kernel, "problem": name} | report_of(launch, architecture)
                    print(json.dumps(report), flush=True)


def count_variants():
    """How many variants of each kernel several resolutions need."""
    for launches_of, problems in OPERATORS:
        for name, sizes in problems.items():
            hashes = {}
            for tokens, count, width in ((31_500, 105, 25), (32_001, 90, 59), (31_991, 98, 1)):
                of_size = sizes | {"tokens": tokens}
                of_size |= {k: v for k, v in {"count": count, "width": width}.items() if k in sizes}
                for kernel, launch in launches_of("sm_90", **of_size):
                    hashes.setdefault(kernel, set()).add(variant_of(launch, "sm_90").hash())
            print(json.dumps([name, {kernel: len(found) for kernel, found in hashes.items()}]))


if __name__ == "__main__":
    if sys.argv[1] == "variants":
        count_variants()
    else:
        report_all(sys.argv[1], "linear" in sys.argv)
