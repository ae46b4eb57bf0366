"""What a finished run leaves comes back whole."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mhla_diffusers import apply_mhla
from mhla_diffusers.generation import load_result
from mhla_diffusers.training.run_folder import RunFolder
from mhla_diffusers.training.trainable import add_adapters

from .models import one_stage, tiny_wan
from .pipelines import dit_pipeline, sana_pipeline, wan_pipeline


def _shaken(transformer: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return transformer.eval()


def _output(transformer: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 4, 2, 8, 8, generator=generator)
    text = torch.randn(1, 3, 8, generator=generator)
    with torch.no_grad():
        prediction: torch.Tensor = transformer.eval()(latents, torch.tensor([500]), text, return_dict=False)[0]
    return prediction


def test_an_unpatched_run_leaves_a_transformer_for_its_pipeline(tmp_path: Path) -> None:
    trained = _shaken(tiny_wan())
    RunFolder(tmp_path).export(trained, one_stage("unused"))
    pipe = wan_pipeline()
    load_result(pipe, tmp_path / "result")
    loaded = pipe.transformer.state_dict()  # not outputs, whose last digit depends on where weights lie in memory
    assert loaded.keys() == trained.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in trained.state_dict().items())
    with pytest.raises(ValueError, match="holds a WanTransformer3DModel, but the pipeline has a SanaTransformer2D"):
        load_result(sana_pipeline(), tmp_path / "result")


def test_lora_comes_with_the_patch_that_it_was_trained_beside(tmp_path: Path) -> None:
    pipe = wan_pipeline()
    trained = apply_mhla(pipe.transformer, sparse="none", blocks=(1, 2, 2))
    add_adapters(trained, 2, seed=0)
    without = _output(trained)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if ".lora_B." in name or ".mhla." in name:
                parameter.add_(0.1)
    config = one_stage("unused", patch="unused", trainable="lora", lora_rank=2)
    RunFolder(tmp_path).export(trained, config)
    loaded = wan_pipeline()
    load_result(loaded, tmp_path / "result")
    assert not torch.allclose(_output(trained), without, atol=1e-3)
    assert torch.allclose(_output(loaded.transformer), _output(trained), atol=1e-6)


def test_lora_for_a_pipeline_that_takes_none_is_refused(tmp_path: Path) -> None:
    pipe = dit_pipeline()
    add_adapters(apply_mhla(pipe.transformer, sparse="none", blocks=(2, 2)), 2, seed=0)
    config = one_stage("unused", patch="unused", trainable="lora", lora_rank=2)
    RunFolder(tmp_path).export(pipe.transformer, config)
    with pytest.raises(ValueError, match="holds LoRA, but DiTPipeline takes none"):
        load_result(dit_pipeline(), tmp_path / "result")
