"""Generating into a folder, from Python and by the command."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageChops
from safetensors.torch import load_file, save_file

from mhla_diffusers import apply_mhla, families, mhla_layers, save_mhla
from mhla_diffusers.families.calling import class_label
from mhla_diffusers.files import written_aside
from mhla_diffusers.generation.generate import SampleSet, generate, name_of_prompt, plan_samples
from mhla_diffusers.generation.pipelines import family_of
from mhla_diffusers.generation.pixels import read_picture
from mhla_diffusers.generation.record import Sample, read_record
from mhla_diffusers.tiny import call_settings, load_tiny, loading

from ..evaluation.pictures import mhla as in_process
from ..evaluation.pictures import write_pictures
from ..families.test_image_to_video import _wan_pipeline

FAST = {"num_inference_steps": 2}
FAST_SET = ("--set", "num_inference_steps=1")
DIT = str(loading.pipeline_folder("dit"))


def prompted(output, *prompts, seeds=(0,), family="dit", **choices):
    """As mhla generate makes it."""
    suffix = ".mp4" if family == "wan" else ".png"
    choices = {"settings": FAST, **choices}
    samples = plan_samples([(prompt, None) for prompt in prompts], suffix, seeds)
    return SampleSet(family, samples, output, **choices)


def numbered(output, count=5, seed=0, **choices):
    """As mhla eval samples makes it."""
    samples = [Sample(f"{number:06d}.png", str(number % 10), seed=100 * seed + number) for number in range(count)]
    return SampleSet("dit", **{"samples": samples, "output": output, "settings": FAST, **choices})


def made(config, *process):
    return [new for _, new in generate(config, *process)]


def not_made(config, named, error=ValueError):
    with pytest.raises(error, match=named):
        made(config)


def differences(first, second):
    """Largest difference of any pixel between the files of two folders."""
    names = sorted(file.name for file in first.glob("*.png"))
    assert names == sorted(file.name for file in second.glob("*.png"))
    pairs = [[Image.open(folder / name) for folder in (first, second)] for name in names]
    return [max(high for _, high in ImageChops.difference(*pair).getextrema()) for pair in pairs]


def test_samples_do_not_depend_on_batch_size_and_processes(tmp_path):
    assert made(numbered(tmp_path / "one")) == [True] * 5
    assert made(numbered(tmp_path / "batched", batch_size=3)) == [True] * 5
    assert made(numbered(tmp_path / "shared", batch_size=2), 0, 2) == [True] * 3
    assert made(numbered(tmp_path / "shared", batch_size=2), 1, 2) == [True] * 2
    # a batched matrix product may round differently in the last bit
    assert max(differences(tmp_path / "one", tmp_path / "batched")) <= 1
    assert max(differences(tmp_path / "one", tmp_path / "shared")) <= 1
    made(numbered(tmp_path / "other", seed=1))
    assert min(differences(tmp_path / "one", tmp_path / "other")) > 10


def test_a_stopped_run_goes_on_and_a_longer_one_too(tmp_path):
    made(numbered(tmp_path))
    kept = (tmp_path / "000000.png").stat().st_mtime_ns
    (tmp_path / "000003.png").rename(tmp_path / ".17-000003.png")  # as a run leaves it that is killed
    assert made(numbered(tmp_path)) == [False] * 4 + [True]
    assert not list(tmp_path.glob(".*.png"))
    assert made(numbered(tmp_path, count=6)) == [False] * 5 + [True]
    assert (tmp_path / "000000.png").stat().st_mtime_ns == kept
    assert [one.text for one in read_record(tmp_path).samples] == list("012345")


def test_a_folder_of_other_samples_is_refused(tmp_path):
    made(numbered(tmp_path, count=2))
    not_made(numbered(tmp_path, seed=1), "000000.png.seed=0, now 100")
    not_made(numbered(tmp_path, settings={}), "num_inference_steps=2, now None")
    not_made(numbered(tmp_path, samples=[Sample("000000.png", "7")]), "000000.png.text='0', now '7'")
    not_made(numbered(write_pictures(tmp_path / "foreign", 1), samples=[Sample("0000.png", "7")]), "0000.png")
    (tmp_path / "samples.json").write_text("[]")
    not_made(numbered(tmp_path, count=2), "samples.json")


def test_further_prompts_and_seeds_join_a_folder(tmp_path):
    assert made(prompted(tmp_path, "a seven", "3", seeds=(0, 5))) == [True] * 4
    images = ["0000-0-a-seven.png", "0000-5-a-seven.png", "0001-0-3.png", "0001-5-3.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*images, "samples.json"]
    # a run for fewer of them lists what earlier ones have made as well
    assert made(prompted(tmp_path, "a seven", seeds=(0, 5))) == [False] * 2
    assert [one.file for one in read_record(tmp_path).samples] == images


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ((), "unpatched, num_inference_steps 1, guidance_scale 4"),
        (("--patch", "faithful", "--change", "density=0.05"), "patch faithful, density 0.05, num_inference_steps 1"),
        (("--patch", "dit-xl-2-256"), "patch dit-xl-2-256"),
        (("--patch", "tiny-dit-sparse", "--set", "guidance_scale=2"), "patch tiny-dit-sparse, .*, guidance_scale 2"),
    ],
)
def test_command_tells_what_runs(tmp_path, choice, told):
    asked = ("generate", "dit", "seven", "--model", "tiny-dit", *FAST_SET, "--device", "cpu")
    ended = in_process(*asked, *choice, "--output", tmp_path)
    assert ended.exit_code == 0, ended.output
    assert re.search(f"^tiny-dit on cpu in float32, .*{told}", ended.output)
    assert "wrote " in ended.output and len(list(tmp_path.glob("0000-0-seven.png"))) == 1


def test_without_a_network_a_hub_id_is_refused_at_once(monkeypatch):
    def fail(*_):
        raise OSError("Name or service not known")

    def ask(*_):
        raise AssertionError("the Hub's client would try again and again")

    monkeypatch.setattr("socket.create_connection", fail)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", ask)
    for offline, named in ((False, "someone/wan .*https://.*Name or service not known"), (True, "HF_HUB_OFFLINE")):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        with pytest.raises(FileNotFoundError, match=named):
            family_of("someone/wan")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stable-cascade", "x"), "Unknown family 'stable-cascade'; "),
        (("wan",), "mhla generate wan PROMPT"),
        (("dit", "seven", "--set", "num_inference_step=2"), "of DiTPipeline 'num_inference_step'"),
        (("dit", "seven", "--set", "num_inference_steps=0"), "num_inference_steps=0"),
        (("wan", "x", "--set", "height"), "'height' must look like key=value"),
        (("wan", "x", "--set", "callback_on_step_end=x"), "'callback_on_step_end'; "),
        (("wan", "x", "--set", "max_sequence_length=x"), "max_sequence_length='x' must"),
        (("dit", "seven", "--set", "guidance_scale=true"), "guidance_scale=True must"),
        (("dit", "3", "--patch", "me/nowhere"), "me/nowhere"),
        (("wan", "x", "--model", DIT), "belongs to dit, but family='wan'"),
        (("dit", "seven", "a cat", *FAST_SET), "'a cat' is not a class"),
        (("wan", "x", *FAST_SET, "--set", "height=33"), "33"),
        (("wan", "x", "--model", str(Path(__file__).parent)), "not a diffusers pipeline: model_index.json is missing"),
        (("mochi", "x"), "family='mochi' has no tiny pipeline; give model"),
        (("dit", "seven", "--image", __file__), "DiTPipeline 'image'"),
    ],
)
def test_command_says_what_is_wrong_and_leaves_no_folder(tmp_path, arguments, message):
    ended = in_process("generate", *arguments, "--output", tmp_path / "a" / "b")
    assert ended.exit_code == 1
    assert isinstance(ended.exception, ValueError | OSError)
    assert message in str(ended.exception)
    assert not list(tmp_path.iterdir())


def test_ctrl_c_says_what_is_made_and_that_the_command_goes_on(tmp_path, monkeypatch):
    call = families.calling.ClassCalling.call

    def interrupted(self, pipe, prompts, *given, **settings):
        if prompts == ["2"]:
            raise KeyboardInterrupt
        return call(self, pipe, prompts, *given, **settings)

    asked = ("generate", "dit", "1", "2", "3", *FAST_SET, "--output", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(families.calling.ClassCalling, "call", interrupted)
        ended = in_process(*asked)
    assert ended.exit_code == 130
    assert "1 of 3 samples are made; the same command goes on" in ended.output
    again = in_process(*asked).output
    assert (again.count(f"kept  {tmp_path}"), again.count(f"wrote {tmp_path}")) == (1, 2)


def test_classes_are_given_by_number_name_or_phrase():
    labels = load_tiny("dit").labels
    for prompt in ("7", "07", "seven", "a seven", "a Seven", "SEVEN "):
        assert class_label(prompt, labels, 1000) == 7
    digits = [(prompt, labels, "0 to 9") for prompt in ("", "  ", "²", "-1", "10", "99", "1000", "1001", "9" * 5000)]
    for prompt, known, allowed in (*digits, ("1000", {}, "0 to 999")):
        with pytest.raises(ValueError, match=f"{re.escape(repr(prompt))} .*{allowed}"):
            class_label(prompt, known, 1000)
    # "Cardigan" is a dog of ImageNet, "cardigan" a piece of clothing
    labels = {"Cardigan": 264, "cardigan": 474}
    assert [class_label(name, labels, 1000) for name in ("Cardigan", "a cardigan")] == [264, 474]
    assert class_label("999", {}, 1000) == 999


def test_a_run_that_failed_does_not_bind_the_folder(tmp_path):
    not_made(prompted(tmp_path, "3", "5000"), "'5000'")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    not_made(prompted(tmp_path / "file" / "out", "1"), "file/out", OSError)
    # what a run that was stopped while it wrote has left is not a sample
    (tmp_path / ".0000-0-3.png").write_text("")
    assert made(prompted(tmp_path, "3")) == [True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": [Sample("a.mp4", "1")]}, "'a.mp4'"),
        ({"dtype": "int8"}, "dtype='int8'.*bfloat16"),
    ],
)
def test_bad_settings_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        numbered(tmp_path, **{name: value() if callable(value) else value for name, value in change.items()})


@pytest.mark.parametrize("text", ["../A cat/✨ " + "x" * 200, "猫" * 300, "🦭" * 300, "𠮷" * 300, "\0", "."])
def test_file_names_are_safe(tmp_path, text):
    (sample,) = plan_samples([(text, None)], ".mp4", seeds=[2**63 - 1])
    file = tmp_path / sample.file
    assert file.parent == tmp_path
    assert len(file.name.encode()) < 220
    with written_aside(file) as aside:
        aside.touch()
    assert file.exists()


def test_file_names_keep_letters_of_every_script_and_stay_apart():
    for prompt in ("a seven moving left", "七向左移动", "семёрка влево"):
        assert name_of_prompt(prompt) == prompt.replace(" ", "-")
    assert name_of_prompt("Eine Straße, nachts").startswith("eine-straße-nachts-")
    alike = ["a cat", "a cat!", "A cat", "a  cat", "a-cat", "", "empty", "!", "x" * 61, "x" * 62, "e\u0301", "\u00e9"]
    assert len(set(map(name_of_prompt, alike))) == len(alike)


def test_samples_are_redone_elsewhere_when_the_patch_or_the_weights_changed(tmp_path):
    """At the same path; the name alone does not tell."""
    patch = tmp_path / "tiny.yaml"
    head = "family: dit\nbase_model: tiny-dit\ndescription: all layers\npatch:\n  blocks: [4, 4]\n"
    patch.write_text(head)
    config = prompted(tmp_path / "patched", "3", patch=str(patch))
    assert mhla_layers(config.load()) and made(config) == [True]
    patch.write_text(f"# a remark\n{head}")
    assert made(config) == [False]
    patch.write_text(head + "  mixing_init: uniform\n")
    not_made(config, "patch_content.mixing_init='locality', now 'uniform'")
    pipe = apply_mhla(load_tiny("dit"), str(patch))
    save_mhla(pipe, tmp_path / "weights")
    config = replace(config, patch=str(tmp_path / "weights"), output=tmp_path / "trained")
    assert made(config) == [True]
    assert made(config) == [False]
    with torch.no_grad():
        next(iter(mhla_layers(pipe).values())).mixing.mul_(0.5)
    save_mhla(pipe, tmp_path / "weights")
    not_made(config, "patch_content='")


def test_a_folder_notices_base_weights_that_changed_at_their_path(tmp_path):
    shutil.copytree(DIT, tmp_path / "model")
    transformer = tmp_path / "model" / "transformer"
    transformer.symlink_to(transformer.rename(tmp_path / "elsewhere"))
    config = prompted(tmp_path / "made", "3", model=str(tmp_path / "model"))
    assert made(config) == [True] and made(config) == [False]
    weights = next((tmp_path / "model" / "transformer").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    not_made(config, "model_content='")


@pytest.mark.parametrize(("family", "prompt"), [("dit", "3"), ("wan", "a seven")])
def test_results_that_are_not_finite_are_refused_with_their_prompt(tmp_path, family, prompt):
    shutil.copytree(loading.pipeline_folder(family), tmp_path / "model")
    weights = next((tmp_path / "model" / "vae").glob("*.safetensors"))
    save_file({name: value * torch.nan for name, value in load_file(weights).items()}, weights)
    settings = {"num_inference_steps": 1} if family == "dit" else {**call_settings("wan"), "num_inference_steps": 1}
    config = prompted(tmp_path / "made", prompt, family=family, model=str(tmp_path / "model"), settings=settings)
    not_made(config, f"'{prompt}' .*finite")
    assert not list((tmp_path / "made").glob("0*"))


@pytest.fixture
def shown(tmp_path):
    """A folder with an image-to-video pipeline."""
    _wan_pipeline().save_pretrained(tmp_path / "wan-i2v")
    return tmp_path / "wan-i2v"


def test_pictures_are_shown_to_an_image_to_video_pipeline(tmp_path, shown, monkeypatch):
    given = []

    def call(self, pipe, prompts, generators, **settings):
        given.append((prompts[0], settings["image"].getpixel((0, 0))))
        return [torch.zeros(5, 16, 16, 3)]

    monkeypatch.setattr(families.calling.WanCalling, "call", call)
    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"{name}.png")
    (tmp_path / "prompts.csv").write_text("text,image\na cat,blue.png\na dog,\n")
    asked = ("a ball", "--prompts", tmp_path / "prompts.csv", "--image", tmp_path / "red.png")
    asked += ("--model", shown, "--output", tmp_path / "out")
    for _ in range(2):  # the second time nothing is generated
        ended = in_process("generate", "wan", *map(str, asked))
        assert ended.exit_code == 0, ended.output
        assert given == [("a ball", (255, 0, 0)), ("a cat", (0, 0, 255)), ("a dog", (255, 0, 0))]
    assert [Path(one.image).name for one in read_record(tmp_path / "out").samples] == ["red.png", "blue.png", "red.png"]
    # another picture under the same name is another sample
    Image.new("RGB", (8, 8), (0, 255, 0)).save(tmp_path / "red.png")
    assert in_process("generate", "wan", *map(str, asked)).exit_code == 0
    assert given[3:] == [("a ball", (0, 255, 0)), ("a dog", (0, 255, 0))]


def test_photographs_are_shown_upright(tmp_path):
    """As they are encoded for training, and as diffusers loads them: cameras store how they were held."""
    photograph = Image.new("RGB", (16, 8), (255, 0, 0))
    photograph.paste((0, 0, 255), (0, 0, 8, 8))
    held = photograph.getexif()
    held[0x0112] = 6  # the left side is up
    photograph.save(tmp_path / "held.png", exif=held)
    found = read_picture(tmp_path / "held.png")
    assert found.size == (8, 16)
    assert found.getpixel((4, 0)) == (0, 0, 255) and found.getpixel((4, 15)) == (255, 0, 0)


def test_files_that_are_no_pictures_are_refused(tmp_path, shown):
    (tmp_path / "text.png").write_text("no picture")
    asked = ("generate", "wan", "a cat", "--model", shown, "--output", tmp_path, "--image", tmp_path / "text.png")
    assert "not a readable image" in str(in_process(*asked).exception)
