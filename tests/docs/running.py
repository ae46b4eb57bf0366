"""Running what the pages say: in this process, in a folder as a reader would have it, on tiny models."""

import re
import runpy
import shlex
import sys
from importlib.util import find_spec
from typing import Any

import click
import pytest
import torch
import typer
from typer.testing import CliRunner

from mhla_diffusers import families
from mhla_diffusers.cli import app
from mhla_diffusers.tiny import load_tiny, pipeline_folder

from .snippets import ROOT, Snippet

TINY_DIT, TINY_SANA, TINY_WAN = (str(pipeline_folder(family)) for family in ("dit", "sana", "wan"))
WAN_CALL = 'num_inference_steps=1, num_frames=6, height=64, width=64, max_sequence_length=10, output_type="latent"'
WAN_SET = "--set num_inference_steps=1 --set num_frames=7 --set max_sequence_length=10"
SANA_SET = "--set num_inference_steps=1 --set height=64 --set width=64 --set use_resolution_binning=false"
DIGITS = "--extractor studies.adaptation.judging:picture_features"
SHORT = "validation.samples=0 batch_size=1"
FEW_STEPS = "--set num_inference_steps=4"

FAMILIES = dict(families._FAMILIES)
"""Those that the package knows by itself."""

SUBSTITUTIONS: list[tuple[str, str]] = [
    # engines, which are not installed here
    (r'^pip install (--no-deps CHECKOUT|vllm==|"sglang).*', "pip install ."),
    (r'^echo "(from mhla_diffusers.*)" > .*', r'python -c "\1"'),
    (
        r"^(?:DIFFUSION_ATTENTION_BACKEND=MHLA )?MHLA_PATCH=(\S+) (?:vllm|sglang) .*",
        "python -c \"from mhla_diffusers.engines.settings import settings_from_environment; "
        r"settings_from_environment(dict(MHLA_PATCH='\1'))" + '"',
    ),
    # models of the Hub
    ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", TINY_WAN),
    ("Efficient-Large-Model/Sana_600M_1024px_diffusers", TINY_SANA),
    ("facebook/DiT-XL-2-256", TINY_DIT),
    ("THUDM/CogView3-Plus-3B", "tiny-cogview3plus"),
    (r'upload_folder\(repo_id="me/my-patch", folder_path="my-patch"\)', 'save_mhla(pipe, "me/my-patch")'),
    # calls in Python
    (r'dtype=torch.bfloat16\).to\("cuda"\)', "dtype=torch.float32)"),
    (r'pipe\("a cat", num_inference_steps=4', f'pipe("a cat", {WAN_CALL}'),
    (r'pipe\("a cat surfing", num_frames=81, height=480, width=832', f'pipe("a cat surfing", {WAN_CALL}'),
    (r'torch\.device\("cuda"\)', 'torch.device("cpu")'),
    (
        r'pipe\.load_lora_weights\("your-lora"\)',
        'pipe.transformer.add_adapter(__import__("peft").LoraConfig(r=2, target_modules=["to_q"]))',
    ),
    (r"enable_model_cpu_offload\(\)", 'enable_model_cpu_offload(device="cpu")'),
    (r"compile_repeated_blocks\(\)", "compile_repeated_blocks(disable=True)"),  # test_combine.py compiles
    (r'pipe\("a seven moving left"\)', 'pipe("a seven moving left", num_inference_steps=1, num_frames=2)'),
    (r"blocks=\(7, 6, 10\)", "blocks=(7, 6, 8)"),
    # generation
    (r"--set (height=480|width=832|num_frames=81|num_inference_steps=2)", ""),
    (rf"^mhla generate wan .*--model {TINY_WAN}.*", rf"\g<0> {WAN_SET} --set height=64 --set width=64"),
    (
        r"^mhla (generate|audit) (wan|sana|dit) (?!.*num_inference_steps).*",
        r"\g<0> --set num_inference_steps=1",
    ),
    (r"^mhla generate wan (?!.*--(model|patch (my-patch|outputs/tiny-wan))).*", r"\g<0> --set num_frames=2"),
    (r"^python pipelines/generate_wan.py .*", rf"\g<0> --model {TINY_WAN} --frames 6 --height 64 --width 64 --steps 1"),
    (r'^(python pipelines/generate_wan_streaming.py ".*") --weights.*', r"\1 --frame-blocks 2 --steps 1"),
    (r"^python pipelines/generate_sana.py .*", rf"\g<0> --model {TINY_SANA} --height 64 --width 64 --steps 1"),
    (r'^(python pipelines/generate_dit.py) "golden retriever"(.*)', rf"\1 seven \2 --model {TINY_DIT} --steps 1"),
    (r"^python mhla_cogview3plus.py generate .*", r"\g<0> --set height=64 --set width=64 --set num_inference_steps=2"),
    (r"^python mhla_cogview3plus.py synthesize .*", r"\g<0> --size 64x64 --steps 2 --dtype float32"),
    # adapting
    (r"finetune/prompts/tiny-(dit|wan).txt", r"prompts-\1.txt"),
    (r"^mhla encode .*", r"\g<0> --frames 9 --fps 6 --size 64x64 --dtype float32"),
    (r"^mhla data videos .*", r"\g<0> --frames 9 --fps 6 --size 64x64"),
    (r"^(mhla synthesize .*)--steps 20", r"\1--steps 1"),
    (r"^mhla finetune finetune/configs/tiny-wan.*", rf"\g<0> {SHORT} steps=1"),
    (
        r"wan2.1-t2v-1.3b-hybrid-transfer.yaml",
        f"tiny-wan-transfer.yaml data=latents/wan2.1-t2v-1.3b {SHORT} steps=1 output=outputs/w-transfer",
    ),
    (r"steps=4000", "steps=2"),
    (
        r"wan2.1-t2v-1.3b-hybrid.yaml",
        f"tiny-wan.yaml patch=outputs/w-transfer/result data=latents/wan2.1-t2v-1.3b {SHORT} steps=1 output=outputs/w",
    ),
    (r"outputs/wan2.1-t2v-1.3b-hybrid", "outputs/w"),
    (r"^accelerate launch finetune/adapt.py .*", rf"\g<0> {SHORT} steps=1 output=outputs/launched"),
    # evaluation
    (r'^accelerate launch "\$\(command -v mhla\)"', "mhla"),
    (r"^(mhla eval samples classes .*)--count 50000", r"\1--count 4 --set num_inference_steps=1"),
    (r"^mhla (eval samples geneval|generate sana --prompts) .*", rf"\g<0> {SANA_SET}"),
    (r"^mhla eval samples vbench .*", rf"\g<0> {WAN_SET} --set height=64 --set width=64"),
    (r"--weights weights-inception-2015-12-05-6726825d.pth", DIGITS),
    (r"--blocks 3,5,10", "--blocks 2,2,3"),
    # choosing settings
    (r"^mhla tune wan (.*) --psnr 30( --set \S+)?", rf"mhla tune wan \1 --psnr 5 {FEW_STEPS} --set num_frames=2"),
    # measuring
    (r"^mhla check\b.*", "mhla check --model tiny-dit"),
    (r"bench op --model wan2.1-1.3b --size 480x800", "bench op --model tiny-dit --seconds 0.01"),
    (r"(bench transformer) --model wan2.1-1.3b", r"\1 --model tiny-dit --seconds 0.01"),
    (rf"bench pipeline --model {TINY_WAN}", f"bench pipeline --model tiny-dit {FEW_STEPS} --repetitions 1"),
]  # fmt: skip
"""What stands in the pages → what is run: tiny models for those of the Hub, few steps, small sizes. In this order."""

