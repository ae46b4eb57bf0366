"""What autoencoders and text encoders give, as transformers take it."""

from typing import Any

import torch


def scaled_latents(latents: torch.Tensor, config: Any) -> torch.Tensor:
    """Latents as a transformer takes them: normalised per channel where the autoencoder says how, or by two factors.

    Args:
        latents: (B, C, ...) as the autoencoder gives them.
        config: of the autoencoder.

    Returns:
        float32, like ``latents``.
    """
    latents = latents.float()
    if getattr(config, "latents_mean", None) is not None:
        mean, std = (
            torch.tensor(values, device=latents.device).view(-1, *[1] * (latents.ndim - 2))
            for values in (config.latents_mean, config.latents_std)
        )
        return (latents - mean) / std
    shift = getattr(config, "shift_factor", None) or 0.0
    scaled: torch.Tensor = (latents - shift) * config.scaling_factor
    return scaled


def padded_text(text: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Text filled up with zeros to a number of tokens that all samples share, and which of them are its own.

    Args:
        text: (n, channels), n at most ``tokens``.
        tokens: how many are wanted.

    Returns:
        (tokens, channels), and int64 (tokens,) of ones and zeros.
    """
    filled = torch.nn.functional.pad(text, (0, 0, 0, tokens - len(text)))
    return filled, (torch.arange(tokens, device=text.device) < len(text)).long()
