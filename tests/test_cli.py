"""The mhla command, run as a user runs it."""

import subprocess
import sys

from safetensors.torch import save_file

from mhla_diffusers import load_mhla, patch_names

from . import models
from .patching.test_conversion import paper_checkpoint


def mhla(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from mhla_diffusers.cli import run; run()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_info_lists_what_there_is():
    shown = mhla("info")
    assert shown.returncode == 0, shown.stderr
    for word in ("diffusers", "eager", "SanaTransformer2DModel", *(name[:12] for name in patch_names())):
        assert word in shown.stdout


def test_info_on_one_patch():
    shown = mhla("info", "--patch", "wan2.1-t2v-1.3b-hybrid")
    assert "[7, 3, 5]" in shown.stdout
    assert "2/3" in shown.stdout


def test_user_errors_have_no_traceback():
    shown = mhla("info", "--patch", "wan2.1-t2v-1.3")
    assert shown.returncode == 1
    assert "did you mean 'wan2.1-t2v-1.3b'" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_convert(tmp_path):
    save_file(paper_checkpoint(models.wan(), [1], True, False), tmp_path / "paper.safetensors")
    made = mhla("convert", str(tmp_path / "paper.safetensors"), str(tmp_path / "patch"), "--blocks", "2,2,3")
    assert made.returncode == 0, made.stderr
    load_mhla(models.wan(), tmp_path / "patch")


def test_import_brings_nothing_heavy_beyond_diffusers():
    """diffusers itself imports triton, through torch; what counts is what this package adds."""
    script = """
import sys, torch, diffusers
before = set(sys.modules)
import mhla_diffusers
heavy = ("transformers", "triton", "peft", "accelerate", "diffusers.pipelines", "diffusers.models", "typer", "rich")
added = [name for name in set(sys.modules) - before if name.startswith(heavy)]
sys.exit(", ".join(added) or 0)
"""
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
