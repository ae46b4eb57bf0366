"""Generating into a folder, from Python and by the command."""

import functools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import DiTPipeline
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3CoreDenoiseStep
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline
from PIL import Image, ImageChops
from safetensors.torch import load_file, save_file

from mhla_diffusers import apply_mhla, families, mhla_layers, save_mhla
from mhla_diffusers.families.calling import class_label
from mhla_diffusers.files import written_aside
from mhla_diffusers.generation import PipelineChoice
from mhla_diffusers.generation.generate import SampleSet, generate, name_of_prompt, plan_samples
from mhla_diffusers.generation.names import pipeline_options
from mhla_diffusers.generation.pipelines import family_of, pipeline_source
from mhla_diffusers.generation.pixels import read_picture
from mhla_diffusers.generation.record import Sample
from mhla_diffusers.tiny import call_settings, load_tiny, loading

from ..evaluation.pictures import mhla as in_process
from ..evaluation.pictures import write_pictures
from ..refusals import refused

FAST = {"num_inference_steps": 2}
FAST_SET = ("--set", "num_inference_steps=1")
DIT = str(loading.pipeline_folder("dit"))


def prompted(output, *prompts, seeds=(0,), family="dit", **choices):
    """As mhla generate makes it."""
    suffix = ".mp4" if family == "wan" else ".png"
    choices = {"settings": FAST, **choices}
    return SampleSet(family, plan_samples(prompts, suffix, seeds), output, seed=None, **choices)


def numbered(output, count=5, **choices):
    """As mhla eval samples makes it."""
    samples = [Sample(f"{number:06d}.png", str(number % 10)) for number in range(count)]
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
    assert json.loads((tmp_path / "samples.json").read_text())[5] == {"file": "000005.png", "text": "5"}


def test_a_folder_of_other_samples_is_refused(tmp_path):
    made(numbered(tmp_path, count=2))
    not_made(numbered(tmp_path, seed=1), "seed=0, .*1")
    not_made(numbered(tmp_path, seed=None), "seed=0, .*None")
    not_made(numbered(tmp_path, settings={}), "num_inference_steps': 2}, .*{}")
    not_made(numbered(tmp_path, samples=[Sample("000000.png", "7")]), "000000.png .*'0'")
    not_made(numbered(tmp_path, count=1), "000001.png .*'1'")
    not_made(numbered(write_pictures(tmp_path / "foreign", 1)), "0000.png")
    (tmp_path / "generation.json").write_text("[]")
    not_made(numbered(tmp_path, count=2), "generation.json")


def test_images_are_written_once_and_kept(tmp_path):
    config = prompted(tmp_path / "out", "a seven", "3", seeds=(0, 5))
    assert made(config) == [True] * 4
    images = ["0000-0-a-seven.png", "0000-5-a-seven.png", "0001-0-3.png", "0001-5-3.png"]
    assert sorted(p.name for p in config.output.iterdir()) == [*images, "generation.json", "samples.json"]
    first = (config.output / "0000-0-a-seven.png").read_bytes()
    assert made(config) == [False] * 4
    (config.output / "0000-0-a-seven.png").unlink()
    assert made(config) == [False, False, False, True]
    assert (config.output / "0000-0-a-seven.png").read_bytes() == first
    # a run for fewer of them lists what earlier ones have made as well
    assert made(prompted(config.output, "a seven", seeds=(0, 5))) == [False] * 2
    listed = json.loads((config.output / "samples.json").read_text())
    assert [one["text"] for one in listed] == ["a seven", "a seven", "3", "3"]


def test_a_tiny_pipeline_is_named_as_everywhere(tmp_path):
    named = prompted(tmp_path, "seven", model="tiny-dit")
    assert named == prompted(tmp_path, "seven") and pipeline_source("tiny-dit") == DIT
    assert [pipeline_source(one) for one in ("tiny-flux", "me/tiny-dit", DIT)] == ["tiny-flux", "me/tiny-dit", DIT]
    assert family_of("tiny-wan").name == "wan"


