"""Compile every launch of the listed and the pooled attention for one architecture; a line of JSON for each.

With "variants" instead of an architecture, count what several sizes compile.

A program of its own, because a kernel is made either for the interpreter or for a GPU.
"""

import json
import re
import sys

import torch

from mhla_diffusers.attention.triton import listed, pooled

from .compiled import compile_launch, variant_of

SHAPES = {
    "wan 480p": (12, 493, 25, 128, torch.bfloat16),
    "dit 2048px": (16, 256, 13, 72, torch.bfloat16),
    "float32": (4, 64, 6, 32, torch.float32),
}
"""Groups, blocks of 64 rows, entries of a list, head dim and type."""
INSTRUCTIONS = "wgmma.mma_async", "mma.sync", "tcgen05.mma", "cp.async.cg", "cp.async.ca", "ld.global", "ld.shared"


def launches_of(shape, architecture, masked=False, causal=False):
    """Name and launch of each kernel, over tensors without memory."""
    groups, blocks, width, head_dim, dtype = shape

    def empty(*sizes, dtype=dtype):
        return torch.empty(sizes, dtype=dtype, device="meta")

    rows, row = empty(groups * blocks * 64, head_dim), empty(groups * blocks * 64, dtype=torch.float32)
    valid = counts = empty(groups * blocks, dtype=torch.int32)
    indices = empty(groups * blocks, width, dtype=torch.int32)
    bias, options = row if masked else None, (0.1, causal, architecture)
    inputs = rows, rows, rows, valid, bias, indices
    yield "listed_forward", listed.forward_launch(*inputs, counts, rows, row, *options)
    yield "listed_dq", listed.dq_launch(*inputs, counts, rows, rows, row, row, rows, row, row, *options)
    turns = starts = queries = counts
    transposed = turns, starts, queries
    yield "listed_dkv", listed.dkv_launch(*inputs, transposed, rows, row, row, rows, rows, *options)
    if not causal:
        inputs = rows, rows, rows, valid, bias, indices[::2]
        yield "listed_forward of 128", listed.forward_launch(*inputs, counts[::2], rows, row, *options)
    if not masked and not causal:
        query, key = rows.unflatten(0, (groups, -1)), empty(groups, blocks, head_dim)
        lse = row.unflatten(0, (groups, -1))
        words = empty(groups * blocks, -(-blocks // 32), dtype=torch.int32)
        inputs = query, key, key, empty(1, blocks, dtype=torch.float32), words
        yield "pooled_forward", pooled.forward_launch(*inputs, query, lse, *options[::2])
        yield "pooled_dq", pooled.dq_launch(*inputs, query, query, lse, lse, query, lse, lse, *options[::2])
        yield "pooled_dkv", pooled.dkv_launch(*inputs, query, lse, lse, *options[::2])[0]


def main_loop(text):
    """How often each instruction stands in the longest loop with matrix products, of PTX."""
    lines = text.splitlines()
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"(\$\w+):", line))}
    ends = [(i, match[1]) for i, line in enumerate(lines) if (match := re.search(r"bra(?:\.uni)?\s+(\$\w+);", line))]
    loops = ["\n".join(lines[labels[label] : i]) for i, label in ends if labels[label] < i]
    counts = [{name: loop.count(f"{name}.") for name in INSTRUCTIONS if f"{name}." in loop} for loop in loops]
    return max(counts, key=lambda found: sum("mma" in name for name in found), default={})


def count_variants():
    """Kernel → how many compiled variants sizes of all kinds need: 1, multiples of 16, and others."""
    hashes = {}
    for groups, blocks, width in ((12, 493, 25), (12, 1182, 59), (24, 256, 16), (2, 16, 1), (2, 1, 1)):
        for kernel, launch in launches_of((groups, blocks, width, 128, torch.bfloat16), "sm_90"):
            hashes.setdefault(kernel, set()).add(variant_of(launch, "sm_90").hash())
    return {kernel: len(found) for kernel, found in hashes.items()}


def report_all(architecture):
    variants = [(shape, False, False) for shape in SHAPES]
    if architecture == "sm_90":
        variants += [("wan 480p", True, False), ("wan 480p", False, True)]
    for shape, masked, causal in variants:
        for kernel, launch in launches_of(SHAPES[shape], architecture, masked, causal):
            made = compile_launch(launch, architecture)
            report = {"kernel": kernel, "shape": shape, "masked": masked, "causal": causal}
            report |= {"architecture": architecture, "registers": made.registers, "stack_bytes": made.stack_bytes}
            report |= {"shared_bytes": made.shared_bytes, "loop": main_loop(made.text)}
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "variants":
        print(json.dumps(count_variants()))
    else:
        report_all(sys.argv[1])
