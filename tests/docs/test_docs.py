"""Every command and every Python snippet of the README, the pages and the notebook, run as a reader would run them.

What is run in place of what takes a download, a GPU or hours is one table, ``SUBSTITUTIONS``; what is not run at all
another, ``ONLY_CHECKED``, with the reasons; both in ``running.py``.
"""

import json
import re
import shlex
import shutil
import traceback
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mhla_diffusers import apply_mhla, families, save_mhla
from mhla_diffusers.generation.record import write_video
from mhla_diffusers.tiny import load_tiny

from .. import models
from ..families.cogview3plus_tiny import save_cogview3plus
from ..scripts import load_script
from ..test_convert_paper_checkpoint import paper_checkpoint
from .running import ONLY_CHECKED, SUBSTITUTIONS, check, follow
from .snippets import PAGES, ROOT, snippets

ALL = [snippet for page in PAGES for snippet in snippets(page)]
CODE = [snippet for snippet in ALL if snippet.language in ("bash", "python")]


@pytest.fixture(scope="module")
def belongings(tmp_path_factory) -> Path:
    """What a reader has: a checkout, and files of their own."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("assets", "finetune", "mhla_diffusers", "patches", "pipelines", "studies", "tools", "LICENSE"):
        (folder / name).symlink_to(ROOT / name)
    write_prompts(folder)
    write_patches(folder)
    write_media(folder)
    write_what_evaluators_give(folder)
    save_file(paper_checkpoint(models.wan(), [1], True, False), folder / "paper.safetensors")
    save_cogview3plus(folder / "tiny-cogview3plus")
    # the page says: the class above it, and saved as mhla_cogview3plus.py
    *_, family, script = [s.text for s in CODE if s.page == "docs/models.md" and s.language == "python"]
    (folder / "mhla_cogview3plus.py").write_text(f"{family}\n{script}")
    return folder


def write_prompts(folder):
    (folder / "prompts.txt").write_text("a seven\na three and an eight\n")
    (folder / "prompts-wan.txt").write_text("a seven moving left\na three bouncing\n")
    (folder / "prompts-dit.txt").write_text("seven\nthree\n")


def write_patches(folder):
    for family, blocks in (("wan", (7, 3, 5)), ("sana", (4, 4)), ("dit", (4, 4))):
        name = "my-patch" if family == "wan" else f"my-{family}-patch"
        save_mhla(apply_mhla(load_tiny(family), blocks=blocks), folder / name)
    for name, family, patch in (
        ("my-patch", "wan", {"blocks": [7, 3, 5]}),
        ("my-dit-patch", "dit", {"blocks": [4, 4]}),
        ("my-cogview3plus", "cogview3plus", {"density": 0.2, "block_size": 4}),
    ):
        content = {"family": family, "base_model": "tiny", "description": "my own", "patch": patch}
        (folder / f"{name}.yaml").write_text(json.dumps(content))


def write_media(folder):
    (folder / "videos").mkdir()
    for number in range(2):
        write_video(torch.rand(10, 64, 64, 3), folder / "videos" / f"{number}.mp4", 6)
        (folder / "videos" / f"{number}.txt").write_text("a seven moving left")
    pictures = numpy.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), dtype=numpy.uint8)
    (folder / "imagenet").mkdir()
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(folder / "imagenet" / f"{number}.png")
    numpy.savez(folder / "VIRTUAL_imagenet256_labeled.npz", mu=numpy.zeros(64), sigma=numpy.eye(64))


def write_what_evaluators_give(folder):
    from mhla_diffusers.evaluation.geneval import TAGS
    from mhla_diffusers.evaluation.vbench import DIMENSIONS

    (folder / "evaluation_metadata.jsonl").write_text(json.dumps({"tag": "single_object", "prompt": "a seven"}))
    (folder / "results.jsonl").write_text("\n".join(json.dumps({"tag": tag, "correct": True}) for tag in TAGS))
    entry = {"prompt_en": "a seven moving left", "dimension": ["scene"]}
    (folder / "VBench_full_info.json").write_text(json.dumps([entry]))
    (folder / "results.json").write_text(json.dumps({name: [0.9, []] for name in DIMENSIONS}))


@pytest.mark.parametrize("page", sorted({snippet.page for snippet in CODE}))
def test_every_command_and_snippet_runs(page, belongings, tmp_path, monkeypatch):
    """Each page by itself, from top to bottom."""
    folder = shutil.copytree(belongings, tmp_path / "reader", symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    names, failed = {}, []
    for snippet in (snippet for snippet in CODE if snippet.page == page):
        try:
            follow(snippet, names)
        except Exception as error:  # noqa: BLE001 - all that fail are told, each with its place
            failed.append(f"{snippet.where}\n{last_lines(error)}")
    if failed:
        pytest.fail("\n\n".join([f"{len(failed)} of {page} failed:", *failed]), pytrace=False)


def last_lines(error: BaseException) -> str:
    """Where it happened, and what."""
    cause = error.__cause__ or error
    return "".join([*traceback.format_tb(cause.__traceback__)[-3:], f"{type(error).__name__}: {error}"])


ADAPTING = sorted(ROOT.glob("finetune/configs/*.yaml"))


@pytest.mark.parametrize("file", ADAPTING, ids=lambda file: file.stem)
def test_commands_at_the_head_of_a_configuration_are_there(file):
    head = re.findall(r"^# .*?\s((?:mhla|accelerate launch) .*)$", file.read_text(), re.MULTILINE)
    assert len(head) >= 4
    for text in head:
        check(shlex.split(text.replace('accelerate launch "$(command -v mhla)"', "mhla")))


def test_what_is_replaced_or_left_out_stands_in_the_pages():
    """A table that says more than the pages would hide what they no longer say."""
    texts = [snippet.text for snippet in CODE]
    for pattern, _ in ONLY_CHECKED:
        assert any(re.search(pattern, text) for text in texts), pattern
    used = set()
    for text in texts:
        for pattern, replacement in SUBSTITUTIONS:
            text, count = re.subn(pattern, replacement, text)
            used |= {pattern} if count else set()
    assert [pattern for pattern, _ in SUBSTITUTIONS if pattern not in used] == []


def test_notebook_tells_what_is_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, names = load_script("tools/run_notebook.py", monkeypatch), {}
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    shown = {cell["id"]: script.run("".join(cell["source"]), names) for cell in code}
    for cell in code:  # numbers differ a little from one machine to another
        (kept,) = cell["outputs"]
        now = script.output_of(shown[cell["id"]])
        texts = [re.sub(r"[\d.,]+", "#", one["data"]["text/plain"]) for one in (kept, now)]
        assert texts[0] == texts[1] and kept["data"].keys() == now["data"].keys(), "run tools/run_notebook.py"
    moved = {name: names["moved"](names[name]) for name in ("softmax", "linear", "sparse")}
    # "fall apart", "the digits are back", and adapting helps
    assert moved["softmax"] == 0 and moved["linear"] > 0.05 > 0.02 > moved["sparse"] > 0
    adapted, adapted_sparse = map(float, shown["adapted"])
    assert moved["linear"] > 1.5 * adapted > 2 * adapted_sparse > 0
    assert "6.2% of the pairs of 32 blocks" in str(shown["sparse-description"])
    assert "4 of 4 self-attentions replaced" in str(shown["patch"])
    assert shown["mixing"].argmax() == 5
    assert shown["save"] is True and shown["remove"] is True
    assert shown["open"].size == (256, 64)