def test_command_tells_what_runs_and_shows_the_steps_on_a_terminal(tmp_path, monkeypatch):
    bars, call = [], DiTPipeline.__call__
    see = lambda pipe, *rest, **named: bars.append(pipe._progress_bar_config) or call(pipe, *rest, **named)  # noqa: E731
    monkeypatch.setattr(DiTPipeline, "__call__", functools.wraps(call)(see))
    asked = ("generate", "dit", "seven", "--model", "tiny-dit", *FAST_SET)
    for folder, choice, told in (
        ("a", (), "unpatched"),
        ("b", ("--patch", "faithful", "--density", "0.05"), "sparse attention, density 5.0%"),
        ("c", ("--patch", "dit-xl-2-256"), "MHLA, to be adapted"),
        ("d", ("--weights", "tiny-dit-sparse", "--set", "guidance_scale=2"), "adapted patch tiny-dit-sparse"),
    ):
        ended = in_process(*asked, *choice, "--device", "cpu", "--output", tmp_path / folder)
        assert ended.exit_code == 0, ended.output
        guidance = 2 if folder == "d" else 4
        assert f"tiny-dit on cpu in float32, 1 step, guidance {guidance}, {told}\n" in ended.output
        recorded = json.loads((tmp_path / folder / "generation.json").read_text())["call"]
        assert recorded == {"num_inference_steps": 1, "guidance_scale": guidance}
    monkeypatch.setattr("mhla_diffusers.generation.generate.shows_bars", lambda: True)
    in_process(*asked, "--output", tmp_path / "e")
    assert bars == [{"disable": True}] * 4 + [{"disable": False}]


def test_the_record_says_how_far_attention_was_from_full_attention(tmp_path):
    asked = ("generate", "dit", "seven", "--model", "tiny-dit", "--device", "cpu", "--output", tmp_path)
    patch = ("--patch", "fast", "--dense-every", 4, "--set", "num_inference_steps=12")
    for _ in range(2):  # the second time there is nothing to make, and what was measured stays
        assert in_process(*asked, *patch).exit_code == 0
        (said,) = json.loads((tmp_path / "generation.json").read_text())["error at dense steps"]
        assert "(median)" in said and "before correction" in said


@pytest.mark.parametrize(
    ("family", "choices", "said"),
    [
        ("wan", {}, "20 steps, 64x64x9, guidance 3"),
        ("wan", {"weights": "me/on-the-hub"}, "20 steps, 64x64x9, guidance 3"),
        ("wan", {"model": str(loading.pipeline_folder("wan"))}, "50 steps, 480x832x81, guidance 5"),
        (
            "wan",
            {"settings": {"num_frames": 5, "height": 32, "num_inference_steps": 7}},
            "7 steps, 32x64x5, guidance 3",
        ),
        ("sana", {}, "20 steps, 64x64, guidance 3"),
    ],
)
def test_the_call_is_said_as_far_as_it_is_known(family, choices, said):
    assert f" in float32, {said}, " in PipelineChoice(family, **choices).summary