ONLY_CHECKED: list[tuple[str, str]] = [
    (r"^make ", "it would run these tests, or call tiny-wan for minutes"),
    (r"^\.ci/run", "it would run these tests"),
    (r"^git clone ", "readers put in the address of the page that they read"),
    (r"^pip (install|download|wheel) ", "it would change the environment, or download packages"),
    (r"^accelerate launch --config_file .* --num_processes 8", "it takes eight GPUs"),
    (r"^torchrun ", "it takes eight GPUs; tests/patching/test_split.py runs it on two processes"),
    (r"^mhla tune path/or/hub-id ", "it reads a model of the Hub; tests/test_tune.py runs a tiny one"),
    (r"^mhla eval compare .* --clip-model openai", "it downloads CLIP; tests/evaluation runs it with a tiny one"),
]
"""Commands that are not run here, and why; that they are there and take these arguments is checked."""


OPTIONAL = ("torchao", "cache_dit", "kernels")
"""Packages without which Python that imports them is not run; .ci/run has all."""


def follow(snippet: Snippet, names: dict[str, Any]) -> None:
    """Run a snippet of a page, whose Python so far has left ``names``; raises what it raises."""
    text = snippet.text
    for pattern, replacement in SUBSTITUTIONS:
        text = re.sub(pattern, replacement, text)
    if snippet.language == "python":
        packages = re.findall(rf"^(?:from|import) ({'|'.join(OPTIONAL)})\b", text, re.MULTILINE)
        if all(map(find_spec, packages)):
            names |= names or {"__name__": snippet.page, "pipe": load_tiny("wan"), "inputs": inputs_of_tiny_wan()}
            # lines of a traceback are those of the page
            exec(compile("\n" * (snippet.line - 1) + text, snippet.page, "exec"), names)
        return
    only_checked = any(re.search(pattern, snippet.text) for pattern, _ in ONLY_CHECKED)
    with pytest.MonkeyPatch.context() as patch:  # a command knows the families of the package alone, and leaves none
        patch.setattr(families, "_FAMILIES", dict(FAMILIES))
        (check if only_checked else run)(shlex.split(text))


