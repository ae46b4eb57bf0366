"""Few steps: the roles of one model, what each is trained with, and what a run leaves."""

import copy
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffusers import TaylorSeerCacheConfig
from peft import LoraConfig

from mhla_diffusers import (
    CausalConfig,
    FewStepScheduler,
    MHLAConfig,
    apply_mhla,
    is_patched,
    load_mhla,
    mhla_disabled,
    remove_mhla,
)
from mhla_diffusers.families import NoisedBatch, predict
from mhla_diffusers.generation import PipelineChoice, load_result
from mhla_diffusers.patching import describe, find_patched, read_record, save_mhla
from mhla_diffusers.patching.few_step_scheduler import few_steps_of
from mhla_diffusers.patching.few_steps import FewSteps
from mhla_diffusers.patching.saving import model_card
from mhla_diffusers.training import ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig, read_metrics, train
from mhla_diffusers.training.config import FewStepsConfig
from mhla_diffusers.training.estimate import StageEstimate, estimate
from mhla_diffusers.training.few_steps import DistributionMatching
from mhla_diffusers.training.finetune import NamedRun, finetune
from mhla_diffusers.training.latents.clips import Clips
from mhla_diffusers.training.latents.data import InMemoryData
from mhla_diffusers.training.latents.encode import synthesize
from mhla_diffusers.training.roles import Roles, lora_of, prepare_for_training
from mhla_diffusers.training.stage import Stage

from ..refusals import refused
from .models import dit_data, tiny_dit, tiny_wan, wan_data
from .pipelines import wan_pipeline

PATCH = MHLAConfig(blocks=(2, 2, 2))
CAUSAL = CausalConfig(blocks=(2, 2, 2), block_length=1)
FEW = FewStepsConfig(times=(1.0, 0.75), guidance=1.0, critic_updates=2, critic_warmup=1)
LORA: dict[str, Any] = {"trainable": "lora", "lora_rank": 2, "lora_layers": "blocks"}
BOTH = pytest.mark.parametrize("settings", [{"trainable": "all"}, LORA], ids=["copies", "LoRA"])


def _stage(few_steps: FewStepsConfig = FEW, **settings: Any) -> StageConfig:
    return StageConfig(**{"steps": 6, "learning_rate": 1e-3, "trainable": "all", **settings, "few_steps": few_steps})


GUIDED = _stage(replace(FEW, guidance=5.0))


def _transfer() -> StageConfig:
    return StageConfig(2, 1e-3, "mhla", ObjectiveWeights(transfer=1.0))


def _config(output: Path, *stages: StageConfig, **settings: Any) -> TrainingConfig:
    return TrainingConfig(str(output), stages, **{"patch": PATCH, "batch_size": 2, **settings})


def _matching(few_steps: FewStepsConfig = FEW, patch: MHLAConfig = PATCH, **settings: Any) -> DistributionMatching:
    """A student that takes gradients, with its critic."""
    config = _config(Path("unused"), _stage(few_steps, **settings), patch=patch)
    model = apply_mhla(tiny_wan(), patch)
    roles = Roles.of(model, config, prepare_for_training(model, config), wan_data().empty)
    matching = Stage(config, 0, roles, Accelerator(cpu=True), step=0, saved={}).matching
    assert matching is not None
    return matching


def _batch() -> NoisedBatch:
    generator = torch.Generator().manual_seed(0)
    latents, noise = torch.randn(2, 2, 4, 2, 8, 8, generator=generator)
    text = {"encoder_hidden_states": torch.randn(2, 3, 8, generator=generator)}
    half = torch.full((2,), 0.5)
    return NoisedBatch(latents, noise, half, latents, 1000 * half, text)


