"""How the autoencoders of the tiny pipelines are trained.

An autoencoder is no diffusion model, so this is a loop of its own: reconstruction error plus a weak pull of the latents
towards the unit normal distribution. Those of videos are trained on single frames.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..tiny import TinyPipeline
from ..tiny.digits import Digits, compose, load_digits, to_rgb

_BATCH = 8
_KL_WEIGHT = 1e-4
_LATENT_NOISE = 0.1
_LATENT_SPREAD = 0.5
"""Standard deviation that latents are scaled to.

On pictures as smooth as these the shape shows through much noise; of unit variance, nearly every training step would
fall where the digit is plain to see already and the caption has nothing to add.
"""


def train_autoencoder(tiny: TinyPipeline, report: Callable[[int, float], None], seed: int = 0) -> Any:
    """Train an autoencoder on the training digits and fit its latent scale.

    Args:
        tiny: whose autoencoder.
        report: called after every step with how many were done and the squared reconstruction error.
        seed: the same seed gives the same weights.

    Returns:
        The autoencoder, in evaluation mode.
    """
    torch.manual_seed(seed)
    chance = random.Random(seed)
    digits = load_digits("train")
    autoencoder = tiny.build_autoencoder()
    optimizer = torch.optim.AdamW(autoencoder.parameters(), lr=2e-3, weight_decay=0.0)
    steps = tiny.autoencoder_steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        pictures = _batch(tiny, digits, chance)
        latents, penalty = _encode(autoencoder, pictures)
        error = nn.functional.mse_loss(tiny.decode(autoencoder, latents), pictures)
        (error + _KL_WEIGHT * penalty).backward()
        nn.utils.clip_grad_norm_(autoencoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        report(step + 1, error.item())
    autoencoder.eval()
    with torch.no_grad():
        encoded = [autoencoder.encode(_batch(tiny, digits, chance)) for _ in range(16)]
    latents = torch.cat([e.latent_dist.mean if hasattr(e, "latent_dist") else e.latent for e in encoded])
    tiny.record_scale(autoencoder, latents, _LATENT_SPREAD)
    return autoencoder


def _batch(tiny: TinyPipeline, digits: Digits, chance: random.Random) -> torch.Tensor:
    """Random pictures (8, 3, H, W), or single frames of clips (8, 3, 1, H, W), in [-1, 1]."""
    pictures = []
    for _ in range(_BATCH):
        picture = compose(tiny.random_scene(chance), digits, tiny.digit_size, chance.randrange(2**32))
        pictures.append(to_rgb(picture[chance.randrange(len(picture))][None] if tiny.is_video else picture))
    frames = torch.stack(pictures)
    return frames if tiny.is_video else frames[:, :, 0]


def _encode(autoencoder: Any, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy latents, and how far they are from unit normal ones."""
    encoded = autoencoder.encode(pictures)
    if hasattr(encoded, "latent_dist"):
        distribution = encoded.latent_dist
        divergence = distribution.mean.square() + distribution.var - 1 - distribution.logvar
        return distribution.sample(), 0.5 * divergence.mean()
    return encoded.latent + _LATENT_NOISE * torch.randn_like(encoded.latent), 0.5 * encoded.latent.square().mean()