@pytest.mark.parametrize(("found", "chosen"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_device_and_type_follow_the_machine(monkeypatch, found, chosen):
    monkeypatch.setattr("mhla_diffusers.devices.choose_device", lambda name: torch.device(found))
    options = pipeline_options()
    assert (options["device"], options["dtype"]) == ("auto", chosen)
    assert pipeline_options(dtype="float16")["dtype"] == "float16"


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


def test_command_writes_one_file_per_prompt_and_seed(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a four\n")
    asked = ("seven", "3", "--prompt-file", file, "--seed", "0", "--seed", "5", "--set", "num_inference_steps=2")
    ended = in_process("generate", "dit", *asked, "--set", "guidance_scale=2", "--output", tmp_path)
    assert ended.exit_code == 0, ended.output
    names = {f"{place:04d}-{seed}-{name}.png" for place, name in enumerate(("seven", "3", "a-four")) for seed in (0, 5)}
    assert {path.name for path in tmp_path.glob("*.png")} == names
    assert ended.output.count("wrote ") == 6
    recorded = json.loads((tmp_path / "generation.json").read_text())
    assert recorded["settings"] == {"num_inference_steps": 2, "guidance_scale": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stable-cascade", "x"), "family='stable-cascade' is unknown; "),
        (("dit",), "mhla generate dit seven"),
        (("wan",), 'mhla generate wan "a seven moving left"'),
        (("dit", "seven", "--set", "num_inference_step=2"), "of DiTPipeline 'num_inference_step'"),
        (("dit", "seven", "--patch", "nope", "--model", "./no-such-model"), "Unknown patch 'nope'"),
        (("dit", "3", "--weights", "nowhere"), "nowhere"),
        (("dit", "seven", "--prompt-file", "nowhere.txt"), "There is no nowhere.txt"),
        (("wan", "x", "--model", DIT), "belongs to dit, but family='wan'"),
        (("dit", "seven", "a cat", *FAST_SET), "'a cat' is not a class"),
        (("wan", "x", *FAST_SET, "--set", "height=33"), "fails with the settings {'num_inference_steps': 1, 'height'"),
        (("wan", "x", "--model", str(Path(__file__).parent)), "not a diffusers pipeline: model_index.json is missing"),
    ],
)
def test_command_says_what_is_wrong_and_leaves_no_folder(tmp_path, arguments, message):
    ended = in_process("generate", *arguments, "--output", tmp_path / "a" / "b")
    assert ended.exit_code == 1
    assert isinstance(ended.exception, ValueError | OSError)
    assert message in str(ended.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [TypeError, ValueError, RuntimeError])
def test_errors_of_the_call_name_the_settings_but_those_of_what_runs_do_not(tmp_path, monkeypatch, error):
    def fail(*arguments, **settings):
        raise error("it is so")

    monkeypatch.setattr("diffusers.DiTPipeline.__call__", functools.wraps(DiTPipeline.__call__)(fail))
    if error is RuntimeError:
        not_made(numbered(tmp_path), "^it is so", RuntimeError)
    else:
        not_made(numbered(tmp_path), "^DiTPipeline .*num_inference_steps.*: it is so")


def test_modular_pipeline_is_named_as_what_it_is(tmp_path):
    MiniMaxH3ModularPipeline(blocks=MiniMaxH3CoreDenoiseStep()).save_pretrained(str(tmp_path / "model"))
    with refused("modular pipeline", error=FileNotFoundError):
        family_of(str(tmp_path / "model"))


def test_video_has_its_frame_rate_and_length(tmp_path):
    av = pytest.importorskip("av")
    config = prompted(tmp_path, "a seven moving left", family="wan", frames_per_second=6)
    ((sample, _),) = generate(config)
    with av.open(str(tmp_path / sample.file)) as container:
        stream = container.streams.video[0]
        assert stream.average_rate == 6
        assert sum(1 for _ in container.decode(stream)) == 9


def test_tiny_pipelines_take_the_dtype_too(tmp_path):
    config = prompted(tmp_path, "1", dtype="bf16")
    assert config == prompted(tmp_path, "1", dtype="bfloat16")
    assert config.load().transformer.dtype == torch.bfloat16
    assert made(config) == [True]


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


def test_a_run_that_failed_before_anything_was_loaded_does_not_bind_the_folder(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(SampleSet, "load", None)
        not_made(prompted(tmp_path, "3", "5000"), "'5000'")
        assert not list(tmp_path.iterdir())
        (tmp_path / "file").write_text("")
        not_made(prompted(tmp_path / "file" / "out", "1"), "file/out", OSError)
        (tmp_path / "file").unlink()
    # what a run that was stopped while it wrote has left is not a sample
    (tmp_path / ".0000-0-3.png").write_text("")
    assert made(prompted(tmp_path, "3")) == [True]


def test_family_without_a_tiny_pipeline_needs_a_model(monkeypatch):
    monkeypatch.setattr("mhla_diffusers.families._FAMILIES", dict(families._FAMILIES))
    families.register_family(replace(families.get_family("dit"), name="other"))
    with refused("family='other'"):
        PipelineChoice("other")
    assert PipelineChoice("other", model="a/folder").of_family.name == "other"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "stable-cascade"}, "family='stable-cascade'"),
        ({"samples": ()}, "samples="),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2, "samples": [Sample("a.png", "1", image="b.png")]}, "batch_size=2"),
        ({"samples": [Sample("a.mp4", "1")]}, "'a.mp4'"),
        ({"patch": "a", "weights": "b"}, "patch.*weights"),
        ({"dtype": "int8"}, "dtype='int8'.*bfloat16"),
        ({"frames_per_second": 0}, "frames_per_second=0"),
        ({"frames_per_second": 8}, "frames_per_second=8 .*'dit'"),
        ({"device": "tpu9"}, "device='tpu9'.*cpu"),
        ({"prompts": ()}, "prompts="),
        ({"seeds": ()}, "seeds="),
        ({"seeds": (0, -1)}, "seeds.1=-1 .*0"),
        ({"seeds": (2**63,)}, "seeds.0=9223372036854775808 "),
    ],
)
def test_bad_settings_are_refused(tmp_path, change, message):
    def choose(prompts=("1",), seeds=(0,), **settings):
        samples = plan_samples(prompts, ".png", seeds)
        SampleSet(**{"family": "dit", "samples": samples, "output": tmp_path, **settings})

    with pytest.raises(ValueError, match=message):
        choose(**change)