def _shake(matching: DistributionMatching) -> None:
    """Change the student's and the critic's weights, as training would."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in (*matching.critic.parameters.values(), *matching.roles.student.parameters()):
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))


def _backward(matching: DistributionMatching, update: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Losses and gradients of an update; the student's names begin with "student "."""
    found = {}
    for loss, parts in matching.losses(_batch(), update, 0):
        loss.backward()
        found |= {name: float(part.detach()) for name, part in parts.items()}
    student = {f"student {name}": x for name, x in matching.roles.student.named_parameters()}
    critics = matching.critic.parameters
    own = {name: x for name, x in student.items() if all(x is not other for other in critics.values())}
    return found, {name: x.grad.clone() for name, x in {**own, **critics}.items() if x.grad is not None}


@BOTH
def test_students_gradient_is_zero_while_the_critic_is_the_teacher(settings: dict[str, Any]) -> None:
    losses, gradients = _backward(_matching(**settings), update=2)
    assert losses["student"] == losses["difference"] == 0 < losses["critic"]
    student = {name for name in gradients if name.startswith("student ")}
    assert student and not any(gradients[name].any() for name in student)
    assert any(gradient.any() for name, gradient in gradients.items() if name not in student)


@BOTH
def test_gradient_leads_from_the_critic_to_the_guided_teacher(settings: dict[str, Any]) -> None:
    """By hand: where critic and teacher differ, a step against the gradient goes towards the teacher."""
    matching = _matching(replace(FEW, guidance=3.0), **settings)
    _shake(matching)
    batch, process = _batch(), matching.process
    torch.manual_seed(0)
    samples, noise, time = torch.randn(2, 4, 2, 8, 8), torch.randn(2, 4, 2, 8, 8), torch.tensor([0.3, 0.8])
    found = matching.difference(samples, batch, noise, time)

    noised, sigma, plain = process.noised(samples, noise, time), time.view(-1, 1, 1, 1, 1), tiny_wan()
    text = batch.conditioning["encoder_hidden_states"]
    with matching.critic.at_work(), torch.no_grad():
        fake = noised - sigma * matching.critic.predict(replace(batch, hidden_states=noised, timestep=1000 * time))
        with_prompt, without = (
            noised - sigma * plain(noised, 1000 * time, one, return_dict=False)[0]
            for one in (text, torch.zeros_like(text))
        )
    real = without + 3.0 * (with_prompt - without)
    for index in range(2):
        expected = (fake[index] - real[index]) / (samples[index] - real[index]).abs().mean()
        torch.testing.assert_close(found[index], expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(fake, real, atol=1e-3)


def test_roles_leave_no_trace() -> None:
    matching = _matching(**LORA)
    _shake(matching)
    model, batch = matching.roles.student, _batch()
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    with torch.no_grad():
        student = predict(model, batch)
        with matching.critic.at_work():
            critic = matching.critic.predict(batch)
        teacher = matching.teacher.predict(batch)
        assert torch.equal(predict(model, batch), student)
        torch.testing.assert_close(teacher, predict(tiny_wan(), batch))
    assert not torch.allclose(critic, teacher, atol=1e-3) and not torch.allclose(critic, student, atol=1e-3)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trained
    assert {lora_of(name) for name in trained if trained[name] and lora_of(name)} == {"mhla", "critic"}


@BOTH
def test_checkpointing_changes_no_gradient(settings: dict[str, Any]) -> None:
    """In a backward pass it runs the model again, which must be the same of the three as in the forward."""
    gradients = []
    for checkpointing in (False, True):
        matching = _matching(replace(FEW, guidance=2.0), **settings)
        _shake(matching)
        if checkpointing:
            matching.roles.student.enable_gradient_checkpointing()  # type: ignore[operator]
        gradients.append(_backward(matching, update=4)[1])
    plain, checkpointed = gradients
    assert plain.keys() == checkpointed.keys() and len(plain) > 20
    for name in plain:
        torch.testing.assert_close(checkpointed[name], plain[name], atol=1e-7, rtol=1e-4)


def test_only_the_students_turn_gives_it_gradients() -> None:
    matching = _matching(**LORA)
    assert [matching.trains_student(update) for update in range(6)] == [False, False, True, False, True, False]
    assert _backward(matching, update=3)[1].keys() == matching.critic.parameters.keys()


def test_first_steps_attend_as_before_the_patch_where_it_says_so() -> None:
    """``softmax_steps`` as a fraction of a few steps: of four, 0.25 is the first, and anything above it two."""
    times = (1.0, 0.9, 0.75, 0.5)
    matching = _matching(replace(FEW, times=times), patch=PATCH.replace(softmax_steps=0.25))
    batch, noise, model = _batch(), torch.randn(4, 2, 4, 2, 8, 8), matching.roles.student.eval()
    found, latents = matching.samples(batch, noise), noise[0]
    with torch.no_grad():
        for index, time in enumerate(times):
            sigma = torch.full((2,), time)
            noised = matching.process.noised(latents, noise[index], sigma)
            given = replace(batch, hidden_states=noised, timestep=1000 * sigma)
            if index == 0:
                with mhla_disabled(model):
                    velocity = predict(model, given)
            else:
                velocity = predict(model, given)
            latents = noised - time * velocity
    torch.testing.assert_close(found, latents)


def test_training_samples_as_the_pipeline_does() -> None:
    matching = _matching(replace(FEW, times=(1.0, 0.9, 0.75, 0.5)))
    scheduler, batch = FewStepScheduler((1.0, 0.9, 0.75, 0.5)), _batch()
    scheduler.set_timesteps(4)
    latents, seen = batch.noise, [batch.noise]
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            given = replace(batch, hidden_states=latents, timestep=timestep.expand(2))
            before, velocity = latents, predict(matching.roles.student, given)
            (latents,) = scheduler.step(velocity, timestep, latents, return_dict=False)
            following = float(scheduler.sigmas[scheduler.step_index])
            if following:  # the noise that was added
                clean = before - timestep / 1000 * velocity
                seen.append((latents - (1 - following) * clean) / following)
    torch.testing.assert_close(matching.samples(batch, seen), latents, atol=1e-4, rtol=1e-4)


# Whole runs


@BOTH
def test_resumed_run_is_the_run_that_was_left_alone(settings: dict[str, Any], tmp_path: Path) -> None:
    few = _stage(replace(FEW, guidance=2.0), steps=8, warmup_steps=2, scheduler="cosine", **settings)
    stages = (_transfer(), few) if "lora_rank" in settings else (few,)
    further: dict[str, Any] = {"gradient_accumulation": 2, "ema_decay": 0.9, "checkpoint_every": 3}
    config = _config(tmp_path / "alone", *stages, prompt_dropout=0.3, keep_checkpoints=9, **further)
    train(apply_mhla(tiny_wan(), PATCH), wan_data(), config)
    shutil.copytree(tmp_path / "alone", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/result")
    for checkpoint in sorted((tmp_path / "again/checkpoints").iterdir())[-2:]:
        shutil.rmtree(checkpoint)
    resumed = replace(config, output=str(tmp_path / "again"))
    assert train(apply_mhla(tiny_wan(), PATCH), wan_data(), resumed, resume="latest").finished
    alone, again = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("alone", "again"))
    assert again == alone
    for file in sorted((tmp_path / "alone/result").iterdir()):
        assert (tmp_path / "again/result" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.filterwarnings("error:Detected call of .lr_scheduler")
@pytest.mark.parametrize(
    ("scheduler", "expected"), [("constant", [1 / 4, 3 / 4, 1, 1]), ("cosine", [1 / 4, 3 / 4, 0.853553, 0.146447])]
)
def test_students_rate_begins_after_the_critics_warm_up(scheduler: Any, expected: list[float], tmp_path: Path) -> None:
    stage = _stage(replace(FEW, critic_warmup=6), steps=14, scheduler=scheduler, warmup_steps=4)
    train(apply_mhla(tiny_wan(), PATCH), wan_data(), _config(tmp_path, _transfer(), stage))
    records = read_metrics(tmp_path / "metrics.jsonl")
    rates = [record["learning_rate"] / 1e-3 for record in records if "student" in record]
    assert rates == pytest.approx(expected, rel=1e-4)


def test_frozen_weights_stay_and_the_critic_is_not_in_the_result(tmp_path: Path) -> None:
    model, validation = apply_mhla(tiny_wan(), PATCH), ValidationConfig(samples=2, every=100, timesteps=2)
    stages = _transfer(), _stage(**LORA)
    result = train(model, wan_data(), _config(tmp_path, *stages, validation=validation)).result
    assert result is not None
    records = read_metrics(tmp_path / "metrics.jsonl")
    found = [record.keys() & {"critic", "student", "difference"} for record in records if "loss" in record]
    assert found[2:5] == [{"critic"}, {"critic"}, {"critic", "difference", "student"}]
    assert sum("validation_loss" in record for record in records) == 2
    saved = load_mhla(tiny_wan(), result)
    names = [name for name, _ in saved.named_parameters() if lora_of(name)]
    assert {lora_of(name) for name in names} == {"mhla"}
    # all linear layers of the blocks, and none of MHLA's own
    assert {name.split(".")[2] for name in names} == {"attn1", "attn2", "ffn"}
    with torch.no_grad():
        torch.testing.assert_close(predict(saved.eval(), _batch()), predict(model.eval(), _batch()))
        remove_mhla(saved)
        assert torch.equal(predict(saved, _batch()), predict(tiny_wan(), _batch()))
    assert saved.state_dict().keys() == tiny_wan().state_dict().keys()


def _trained(folder: Path, patch: MHLAConfig | None = PATCH, **settings: Any) -> Path:
    pipe = wan_pipeline()
    if patch is not None:
        apply_mhla(pipe.transformer, patch)
    stage = _stage(FewStepsConfig((1.0, 0.9, 0.5), 2.0, critic_warmup=1, critic_updates=1), steps=2, **settings)
    result = train(pipe.transformer, wan_data(), _config(folder, stage, patch=patch)).result
    assert result is not None
    return result


@pytest.fixture(scope="module")
def lora_result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _trained(tmp_path_factory.mktemp("lora"), **LORA)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All weights."""
    return _trained(tmp_path_factory.mktemp("all"))


CALL: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 5, "output_type": "latent", "max_sequence_length": 8}


def _sample(pipe: Any, prompts: list[str], seeds: list[int], **settings: Any) -> torch.Tensor:
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    call = {**CALL, "guidance_scale": 1.0, "num_inference_steps": 3, **settings}
    latents: torch.Tensor = pipe(prompts, generator=generators, **call).frames
    return latents


@pytest.mark.parametrize("trained", ["lora_result", "result"])
def test_loaded_result_samples_in_its_steps(trained: str, request: pytest.FixtureRequest) -> None:
    pipe = wan_pipeline()
    own, before = pipe.scheduler, _sample(pipe, ["a cat"], [0])
    load_mhla(pipe, request.getfixturevalue(trained))
    assert few_steps_of(pipe) == find_patched(pipe)["transformer"].few_steps == FewSteps((1.0, 0.9, 0.5), 2.0)
    found = _sample(pipe, ["a cat", "a dog"], [0, 1])
    # the noise between steps follows from the generator, and not from the others of the batch
    torch.testing.assert_close(_sample(pipe, ["a dog"], [1]), found[1:], atol=1e-4, rtol=1e-4)
    with refused("num_inference_steps=20"):
        _sample(pipe, ["a cat"], [0], num_inference_steps=20)
    pipe.transformer.enable_cache(TaylorSeerCacheConfig(cache_identifiers=[r"blocks\.\d+\.attn1"]))
    with pytest.warns(UserWarning, match="guidance_scale=5.0") as told:
        _sample(pipe, ["a cat"], [0], guidance_scale=5.0)
    assert any("TaylorSeer" in str(one.message) for one in told)
    pipe.transformer.disable_cache()
    remove_mhla(pipe)
    assert pipe.scheduler is own and torch.equal(_sample(pipe, ["a cat"], [0]), before)


def test_scheduler_goes_and_comes_back_with_the_patch(lora_result: Path) -> None:
    """Also where another was set by hand, the pipeline was copied, or another pipeline has the same transformer."""
    pipe = wan_pipeline()
    before = pipe.scheduler = FewStepScheduler([1.0, 0.5])
    load_mhla(pipe, lora_result)
    copied, other = copy.deepcopy(pipe), type(pipe)(**pipe.components)
    found = few_steps_of(remove_mhla(copied))
    assert found is not None and found.times == (1.0, 0.5)
    assert few_steps_of(pipe) == FewSteps((1.0, 0.9, 0.5), 2.0)
    remove_mhla(other)
    assert pipe.scheduler is other.scheduler is before
    load_mhla(pipe, lora_result)
    pipe.scheduler = since = FewStepScheduler([1.0, 0.8])
    remove_mhla(pipe)
    assert pipe.scheduler is since


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        *(({"times": times}, "times") for times in ((0.9, 0.5), (1.0, 0.5, 0.5), (), (1.0, 0.0), 4, "1.0", None)),
        ({"times": tuple(1 - place / 10 for place in range(9))}, "1 to 8"),
        ({"trainable": "attention"}, "trainable='attention'"),
        ({"objectives": ObjectiveWeights(diffusion=1.0)}, "objectives"),
        ({"critic_rank": 4}, "critic_rank=4"),
        ({"steps": 2}, "steps=2 .*at least 3"),
        ({"lora_layers": "blocks"}, "lora_layers='blocks'"),
    ],
)
def test_settings_that_are_not_allowed(change: dict[str, Any], problem: str) -> None:
    few_steps = {name: value for name, value in change.items() if hasattr(FEW, name)}
    with pytest.raises(ValueError, match=problem):
        _stage(replace(FEW, **few_steps), **{name: x for name, x in change.items() if name not in few_steps})


def _without_empty() -> InMemoryData:
    data = wan_data()
    return InMemoryData([data[index] for index in range(len(data))])


@pytest.mark.parametrize(
    ("make", "data", "patch", "stages", "problem"),
    [
        (tiny_dit, dit_data, PATCH.replace(blocks=(2, 2)), [GUIDED], "DDPM"),
        (tiny_wan, _without_empty, PATCH, [GUIDED], "guidance=5.0"),
        (tiny_wan, wan_data, CAUSAL, [GUIDED], "causal='block'"),
        (tiny_wan, wan_data, PATCH, [_stage(), _transfer()], r"stages\.0"),  # few steps come last
    ],
)
def test_what_cannot_learn_few_steps(make, data, patch, stages, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        train(apply_mhla(make(), patch), data(), _config(tmp_path, *stages, patch=patch))


def test_card_and_description_tell_the_steps(lora_result: Path, tmp_path: Path) -> None:
    pipe = load_mhla(wan_pipeline(), lora_result)
    folder = save_mhla(pipe, tmp_path / "again")
    for text in (str(describe(pipe)), model_card(pipe, "me/mine", read_record(folder))):
        assert "3 steps" in text and "1, 0.9, 0.5" in text
    # what was saved again is the same patch
    other = load_mhla(wan_pipeline(), folder)
    assert torch.equal(*(_sample(one, ["a cat"], [0]) for one in (pipe, other)))


def _fused(result: Path) -> Any:
    pipe = load_mhla(wan_pipeline(), result)
    pipe.fuse_lora(components=["transformer"])
    return pipe


def test_lora_of_a_patch_that_was_fused_and_unloaded_is_told(
    lora_result: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = _fused(lora_result)
    pipe.unload_lora_weights()
    for act in (lambda: save_mhla(pipe, tmp_path / "saved"), lambda: remove_mhla(pipe)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "mhla_diffusers"):
            act()
        assert "LoRA 'mhla'" in caplog.text


def _damaged(result: Path, folder: Path) -> Path:
    broken = shutil.copytree(result, folder / "broken")
    (file,) = broken.glob("lora-*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    return broken


def _with_lora() -> Any:
    """With a LoRA of the name that a patch's own has."""
    pipe = wan_pipeline()
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), adapter_name="mhla")
    return pipe


