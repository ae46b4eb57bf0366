"""Print how many variants of the kernels a dozen sizes of video compile, and how many tilings these ask for, as JSON.

A program of its own, because a kernel is made either for the interpreter or for a GPU.
"""

import json
import sys
from dataclasses import replace

import torch

from mhla_diffusers.attention.parallel.place import parts
from mhla_diffusers.attention.triton.arguments import angles_of
from mhla_diffusers.benchmark.kernels import (
    call_of,
    exact_call_of,
    exact_launches_of,
    launches_of,
    own_block_launches_of,
    sequence_call_of,
    variant_of,
)
from mhla_diffusers.benchmark.models import family_of_model, models
from mhla_diffusers.benchmark.shapes import shapes

from ..shares import shares_of

GRIDS = [
    *((21, 30, 52), (21, 30, 50), (21, 52, 30), (21, 45, 80), (21, 80, 45), (21, 32, 32)),
    *((1, 45, 80), (13, 30, 52), (21, 36, 64), (9, 40, 40), (31, 33, 49)),
]
ARCHITECTURE = "sm_90"

if __name__ == "__main__":
    wan, family = shapes()["wan2.1-1.3b-480p"], family_of_model(models()["wan2.1-1.3b"])
    launches = {"MHLA": [], "sparse": [], "shares": [], "own block": []}
    for grid in GRIDS:
        shape = replace(wan, grid=grid, tiles=family.exact_tiles(grid))
        for batch in (1, 2):
            call = call_of(shape, torch.bfloat16, batch, everything=True)
            launches["MHLA"] += launches_of(call, ARCHITECTURE)
            launches["own block"] += own_block_launches_of(sequence_call_of(call, 128, False), False, ARCHITECTURE)
            of_tokens = torch.empty(1, shape.tokens, 1, shape.head_dim, device="meta")
            lengths = [count for _, count in parts(shape.tokens, 3)]
            for share in shares_of(replace(call, rotary=of_tokens, rotary_axes=None), lengths):
                # a process holds its share at the start of memory, and not in the midst of the whole
                own = replace(share, key_mask=torch.empty_like(share.key_mask))
                launches["shares"] += launches_of(own, ARCHITECTURE)
            of_tiles = exact_call_of(shape, shape.tiles, torch.bfloat16, batch, everything=True)
            table = angles_of(call)
            launches["exact"] += exact_launches_of(of_tiles, table, ARCHITECTURE)
    counts = {
        name: {
            "variants": len({variant_of(launch, ARCHITECTURE).hash() for launch in found}),
            "tilings": len({(launch.name, launch.tiles) for launch in found}),
        }
        for name, found in launches.items()
    }
    sys.stdout.write(json.dumps(counts))