@pytest.mark.parametrize("text", ["../A cat/✨ " + "x" * 200, "猫" * 300, "🦭" * 300, "𠮷" * 300, "\0", "."])
def test_file_names_are_safe(tmp_path, text):
    (sample,) = plan_samples([text], ".mp4", seeds=[2**63 - 1])
    file = tmp_path / sample.file
    assert file.parent == tmp_path
    assert len(file.name.encode()) < 220
    with written_aside(file) as aside:
        aside.touch()
    assert file.exists()


def test_file_names_keep_letters_of_every_script():
    for prompt in ("a seven moving left", "七向左移动", "семёрка влево", "हिन्दी में सात"):
        assert name_of_prompt(prompt) == prompt.replace(" ", "-")
    assert name_of_prompt("Eine Straße, nachts").startswith("eine-straße-nachts-")
    decomposed, composed = "cafe\u0301", "caf\u00e9"
    assert name_of_prompt(composed) == composed
    assert name_of_prompt(decomposed).startswith(composed)


def test_prompts_whose_letters_are_the_same_stay_apart():
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
    not_made(config, "patch_content={.*'locality'}, .*{.*'uniform'}")
    pipe = apply_mhla(load_tiny("dit"), str(patch))
    save_mhla(pipe, tmp_path / "weights")
    config = replace(config, patch=None, weights=str(tmp_path / "weights"), output=tmp_path / "trained")
    assert made(config) == [True]
    assert made(config) == [False]
    with torch.no_grad():
        next(iter(mhla_layers(pipe).values())).mixing.mul_(0.5)
    save_mhla(pipe, tmp_path / "weights")
    not_made(config, "weights_content='")


def test_a_folder_notices_base_weights_that_changed_at_their_path_and_another_frame_rate(tmp_path):
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
    video = prompted(tmp_path / "video", "a seven", family="wan", settings={"num_inference_steps": 1})
    made(video)
    not_made(replace(video, frames_per_second=99), "frames_per_second=.* 99")