def _train_all(model: Any, result: Path, folder: Path) -> None:
    """Train what a patch's LoRA adds to."""
    train(model, wan_data(), _config(folder / "second", _stage(), patch=str(result)))


@pytest.mark.parametrize(
    ("make", "act", "named"),
    [
        (
            lambda _: wan_pipeline(),
            lambda pipe, result, folder: load_mhla(pipe, _damaged(result, folder)),
            r"lora-\w+\.safetensors",
        ),
        (lambda _: _with_lora(), lambda pipe, result, _: load_mhla(pipe, result), "'mhla'"),
        (_fused, lambda pipe, *_: remove_mhla(pipe), "unfuse_lora"),
        (lambda result: load_mhla(tiny_wan(), result), _train_all, "trainable='all'"),
    ],
    ids=["damaged", "another", "fused", "trained"],
)
def test_what_a_patchs_lora_does_not_allow_changes_nothing(make, act, named, lora_result, tmp_path):
    model = make(lora_result)
    before = is_patched(model), few_steps_of(model)
    with pytest.raises(ValueError, match=named):
        act(model, lora_result, tmp_path)
    assert (is_patched(model), few_steps_of(model)) == before
    assert not (tmp_path / "second").exists()


def test_unpatched_model_is_distilled_too(tmp_path: Path) -> None:
    pipe = wan_pipeline()
    load_result(pipe, _trained(tmp_path, patch=None))
    assert few_steps_of(pipe) == FewSteps((1.0, 0.9, 0.5), 2.0) and not is_patched(pipe)


