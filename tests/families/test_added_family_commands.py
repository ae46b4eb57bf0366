"""Commands know a family that was registered: CogView3-Plus from a folder, on the command line.

The page "Add a model" generates and synthesizes with it, which tests/docs runs.
"""

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
from .cogview3plus_tiny import CALL, CASE, save_cogview3plus

SETTINGS = [word for name, value in CALL.items() for word in ("--set", f"{name}={str(value).lower()}")]


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    """CogView3-Plus, known to the package during one test."""
    register_family(COGVIEW3PLUS)
    yield
    families._FAMILIES.pop(COGVIEW3PLUS.name)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_cogview3plus(tmp_path_factory.mktemp("cogview3plus") / "model")


def run(*arguments) -> None:
    ended = mhla(*arguments)
    assert ended.exit_code == 0, f"{ended.output}\n{ended.exception!r}"


def test_audit(model, tmp_path):
    patch = tmp_path / "patch.yaml"
    patched = {"density": 0.2, "block_size": 4}
    about = {"family": "cogview3plus", "base_model": "THUDM/CogView3-Plus-3B", "description": "all layers"}
    patch.write_text(yaml.safe_dump({**about, "patch": patched}))
    run("audit", "cogview3plus", "a cat", "--model", model, "--patch", patch, *SETTINGS, "--output", tmp_path / "found")
    assert len(json.loads((tmp_path / "found" / "audit.json").read_text())["layers"]) == 3  # the first stays dense


def test_encode_and_finetune(model, tmp_path):
    """Pictures; then attention transfer, and distillation with the loss that the model was trained with."""
    pictures, latents = tmp_path / "pictures", tmp_path / "latents"
    pictures.mkdir()
    for number in range(3):
        Image.new("RGB", (70, 80), (50 * number, 90, 120)).save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text("a cat")
    run("encode", "--model", model, "--source", pictures, "--output", latents, "--size", "64x64", "--precision", "no")
    assert LatentCache(latents).shapes == [(4, 8, 8)] * 3
    config = {
        **{"model": str(model), "data": str(latents), "output": str(tmp_path / "run")},
        **{"patch": {"density": 0.2, "block_size": 4}, "prompt_dropout": 0.2, "steps": 1, "learning_rate": 1e-3},
        "validation": {"samples": 1, "every": 1, "prompts": ["a cat"], "inference_steps": 2},
        **{"trainable": "attention", "objectives": {"transfer": 1.0}},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    run("finetune", file, f"output={tmp_path / 'transfer'}")
    begun = f"patch={tmp_path / 'transfer' / 'result'}"
    run("finetune", file, begun, "trainable=all", "objectives={diffusion: 1.0, distillation: 1.0}")
    assert is_patched(load_mhla(CASE.pipeline(), tmp_path / "run" / "result"))
    assert list((tmp_path / "run" / "samples").rglob("*.png"))
