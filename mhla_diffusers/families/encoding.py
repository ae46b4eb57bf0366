"""What autoencoders and text encoders give, as transformers take it."""

from typing import Any

import torch


def of_unit_scale(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """What an autoencoder gives, (B, C, ...), by its own factors of the scale that transformers are trained on.

    They are a mean and a deviation of every channel, among its buffers or in its configuration, or one shift for all,
    and a ``scaling_factor``; those that it lacks change nothing.
    """
    shift, factor, deviation = _scale_of(vae, latents)
    scaled = (latents - shift) * factor
    return scaled if deviation is None else scaled / deviation


def of_own_scale(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`of_unit_scale`: what an autoencoder decodes, (B, C, ...)."""
    shift, factor, deviation = _scale_of(vae, latents)
    scaled = latents if deviation is None else latents * deviation
    return scaled / factor + shift


def _scale_of(vae: Any, latents: torch.Tensor) -> tuple[Any, float, torch.Tensor | None]:
    """Shift, factor and, if there are any, deviations of the channels."""
    buffers, config = dict(vae.named_buffers(recurse=False)), vae.config
    mean, deviation = (
        _of_channels(buffers.get(name, config.get(name)), latents) for name in ("latents_mean", "latents_std")
    )
    shift = mean if mean is not None else config.get("shift_factor") or 0.0
    return shift, config.get("scaling_factor") or 1.0, deviation


def _of_channels(values: Any, latents: torch.Tensor) -> torch.Tensor | None:
    """(C,) so that it can be combined with latents (B, C, ...); None for none."""
    return None if values is None else torch.as_tensor(values).to(latents).view(-1, *[1] * (latents.ndim - 2))


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