def test_generation_refuses_settings_that_contradict(result: Path, tmp_path: Path) -> None:
    wan_pipeline().save_pretrained(tmp_path)
    for settings in ({"num_inference_steps": 20}, {"guidance_scale": 5.0}):
        with pytest.raises(ValueError, match="=".join(str(x) for x in next(iter(settings.items())))):
            PipelineChoice("wan", model=str(tmp_path), weights=str(result), settings=settings).load()
    choice = PipelineChoice("wan", model=str(tmp_path), weights=str(result), settings=CALL)
    pipe = choice.load()
    found = choice.call(pipe, ["a cat"], [torch.Generator().manual_seed(0)])
    torch.testing.assert_close(found, _sample(pipe, ["a cat"], [0]))


@pytest.mark.parametrize("order", ["before", "after"])
def test_public_lora_goes_under_a_patch(order: str) -> None:
    """Random weights by the names that LoRAs for Wan's own code have."""
    torch.manual_seed(0)
    layers = [f"{part}.{name}" for part in ("self_attn", "cross_attn") for name in "qkvo"]
    lora = {}
    for name, (inputs, outputs) in {**dict.fromkeys(layers, (24, 24)), "ffn.0": (24, 32), "ffn.2": (32, 24)}.items():
        for block in range(2):
            key = f"diffusion_model.blocks.{block}.{name}"
            lora[f"{key}.lora_down.weight"] = 0.3 * torch.randn(4, inputs)
            lora[f"{key}.lora_up.weight"] = 0.3 * torch.randn(outputs, 4)
    pipe, plain, other = wan_pipeline(), wan_pipeline(), wan_pipeline()
    apply_mhla(plain, PATCH)
    if order == "before":
        pipe.load_lora_weights(dict(lora))
    apply_mhla(pipe, PATCH)
    if order == "after":
        pipe.load_lora_weights(dict(lora))
    other.load_lora_weights(dict(lora))
    for one in (pipe, plain, other):
        one.scheduler = FewStepScheduler([1.0, 0.9375, 0.625])
    assert not torch.allclose(*(_sample(one, ["a cat"], [0]) for one in (pipe, plain)), atol=1e-2)
    remove_mhla(pipe)
    torch.testing.assert_close(*(_sample(one, ["a cat"], [0]) for one in (pipe, other)))


