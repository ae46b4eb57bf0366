"""The automatic choice of layers on a trained tiny pipeline."""

import torch

from mhla_diffusers import apply_mhla
from mhla_diffusers.patching import record_calls
from mhla_diffusers.tiny import load_tiny

from .. import models
from ..analysis.tiny import run_tiny


def test_automatic_choice_moves_the_output_no_more_than_the_fixed_one():
    """On the untrained patch, judged on other noise and another class than it was chosen on."""
    pipe = load_tiny("dit")
    judged = record_calls(
        {"transformer": pipe.transformer},
        lambda: pipe(class_labels=[4], num_inference_steps=6, generator=torch.Generator().manual_seed(9)),
    )["transformer"]
    with torch.no_grad():
        expected = [call.predict(pipe.transformer) for call in judged]
    changes = {}
    for layers in ("2/3", "auto:2/3"):
        patched = load_tiny("dit")
        calibration = {"calibration": run_tiny(patched, steps=6)} if layers.startswith("auto") else {}
        apply_mhla(patched, sparse="none", blocks=(4, 4), layers=layers, **calibration)
        with torch.no_grad():
            found = [call.predict(patched.transformer) for call in judged]
        changes[layers] = sum(models.relative_change(f, e) ** 2 for f, e in zip(found, expected, strict=True))
    assert changes["auto:2/3"] <= changes["2/3"]
