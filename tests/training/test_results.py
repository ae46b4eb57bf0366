"""What a run leaves: the trained model, in its pipeline; samples of its validations."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mhla_diffusers import MHLAConfig, apply_mhla, load_mhla
from mhla_diffusers.families import Clip
from mhla_diffusers.generation.pipelines import PipelineChoice, load_result
from mhla_diffusers.tiny import load_tiny
from mhla_diffusers.training import train
from mhla_diffusers.training.validation import PromptSampler
from mhla_diffusers.training.weights import add_lora, write_weights

from ..refusals import refused
from .models import settings, tiny_wan, wan_data
from .pipelines import dit_pipeline, sana_pipeline, wan_pipeline

PATCH = MHLAConfig(blocks=(2, 2, 2))


def output_of(transformer: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 4, 2, 8, 8, generator=generator)
    text = torch.randn(1, 3, 8, generator=generator)
    with torch.no_grad():
        prediction: torch.Tensor = transformer.eval()(latents, torch.tensor([500]), text, return_dict=False)[0]
    return prediction


@pytest.mark.parametrize("trainable", ["unpatched", "mhla", "all", "lora"])
def test_result_loads_and_is_the_trained_model(trainable: str, tmp_path: Path) -> None:
    pipe = wan_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    usual: dict[str, Any] = {"trainable": trainable, "patch": PATCH, "learning_rate": 1e-2}
    usual |= {"trainable": "all", "patch": None} if trainable == "unpatched" else {}
    usual |= {"lora_rank": 2} if trainable == "lora" else {}
    begun = wan_pipeline().transformer
    for transformer in (pipe.transformer, begun):
        if usual["patch"]:
            apply_mhla(transformer, PATCH)
    result = train(pipe.transformer, wan_data(), settings(tmp_path / "run", **usual)).result
    assert result is not None
    trained, loaded = output_of(pipe.transformer), wan_pipeline()
    load_result(loaded, result if trainable == "lora" else tmp_path / "run")  # of a run its result is meant
    assert torch.allclose(output_of(loaded.transformer), trained, atol=1e-6)
    assert not torch.allclose(output_of(begun), trained, atol=1e-3)
    if trainable == "lora":
        assert torch.allclose(output_of(load_mhla(tiny_wan(), result)), trained, atol=1e-6)
        choice = PipelineChoice("wan", model=str(tmp_path / "model"), patch=str(tmp_path / "run"))
        assert choice.patch == str(result)
        chosen = choice.load()
        assert torch.allclose(output_of(chosen.transformer), trained, atol=1e-6)
    if trainable == "unpatched":
        with refused("WanTransformer3DModel"):
            load_result(sana_pipeline(), result)


def test_lora_of_a_class_without_methods_for_it_comes_with_the_patch(tmp_path: Path) -> None:
    pipe, loaded = dit_pipeline(), dit_pipeline()
    add_lora(apply_mhla(pipe.transformer, blocks=(2, 2)), 2, seed=0)
    config = settings("unused", patch="unused", trainable="lora", lora_rank=2)
    write_weights(pipe.transformer, config, tmp_path / "result")
    load_result(loaded, tmp_path / "result")
    trained, found = (
        {name: x for name, x in one.transformer.named_parameters() if ".lora_" in name} for one in (pipe, loaded)
    )
    assert trained.keys() == found.keys()
    assert all(torch.equal(x, trained[name]) for name, x in found.items())


def test_samples_of_a_validation_are_the_same_every_time_and_unknown_classes_are_refused(tmp_path: Path) -> None:
    pipe, clip = load_tiny("dit"), Clip(frames=1, fps=1.0, sizes=((32, 32),))
    PromptSampler(pipe, ["7", "seven"], clip, steps=2)(pipe.transformer, tmp_path)
    first, second = (file.read_bytes() for file in sorted(tmp_path.glob("*.png")))
    assert first == second and pipe.transformer.training is False
    with refused("'a cat'"):
        PromptSampler(pipe, ["7", "a cat"], clip, steps=2)