# Without weights, and without data


def _dry_run(sample: Any = None, few_steps: FewStepsConfig = FEW, **settings: Any) -> StageEstimate:
    with torch.device("meta"):
        model = apply_mhla(tiny_wan(), PATCH)
    config = _config(Path("unused"), _stage(few_steps, **settings))
    return estimate(model, sample or wan_data()[0], config).stages[0]


@BOTH
def test_dry_run_counts_student_and_critic(settings: dict[str, Any]) -> None:
    counted, sample = _dry_run(**settings), wan_data()[0]
    assert counted.activation_bytes > 0
    if settings["trainable"] == "all":
        of_prompts = {**sample, "latents": torch.zeros_like(sample["latents"], dtype=torch.uint8)}
        assert counted == _dry_run(of_prompts, **settings)
        whole, own = (
            sum(x.numel() for x in model.parameters()) for model in (tiny_wan(), apply_mhla(tiny_wan(), PATCH))
        )
        assert counted.trainable_parameters == own + whole
        assert counted.training_bytes == 12 * (own + whole) + 4 * whole
        return
    wider, rarer, longer = (
        _dry_run(few_steps=replace(FEW, **changes), **settings)
        for changes in ({"critic_rank": 4}, {"critic_updates": 4}, {"times": (1.0, 0.9, 0.5)})
    )
    assert wider.trainable_parameters > counted.trainable_parameters
    # a student that is updated more rarely, or has fewer steps before, costs less
    assert rarer.flops < counted.flops < longer.flops


