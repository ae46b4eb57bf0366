"""Noise, times and losses against those of diffusers' schedulers."""

import math

import diffusers
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from torch.distributions import Normal, kl_divergence

from mhla_diffusers.families import FlowMatching, LearnedVarianceDDPM
from mhla_diffusers.families.processes import VelocityDDPM

from ..refusals import refused


def test_flow_matching_agrees_with_diffusers_scheduler() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    place = torch.tensor([0, 400, 900])
    unshifted = 1 - place / 1000
    process = FlowMatching(shift=3.0)
    quantile = torch.special.ndtr(torch.logit(unshifted.double()))[1:]
    sigma = process.time_at(quantile)
    assert torch.allclose(sigma, scheduler.sigmas[place[1:]], atol=1e-5)
    assert torch.allclose(process.timestep(sigma), scheduler.timesteps[place[1:]], atol=1e-2)
    latents, noise = torch.randn(2, 2, 4, 3, 5, 5)
    assert torch.allclose(
        process.noised(latents, noise, scheduler.sigmas[place[1:]]),
        scheduler.scale_noise(latents, scheduler.timesteps[place[1:]], noise),
        atol=1e-5,
    )
    batch = process.make_batch(latents, noise, torch.tensor([0.1, 0.9]), {})
    assert process.loss(noise - latents, batch).max() < 1e-10


def test_ddpm_noises_as_diffusers_does() -> None:
    scheduler = DDPMScheduler(num_train_timesteps=1000, beta_start=1e-4, beta_end=0.02, beta_schedule="linear")
    latents, noise = torch.randn(2, 4, 4, 8, 8)
    time = torch.tensor([0, 1, 500, 999])
    expected = scheduler.add_noise(latents, noise, time)
    assert torch.allclose(LearnedVarianceDDPM().noised(latents, noise, time), expected, atol=1e-4)


def test_variational_bound_is_the_divergence_of_the_posteriors() -> None:
    process = LearnedVarianceDDPM()
    latents, noise, wrong = torch.randn(3, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    batch = process.make_batch(latents, noise, torch.tensor([0.3005]), {})
    time = int(batch.time)
    scheduler = DDPMScheduler(
        beta_start=1e-4, beta_end=0.02, beta_schedule="linear", variance_type="learned_range", clip_sample=False
    )
    fraction = torch.rand(latents.shape)
    prediction = torch.cat([wrong, 2 * fraction - 1], dim=1)
    # diffusers adds sqrt(variance) · noise to the mean: two steps with equal and opposite noise tell both apart
    log_variance = scheduler._get_variance(time, predicted_variance=2 * fraction - 1, variance_type="learned_range")
    draw = torch.Generator().manual_seed(3)
    stepped = scheduler.step(prediction, time, batch.hidden_states, generator=draw).prev_sample
    added = torch.randn(latents.shape, generator=torch.Generator().manual_seed(3))
    scale = (0.5 * log_variance).exp()
    mean = stepped - scale * added
    plain = DDPMScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear", clip_sample=False)
    draw = torch.Generator().manual_seed(3)
    variance = plain._get_variance(time)
    true_mean = plain.step(noise, time, batch.hidden_states, generator=draw).prev_sample - variance.sqrt() * added
    expected = kl_divergence(Normal(true_mean, variance.sqrt()), Normal(mean, scale)).mean() / math.log(2)
    simple = (wrong - noise).square().mean()
    assert torch.allclose(process.loss(prediction, batch)[0], simple + expected, rtol=2e-3)


def test_bound_at_time_zero_is_finite_everywhere() -> None:
    process = LearnedVarianceDDPM()
    latents = torch.tensor([-30.0, -1.0, -0.5, 0.0, 0.9995, 1.0, 30.0]).view(1, 1, 1, 7)
    batch = process.make_batch(latents, torch.zeros_like(latents), torch.tensor([1e-6]), {})
    prediction = torch.zeros(1, 2, 1, 7, requires_grad=True)
    loss = process.loss(prediction, batch)
    loss.sum().backward()
    assert prediction.grad is not None
    assert loss.isfinite().all()
    assert prediction.grad.isfinite().all()


def test_bound_does_not_move_the_noise_prediction() -> None:
    process = LearnedVarianceDDPM()
    latents, noise = torch.randn(2, 2, 4, 8, 8)
    batch = process.make_batch(latents, noise, torch.tensor([0.2, 0.7]), {})
    exact = torch.cat([noise, torch.zeros_like(noise)], dim=1).requires_grad_()
    process.loss(exact, batch).sum().backward()
    assert exact.grad is not None
    assert exact.grad[:, :4].abs().max() == 0
    assert exact.grad[:, 4:].abs().max() > 0


def test_model_without_variance_is_refused() -> None:
    process = LearnedVarianceDDPM()
    batch = process.make_batch(torch.zeros(1, 4, 2, 2), torch.zeros(1, 4, 2, 2), torch.tensor([0.5]), {})
    with refused("8 channels", "got 4"):
        process.loss(torch.zeros(1, 4, 2, 2), batch)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_velocity_is_that_of_diffusers_scheduler(shift: float) -> None:
    settings = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "snr_shift_scale": shift}
    scheduler, process = diffusers.CogVideoXDDIMScheduler(**settings), VelocityDDPM(snr_shift=shift)
    latents, noise = torch.randn(2, 5, 4, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    time = torch.tensor([0, 1, 500, 998, 999])
    batch = process.make_batch(latents, noise, (time + 0.5) / 1000, {})
    assert torch.equal(batch.timestep, time)
    # amplitudes are float32
    expected = scheduler.add_noise(latents, noise, time)
    torch.testing.assert_close(batch.hidden_states, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(batch.hidden_states[-1], noise[-1])
    velocity = scheduler.get_velocity(latents, noise, time)
    assert process.loss(velocity, batch).max() < 1e-10
    torch.testing.assert_close(process.loss(velocity + 0.5, batch), torch.full((5,), 0.25), rtol=1e-4, atol=0)
