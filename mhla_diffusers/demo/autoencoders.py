"""The autoencoders of the tiny pipelines: diffusers' classes at small sizes, and how they are trained.

An autoencoder is no diffusion model, so this is a loop of its own: reconstruction error plus a weak pull of the latents
towards the unit normal distribution. The video autoencoder has temporal stride 1 and is trained on single frames: its
convolutions begin without a view of earlier frames, and single frames give those weights no gradient, so it treats
every frame of a clip alike.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..tiny.digits import DIGIT_SIZES, Digits, compose, load_digits, random_scene, to_rgb

LATENT_CHANNELS = {"dit": 4, "sana": 4, "wan": 4}
STRIDES = {"dit": 4, "sana": 4, "wan": 4}

AUTOENCODER_STEPS = {"dit": 400, "sana": 400, "wan": 250}
"""Updates of an autoencoder."""

_BATCH = 8
_KL_WEIGHT = 1e-4
_LATENT_NOISE = 0.1
_LATENT_SCALE = 0.5


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
    autoencoder = AutoencoderKLWan(
        base_dim=16,
        z_dim=channels,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * channels,
        latents_std=[1.0] * channels,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=1,
        scale_factor_spatial=4,
    )
    _forget_earlier_frames(autoencoder)
    return autoencoder


@torch.no_grad()
def _forget_earlier_frames(autoencoder: Any) -> None:
    """Leave of every causal convolution the weights of the current frame, the last of its kernel."""
    for module in autoencoder.modules():
        if isinstance(module, nn.Conv3d):
            module.weight[:, :, :-1] = 0


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
    steps, digits = AUTOENCODER_STEPS[family], load_digits("train")
    autoencoder = build_autoencoder(family)
    optimizer = torch.optim.AdamW(autoencoder.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        pictures = _batch(family, digits, chance)
        latents, penalty = _encode(autoencoder, pictures)
        restored = _decode(autoencoder, family, latents)
        error = nn.functional.mse_loss(restored, pictures)
        (error + _KL_WEIGHT * penalty).backward()
        nn.utils.clip_grad_norm_(autoencoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        report(step + 1, error.item())
    autoencoder.eval()
    _fit_scale(autoencoder, family, digits, chance)
    return autoencoder


def _batch(family: str, digits: Digits, chance: random.Random) -> torch.Tensor:
    """Random pictures (8, 3, H, W), for wan single frames of clips (8, 3, 1, H, W), in [-1, 1]."""
    pictures = []
    for _ in range(_BATCH):
        picture = compose(random_scene(family, chance), digits, DIGIT_SIZES[family], chance.randrange(2**32))
        frame = to_rgb(picture[chance.randrange(len(picture))][None]) if family == "wan" else to_rgb(picture)
        pictures.append(frame[:, None] if family == "wan" else frame)
    return torch.stack(pictures)


def _encode(autoencoder: Any, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy latents, and how far they are from unit normal ones."""
    encoded = autoencoder.encode(pictures)
    if hasattr(encoded, "latent_dist"):
        distribution = encoded.latent_dist
        divergence = distribution.mean.square() + distribution.var - 1 - distribution.logvar
        return distribution.sample(), 0.5 * divergence.mean()
    return encoded.latent + _LATENT_NOISE * torch.randn_like(encoded.latent), 0.5 * encoded.latent.square().mean()


def _decode(autoencoder: Any, family: str, latents: torch.Tensor) -> torch.Tensor:
    """Pictures of latents; for wan without the final clamp, behind which a dark pixel gets no gradient."""
    if family != "wan":
        return autoencoder.decode(latents, return_dict=False)[0]
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    frames = autoencoder.decoder(autoencoder.post_quant_conv(latents), first_chunk=True)
    return unpatchify(frames, autoencoder.config.patch_size)


@torch.no_grad()
def _fit_scale(autoencoder: Any, family: str, digits: Digits, chance: random.Random) -> None:
    """Write into the configuration what brings the latents to half of unit variance.

    On pictures as smooth as these the shape shows through much noise; of unit variance, nearly every training step
    would fall where the digit is plain to see already and the caption has nothing to add.
    """
    encoded = [autoencoder.encode(_batch(family, digits, chance)) for _ in range(16)]
    latents = torch.cat([e.latent_dist.mean if hasattr(e, "latent_dist") else e.latent for e in encoded])
    if family != "wan":
        autoencoder.register_to_config(scaling_factor=round(_LATENT_SCALE / latents.std().item(), 4))
        return
    channels = latents.movedim(1, 0).flatten(1)
    autoencoder.register_to_config(
        latents_mean=[round(x, 4) for x in channels.mean(dim=1).tolist()],
        latents_std=[round(x / _LATENT_SCALE, 4) for x in channels.std(dim=1).tolist()],
    )