def test_prompts_alone_are_enough(tmp_path: Path) -> None:
    pipe = wan_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    clip = Clips(frames=5, fps=8, sizes=((32, 32),))
    synthesize(pipe, str(tmp_path / "model"), ["a cat", "a dog"], tmp_path / "prompts", clip, steps=0)
    few = _stage(replace(FEW, guidance=2.0))
    patch = PATCH.replace(blocks=(2, 1, 1))
    shared = {"model": str(tmp_path / "model"), "data": str(tmp_path / "prompts"), "patch": patch}
    with refused("--steps 0"):
        finetune(_config(tmp_path / "refused", _transfer(), few, clip=clip, **shared))
    validation = ValidationConfig(prompts=("a cat",), every=100)
    config = _config(tmp_path / "run", few, validation=validation, clip=clip, **shared)
    assert finetune(config).finished
    assert sorted(path.name for path in (tmp_path / "run/samples").iterdir()) == ["step-00000000", "step-00000006"]
    # a configuration without a clip generates what the data holds, and not the long clips of the family
    found = NamedRun(replace(config, clip=None)).clip
    assert (found.frames, found.sizes) == (clip.frames, clip.sizes)


def test_a_pipeline_is_saved_and_loaded_with_its_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = wan_pipeline()
    pipe.scheduler = FewStepScheduler([1.0, 0.8, 0.4], guidance=3.0)
    pipe.save_pretrained(tmp_path)
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("diffusers.configuration_utils"), "warning", said.append)
    loaded = type(pipe).from_pretrained(tmp_path)
    assert few_steps_of(loaded) == FewSteps((1.0, 0.8, 0.4), 3.0)
    assert loaded.scheduler.config.shift == 1.0 and not said
