"""The mhla command, run as a user runs it."""

import getpass
import importlib
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import diffusers
import pytest
import torch
from typer.testing import CliRunner

import mhla_diffusers
from mhla_diffusers import save_mhla
from mhla_diffusers.benchmark.cases import models as models_to_measure
from mhla_diffusers.cli import app, run
from mhla_diffusers.config import load_patch, patch_names
from mhla_diffusers.families import get_family
from mhla_diffusers.families.refused import REFUSED
from mhla_diffusers.moved import MOVED
from mhla_diffusers.reporting import require_matplotlib

from . import models


def mhla_here(*arguments: str) -> str:
    """What a command prints, run in this process, which has imported torch and diffusers already."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_info_lists_what_there_is():
    shown = mhla_here("info")
    words = shown.split()
    words += [word.rstrip(",:") for word in words]
    names = (*patch_names(), *models_to_measure())
    for word in ("diffusers", "WanVACETransformer3DModel", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", *names):
        assert word in words, "whole, although this is not a terminal"
    assert not REFUSED.keys() & set(words)
    assert max(map(len, shown.splitlines())) <= 80


def test_errors_name_extras_that_there_are(monkeypatch):
    root = Path(mhla_diffusers.__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = "".join(file.read_text() for file in root.glob("mhla_diffusers/**/*.py"))
    assert set(re.findall(r"(?:installing\(|required\(.*, )\W(\w+)\W\)", sources)) <= extras.keys()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'`pip install "\.\[plots\]"`'):
        require_matplotlib()


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ("wan2.1-t2v-1.3b-hybrid", ("MHLA of 7x3x5 blocks", "has to be adapted first", "- 7 - 3 - 5", "2/3")),
        ("tiny-wan-mhla", ("a saved patch", "- 3 - 4 - 4")),
        ("faithful", ("in every layer but the first 1; works untrained",)),
    ],
)
def test_info_on_one_patch(patch, words):
    shown = mhla_here("info", "--patch", patch)
    assert all(word in " ".join(shown.split()) for word in words)
    assert all(len(line) <= 80 for line in shown.splitlines() if "/" not in line)


@pytest.mark.parametrize("ask", [load_patch, get_family, lambda name: mhla_here(*name.split())])
def test_every_way_in_says_where_a_removed_name_went(ask, monkeypatch):
    monkeypatch.setitem(MOVED, "some-thing", "It is in studies/.")
    with pytest.raises(ValueError, match="It is in studies/."):
        ask("some-thing")


@pytest.mark.parametrize(
    ("asked", "instead"),
    [
        ("generate wan a --steps 4", "--set num_inference_steps"),
        ("bench pipeline --density 0.1", "--change density"),
        ("tune tiny-wan --prompts a.txt --size 64", "--set num_inference_steps"),
        ("info --patch gone.yaml", "gone.yaml does not exist; "),
        ("generate wan a --image gone.png", "'gone.png' does not exist"),
    ],
)
def test_a_removed_option_says_what_took_its_place_and_a_missing_file_which(asked, instead, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mhla", *asked.split()])
    with pytest.raises(SystemExit):
        run()
    shown = capsys.readouterr().err
    assert instead in shown and "Errno" not in shown


def test_info_on_a_saved_patch(tmp_path):
    model = models.patched("wan", output_gate=True)
    model.blocks[1].attn1.to_q.weight.data.mul_(1.5)
    save_mhla(model, tmp_path, weights=["blocks.1.attn1.to_q.weight"], base_model="someone/base")
    shown = mhla_here("info", "--patch", str(tmp_path))
    assert all(word in shown for word in ("someone/base", "changed", "- 3", "blocks.1.attn1.to_q.weight"))


def test_info_as_a_report():
    shown = mhla_here("info", "--report")
    versions = [f"{module.__name__}: {module.__version__}" for module in (mhla_diffusers, torch, diffusers)]
    for line in (*versions, "backends: auto, eager, triton"):
        assert f"\n{line}" in f"\n{shown}"
    personal = (str(Path.home()), getpass.getuser(), platform.node(), sys.prefix)
    assert not [word for word in personal if word in shown]
    assert shown.isascii() and len(shown) < 2000


def test_an_error_tells_its_causes_and_where_it_comes_from_if_asked(monkeypatch, capsys):
    def fail(*arguments):
        raise ValueError("it fails with the settings") from RuntimeError("mismatched sizes")

    monkeypatch.setattr("mhla_diffusers.benchmark.info.report", fail)
    monkeypatch.setattr(sys, "argv", ["mhla", "info", "--report"])
    with pytest.raises(SystemExit) as ended:
        run()
    shown = capsys.readouterr().err
    assert "Error: it fails with the settings\nCaused by RuntimeError: mismatched sizes" in shown
    assert ended.value.code == 1 and "mhla --traceback" in shown and "Traceback" not in shown
    monkeypatch.setattr(sys, "argv", ["mhla", "--traceback", "info", "--report"])
    with pytest.raises(ValueError, match="it fails"):
        run()


def modules_after(script: str) -> set[str]:
    """What a fresh Python has imported after a script."""
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys\n{script}\nprint('MODULES', *sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(ended.stdout.rpartition("MODULES")[2].split())


HELP = """
import click, typer
from mhla_diffusers.cli import app

