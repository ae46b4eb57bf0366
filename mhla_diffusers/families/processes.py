"""How each family noises latents, (B, C, F, H, W) or (B, C, H, W), and what its model predicts."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

KNOWN_FRAMES = "known_frames"
"""Conditioning of a sample whose first latent frames are given, as by a picture: their number, int64 ()."""


@dataclass(frozen=True)
class NoisedBatch:
    """Input of one forward of the transformer, and the target of its output."""

    latents: Tensor
    noise: Tensor
    time: Tensor
    """(B,): σ in (0, 1), or the integer step for DDPM; of every frame (B, F), with 0 for clean ones."""
    hidden_states: Tensor
    """Like ``latents``, noised: the transformer's input."""
    timestep: Tensor
    """Like ``time``, as the transformer takes it."""
    conditioning: Mapping[str, Tensor]


class DiffusionProcess(ABC):
    """How a family was trained."""

    channels: int | None = None
    """How many channels are noised and predicted, None for all; those after them, of a picture, stay clean."""

    @abstractmethod
    def time_at(self, quantile: Tensor) -> Tensor:
        """Return the time at quantiles in (0, 1) of the training distribution: float32 (B,) to (B,)."""

    @abstractmethod
    def noised(self, latents: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return the latents at a time, like ``latents``."""

    @abstractmethod
    def timestep(self, time: Tensor) -> Tensor:
        """Return the transformer's argument for a time: (B,) to (B,)."""

    @abstractmethod
    def loss(self, prediction: Tensor, batch: NoisedBatch) -> Tensor:
        """Return the training loss per sample: float32 (B,)."""

    def make_batch(
        self, latents: Tensor, noise: Tensor, quantile: Tensor, conditioning: Mapping[str, Tensor]
    ) -> NoisedBatch:
        """Noise latents to times at quantiles, (B,) or of frames (B, F); :data:`KNOWN_FRAMES` of them stay clean."""
        given = dict(conditioning)
        if (known := given.pop(KNOWN_FRAMES, None)) is not None:
            is_noised = torch.arange(latents.shape[2], device=quantile.device) >= known[:, None].to(quantile.device)
            quantile = quantile.reshape(len(quantile), -1) * is_noised
        time = self.time_at(quantile)
        hidden_states = self.noised(latents, noise, time)
        if self.channels is not None:
            hidden_states = torch.cat([hidden_states[:, : self.channels], latents[:, self.channels :]], dim=1)
        return NoisedBatch(latents, noise, time, hidden_states, self.timestep(time), given)


class FlowMatching(DiffusionProcess):
    """Straight paths to the noise; the model predicts the velocity, noise − latents, and takes 1000 σ.

    σ follows a logit-normal distribution, shifted: σ ↦ shift σ / (1 + (shift − 1) σ).
    """

    def __init__(self, shift: float, timestep_scale: float = 1.0, channels: int | None = None) -> None:
        self.shift, self.timestep_scale, self.channels = shift, timestep_scale, channels

    def time_at(self, quantile: Tensor) -> Tensor:
        """Return σ of the quantiles: the sigmoid of a standard normal variable, shifted."""
        return self.shifted(torch.special.ndtri(quantile.double()).sigmoid()).float()

    def shifted(self, sigma: Tensor) -> Tensor:
        """Return σ after the shift, of the same shape and type."""
        return self.shift * sigma / (1 + (self.shift - 1) * sigma)

    def noised(self, latents: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return (1 − σ) latents + σ noise."""
        sigma = _along(time, latents)
        return (1 - sigma) * latents + sigma * noise

    def timestep(self, time: Tensor) -> Tensor:
        """Return 1000 σ, scaled."""
        return time * 1000 * self.timestep_scale

    def loss(self, prediction: Tensor, batch: NoisedBatch) -> Tensor:
        """Return the mean squared error to the velocity, over frames that are not clean."""
        velocity = (batch.noise - batch.latents)[:, : self.channels]
        error = (prediction[:, : velocity.shape[1]].float() - velocity.float()).square()
        if batch.time.ndim == 1:
            return error.flatten(1).mean(dim=1)
        noised = (batch.time > 0).float()
        by_frame = error.movedim(2, 1).flatten(2).mean(dim=2)
        return (by_frame * noised).sum(dim=1) / noised.sum(dim=1).clamp_min(1)


class _DDPM(DiffusionProcess):
    """Steps of a schedule, all equally likely in training."""

    def __init__(self, signal: Tensor) -> None:
        self.signal = signal

    def time_at(self, quantile: Tensor) -> Tensor:
        """Return the step: int64."""
        return (quantile.double() * len(self.signal)).long().clamp(0, len(self.signal) - 1)

    def timestep(self, time: Tensor) -> Tensor:
        """Return the step itself."""
        return time

    def noised(self, latents: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return √ᾱ latents + √(1 − ᾱ) noise."""
        signal, rest = self.amplitudes(time, latents)
        return signal * latents + rest * noise

    def amplitudes(self, time: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return √ᾱ and √(1 − ᾱ) of every sample, float32 (B, 1, ...)."""
        signal = self.signal.to(time.device)[time]
        return _along(signal.sqrt().float(), like), _along((1 - signal).sqrt().float(), like)


class LearnedVarianceDDPM(_DDPM):
    """DiT: the model predicts the noise and, in as many further channels, the variance; β grows from 0.0001 to 0.02.

    The loss is the noise's mean squared error plus the variational bound in bits per dimension, for the variance alone.
    """

    def __init__(self) -> None:
        betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
        super().__init__((1 - betas).cumprod(dim=0))
        before = torch.cat([torch.ones(1, dtype=torch.float64), self.signal[:-1]])
        variance = betas * (1 - before) / (1 - self.signal)
        self.log_variances = torch.cat([variance[1:2], variance[1:]]).log(), betas.log()
        self.posterior = (
            before.sqrt() * betas / (1 - self.signal),
            (1 - before) * (1 - betas).sqrt() / (1 - self.signal),
        )

    def loss(self, prediction: Tensor, batch: NoisedBatch) -> Tensor:
        """Add the noise's squared error and the variance's bound; ValueError without channels for the variance."""
        channels = batch.latents.shape[1]
        if prediction.shape[1] != 2 * channels:
            raise ValueError(
                f"A DiT with learned variance predicts {2 * channels} channels for {channels} of latents, "
                f"got {prediction.shape[1]}."
            )
        noise, variance = prediction.float().split(channels, dim=1)
        simple = (noise - batch.noise.float()).square().flatten(1).mean(dim=1)
        noise, fraction = noise.detach(), (variance + 1) / 2
        latents, hidden_states, time = batch.latents.float(), batch.hidden_states.float(), batch.time
        signal, rest = self.amplitudes(time, latents)
        tables = (*self.log_variances, *self.posterior)
        low, high, clean_weight, noised_weight = (_along(x.to(time.device)[time].float(), latents) for x in tables)
        log_variance = fraction * high + (1 - fraction) * low
        predicted = (hidden_states - rest * noise) / signal
        true_mean, mean = (clean_weight * clean + noised_weight * hidden_states for clean in (latents, predicted))
        divergence = 0.5 * (
            log_variance - low + (low - log_variance).exp() - 1 + (true_mean - mean).square() * (-log_variance).exp()
        )
        # −log of the probability of an interval of 1/255 around each value, for values from −1 to 1
        inverse = (-0.5 * log_variance).exp()
        upper = torch.special.log_ndtr((latents - mean + 1 / 255) * inverse)
        lower = torch.special.log_ndtr((latents - mean - 1 / 255) * inverse)
        above_lower = torch.special.log_ndtr((mean - latents + 1 / 255) * inverse)
        inside = upper + torch.log1p(-(lower - upper).clamp(max=-1e-7).exp())
        likelihood = -torch.where(latents < -0.999, upper, torch.where(latents > 0.999, above_lower, inside))
        bound = torch.where(_along(time == 0, latents), likelihood, divergence)
        return simple + bound.flatten(1).mean(dim=1) / math.log(2)


class VelocityDDPM(_DDPM):
    """CogVideoX: the model predicts the velocity, √ᾱ noise − √(1 − ᾱ) latents, up to pure noise at the last step.

    Its squared error is that of the latents, divided by 1 − ᾱ as CogVideoX weighs it. ``snr_shift`` divides the ratio
    ᾱ / (1 − ᾱ) of every step: 3.0 for CogVideoX-2B.
    """

    def __init__(self, snr_shift: float = 1.0, *, channels: int | None = None) -> None:
        from diffusers import CogVideoXDDIMScheduler

        schedule = CogVideoXDDIMScheduler(rescale_betas_zero_snr=True, snr_shift_scale=snr_shift)
        super().__init__(schedule.alphas_cumprod)
        self.channels = channels

    def loss(self, prediction: Tensor, batch: NoisedBatch) -> Tensor:
        """Return the mean squared error to the velocity."""
        latents, noise = (x[:, : self.channels].float() for x in (batch.latents, batch.noise))
        signal, rest = self.amplitudes(batch.time, latents)
        velocity = signal * noise - rest * latents
        return (prediction[:, : self.channels].float() - velocity).square().flatten(1).mean(dim=1)


def _along(value: Tensor, like: Tensor) -> Tensor:
    """Return values of samples (B,) as (B, 1, ...), or of frames (B, F) as (B, 1, F, ...)."""
    if value.ndim == 2:
        return value.view(len(value), 1, -1, *[1] * (like.ndim - 3))
    return value.view(-1, *[1] * (like.ndim - 1))
