"""The autoencoders of the tiny pipelines: diffusers' classes at small sizes, and how they are trained.

An autoencoder is no diffusion model, so this is a loop of its own: reconstruction error plus a weak pull of the latents
towards the unit normal distribution.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .digits import DIGIT_SIZES, FRAMES, PICTURE_SIZE, Digits, compose, load_digits, random_scene, to_rgb

LATENT_CHANNELS = {"dit": 4, "sana": 8, "wan": 32}
STRIDES = {"dit": 4, "sana": 4, "wan": 8}

_CLIP_SIZE = 32
"""Height and width of the pieces of clips that a video autoencoder sees until the last steps."""
_WHOLE_FROM = 0.8
"""Part of the steps after which it sees whole frames, since its middle block attends over all of a frame."""
_KL_WEIGHT = 1e-4
_LATENT_NOISE = 0.1


def build_autoencoder(family: str) -> Any:
    """An untrained autoencoder: AutoencoderKL (dit), AutoencoderDC (sana) or AutoencoderKLWan (wan)."""
    from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderKLWan

    channels = LATENT_CHANNELS[family]
    if family == "dit":
        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(16, 32, 32),
            layers_per_block=1,
            latent_channels=channels,
            norm_num_groups=8,
            sample_size=64,
            mid_block_add_attention=False,
        )
    if family == "sana":
        return AutoencoderDC(
            latent_channels=channels,
            attention_head_dim=8,
            encoder_block_types=("ResBlock",) * 3,
            decoder_block_types=("ResBlock",) * 3,
            encoder_block_out_channels=(16, 32, 32),
            decoder_block_out_channels=(16, 32, 32),
            encoder_layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1),
            encoder_qkv_multiscales=((), (), ()),
            decoder_qkv_multiscales=((), (), ()),
        )
    return AutoencoderKLWan(
        base_dim=16,
        z_dim=channels,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, False],
        latents_mean=[0.0] * channels,
        latents_std=[1.0] * channels,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=2,
    )


@dataclass(frozen=True)
class AutoencoderRecipe:
    """How an autoencoder is trained."""

    steps: int
    batch_size: int
    frames: int = 1
    """Length of the pieces of clips. A video autoencoder works on four frames at a time and remembers the last ones, so
    only the third group of frames shows it what all later ones look like."""


AUTOENCODER_RECIPES = {
    "dit": AutoencoderRecipe(400, batch_size=8),
    "sana": AutoencoderRecipe(400, batch_size=8),
    "wan": AutoencoderRecipe(450, batch_size=3, frames=9),
}


def train_autoencoder(family: str, report: Callable[[int, float], None], seed: int = 0) -> Any:
    """Train an autoencoder on the training digits and fit its latent scale.

    Args:
        family: dit, sana or wan.
        report: called after every step with how many were done and the squared reconstruction error.
        seed: the same seed gives the same weights.

    Returns:
        The autoencoder, in evaluation mode.
    """
    torch.manual_seed(seed)
    chance = random.Random(seed)
    recipe, digits = AUTOENCODER_RECIPES[family], load_digits("train")
    autoencoder = build_autoencoder(family)
    optimizer = torch.optim.AdamW(autoencoder.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=recipe.steps, pct_start=0.1)
    for step in range(recipe.steps):
        pictures = _batch(family, digits, chance, whole=step >= _WHOLE_FROM * recipe.steps)
        latents, penalty = _encode(autoencoder, pictures)
        restored = autoencoder.decode(latents, return_dict=False)[0]
        error = torch.nn.functional.mse_loss(restored, pictures)
        (error + _KL_WEIGHT * penalty).backward()
        torch.nn.utils.clip_grad_norm_(autoencoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        report(step + 1, error.item())
    autoencoder.eval()
    _fit_scale(autoencoder, family, digits, chance)
    return autoencoder


def _batch(family: str, digits: Digits, chance: random.Random, whole: bool) -> torch.Tensor:
    """Random pictures (B, 3, H, W) or pieces of clips (B, 3, F, H, W), in [-1, 1]."""
    recipe = AUTOENCODER_RECIPES[family]
    pictures = []
    for _ in range(recipe.batch_size):
        picture = compose(random_scene(family, chance), digits, DIGIT_SIZES[family], chance.randrange(2**32))
        pictures.append(to_rgb(_piece(picture, recipe.frames, chance, whole) if family == "wan" else picture))
    return torch.stack(pictures)


def _piece(clip: torch.Tensor, length: int, chance: random.Random, whole: bool) -> torch.Tensor:
    """A few consecutive frames, whole or cut to a random square."""
    start = chance.randrange(FRAMES - length + 1)
    frames = clip[start : start + length]
    if whole:
        return frames
    top, left = (chance.randrange(0, PICTURE_SIZE - _CLIP_SIZE + 1, 8) for _ in range(2))
    return frames[:, top : top + _CLIP_SIZE, left : left + _CLIP_SIZE]


def _encode(autoencoder: Any, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy latents, and how far they are from unit normal ones."""
    encoded = autoencoder.encode(pictures)
    if hasattr(encoded, "latent_dist"):
        distribution = encoded.latent_dist
        divergence = distribution.mean.square() + distribution.var - 1 - distribution.logvar
        return distribution.sample(), 0.5 * divergence.mean()
    return encoded.latent + _LATENT_NOISE * torch.randn_like(encoded.latent), 0.5 * encoded.latent.square().mean()


@torch.no_grad()
def _fit_scale(autoencoder: Any, family: str, digits: Digits, chance: random.Random) -> None:
    """Write into the configuration what brings the latents to unit variance."""
    encoded = [autoencoder.encode(_batch(family, digits, chance, whole=True)) for _ in range(16)]
    latents = torch.cat([e.latent_dist.mean if hasattr(e, "latent_dist") else e.latent for e in encoded])
    if family != "wan":
        autoencoder.register_to_config(scaling_factor=round(1 / latents.std().item(), 4))
        return
    channels = latents.movedim(1, 0).flatten(1)
    autoencoder.register_to_config(
        latents_mean=[round(x, 4) for x in channels.mean(dim=1).tolist()],
        latents_std=[round(x, 4) for x in channels.std(dim=1).tolist()],
    )