def inputs_of_tiny_wan() -> dict[str, torch.Tensor]:
    """Arguments of its transformer's forward."""
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, 4, 9, 16, 16, generator=generator),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 10, 64, generator=generator),
    }


def run(command: list[str]) -> None:
    """Run a command in this process.

    Raises:
        AssertionError: it failed.
    """
    program, *arguments = command
    if program == "accelerate" and arguments[0] == "launch":
        program, arguments = "python", arguments[1:]
    if program == "mhla":
        result = CliRunner().invoke(app, arguments)
        error = result.exception
        if error is not None:
            raise AssertionError(f"{type(error).__name__}: {error}\n{result.output[-2000:]}") from error
    elif program == "python":
        run_python(arguments)
    else:
        raise AssertionError(f"There is no way to run {program!r}; give it one, or say in ONLY_CHECKED why not.")


def run_python(arguments: list[str]) -> None:
    """``python -c CODE`` or ``python FILE ARGUMENTS``."""
    before = sys.argv
    sys.argv = arguments
    try:
        if arguments[0] == "-c":
            exec(arguments[1], {"__name__": "__main__"})
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise AssertionError(f"exit code {ended.code}") from ended
    finally:
        sys.argv = before


def check(command: list[str]) -> None:
    """Check that the files of the checkout that a command names are there, and that ``mhla`` takes its arguments.

    Raises:
        AssertionError: they are not.
        click.ClickException: it does not.
    """
    name, *arguments = command
    if name == "mhla":
        inner, context = typer.main.get_command(app), None
        while hasattr(inner, "resolve_command"):
            context = click.Context(inner, info_name=name, parent=context)
            name, inner, arguments = inner.resolve_command(context, arguments)
        try:
            inner.make_context(name, list(arguments), parent=context)
        except Exception as error:
            if "does not exist" not in str(error):  # a file that a reader has
                raise
    elif name == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{arguments[0]}:", makefile, re.MULTILINE), f"no target {arguments[0]}"
    for word in command:
        if word.startswith((".ci/", "finetune/", "pipelines/", "studies/", "tools/")):
            assert (ROOT / word).exists(), f"{word} is not there"
