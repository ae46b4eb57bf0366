"""Every command knows a family that was registered: CogView3-Plus from a folder, on the command line."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from PIL import Image

from mhla_diffusers import families, is_patched, load_mhla
from mhla_diffusers.families import register_family
from mhla_diffusers.training.data.cache import LatentCache

from ..evaluation.pictures import mhla
from .cogview3plus import COGVIEW3PLUS
from .cogview3plus_tiny import CALL, cogview3plus_pipeline, save_cogview3plus

SETTINGS = [word for name, value in CALL.items() for word in ("--set", f"{name}={str(value).lower()}")]
PATCH = """\
family: cogview3plus
base_model: THUDM/CogView3-Plus-3B
description: all layers
patch:
  density: 0.2
  block_size: 4
"""


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    """CogView3-Plus, known to the package during one test."""
    register_family(COGVIEW3PLUS)
    yield
    families._FAMILIES.pop(COGVIEW3PLUS.name)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_cogview3plus(tmp_path_factory.mktemp("cogview3plus") / "model")


@pytest.fixture
def patch(tmp_path) -> Path:
    file = tmp_path / "patch.yaml"
    file.write_text(PATCH)
    return file


def run(*arguments) -> str:
    """What a command prints; it must end well."""
    ended = mhla(*arguments)
    assert ended.exit_code == 0, f"{ended.output}\n{ended.exception!r}"
    return ended.output


def test_generate_and_audit(model, patch, tmp_path):
    patched = ("--model", model, "--patch", patch, *SETTINGS)
    run("generate", "cogview3plus", "the red dog", *patched, "--output", tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.png")
    assert Image.open(file).size == (64, 64)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\nthe red dog\n")
    asked = ("--prompt-file", prompts, "--model", model, *SETTINGS)
    run("generate", "cogview3plus", *asked, "--output", tmp_path / "set")
    assert len(list((tmp_path / "set").glob("*.png"))) == 2
    assert "worst head" in run("audit", "cogview3plus", "a cat", *patched, "--output", tmp_path / "found")
    assert len(json.loads((tmp_path / "found" / "audit.json").read_text())["layers"]) == 3  # the first stays dense


def test_encode(model, tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(2):
        Image.new("RGB", (70, 80), (50 * number, 90, 120)).save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text("a cat")
    where = ("--model", model, "--source", pictures, "--output", tmp_path / "latents")
    run("encode", *where, "--size", "64x64", "--precision", "no")
    assert LatentCache(tmp_path / "latents").shapes == [(4, 8, 8)] * 2


def test_synthesize_and_finetune(model, tmp_path):
    """Latents of prompts; then attention transfer, and distillation with the loss that the model was trained with."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\nthe red dog\na blue ball\n")
    made = ("--model", model, "--prompts", prompts, "--output", tmp_path / "latents")
    run("synthesize", *made, "--size", "64x64", "--steps", "2", "--precision", "no")
    one_step = {"steps": 1, "learning_rate": 1e-3}
    config = {
        "model": str(model),
        "data": str(tmp_path / "latents"),
        "output": str(tmp_path / "run"),
        "patch": {"density": 0.2, "block_size": 4},
        "prompt_dropout": 0.2,
        "validation": {"samples": 1, "every": 1, "prompts": ["a cat"], "inference_steps": 2},
        **one_step,
        "trainable": "attention",
        "objectives": {"transfer": 1.0},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    run("finetune", file, f"output={tmp_path / 'transfer'}")
    begun = f"patch={tmp_path / 'transfer' / 'result'}"
    run("finetune", file, begun, "trainable=all", "objectives={diffusion: 1.0, distillation: 1.0}")
    assert is_patched(load_mhla(cogview3plus_pipeline(), tmp_path / "run" / "result"))
    assert list((tmp_path / "run" / "samples").rglob("*.png"))
