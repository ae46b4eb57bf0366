"""Times of frame blocks: which are drawn, that all belongs to the seed, what is noised and predicted, and errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SkyReelsV2Transformer3DModel, WanTransformer3DModel, WanVACETransformer3DModel

import mhla_diffusers as mhla
from mhla_diffusers.families import arguments_of, get_family, predict
from mhla_diffusers.training import InMemoryData, TrainingConfig, ValidationConfig, train
from mhla_diffusers.training.data.times import even_quantiles, frames_together, random_quantiles

from ...models import assert_changed, wan
from ..models import settings

CAUSAL: dict[str, Any] = {"blocks": (3, 2, 2), "causal": "block", "block_length": 2}
FRAMES = 6


def _config(output: object = "outputs/run", **changes: Any) -> TrainingConfig:
    usual = settings(output, 2, trainable="attention", patch=mhla.CausalConfig(**CAUSAL))
    return usual.replace(validation=ValidationConfig(samples=1, timesteps=2), **changes)


def _data() -> InMemoryData:
    generator = torch.Generator().manual_seed(0)
    shapes = {"latents": (16, FRAMES, 8, 8), "encoder_hidden_states": (6, 32)}
    return InMemoryData(
        [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(4)]
    )


def test_a_frame_block_shares_its_time_and_half_of_the_videos_have_begun() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([random_quantiles(FRAMES, 2, generator) for _ in range(2000)])
    assert drawn.shape == (2000, FRAMES) and drawn.dtype == torch.float64
    assert torch.equal(drawn[:, 0], drawn[:, 1]) and torch.equal(drawn[:, 2], drawn[:, 3])
    blocks = drawn[:, ::2]
    # a block that is clean has clean ones before it alone, and the last is never clean
    assert ((blocks[:, 1:] == 0) <= (blocks[:, :-1] == 0)).all() and (blocks[:, -1] > 0).all()
    # of the half that has begun a third each has 0, 1 and 2 clean blocks; 5 standard deviations of 2000 draws
    clean = [(blocks == 0).sum(dim=1).eq(count).float().mean().item() for count in (1, 2)]
    assert clean == pytest.approx([1 / 6, 1 / 6], abs=5 * (5 / 36 / 2000) ** 0.5)
    noised = blocks[blocks > 0]
    assert noised.mean().item() == pytest.approx(0.5, abs=5 * (1 / 12 / len(noised)) ** 0.5)
    # those of a validation are fixed, and differ from block to block
    found = even_quantiles(torch.tensor(0.5, dtype=torch.float64), FRAMES, 2)
    assert found.shape == (FRAMES,) and found[0] == found[1] == 0.5
    assert len(set(found.tolist())) == 3 and 0 < found.min() < found.max() < 1


@pytest.mark.parametrize("cls", [WanTransformer3DModel, SkyReelsV2Transformer3DModel])
def test_every_frame_is_noised_to_its_time_and_clean_ones_are_not_judged(cls: type) -> None:
    model = mhla.apply_mhla(wan(cls, num_layers=1), **CAUSAL)
    process = get_family(model).training.process(model, 3.0)
    assert frames_together(model) == 2
    latents, noise = torch.randn(2, 16, FRAMES, 8, 8), torch.randn(2, 16, FRAMES, 8, 8)
    quantile, text = torch.tensor([[0, 0, 0.5, 0.5, 0.9, 0.9], [0.3] * 6]).double(), torch.randn(2, 6, 32)
    batch = process.make_batch(latents, noise, quantile, {"encoder_hidden_states": text})
    assert torch.equal(batch.hidden_states[0, :, :2], latents[0, :, :2])
    sigma = process.time_at(quantile)[0, 4]
    assert torch.equal(batch.hidden_states[0, :, 4], (1 - sigma) * latents[0, :, 4] + sigma * noise[0, :, 4])
    # one time for all frames, as often as there are frames, is that one time
    alone = process.make_batch(latents[1:], noise[1:], quantile[1:, 0], {"encoder_hidden_states": text[1:]})
    with torch.no_grad():
        prediction, one_time = predict(model, batch), predict(model, alone)
    assert torch.allclose(prediction[1:], one_time, rtol=1e-4, atol=1e-5)  # float32 sums of another batch
    losses = process.loss(prediction, batch)
    assert losses[1].item() == pytest.approx(process.loss(one_time, alone).item(), rel=1e-4)
    other = prediction.clone()
    other[0, :, :2] += 1
    assert torch.equal(process.loss(other, batch), losses)
    if cls is SkyReelsV2Transformer3DModel:
        assert arguments_of(model, batch)["enable_diffusion_forcing"]


def test_a_causal_patch_is_trained_and_validated_with_times_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mhla.apply_mhla(wan(num_layers=1), **CAUSAL)
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["timestep"]), with_kwargs=True)
    (layer,) = mhla.mhla_layers(model).values()
    before = layer.mixing.detach().clone()
    assert train(model, _data(), _config(tmp_path)).finished
    assert all(times.shape[1:] == (FRAMES * 16,) for times in seen)
    assert_changed(layer.mixing.detach(), before)


@pytest.mark.parametrize(
    ("make", "layers", "words"),
    [
        (lambda: wan(WanVACETransformer3DModel, num_layers=1, vace_layers=[0], vace_in_channels=12), "all", "WanVACE"),
        (lambda: wan(num_layers=2), [1], r"1 of 2 .*blocks\.0\.attn1"),
    ],
)
def test_models_with_one_time_for_all_frames_are_refused_before_training(make: Any, layers: Any, words: str) -> None:
    """And those of which some layers see later frames."""
    with pytest.raises(ValueError, match=f"causal='block'.*{words}"):
        train(mhla.apply_mhla(make(), **CAUSAL, layers=layers), _data(), _config("unused"))