@pytest.mark.parametrize(("family", "prompt"), [("dit", "3"), ("wan", "a seven")])
def test_results_that_are_not_finite_are_refused_with_their_prompt(tmp_path, family, prompt):
    shutil.copytree(loading.pipeline_folder(family), tmp_path / "model")
    weights = next((tmp_path / "model" / "vae").glob("*.safetensors"))
    save_file({name: value * torch.nan for name, value in load_file(weights).items()}, weights)
    settings = {"num_inference_steps": 1} if family == "dit" else {**call_settings("wan"), "num_inference_steps": 1}
    config = prompted(tmp_path / "made", prompt, family=family, model=str(tmp_path / "model"), settings=settings)
    not_made(config, f"finite .*'{prompt}'")
    assert not list((tmp_path / "made").glob("0*"))


def _shown(tmp_path: Path) -> str:
    """A folder with an image-to-video pipeline."""
    from ..families.test_image_to_video import _wan_pipeline

    folder = tmp_path / "wan-i2v"
    _wan_pipeline().save_pretrained(folder)
    return str(folder)


def test_pictures_are_shown_to_an_image_to_video_pipeline(tmp_path, monkeypatch):
    given = []

    def call(self, pipe, prompts, generators, **settings):
        given.append((prompts[0], settings["image"].getpixel((0, 0))))
        return [torch.zeros(5, 16, 16, 3)]

    monkeypatch.setattr(families.calling.WanCalling, "call", call)
    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"{name}.png")
    (tmp_path / "prompts.csv").write_text("text,image\na cat,blue.png\na dog,\n")
    asked = ("a ball", "--prompt-file", tmp_path / "prompts.csv", "--image", tmp_path / "red.png")
    asked += ("--model", _shown(tmp_path), "--output", tmp_path / "out")
    for _ in range(2):  # the second time nothing is generated
        ended = in_process("generate", "wan", *map(str, asked))
        assert ended.exit_code == 0, ended.output
        assert given == [("a ball", (255, 0, 0)), ("a cat", (0, 0, 255)), ("a dog", (255, 0, 0))]
    listed = json.loads((tmp_path / "out" / "samples.json").read_text())
    assert [Path(one["image"]).name for one in listed] == ["red.png", "blue.png", "red.png"]
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


def test_every_row_needs_a_picture_before_the_first_is_generated(tmp_path):
    """Also of pipelines whose call has a default for it, as LTX's; no weights are read."""
    folder = tmp_path / "ltx-i2v"
    folder.mkdir()
    for name in ("LTXImageToVideoPipeline", "LTX2ImageToVideoPipeline"):
        (folder / "model_index.json").write_text(json.dumps({"_class_name": name}))
        Image.new("RGB", (8, 8)).save(tmp_path / "black.png")
        (tmp_path / "prompts.csv").write_text("text,image\na cat,black.png\na dog,\n")
        asked = ("ltx", "--prompt-file", str(tmp_path / "prompts.csv"), "--model", str(folder))
        ended = in_process("generate", *asked, "--output", str(tmp_path / "out"))
        assert f"{name} needs a picture for every prompt, and 'a dog' has none" in str(ended.exception), ended.output


def test_pictures_that_cannot_be_shown_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    Image.new("RGB", (64, 64)).save(tmp_path / "huge.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "black.png")
    (tmp_path / "text.png").write_text("no picture")
    picture, model = ("--image", str(tmp_path / "black.png")), ("--model", _shown(tmp_path))
    for asked, message in (
        (("dit", "seven", *picture), "DiTPipeline takes no picture; leave --image out"),
        (("wan", "a cat", *model), "needs a picture for every prompt, and 'a cat' has none"),
        (("wan", "a cat", *model, "--image", str(tmp_path / "none.png")), "There is no picture"),
        (("wan", "a cat", *model, "--image", str(tmp_path / "text.png")), "is not a readable image"),
        (
            ("wan", "a cat", *model, "--image", str(tmp_path / "huge.png")),
            "is not a readable image: Image size",
        ),
    ):
        ended = in_process("generate", *asked, "--output", str(tmp_path / "out"))
        assert ended.exit_code == 1 and message in str(ended.exception), ended.output
