import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import WanPipeline
from typer.testing import CliRunner

from mhla_diffusers import load_mhla
from mhla_diffusers.cli import app
from mhla_diffusers.families import Clip
from mhla_diffusers.generation.pipelines import put_on
from mhla_diffusers.training import TrainingConfig
from mhla_diffusers.training.data.cache import CacheWriter, LatentCache, SourceFile, read_index
from mhla_diffusers.training.finetune import export_checkpoint, finetune
from mhla_diffusers.training.validation import prompt_sampler

from ..refusals import refused
from .conftest import Saved
from .pipelines import sana_pipeline, wan_pipeline, write_image, write_video

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("finetune/configs/*.yaml"))


@pytest.fixture(scope="session")
def model(wan: Saved) -> str:
    return wan[1].name


@pytest.fixture(scope="session")
def latents(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two samples, made by the command."""
    folder = tmp_path_factory.mktemp("latents")
    return _synthesize(model, folder, "a red ball\n\na blue ball moves\n")


def _synthesize(model: str, folder: Path, prompts: str) -> Path:
    (folder / "prompts.txt").write_text(prompts)
    made = _cli(
        *("synthesize", "--model", model, "--prompts", folder / "prompts.txt", "--output", folder / "latents"),
        *("--frames", 5, "--size", "32x32", "--steps", 2, "--dtype", "float32", "--device", "cpu"),
    )
    assert "holds 2 samples" in made
    return folder / "latents"


@pytest.fixture
def config_file(tmp_path: Path, model: str) -> Path:
    path = tmp_path / "run.yaml"
    written = {
        "model": model,
        "patch": {"blocks": [2, 2, 2]},
        "data": str(tmp_path / "latents"),
        "output": str(tmp_path / "run"),
        "steps": 4,
        "learning_rate": 1e-3,
        "trainable": "all",
        "objectives": {"diffusion": 1, "distillation": 1},
    }
    path.write_text(yaml.safe_dump(written))
    return path


def _cli(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    "changes",
    [
        ("trainable=all", "ema_decay=0.9"),
        ("trainable=lora", "lora_rank=2", "learning_rate=1e-2", "optimizer=schedule-free"),
        ("trainable=attention", "objectives={diffusion: 1}", "patch=null"),
    ],
    ids=["all", "lora", "unpatched"],
)
def test_an_exported_checkpoint_is_the_result_and_generates_what_the_run_showed(
    changes: tuple[str, ...], tmp_path: Path, model: str, latents: Path, config_file: Path
) -> None:
    """The run starts from the result of attention transfer and generates samples at every validation."""
    given, run = (f"data={latents}", "checkpoint_every=1", "keep_checkpoints=9"), tmp_path / "run"
    if "patch=null" not in changes:
        first = ("trainable=mhla", "objectives={transfer: 1.0}", f"output={tmp_path / 'transfer'}")
        assert str(tmp_path / "transfer" / "result") in _cli("finetune", config_file, *given, *first)
        given = (*given, f"patch={tmp_path / 'transfer' / 'result'}")
    shown = "validation={prompts: [a blue ball], every: 1, inference_steps: 2}"
    assert str(run / "result") in _cli("finetune", config_file, *given, shown, *changes)
    assert len(list((run / "samples").rglob("00.mp4"))) == 5
    _cli("export", run, "--output", tmp_path / "last")
    assert _files(tmp_path / "last") == _files(run / "result")
    with pytest.raises(FileNotFoundError) as raised:
        load_mhla(wan_pipeline(), run / "checkpoints" / "step-00000003")
    command = str(raised.value).partition("mhla ")[2].replace("FOLDER", str(tmp_path / "middle"))
    _cli(*shlex.split(command))
    assert _files(tmp_path / "middle") != _files(run / "result")
    pipe = WanPipeline.from_pretrained(model)  # as the run, since rounding depends on where weights lie in memory
    put_on(pipe, str(tmp_path / "middle"))
    sample = prompt_sampler(pipe, ["a blue ball"], Clip(frames=5, fps=16.0, sizes=((32, 32),)), 2, "transformer")
    sample(pipe.transformer, tmp_path / "made")
    assert _files(tmp_path / "made") == _files(run / "samples" / "step-00000003")
    with refused(str(tmp_path / "last")):
        export_checkpoint(run, tmp_path / "last")
    if "patch=null" in changes:
        with refused("WanTransformer3DModel"):
            put_on(sana_pipeline(), str(run / "result"))


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_run_is_not_resumed_with_another_patch_or_weights(
    tmp_path: Path, model: str, latents: Path, config_file: Path
) -> None:
    """At the same paths."""
    shutil.copytree(model, tmp_path / "model")
    patch, weights = tmp_path / "patch.yaml", next((tmp_path / "model/transformer").glob("*.safetensors"))
    patch.write_text("family: wan\nbase_model: a\ndescription: b\npatch: {blocks: [2, 2, 2]}\n")
    named = [f"model={tmp_path / 'model'}", f"patch={patch}", f"data={latents}"]
    config = TrainingConfig.from_yaml(config_file, named)
    assert finetune(config).finished
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with refused("the content of model"):
        finetune(config, resume="latest")
    patch.write_text(patch.read_text().replace("]}", "], mixing_init: uniform}"))
    with refused("the content of patch.mixing_init"):
        finetune(config, resume="latest")


def test_a_run_on_shares_of_folders_resumes(tmp_path: Path, model: str, latents: Path, config_file: Path) -> None:
    """However they are listed; another share or folder is refused."""
    other = _synthesize(model, tmp_path, "a red cube\n\na blue cube moves\n")

    def run(name: str, *changes: str, resume: str | None = None) -> dict[str, bytes]:
        config = TrainingConfig.from_yaml(config_file, [f"output={tmp_path / name}", "checkpoint_every=1", *changes])
        assert finetune(config, resume).finished
        return _files(tmp_path / name / "result")

    both, turned = f"data={{{latents}: 3, {other}: 1}}", f"data={{{other}: 1, {latents}: 3}}"
    alone = run("alone", both)
    run("run", both, "steps=2")
    assert run("run", turned, resume="latest") == alone != run("one", f"data={latents}")
    with refused(f"data.{latents}=1.0, which was 3.0"):
        run("run", both.replace(": 3,", ": 1,"), "steps=6", resume="latest")
    shutil.rmtree(other)
    _synthesize(model, tmp_path, "a red cube\n\na green cube moves\n")
    with refused(f"the content of data.{other}"):
        run("run", both, "steps=6", resume="latest")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_valid_and_open_with_commands_for_their_model_and_data(path: Path) -> None:
    """tests/docs parses the commands."""
    config, text = TrainingConfig.from_yaml(path), path.read_text()
    assert config.output == f"outputs/{path.stem}"
    for line in re.findall(r"^# .* mhla ((?:encode|synthesize) .*)$", text, re.MULTILINE):
        assert f"--model {config.model} " in line and f"--output {config.data} " in f"{line} "
    assert text.count("--resume latest") == 1
    if (first := path.with_stem(f"{path.stem}-transfer")).is_file():
        assert config.patch == f"{TrainingConfig.from_yaml(first).output}/result"


FINETUNE = ("finetune", "run.yaml")


@pytest.mark.parametrize(
    ("command", "error", "named"),
    [
        ((*FINETUNE, "data=none"), FileNotFoundError, "none .*mhla encode or synthesize"),
        ((*FINETUNE, "data=two", "batch_size=3"), ValueError, "batch_size=3"),
        ((*FINETUNE, "patch=sana-0.6b"), ValueError, "'sana' .* 'wan'"),
        ((*FINETUNE, "component=vae"), ValueError, "AutoencoderKLWan"),
        ((*FINETUNE, "data=two", "patch.blocks=[9,2,2]"), ValueError, "9 blocks"),
        ((*FINETUNE, "data={two: 1, another: 2}"), ValueError, r"another .*vae='AutoencoderKLWan \(configuration 0\)'"),
        ((*FINETUNE, "data=two", "output=file"), OSError, "file"),
        (("synthesize", "--model", "empty", "--prompts", "bad.txt", "--output", "x"), ValueError, "'horse'"),
        (("encode", "--model", "empty", "--source", "images", "--output", "x"), ValueError, "'horse'"),
    ],
)
def test_bad_input_is_refused_before_weights_are_read(
    command, error, named, tmp_path, latents, config_file, monkeypatch
):
    """The pipeline to encode with has no weights at all."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("two").symlink_to(latents)
    assets = ROOT / "mhla_diffusers/tiny/assets/tiny-dit"
    shutil.copytree(assets, "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    Path("bad.txt").write_text("seven\nhorse\n")
    write_image(Path("images/a.png"))
    Path("images/a.txt").write_text("horse")
    header = {"family": "wan", "vae": "AutoencoderKLWan (configuration 0)", "text_encoder": "x"}
    writer = CacheWriter("another", header, [], {"encoder_hidden_states": torch.zeros(3, 8)})
    writer.add(SourceFile("a", clips=(writer.write({"latents": torch.zeros(4, 2, 4, 4)}, (5, 32, 32)),)))
    with pytest.raises(error, match=named):
        _cli(*command)


def test_what_is_encoded_is_what_was_announced(tmp_path: Path) -> None:
    """By bucket, with a reason for each file that is left out."""
    videos = tmp_path / "videos"
    write_video(videos / "wide.mp4", 20, 12, (64, 96))
    write_video(videos / "small.mp4", 9, 6, (32, 32))
    write_video(videos / "slow.mp4", 8, 3, (64, 72))
    write_video(videos / "short.mp4", 4, 6, (64, 64))
    write_image(videos / "picture.png", (64, 64))
    (videos / "broken.mp4").write_bytes(b"no video")
    for file in [*videos.iterdir()]:
        file.with_suffix(".txt").write_text("a seven moving left")
    write_video(videos / "mute.mp4", 12, 6, (64, 64))
    options = ("--frames", 9, "--fps", 6, "--size", 64, "--size", "64x96", "--upscale")
    before = _cli("data", videos, "--model", "tiny-wan", *options)
    to = ("--output", tmp_path / "latents", "--dtype", "float32")
    encoded = _cli("encode", "--model", "tiny-wan", "--source", videos, *to, *options)
    after = _cli("data", tmp_path / "latents", "--model", "tiny-wan")
    assert f"{videos}: 3 of 7 files are used; clips: 3." in before
    found = [[line.split() for line in text.split("\n\n")[1].splitlines()] for text in (before, encoded, after)]
    assert found[0] == found[1] == found[2]
    header, *rows = found[0]
    assert header == ["size", "frames", "clips", "latents", "tokens"]
    assert [row[:4] for row in rows] == [["64x64", "9", "2", "4x9x16x16"], ["64x96", "9", "1", "4x9x16x24"]]
    assert int(rows[1][4]) == int(rows[0][4]) * 3 // 2
    for reason in ("short.mp4: too short", "mute.mp4: it has no caption", "picture.png: an image", "broken.mp4: not a"):
        assert all(f"\n  {reason}" in text for text in (before, encoded, after))
    assert "clips: 3" in _cli("data", tmp_path / "latents")
    for options, named in (((), "--model"), (("--model", "tiny-wan", "--frames", 81), "None of the files")):
        with refused(named):
            _cli("data", videos, *options)


def test_the_longest_clips_and_captions_in_several_orders(tmp_path: Path, model: str) -> None:
    """Clips have lengths that the model takes, and the first order of a caption is the one that was written."""
    videos, tags = tmp_path / "videos", ["a red ball", "moving left", "white", "slow"]
    for frames in (4, 6, 14, 18):
        write_video(videos / f"{frames}.mp4", frames, fps=16)
    text = [", ".join(tags), "a red ball"]
    rows = [json.dumps({"file_name": f"{name}.mp4", "text": text}) for name in ("4", "6", "14", "18", "gone")]
    (videos / "metadata.jsonl").write_text("\n".join(rows))
    clips = ("--longest", "--size", "32x32", "--frames", 17)
    for fewest, lengths in (((), [5, 13, 17]), (("--frames", 9), [13, 17])):
        printed = _cli("data", videos, "--model", model, *clips, *fewest).split("\n\n")[1]
        assert [int(line.split()[1]) for line in printed.splitlines()[1:]] == lengths
    encode = ("encode", "--model", model, "--source", videos, "--output", tmp_path / "latents", *clips)
    for _ in range(2):
        made = _cli(*encode, "--shuffle-captions", 3, "--device", "cpu")
        files = {file.name: file for file in read_index(tmp_path / "latents")[1]}
        written, *others, alone = files["18.mp4"].captions
        assert [written, alone] == text
        assert len({written, *others}) == 3 and all(sorted(other.split(", ")) == sorted(tags) for other in others)
    assert "3 of 5 files are used" in made and "  gone.mp4: [Errno 2]" in made
    assert len(LatentCache(tmp_path / "latents")[0]) == 1 + 4
    with refused("latents", "--model"):
        _cli("data", tmp_path / "latents", "--frames", 9)
