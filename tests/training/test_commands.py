import math
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from diffusers import WanPipeline
from typer.testing import CliRunner

from mhla_diffusers import load_mhla
from mhla_diffusers.cli import app
from mhla_diffusers.families import Clip, families
from mhla_diffusers.generation import load_result
from mhla_diffusers.tiny import pipeline_folder
from mhla_diffusers.training import TrainingConfig, read_metrics
from mhla_diffusers.training.finetune import NamedRun, dry_run, export, finetune
from mhla_diffusers.training.latents.cache import CacheWriter
from mhla_diffusers.training.run_folder import RunFolder
from mhla_diffusers.training.validation import PromptSampler

from ..refusals import refused
from .pipelines import dit_pipeline, sana_pipeline, wan_pipeline, write_image, write_video
from .processes import finish, start_process

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("finetune/configs/*.yaml"))


CLIP = "clip={frames: 5, fps: 8, sizes: [[32, 32]]}"
PROMPTS = "prompts: [a blue ball], every: 4"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    wan_pipeline().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def latents(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two samples, made by the command."""
    folder = tmp_path_factory.mktemp("latents")
    (folder / "prompts.txt").write_text("a red ball\n\na blue ball moves\n")
    made = _cli(
        *("synthesize", "--model", model, "--prompts", folder / "prompts.txt", "--output", folder / "latents"),
        *("--frames", 5, "--size", "32x32", "--steps", 2, "--precision", "no", "--device", "cpu"),
    )
    assert "holds 2 samples" in made
    return folder / "latents"


@pytest.fixture
def config_file(tmp_path: Path, model: str) -> Path:
    path = tmp_path / "run.yaml"
    settings = {
        "model": model,
        "patch": {"blocks": [2, 2, 2]},
        "data": str(tmp_path / "latents"),
        "output": str(tmp_path / "run"),
        "stages": [
            {"steps": 2, "learning_rate": 1e-3, "trainable": "mhla", "objectives": {"transfer": 1.0}},
            {"steps": 2, "learning_rate": 1e-3, "trainable": "all", "objectives": {"diffusion": 1, "distillation": 1}},
        ],
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def _cli(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_from_prompts_to_a_patch_that_loads(tmp_path: Path, latents: Path, config_file: Path) -> None:
    """Samples are generated from prompts at every validation."""
    given = (f"data={latents}", CLIP, f"validation={{{PROMPTS}, inference_steps: 2}}", "ema_decay=0.9")
    assert "stage 0: trains mhla" in _cli("finetune", "--config", config_file, *given, "--dry-run")
    assert str(tmp_path / "run" / "result") in _cli("finetune", "--config", config_file, *given)
    written = sorted(str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run" / "samples").rglob("*.mp4"))
    assert written == ["samples/step-00000000/00.mp4", "samples/step-00000004/00.mp4"]
    pipe = load_mhla(wan_pipeline(), tmp_path / "run" / "result")
    frames = pipe("a red ball", height=32, width=32, num_frames=5, num_inference_steps=2, output_type="pt").frames
    assert frames.isfinite().all()


LORA_STAGE = "{steps: 4, learning_rate: 1.0e-2, trainable: lora, lora_rank: 2, objectives: {diffusion: 1}}"
UNPATCHED_STAGE = "{steps: 4, learning_rate: 1.0e-2, trainable: attention, objectives: {diffusion: 1}}"


@pytest.mark.parametrize(
    "changes",
    [(), (f"stages=[{LORA_STAGE}]",), (f"stages=[{UNPATCHED_STAGE}]", "patch=null")],
    ids=["all", "lora", "unpatched"],
)
def test_an_exported_checkpoint_is_the_result_and_generates_what_the_run_showed(
    changes: tuple[str, ...], tmp_path: Path, model: str, latents: Path, config_file: Path
) -> None:
    run, every = tmp_path / "run", ("checkpoint_every=1", "keep_checkpoints=9", "export_every=3", "ema_decay=0.9")
    shown = "validation={prompts: [a blue ball], every: 1, inference_steps: 2}"
    _cli("finetune", "--config", config_file, f"data={latents}", CLIP, shown, *every, *changes)
    _cli("export", run, "--output", tmp_path / "last")
    assert _files(tmp_path / "last") == _files(run / "result")
    checkpoint = run / "checkpoints" / "step-00000003"
    with pytest.raises(FileNotFoundError) as raised:
        load_mhla(wan_pipeline(), checkpoint)
    command = str(raised.value).partition("mhla ")[2].replace("FOLDER", str(tmp_path / "middle"))
    _cli(*shlex.split(command))
    assert _files(tmp_path / "middle") == _files(run / "exports" / "step-00000003") != _files(run / "result")
    pipe = WanPipeline.from_pretrained(model)  # as the run, since rounding depends on where weights lie in memory
    load_result(pipe, tmp_path / "middle")
    PromptSampler(pipe, ["a blue ball"], Clip(5, 8.0, ((32, 32),)), steps=2)(pipe.transformer, tmp_path / "made")
    assert _files(tmp_path / "made") == _files(run / "samples" / "step-00000003")
    with refused(str(tmp_path / "last")):
        export(run, tmp_path / "last")


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_run_is_not_resumed_with_other_latents_patch_or_weights(
    tmp_path: Path, model: str, latents: Path, config_file: Path
) -> None:
    """At the same paths; put back, it is."""
    shutil.copytree(latents, tmp_path / "latents")
    shutil.copytree(model, tmp_path / "model")
    patch = tmp_path / "patch.yaml"
    patch.write_text("family: wan\nbase_model: a\ndescription: b\npatch: {blocks: [2, 2, 2]}\n")
    config = TrainingConfig.from_yaml(config_file, [f"model={tmp_path / 'model'}", f"patch={patch}"])
    assert finetune(config).finished

    def other_latents() -> None:
        lines = "a red cube\n\na blue cube moves\n"
        (tmp_path / "prompts.txt").write_text(lines)
        shutil.rmtree(tmp_path / "latents")
        synthesize = ("synthesize", "--model", model, "--prompts", tmp_path / "prompts.txt", "--steps", 2)
        _cli(*synthesize, "--output", tmp_path / "latents", "--frames", 5, "--size", "32x32", "--precision", "no")

    def other_weights() -> None:
        file = tmp_path / "model/transformer/diffusion_pytorch_model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"x")

    for name, change in {
        "data": other_latents,
        "patch.mixing_init": lambda: patch.write_text(patch.read_text().replace("]}", "], mixing_init: uniform}")),
        "model": other_weights,
    }.items():
        shutil.copytree(tmp_path, tmp_path.with_name("kept"), dirs_exist_ok=True)
        change()
        with refused(f" {name}="):
            finetune(config, resume="latest")
        for file in ("latents", "model"):
            shutil.rmtree(tmp_path / file)
        shutil.copytree(tmp_path.with_name("kept"), tmp_path, dirs_exist_ok=True)
        assert finetune(config, resume="latest").finished


def test_raw_files_are_encoded_first(tmp_path: Path, config_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "videos").mkdir()
    for index in range(2):
        write_video(tmp_path / "videos" / f"{index}.mp4")
        (tmp_path / "videos" / f"{index}.txt").write_text("a red ball")
    config = TrainingConfig.from_yaml(config_file, [f"data={tmp_path / 'videos'}", CLIP])
    assert finetune(config).finished
    assert caplog.text.count("nothing of it is adapted yet") == 1
    assert (tmp_path / "run" / "latents" / "index.json").is_file()
    index = (tmp_path / "run" / "latents" / "index.json").read_bytes()
    (tmp_path / "videos" / "1.txt").write_text("a blue ball")
    with refused("1.mp4"):
        finetune(config, resume="latest")
    (tmp_path / "videos" / "1.txt").write_text("a red ball")
    assert finetune(config, resume="latest").finished
    assert (tmp_path / "run" / "latents" / "index.json").read_bytes() == index


def test_bfloat16_keeps_frozen_weights_small_and_trains(tmp_path: Path, latents: Path, config_file: Path) -> None:
    stage = "{steps: 4, learning_rate: 1.0e-3, trainable: lora, lora_rank: 2, objectives: {distillation: 1}}"
    changed = [f"data={latents}", CLIP, "precision=bfloat16", "ema_decay=0.9", "gradient_checkpointing=true"]
    changed += ["patch={density: 0.5, block_size: 2}", f"stages=[{stage}]"]
    changed += [f"validation={{{PROMPTS}, inference_steps: 1}}"]
    config = TrainingConfig.from_yaml(config_file, changed)
    finish([start_process(finetune, config)], timeout=120)
    losses = [record["loss"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 4
    assert all(math.isfinite(loss) for loss in losses)
    load_mhla(wan_pipeline(), tmp_path / "run" / "result")
    export(tmp_path / "run", tmp_path / "again")
    assert _files(tmp_path / "again") == _files(tmp_path / "run" / "result")


def test_script_trains_and_resumes(
    tmp_path: Path, latents: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [str(ROOT / "finetune" / "adapt.py"), "--config", str(config_file), f"data={latents}"]
    for more, code in ((["checkpoint_every=1"], 0), ([], 1), (["--resume", "latest"], 0)):
        monkeypatch.setattr(sys, "argv", [*script, *more])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(script[0], run_name="__main__")
        assert ended.value.code == code
        assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 4


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_valid_and_open_with_commands_that_parse(path: Path) -> None:
    config = TrainingConfig.from_yaml(path)
    assert config.output == f"outputs/{path.stem}"
    assert config.model is not None
    sources = {model.source for family in families() for model in family.models}
    assert config.model in sources or path.stem.startswith("tiny-"), "a dry run needs no Hub"
    commands = [_parse(line) for line in re.findall(r"^#.* ((?:mhla|accelerate launch) .*)$", path.read_text(), re.M)]
    tiny = path.stem.startswith("tiny-")
    samples = {"classes", "generate", "geneval", "vbench"}
    names = {name for name, _ in commands}
    assert names >= {"synthesize", "finetune"} | ({"compare"} if tiny else {"encode"})
    assert names & samples
    for name, values in commands:
        if name in ("encode", "synthesize"):
            assert (values["model"], str(values["output"])) == (config.model, config.data)
        elif name == "finetune":
            assert values["config"] == Path("finetune/configs", path.name)
        elif name in samples and "weights" in values:
            assert values["weights"] == f"{config.output}/result" or (tiny and values["weights"] is None)
            assert values["model"] == (None if tiny else config.model)
            assert config.model.endswith(f"tiny-{values['family']}") or not tiny
    assert sum(values.get("resume") == "latest" for _, values in commands) == 1
    assert sum(values.get("dry_run", False) for _, values in commands) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "millions"), [("sana-0.6b", 592), ("wan2.1-t2v-1.3b", 1420)])
def test_dry_runs_of_recipes_need_no_hub(name, millions, tmp_path, monkeypatch):
    """One stage counts all parameters."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    changed = [f"data={tmp_path / 'latents'}", f"stages=[{UNPATCHED_STAGE}]"]
    config = TrainingConfig.from_yaml(ROOT / f"finetune/configs/{name}.yaml", changed)
    assert dry_run(config).parameters / 1e6 == pytest.approx(millions, rel=0.01)


def _parse(line: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the mhla command in a line; finetune/adapt.py takes those of mhla finetune."""
    words = shlex.split(line)
    if words[:2] == ["accelerate", "launch"]:
        words = words[2:]
    if words[0] == "finetune/adapt.py":
        words = ["mhla", "finetune", *words[1:]]
    assert words[0] in ("mhla", "$(command -v mhla)")
    command: Any = typer.main.get_command(app)
    name, *arguments = words[1:]
    command = command.commands[name]
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    return name, command.make_context(name, arguments).params


@pytest.mark.parametrize(
    ("make", "blocks", "clip", "tokens"),
    [
        (wan_pipeline, (2, 2, 2), "{frames: 5, fps: 8, sizes: [[32, 32]]}", 8),
        (sana_pipeline, (2, 2), "{frames: 1, fps: 1, sizes: [[16, 16]]}", 64),
        (dit_pipeline, (2, 2), "{frames: 1, fps: 1, sizes: [[16, 16]]}", 16),
    ],
)
def test_dry_run_of_every_family(
    make: Callable[[], Any], blocks: tuple[int, ...], clip: str, tokens: int, tmp_path: Path, config_file: Path
) -> None:
    pipe = make()
    pipe.save_pretrained(tmp_path / "family")
    changed = [f"model={tmp_path / 'family'}", f"patch.blocks={list(blocks)}", f"clip={clip}"]
    estimate = dry_run(TrainingConfig.from_yaml(config_file, changed))
    assert estimate.tokens == tokens
    extra = 2 * (2 ** (2 * len(blocks)))
    assert estimate.parameters == sum(parameter.numel() for parameter in pipe.transformer.parameters()) + extra
    assert [stage.trainable_parameters for stage in estimate.stages] == [extra, estimate.parameters]
    assert estimate.stages[1].flops > estimate.stages[0].flops > 0


def test_dry_run_counts_softmax_attention_and_what_gradient_checkpointing_saves(config_file: Path) -> None:
    """Forward, backward of a fused kernel, which is 2.5 forwards, and the forward that checkpointing adds."""
    found = {}
    for checkpointing, passes in (("false", 3.5), ("true", 4.5)):
        estimates = []
        for layers in ("all", "0.5"):
            stage = "stages=[{steps: 1, learning_rate: 1, trainable: all, objectives: {diffusion: 1}}]"
            clip = "clip={frames: 9, fps: 8, sizes: [[512, 512]]}"
            changed = [stage, clip, f"patch.layers={layers}", f"gradient_checkpointing={checkpointing}"]
            estimates.append(dry_run(TrainingConfig.from_yaml(config_file, changed)))
        tokens, width, (whole, hybrid) = estimates[0].tokens, 24, (one.stages[0] for one in estimates)
        assert hybrid.flops - whole.flops == pytest.approx(passes * 4 * tokens**2 * width, rel=0.1)
        # nobody holds the scores of all tokens with all tokens
        assert hybrid.activation_bytes < 2 * 4 * tokens**2
        found[checkpointing] = whole
    assert found["true"].activation_bytes < 0.8 * found["false"].activation_bytes
    assert found["true"].flops > found["false"].flops


DRY_RUN, FINETUNE = ("finetune", "--config", "run.yaml", "--dry-run", CLIP), ("finetune", "--config", "run.yaml")


@pytest.mark.parametrize(
    ("command", "error", "named"),
    [
        ((*DRY_RUN, "data=null"), ValueError, "data"),
        ((*DRY_RUN, "data=two", "batch_size=3"), ValueError, "batch_size=3"),
        ((*DRY_RUN, "model=images"), FileNotFoundError, "images"),
        ((*DRY_RUN, "patch=sana-0.6b"), ValueError, "'sana-0.6b' .* 'sana' .* 'wan'"),
        ((*DRY_RUN, "component=vae"), ValueError, "AutoencoderKLWan"),
        ((*DRY_RUN, "component=transformer_2"), ValueError, "'transformer_2'"),
        ((*DRY_RUN, "patch.blocks=[9,2,2]"), ValueError, "9 blocks"),
        ((*DRY_RUN, "patch={block_size: 64}"), ValueError, "block_size=64 .* 8 tokens"),
        ((*FINETUNE, "data=another"), ValueError, r"vae='AutoencoderKLWan \(configuration 0\)'"),
        ((*FINETUNE, "data=two", "output=file"), OSError, "file"),
        (("synthesize", "--model", "empty", "--prompts", "bad.txt", "--output", "x"), ValueError, "'horse'"),
        (("encode", "--model", "empty", "--source", "images", "--output", "x"), ValueError, "'horse'"),
        (("synthesize", "--model", "empty", "--prompts", "seven.txt", "--output", "file/x"), OSError, "file/x"),
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
    Path("seven.txt").write_text("seven")
    Path("bad.txt").write_text("seven\nhorse\n")
    write_image(Path("images/a.png"))
    Path("images/a.txt").write_text("horse")
    header = {"family": "wan", "vae": "AutoencoderKLWan (configuration 0)", "text_encoder": "x", "settings": {}}
    writer = CacheWriter(Path("another"), header)
    writer.add("a", "b", {"latents": torch.zeros(4, 2, 4, 4)})
    writer.flush()
    with pytest.raises(error, match=named):
        _cli(*command)


def test_missing_data_names_the_commands_that_make_it(tmp_path: Path, model: str, config_file: Path) -> None:
    """They parse, and make what the configuration takes."""
    latents = tmp_path / "latents"
    config = TrainingConfig.from_yaml(config_file, ["clip={frames: 5, fps: 8, sizes: [[32, 32], [32, 48]]}"])
    with pytest.raises(FileNotFoundError) as raised:
        finetune(config)
    encode, synthesize = re.findall(r"`(mhla .*?)`", str(raised.value))
    for command, name, frames, sizes in (
        (encode, "encode", [5], ["32x32", "32x48"]),
        (synthesize, "synthesize", 5, ["32x32"]),
    ):
        found, values = _parse(command)
        assert (found, values["model"], values["output"]) == (name, model, latents)
        assert (values["frames"], values["sizes"], values["precision"]) == (frames, sizes, config.precision)
    assert _parse(encode)[1]["fps"] == 8
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("make", [wan_pipeline, sana_pipeline])
def test_what_does_not_run_the_transformer_does_not_read_its_weights(tmp_path: Path, make: Callable[[], Any]) -> None:
    """Encoding, and samples of a training, which put the transformer in training in its place."""
    model, is_video = tmp_path / "model", make is wan_pipeline
    make().save_pretrained(model)
    (model / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    common = ("--model", model, "--device", "cpu", "--frames", 5 if is_video else 1, "--size", "32x32")
    if is_video:
        write_video(tmp_path / "data" / "a.mp4")
    else:
        write_image(tmp_path / "data" / "a.png")
    (tmp_path / "data" / "a.txt").write_text("5")
    made = _cli("encode", *common, "--source", tmp_path / "data", "--output", tmp_path / "encoded", "--workers", 0)
    assert "1 of 1 files are used" in made
    stages = ({"steps": 1, "learning_rate": 1, "trainable": "all", "objectives": {"diffusion": 1}},)
    settings = {"model": str(model), "data": str(tmp_path / "encoded"), "output": str(tmp_path), "stages": stages}
    validation = {"prompts": ["5"], "inference_steps": 1}
    transformer = make().transformer
    NamedRun(TrainingConfig.read({**settings, "validation": validation})).sampler()(transformer, tmp_path / "made")
    assert [path.stem for path in (tmp_path / "made").iterdir()] == ["00"]


def test_help_of_the_script_does_not_wait_for_torch() -> None:
    script = ROOT / "finetune" / "adapt.py"
    code = "import runpy, sys\nsys.argv[1:] = ['--help']\ntry:\n"
    code += f"    runpy.run_path({str(script)!r}, run_name='__main__')\n"
    code += "except SystemExit:\n    print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "--quiet" in shown and shown.endswith("False\n")


def test_a_tiny_pipeline_is_named_in_a_configuration():
    config = TrainingConfig.from_yaml(ROOT / "finetune/configs/tiny-wan.yaml", ["model=tiny-wan", "data=nowhere"])
    assert dry_run(config).tokens == 576
    config = replace(config, model=str(pipeline_folder("wan")), clip=None)
    assert dry_run(config).tokens == 576, "of its own clip"
    with pytest.raises(FileNotFoundError, match="--model tiny-wan --output nowhere"):
        NamedRun(config).open_data()


@pytest.mark.parametrize(("name", "is_near"), [("last", True), ("elsewhere", False)])
def test_a_checkpoint_with_a_name_near_latest_is_asked_about(name, is_near, tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        RunFolder(tmp_path).find(name)
    assert ("'latest'" in str(error.value)) == is_near
