"""Random numbers as a function of the seed and of their purpose, so that a resumed run draws the same."""

import hashlib

import torch


def generator_for(seed: int, *purpose: str | int) -> torch.Generator:
    """Return a separate CPU generator for a purpose, for example ``generator_for(0, "noise", step, position)``."""
    text = "/".join(map(str, (seed, *purpose)))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