def show(path, command):
    try:
        app([*path, "--help"], standalone_mode=False)
    except SystemExit as error:
        assert error.code == 0
    for name, inner in getattr(command, "commands", {}).items():
        show([*path, name], inner)

show([], typer.main.get_command(app))
"""


WRONG = """
import sys
from mhla_diffusers.cli import app

for words in {commands}:
    try:
        app(words.split(), standalone_mode=False)
    except Exception as error:
        assert "nowhere" in str(error), error
    else:
        sys.exit("not refused: " + words)
"""
MISSING = [
    "generate wan --prompts nowhere",
    "encode --model tiny-wan --source nowhere --output x",
    "synthesize --model tiny-wan --prompts nowhere --output x",
    "tune wan --prompts nowhere",
    "finetune nowhere.yaml",
]


@pytest.mark.parametrize(
    ("script", "imported", "left_out"),
    [
        (
            HELP,
            "mhla_diffusers.evaluation.commands",
            "torch diffusers transformers accelerate triton numpy psutil",
        ),
        # whose devices are torch's; diffusers and torch.compile would take longer to import than torch itself
        (
            "from mhla_diffusers.cli import app; app(['info'], standalone_mode=False)",
            "torch",
            "diffusers transformers torch._dynamo",
        ),
        ("import mhla_diffusers", "mhla_diffusers", "torch diffusers numpy typer rich yaml"),
        (WRONG.format(commands=MISSING), "mhla_diffusers.cli", "torch diffusers numpy"),
        (
            WRONG.format(commands=["generate nowhere x", "generate wan x --patch nowhere", "bench op --model nowhere"]),
            "torch",
            "diffusers transformers torch._dynamo",
        ),
    ],
    ids=["help of every command", "info", "the package", "files that are missing", "names that are unknown"],
)
def test_what_is_imported(script, imported, left_out):
    found = modules_after(script)
    assert imported in found
    assert not found & set(left_out.split())


def test_names_of_lazy_packages_are_there():
    for package in ("", ".training"):
        module = importlib.import_module(f"mhla_diffusers{package}")
        for name in module.__all__:
            assert getattr(module, name).__name__ == name
        assert set(module.__all__) <= set(dir(module))
        with pytest.raises(AttributeError):
            module.__getattr__("apply_mlha")


@pytest.mark.parametrize("name", ["mhla_diffusers.cli", "mhla_diffusers"])
def test_version_and_running_as_a_module(name):
    start = ["-c", "from mhla_diffusers.cli import run; run()"] if name.endswith("cli") else ["-m", name]
    shown = subprocess.run([sys.executable, *start, "--version"], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout) == (0, f"mhla_diffusers {mhla_diffusers.__version__}\n")


def test_a_reader_that_leaves_is_no_error(tmp_path):
    """As in ``mhla generate … | head -1``."""
    command = [sys.executable, "-m", "mhla_diffusers", "generate", "wan", "a", "--output", str(tmp_path)]
    command += ["--dtype", "bfloat16"]
    with subprocess.Popen(
        [*command, "--set", "num_inference_steps=1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 1  # by click
    assert "Error" not in said and "Broken pipe" not in said
    # nor do diffusers' warnings of casts that the command makes, or of a VAE that leaves frames as they are
    assert "kept in float32" not in said and "divisible by 1" not in said
    assert [file.suffix for file in tmp_path.glob("0*")] == [".mp4"]
