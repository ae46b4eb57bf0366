"""What the tools and the studies adapt with."""

from statistics import fmean

import pytest
import torch

from mhla_diffusers.tiny import load_tiny
from mhla_diffusers.training import TrainingConfig
from studies.adaptation.adaptation import Adaptation, load_variant, runs_of, variants
from studies.adaptation.digits import TINY

from ..scripts import CONFIGS


@pytest.mark.parametrize("name", TINY)
def test_variants_ship_adapted_by_the_configuration_that_ships(name):
    """Each opens by its name, and predicts better than a fresh patch on digits that it was not adapted on."""
    tiny, first = TINY[name], CONFIGS / f"tiny-{name}-transfer.yaml"
    files = [first] * first.is_file() + [CONFIGS / f"tiny-{name}.yaml"]
    shipped = [TrainingConfig.from_yaml(file) for file in files]
    control, *patches = variants(tiny)
    assert control.name == ("own linear attention" if name == "sana" else "softmax")
    assert patches[-1].patch == shipped[0].patch
    adaptation = Adaptation(tiny, 1, 4, seed=3)
    runs = runs_of(patches[-1], tiny)
    for settings, config in zip(runs, shipped, strict=True):
        used = adaptation.config(patches[-1].patch, "x", **settings)
        for setting in (*settings, "batch_size", "prompt_dropout", "flow_shift"):
            assert getattr(used, setting) == getattr(config, setting)
    own, trained_on = load_tiny(name).transformer.state_dict(), load_variant(tiny, control).transformer.state_dict()
    assert any(not torch.equal(own[key], trained_on[key]) for key in own)
    for variant in patches:
        pipes = load_variant(tiny, variant), adaptation.patched(variant.patch)
        adapted, fresh = (fmean(adaptation.held_out_losses(pipe)) for pipe in pipes)
        assert adapted < fresh, variant.name
