"""What the demo and the comparisons in finetune/ adapt with."""

import pytest
import torch

from mhla_diffusers import MHLAConfig
from mhla_diffusers.demo.adaptation import DIFFUSION, Adaptation, Recipe, digit_latents, held_out_curve
from mhla_diffusers.families import predict
from mhla_diffusers.patching import is_patched, mhla_layers
from mhla_diffusers.tiny import TINY, load_tiny

MHLA = MHLAConfig(blocks=(4, 4))
HELD_OUT = 3


@pytest.fixture(scope="module")
def adaptation():
    tiny = TINY["dit"]
    data = digit_latents(load_tiny("dit"), tiny, 8, HELD_OUT)
    return Adaptation(tiny, data, HELD_OUT, seed=1, validate_every=1, batch_size=4)


def test_curve_begins_with_the_patched_model_and_ends_with_the_adapted_one(adaptation, tmp_path):
    pipe = adaptation.patched(MHLA)
    before = adaptation.held_out_losses(pipe)
    adaptation.adapt(pipe, Recipe(1, transfer_steps=1), tmp_path)
    after = adaptation.held_out_losses(pipe)
    assert len(before) == len(after) == HELD_OUT
    curve = held_out_curve(tmp_path)
    assert [step for step, _ in curve] == [0, 1, 2]
    assert curve[0][1] == pytest.approx(sum(before) / HELD_OUT, rel=1e-6)
    assert curve[-1][1] == pytest.approx(sum(after) / HELD_OUT, rel=1e-6)
    assert not pipe.transformer.training


def test_weights_that_are_learned_are_fitted_before_the_first_update_and_only_then(adaptation, tmp_path, caplog):
    caplog.set_level("INFO", "mhla_diffusers.training.validation")
    sparse = {"mixing_per_head": True, "sparse": "content", "block_size": 2}
    pipe = adaptation.patched(MHLA.replace(**sparse, fit_pooled_bias=False))
    adaptation.adapt(pipe, Recipe(1), tmp_path / "first")
    assert "Fitting λ and β on 8 training samples" in caplog.text
    caplog.clear()
    adaptation.adapt(pipe, Recipe(1), tmp_path / "second")
    adaptation.adapt(adaptation.patched(MHLA.replace(**sparse)), Recipe(1), tmp_path / "fitted in the call")
    assert "Fitting" not in caplog.text


def test_unpatched_pipeline_trains_on(adaptation, tmp_path):
    pipe = adaptation.patched(None)
    assert not is_patched(pipe)
    adaptation.adapt(pipe, Recipe(1, objectives=DIFFUSION), tmp_path)
    assert (tmp_path / "result" / "config.json").is_file()


def test_layers_are_chosen_on_what_the_calibration_runs(adaptation):
    seen = []

    def calibration(pipe):
        seen.append(pipe)
        batch = adaptation.batch(pipe.transformer, range(2), torch.tensor([0.25, 0.75]))
        return predict(pipe.transformer, batch)

    pipe = adaptation.patched(MHLA.replace(layers="auto:1/2"), calibration)
    assert all(one is pipe for one in seen)
    assert seen
    assert len(mhla_layers(pipe)) == 2
    assert len(next(iter(mhla_layers(pipe).values())).config.layers) == 2
    seen.clear()
    adaptation.patched(MHLA, calibration)
    assert not seen


def test_batch_has_always_the_same_noise(adaptation):
    transformer = load_tiny("dit").transformer
    first, again = (adaptation.batch(transformer, (0, 1), torch.tensor([0.5, 0.5])) for _ in range(2))
    assert torch.equal(first.hidden_states, again.hidden_states)
    assert torch.equal(first.latents[1], adaptation.data[1]["latents"])
