"""The pipelines that ship with the package, as they are."""

import json

import pytest
import torch

from mhla_diffusers.families import get_family
from mhla_diffusers.tiny import TINY, call_settings, load_tiny, loading

from ..refusals import refused


@pytest.mark.parametrize("family", TINY)
def test_files_are_small_and_safe_and_name_no_folder_of_the_machine_that_trained_them(family):
    files = [path for path in loading.pipeline_folder(family).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 6_000_000
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".jinja"}
    assert not [path for path in files if path.name == "config.json" and "_name_or_path" in path.read_text()]


@pytest.mark.parametrize("family", ["sana", "wan"])
def test_unknown_words_still_work(family):
    output = load_tiny(family)(
        "an octopus and a seven, zwölf Ämter 🙂", **{**call_settings(family), "num_inference_steps": 1}
    )
    assert output is not None


@pytest.mark.parametrize("family", TINY)
def test_called_without_settings_it_has_those_that_it_was_trained_for(family, tmp_path):
    pipe = load_tiny(family)
    prompt = [7] if family == "dit" else "a seven moving left"
    noise = torch.Generator().manual_seed
    short = {"num_inference_steps": 1, "output_type": "np"}
    settings = {**call_settings(family), **short}
    plain = type(pipe).__mro__[1].from_pretrained(loading.pipeline_folder(family))
    (expected,) = plain(prompt, generator=noise(0), **settings).values()
    (found,) = pipe(prompt, generator=noise(0), **short).values()
    assert (found == expected).all()
    pipe.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["_class_name"] == type(plain).__name__
    with pytest.raises(TypeError):
        pipe(prompt, stepz=1)


def test_video_has_at_least_512_tokens():
    pipe = load_tiny("wan")
    family = get_family(pipe.transformer)
    with torch.no_grad():
        latents = family.training.encode_pixels(pipe, torch.zeros(1, 3, 9, 64, 64))
    grid = torch.Size(family.token_grid(pipe.transformer, latents))
    assert grid.numel() >= 512


def test_an_unknown_family_is_refused():
    with refused("family='flux'", "dit, sana, wan"):
        load_tiny("flux")
