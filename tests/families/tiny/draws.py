"""Random arguments of a transformer's forward, from a seed; no two rows of a batch are alike."""

from collections.abc import Callable

import torch

TEXT_TOKENS = 6


def drawer(batch: int, seed: int) -> Callable[..., torch.Tensor]:
    """A function that draws normal values of shape (batch, *what it is given)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=generator)

    return draw


def timesteps(batch: int) -> torch.Tensor:
    """Steps of a scheduler, (batch,), for at most three samples."""
    return torch.tensor([500, 250, 750])[:batch]


def text_mask(batch: int) -> torch.Tensor:
    """1 for text and 0 for the padding after it, (batch, ``TEXT_TOKENS``), for at most three samples."""
    return (torch.arange(TEXT_TOKENS) < torch.tensor([[5], [3], [4]])[:batch]).long()


def prompt_embeddings(tokens: int, channels: int) -> dict[str, torch.Tensor]:
    """Arguments of a pipeline's call in place of a prompt, which some pipelines read only where ftfy is installed."""
    prompt, negative = drawer(2, seed=5)(tokens, channels)[:, None]
    return {"prompt_embeds": prompt, "negative_prompt_embeds": negative}
