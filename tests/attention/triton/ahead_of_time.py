"""What the compiler makes of every kernel for GPUs that are not there, kept in kernels.csv.

A program of its own, because a kernel is made either for the interpreter or for a GPU:

    python -m tests.attention.triton.ahead_of_time write              compile what kernels.csv lacks (minutes)
    python -m tests.attention.triton.ahead_of_time add problem ...    add rows of sm_90 by another Triton
    python -m tests.attention.triton.ahead_of_time rows               as JSON the rows that "write" makes, and the
                                                                      variants that two resolutions need, by problem

``make kernels`` writes the whole table.
"""

import ast
import csv
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from mhla_diffusers.attention import mhla_attention, sparse_attention
from mhla_diffusers.attention.triton import backend, tiles
from mhla_diffusers.files import written_aside

from .meta import Operators, nothing_launched

HALF, FLOAT = torch.bfloat16, torch.float32
WAN = {"tokens": 31_500, "heads": 12, "head_dim": 128, "dtype": HALF}
MHLA, SPARSE = {"blocks": 105}, {"block_size": 64, "key_block_size": 64}
WIDE = {"head_dim": 256, "heads": 6}
BOTH = WAN | MHLA | SPARSE
TABLE = {
    "16 bits": BOTH,
    "16 bits, 256 channels": BOTH | WIDE,
    "float32": BOTH | {"dtype": FLOAT},
    "float32, 256 channels": BOTH | WIDE | {"dtype": FLOAT},
}
"""Calls for every column of the table of tiles; together they launch every kernel."""
PROBLEMS = TABLE | {
    "blocks of 128": WAN | SPARSE | {"block_size": 128, "key_block_size": 128},
    "keys in 32": WAN | SPARSE | {"key_block_size": 32},
    "keys in 16": WAN | SPARSE | {"key_block_size": 16},
    "means": WAN | SPARSE | {"key_block_size": 32, "far": "means"},
    "MHLA": WAN | MHLA | {"everything": True, "rope": "before"},
    "72 channels": BOTH | {"head_dim": 72, "heads": 16, "everything": True},
    "causal": WAN | {"blocks": 21, "causal": "token"},
}
_USUAL = ["16 bits", "keys in 32"]
COLUMNS = {
    "sm_90": list(PROBLEMS),
    "sm_80": [*_USUAL, "means"],
    **dict.fromkeys(("sm_86", "gfx942"), [*_USUAL, "16 bits, 256 channels", "float32, 256 channels"]),
    **dict.fromkeys(("sm_89", "sm_100", "sm_120"), _USUAL),
}
"""What the cards compile that together meet every entry of the table; others compile the tiles for 16 bits. Narrow
heads in float32 have the same tiles on every card, or those of wide ones, which need more memory."""
TABLE_FILE = Path(__file__).with_name("kernels.csv")
NAMED = "triton", "architecture", "kernel", "problem", "key"
COMPILED = "shared_bytes", "stack_bytes", "registers", "narrow_loads", "wgmma"


def launches_of(architecture, tokens, heads, head_dim, dtype, everything=False, **kinds):
    """Kernels and arguments of one call of each attention that has blocks, and its gradients."""
    tiles.architecture_of = lambda _: architecture
    backend.why_not = lambda *_: None

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    query, key, value = (empty(1, tokens, heads, head_dim) for _ in range(3))
    shared = {"rotary": (empty(1, tokens, 1, head_dim, dtype=FLOAT).detach(),) * 2, "backend": "triton"}
    if everything:
        shared["key_mask"] = empty(1, tokens, dtype=FLOAT).detach()
    with Operators(), nothing_launched() as launches:
        if "block_size" in kinds:
            sizes = {name: kinds[name] for name in ("block_size", "key_block_size", "far") if name in kinds}
            output = sparse_attention(query, key, value, (tokens,), **sizes, **shared)
            torch.autograd.backward(output, torch.empty_like(output))
        if "blocks" in kinds:
            options = {name: kinds[name] for name in ("rope", "causal") if name in kinds}
            if everything:
                options |= {"output_norm": empty(head_dim), "output_gate": empty(1, tokens, heads, head_dim)}
            if "causal" in kinds:
                options["linear_weight"] = empty(heads, dtype=FLOAT)
            blocks = kinds["blocks"]
            mixing = empty(blocks, blocks, dtype=FLOAT)
            output = mhla_attention(query, key, value, mixing, (tokens,), (blocks,), **options, **shared)
            torch.autograd.backward(output, torch.empty_like(output))
    return launches


@cache
def launches_of_problem(architecture, name):
    """The same of one of the problems."""
    return launches_of(architecture, **PROBLEMS[name])


def name_of(kernel, arguments):
    """A kernel's name; that of one that computes outputs or, given their gradient, gradients says which."""
    parameter = kernel.signature.parameters.get("output_gradient")
    is_either = parameter is not None and parameter.default is None
    return kernel.__name__ + (", gradient" if is_either and arguments.get("output_gradient") is not None else "")


def variant_of(kernel, arguments, architecture):
    """The kernel as Triton specialises it at this launch; of two that share compiled code ``hash()`` is the same."""
    options = {name: arguments[name] for name in ("num_warps", "num_stages")}
    arguments = {name: x for name, x in arguments.items() if name not in options}
    compiler = make_backend(target_of(architecture))
    bind = create_function_from_signature(kernel.signature, kernel.params, compiler)
    bound, specialization, _ = bind(**arguments, **options)
    _, signature, constants, attributes = kernel._pack_args(compiler, options, bound, specialization, options)
    return ASTSource(kernel, signature, constants, attributes), options


def target_of(architecture):
    if architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    return GPUTarget("hip", architecture, 64)


def report_of(source, options, architecture):
    """Registers and stack of a thread, shared memory of a block, and what the text of PTX tells."""
    compiled = triton.compile(source, target=target_of(architecture), options=options)
    report = dict.fromkeys(COMPILED, 0) | {"shared_bytes": int(compiled.metadata.shared)}
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
    return report | {"wgmma": products_of_main_loop(text), "narrow_loads": narrow}


def products_of_main_loop(text):
    """Tensor-core instructions of Hopper in the loop of PTX that has most."""
    lines = text.splitlines()
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"(\$\w+):", line))}
    ends = [(i, match[1]) for i, line in enumerate(lines) if (match := re.search(r"bra(?:\.uni)?\s+(\$\w+);", line))]
    loops = ["\n".join(lines[labels[label] : i]) for i, label in ends if labels[label] < i]
    return max((loop.count("wgmma.mma_async.") for loop in loops), default=0)


@cache
def code_of(function):
    """A kernel and the functions that it calls, without docstrings and places, by name; and constants that they use."""
    codes, left = {}, [function]
    while left:
        function = left.pop()
        tree = function.parse()
        tree.body[0].body = [x for x in tree.body[0].body if not isinstance(getattr(x, "value", None), ast.Constant)]
        codes[function.__name__] = ast.unparse(tree)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        known = {name: x for name, x in function.__globals__.items() if name in used}
        left += [x for name, x in known.items() if isinstance(x, triton.JITFunction) and name not in codes]
        codes |= {name: str(x) for name, x in known.items() if isinstance(x, triton.language.constexpr)}
    return sorted(codes.items())


def key_of(source, options):
    """Hash of all that the compiler gets: code, types, constants and options."""
    attributes = {place: x for place, x in source.attrs.items() if x}
    parts = code_of(source.fn), source.signature, source.constants, attributes, options
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def rows(columns):
    """Row, source and options of every variant that these problems launch on these cards."""
    assert not triton.knobs.runtime.interpret, "the interpreter compiles nothing; unset TRITON_INTERPRET"
    for architecture, names in columns.items():
        known = set()
        for name in names:
            for kernel, arguments in launches_of_problem(architecture, name):
                source, options = variant_of(kernel, arguments, architecture)
                if (key := key_of(source, options)) not in known:
                    known.add(key)
                    named = triton.__version__, architecture, name_of(kernel, arguments), name, key
                    yield dict(zip(NAMED, named, strict=True)), source, options


def write_table(columns, *, beside=False):
    """Compile what the table lacks; other rows go, but for those of another Triton if these stand beside them."""
    with TABLE_FILE.open(newline="") as file:
        kept = {tuple(row[name] for name in NAMED): row for row in csv.DictReader(file)}
    table = {name: row for name, row in kept.items() if beside and name[0] != triton.__version__}
    for row, source, options in rows(columns):
        name = tuple(row.values())
        if name not in kept:
            print(*name[1:4], flush=True)
        table[name] = kept.get(name) or row | report_of(source, options, row["architecture"])
    with written_aside(TABLE_FILE) as aside, aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, (*NAMED, *COMPILED), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table.values())


def count_variants():
    """How many variants of each kernel two resolutions need, of which one is divisible by 16."""
    for name, sizes in PROBLEMS.items():
        other = {"tokens": 32_000} | ({"blocks": 96} if sizes.get("blocks") == MHLA["blocks"] else {})
        hashes = {}
        for kernel, arguments in (*launches_of_problem("sm_90", name), *launches_of("sm_90", **sizes | other)):
            source, _ = variant_of(kernel, arguments, "sm_90")
            hashes.setdefault(name_of(kernel, arguments), set()).add(source.hash())
        print(json.dumps([name, {kernel: len(found) for kernel, found in hashes.items()}]))


if __name__ == "__main__":
    command, *chosen = sys.argv[1:]
    if command == "write":
        write_table(COLUMNS)
    elif command == "add":
        write_table({"sm_90": chosen}, beside=True)
    elif command == "rows":
        print(json.dumps([row for row, _, _ in rows(COLUMNS)]))
        count_variants()
