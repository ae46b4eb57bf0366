"""Few steps: the roles of one model, what each is trained with, and what a run leaves."""

import copy
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import TaylorSeerCacheConfig
from peft import LoraConfig

from mhla_diffusers import FewStepScheduler, MHLAConfig, apply_mhla, is_patched, load_mhla, mhla_disabled, remove_mhla
from mhla_diffusers.families import Clip, NoisedBatch, get_family, predict
from mhla_diffusers.generation import PipelineChoice, load_result
from mhla_diffusers.patching import describe, find_patched, read_record, save_mhla
from mhla_diffusers.patching.few_step_scheduler import FewSteps, few_steps_of
from mhla_diffusers.patching.saving import model_card
from mhla_diffusers.training import ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig, read_metrics, train
from mhla_diffusers.training.config import FewStepsConfig
from mhla_diffusers.training.critic import make_critic
from mhla_diffusers.training.estimate import StageEstimate, estimate
from mhla_diffusers.training.few_steps import FewStepObjective
from mhla_diffusers.training.finetune import ResolvedRun, finetune
from mhla_diffusers.training.latents.data import InMemoryData
from mhla_diffusers.training.latents.encode import synthesize
from mhla_diffusers.training.objectives import Place
from mhla_diffusers.training.teacher import Teacher
from mhla_diffusers.training.trainable import CRITIC, STUDENT, add_adapters, changed_names, is_lora, make_trainable

from .models import dit_data, tiny_dit, tiny_wan, wan_data
from .pipelines import wan_pipeline
from .processes import finish, start_training

PATCH = MHLAConfig(blocks=(2, 2, 2))
FEW = FewStepsConfig(times=(1.0, 0.75), guidance=1.0, critic_updates=2, critic_warmup=1)
LORA: dict[str, Any] = {"trainable": "lora", "lora_rank": 2, "lora_layers": "blocks"}


def _stage(few_steps: FewStepsConfig = FEW, **settings: Any) -> StageConfig:
    return StageConfig(**{"steps": 6, "learning_rate": 1e-3, "trainable": "all", **settings, "few_steps": few_steps})


def _config(output: Path, *stages: StageConfig, **settings: Any) -> TrainingConfig:
    return TrainingConfig(str(output), stages, **{"patch": PATCH, "batch_size": 2, **settings})


def _objective(few_steps: FewStepsConfig = FEW, patch: MHLAConfig = PATCH, **settings: Any) -> FewStepObjective:
    """A student that takes gradients, with its critic."""
    stage = _stage(few_steps, **settings)
    model = apply_mhla(tiny_wan(), patch)
    if stage.lora_rank is not None:
        add_adapters(model, stage.lora_rank, 0, stage.lora_layers)
    critic = make_critic(model, stage, few_steps, 0)
    teacher = Teacher(model, changed_names(model, [stage]))
    make_trainable(model, {*changed_names(model, [stage]), *critic.parameters})
    for parameter in critic.parameters.values():
        parameter.requires_grad_(True)
    process: Any = get_family(model).process(model, 3.0)
    return FewStepObjective(few_steps, process, model.train(), teacher, critic, wan_data().empty, seed=0)


def _batch(seed: int = 0) -> NoisedBatch:
    generator = torch.Generator().manual_seed(seed)
    latents, noise = torch.randn(2, 2, 4, 2, 8, 8, generator=generator)
    text = {"encoder_hidden_states": torch.randn(2, 3, 8, generator=generator)}
    half = torch.full((2,), 0.5)
    return NoisedBatch(latents, noise, half, latents, 1000 * half, text)


def _shake(objective: FewStepObjective, prefix: str = "") -> None:
    """Change the student's and the critic's weights, as training would."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in (*objective.critic.parameters.values(), *objective.transformer.parameters()):
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))


def _gradients(objective: FewStepObjective) -> dict[str, torch.Tensor]:
    everything = {**dict(objective.transformer.named_parameters()), **objective.critic.parameters}
    return {name: p.grad.clone() for name, p in everything.items() if p.grad is not None}


def _backward(loss: torch.Tensor) -> None:
    loss.backward()


BOTH = pytest.mark.parametrize("settings", [{"trainable": "all"}, LORA], ids=["copies", "LoRA"])


@BOTH
def test_students_gradient_is_zero_while_the_critic_is_the_teacher(settings: dict[str, Any]) -> None:
    objective = _objective(**settings)
    losses = objective.update(_batch(), objective.draws(_batch(), Place(0, 0)), turn=True, backward=_backward)
    assert losses["student"] == losses["difference"] == 0
    assert losses["critic"] > 0
    critics = objective.critic.parameters
    student = {name: grad for name, grad in _gradients(objective).items() if name not in critics}
    if settings["trainable"] == "lora":  # of a copy the names are those of the student
        assert student
        assert all(not grad.any() for grad in student.values())
    assert any(p.grad is not None and p.grad.any() for p in critics.values())


@BOTH
def test_gradient_leads_from_the_critic_to_the_guided_teacher(settings: dict[str, Any]) -> None:
    """By hand: where critic and teacher differ, a step against the gradient goes towards the teacher."""
    objective = _objective(replace(FEW, guidance=3.0), **settings)
    _shake(objective)
    batch, process = _batch(), objective.process
    torch.manual_seed(0)
    samples, noise, time = torch.randn(2, 4, 2, 8, 8), torch.randn(2, 4, 2, 8, 8), torch.tensor([0.3, 0.8])
    draws: Any = type("Draws", (), {"student_noise": noise, "student_time": time})
    found = objective.gradient(samples, batch, draws)

    noised, sigma = process.noised(samples, noise, time), time.view(-1, 1, 1, 1, 1)
    plain = tiny_wan()

    def clean(model: Any, text: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            velocity: torch.Tensor = model(noised, 1000 * time, text, return_dict=False)[0]
        return noised - sigma * velocity

    text = batch.conditioning["encoder_hidden_states"]
    with_prompt, without = clean(plain, text), clean(plain, torch.zeros_like(text))
    real = without + 3.0 * (with_prompt - without)
    with objective.critic.at_work(), torch.no_grad():
        given = replace(batch, hidden_states=noised, timestep=1000 * time)
        fake = noised - sigma * objective.critic.predict(given)
    for index in range(2):
        expected = (fake[index] - real[index]) / (samples[index] - real[index]).abs().mean()
        torch.testing.assert_close(found[index], expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(fake, real, atol=1e-3)


def test_roles_leave_no_trace() -> None:
    objective = _objective(**LORA)
    _shake(objective)
    model, batch = objective.transformer, _batch()
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    with torch.no_grad():
        student = predict(model, batch)
        with objective.critic.at_work():
            critic = objective.critic.predict(batch)
        with objective.teacher.at_work():
            teacher = predict(model, batch)
        assert torch.equal(predict(model, batch), student)
        torch.testing.assert_close(teacher, predict(tiny_wan(), batch))
    assert not torch.allclose(critic, teacher, atol=1e-3)
    assert not torch.allclose(critic, student, atol=1e-3)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trained
    lora = {name for name in trained if is_lora(name)}
    assert all(trained[name] for name in lora)
    assert {name.split(".")[-2] for name in lora} == {STUDENT, CRITIC}


@BOTH
def test_checkpointing_changes_no_gradient(settings: dict[str, Any]) -> None:
    """In a backward pass it runs the model again, which must be the same of the three as in the forward."""
    few = replace(FEW, guidance=2.0)
    gradients = []
    for checkpointing in (False, True):
        objective = _objective(few, **settings)
        _shake(objective)
        if checkpointing:
            objective.transformer.enable_gradient_checkpointing()  # type: ignore[operator]
        objective.update(_batch(), objective.draws(_batch(), Place(3, 0)), turn=True, backward=_backward)
        gradients.append(_gradients(objective))
    plain, checkpointed = gradients
    assert plain.keys() == checkpointed.keys()
    assert len(plain) > 20
    for name in plain:
        torch.testing.assert_close(checkpointed[name], plain[name], atol=1e-7, rtol=1e-4)


def test_only_the_students_turn_gives_it_gradients() -> None:
    objective = _objective(**LORA)
    assert [objective.is_models_turn(update) for update in range(6)] == [False, False, True, False, True, False]
    _shake(objective)
    objective.update(_batch(), objective.draws(_batch(), Place(0, 0)), turn=False, backward=_backward)
    assert _gradients(objective).keys() == objective.critic.parameters.keys()


def test_first_steps_attend_as_before_the_patch_where_it_says_so() -> None:
    """``softmax_steps`` as a fraction of a few steps: of four, 0.25 is the first, and anything above it two."""
    times = (1.0, 0.9, 0.75, 0.5)
    objective = _objective(replace(FEW, times=times), patch=PATCH.replace(softmax_steps=0.25))
    batch, noise, model = _batch(), torch.randn(4, 2, 4, 2, 8, 8), objective.transformer.eval()
    found = objective.samples(batch, noise)
    process, latents = objective.process, noise[0]
    with torch.no_grad():
        for index, time in enumerate(times):
            sigma = torch.full((2,), time)
            noised = process.noised(latents, noise[index], sigma)
            given = replace(batch, hidden_states=noised, timestep=1000 * sigma)
            if index == 0:
                with mhla_disabled(model):
                    velocity = predict(model, given)
            else:
                velocity = predict(model, given)
            latents = noised - time * velocity
    torch.testing.assert_close(found, latents)


def test_training_samples_as_the_pipeline_does() -> None:
    objective = _objective(replace(FEW, times=(1.0, 0.9, 0.75, 0.5)))
    scheduler, batch = FewStepScheduler((1.0, 0.9, 0.75, 0.5)), _batch()
    scheduler.set_timesteps(4)
    latents, seen = batch.noise, [batch.noise]
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            given = replace(batch, hidden_states=latents, timestep=timestep.expand(2))
            before = latents
            velocity = predict(objective.transformer, given)
            (latents,) = scheduler.step(velocity, timestep, latents, return_dict=False)
            following = float(scheduler.sigmas[scheduler.step_index])
            if following:  # the noise that was added
                clean = before - timestep / 1000 * velocity
                seen.append((latents - (1 - following) * clean) / following)
    torch.testing.assert_close(objective.samples(batch, torch.stack(seen)), latents, atol=1e-4, rtol=1e-4)


# Whole runs


def _transfer() -> StageConfig:
    return StageConfig(2, 1e-3, "mhla", ObjectiveWeights(transfer=1.0))


@BOTH
def test_resumed_run_is_the_run_that_was_left_alone(settings: dict[str, Any], tmp_path: Path) -> None:
    stages = (_transfer(), _stage(replace(FEW, guidance=2.0), steps=8, **settings)) if "lora_rank" in settings else ()
    stages = stages or (_stage(replace(FEW, guidance=2.0), steps=8, **settings),)
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


@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_losses(tmp_path: Path) -> None:
    def config(name: str) -> TrainingConfig:
        return _config(tmp_path / name, _transfer(), _stage(steps=12, **LORA), checkpoint_every=2)

    metrics = tmp_path / "killed/metrics.jsonl"
    alone, process = start_training(config("alone")), start_training(config("killed"))
    while process.is_alive() and not (metrics.is_file() and metrics.read_bytes().count(b"\n") >= 8):
        pass
    process.kill()
    process.join()
    assert not (tmp_path / "killed/result").exists()
    finish([alone, start_training(config("killed"), "latest")])
    assert read_metrics(metrics) == read_metrics(tmp_path / "alone/metrics.jsonl")
    for file in sorted((tmp_path / "alone/result").iterdir()):
        assert (tmp_path / "killed/result" / file.name).read_bytes() == file.read_bytes()


def test_metrics_name_both_losses_and_validation(tmp_path: Path) -> None:
    config = _config(tmp_path, _stage(steps=5), validation=ValidationConfig(samples=2, every=100, timesteps=2))
    train(apply_mhla(tiny_wan(), PATCH), wan_data(), config)
    records = read_metrics(tmp_path / "metrics.jsonl")
    updates = [record for record in records if "loss" in record]
    assert [sorted(record.keys() & {"critic", "student", "difference"}) for record in updates] == [
        ["critic"],
        ["critic"],
        ["critic", "difference", "student"],
        ["critic"],
        ["critic", "difference", "student"],
    ]
    assert len([record for record in records if "validation_loss" in record]) == 2


@pytest.mark.filterwarnings("error:Detected call of .lr_scheduler")
@pytest.mark.parametrize(
    ("scheduler", "expected"), [("constant", [1 / 4, 3 / 4, 1, 1]), ("cosine", [1 / 4, 3 / 4, 0.853553, 0.146447])]
)
def test_students_rate_begins_after_the_critics_warm_up(scheduler: Any, expected: list[float], tmp_path: Path) -> None:
    few_steps = replace(FEW, critic_warmup=6)
    stage = _stage(few_steps, steps=14, scheduler=scheduler, warmup_steps=4)
    config = _config(tmp_path, _transfer(), stage, checkpoint_every=1, keep_checkpoints=99)
    train(apply_mhla(tiny_wan(), PATCH), wan_data(), config)
    records = read_metrics(tmp_path / "metrics.jsonl")
    rates = [record["learning_rate"] / 1e-3 for record in records if "student" in record]
    assert rates == pytest.approx(expected, rel=1e-4)
    # resumed within the warm-up of the critic, and within that of the student
    for step in (5, 10):
        for checkpoint in sorted((tmp_path / "checkpoints").iterdir())[step:]:
            shutil.rmtree(checkpoint)
        shutil.rmtree(tmp_path / "result")
        train(apply_mhla(tiny_wan(), PATCH), wan_data(), config, resume="latest")
        assert read_metrics(tmp_path / "metrics.jsonl") == records


def test_frozen_weights_stay_and_the_critic_is_not_in_the_result(tmp_path: Path) -> None:
    model = apply_mhla(tiny_wan(), PATCH)
    result = train(model, wan_data(), _config(tmp_path, _transfer(), _stage(**LORA))).result
    assert result is not None
    saved = load_mhla(tiny_wan(), result)
    names = [name for name, _ in saved.named_parameters() if is_lora(name)]
    assert names
    assert all(CRITIC not in name for name in names)
    # all linear layers of the blocks, and none of MHLA's own
    assert {name.split(".")[2] for name in names} == {"attn1", "attn2", "ffn"}
    with torch.no_grad():
        torch.testing.assert_close(predict(saved.eval(), _batch()), predict(model.eval(), _batch()))
        remove_mhla(saved)
        assert torch.equal(predict(saved, _batch()), predict(tiny_wan(), _batch()))
    assert {name for name, _ in saved.named_parameters()} == {name for name, _ in tiny_wan().named_parameters()}


def _trained(folder: Path, **settings: Any) -> Path:
    pipe = wan_pipeline()
    patch = settings.pop("patch", PATCH)
    if patch is not None:
        apply_mhla(pipe.transformer, patch)
    stage = _stage(FewStepsConfig((1.0, 0.9, 0.5), 2.0, critic_warmup=1, critic_updates=1), **settings)
    result = train(pipe.transformer, wan_data(), _config(folder, stage, patch=patch)).result
    assert result is not None
    return result


CALL: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 5, "output_type": "latent", "max_sequence_length": 8}


def _sample(pipe: Any, prompts: list[str], seeds: list[int], **settings: Any) -> torch.Tensor:
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    latents: torch.Tensor = pipe(prompts, generator=generators, **{**CALL, "guidance_scale": 1.0, **settings}).frames
    return latents


@pytest.mark.parametrize("settings", [LORA, {"trainable": "all"}], ids=["LoRA", "all"])
def test_loaded_result_samples_in_its_steps(settings: dict[str, Any], tmp_path: Path) -> None:
    pipe = wan_pipeline()
    own = pipe.scheduler
    before = _sample(pipe, ["a cat"], [0], num_inference_steps=3)
    load_mhla(pipe, _trained(tmp_path, **settings))
    assert isinstance(pipe.scheduler, FewStepScheduler)
    assert find_patched(pipe)["transformer"].few_steps is not None
    found = _sample(pipe, ["a cat", "a dog"], [0, 1], num_inference_steps=3)
    # the noise between steps follows from the generator, and not from the others of the batch
    torch.testing.assert_close(_sample(pipe, ["a dog"], [1], num_inference_steps=3), found[1:], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="num_inference_steps=20.*num_inference_steps=3"):
        _sample(pipe, ["a cat"], [0], num_inference_steps=20)
    with pytest.warns(UserWarning, match="guidance_scale=5.0.*guidance of 2 .*guidance_scale=1.0"):
        _sample(pipe, ["a cat"], [0], num_inference_steps=3, guidance_scale=5.0)
    pipe.transformer.enable_cache(TaylorSeerCacheConfig(cache_identifiers=[r"blocks\.\d+\.attn1"]))
    with pytest.warns(UserWarning, match=r"TaylorSeer .*disable_cache\(\)"):
        _sample(pipe, ["a cat"], [0], num_inference_steps=3)
    pipe.transformer.disable_cache()
    remove_mhla(pipe)
    assert pipe.scheduler is own
    assert torch.equal(_sample(pipe, ["a cat"], [0], num_inference_steps=3), before)


def test_times_are_those_of_the_patch_over_others_set_by_hand(tmp_path: Path) -> None:
    result = _trained(tmp_path, **LORA)
    pipe = wan_pipeline()
    pipe.scheduler = before = FewStepScheduler([1.0, 0.5])
    load_mhla(pipe, result)
    few_steps = few_steps_of(pipe)
    assert few_steps is not None
    assert few_steps.times == (1.0, 0.9, 0.5)
    remove_mhla(pipe)
    assert pipe.scheduler is before
    load_mhla(pipe, result)
    pipe.scheduler = since = FewStepScheduler([1.0, 0.8])
    remove_mhla(pipe)
    assert pipe.scheduler is since


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"times": (0.9, 0.5)}, r"times=\[0.9, 0.5\]"),
        ({"times": (1.0, 0.5, 0.5)}, "times"),
        ({"times": ()}, "times"),
        ({"times": tuple(1 - place / 10 for place in range(9))}, "1 to 8"),
        ({"times": (1.0, 0.0)}, "times"),
        ({"times": 4}, "times=4 must be a list"),
        ({"times": "1.0"}, "times='1.0' must be a list"),
        ({"times": None}, "times=None must be a list"),
        ({"guidance": None}, "guidance=None"),
        ({"guidance": 0.5}, "guidance=0.5"),
        ({"critic_updates": 0}, "critic_updates=0"),
        ({"critic_warmup": -1}, "critic_warmup=-1"),
    ],
)
def test_settings_that_are_not_allowed(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replace(FEW, **change)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"trainable": "attention"}, "trainable='attention'.*lora.*all"),
        ({"objectives": ObjectiveWeights(diffusion=1.0)}, "either objectives"),
        ({"few_steps": replace(FEW, critic_rank=4)}, "critic_rank=4"),
        ({"steps": 2}, "steps=2 .*at least 3"),
        ({"lora_layers": "blocks"}, "lora_layers='blocks' is for trainable=lora"),
    ],
)
def test_stages_that_are_not_allowed(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        StageConfig(**{"steps": 6, "learning_rate": 1e-3, "trainable": "all", "few_steps": FEW, **settings})


def test_few_steps_are_the_last_stage(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"stages.0: few_steps must be the last"):
        _config(tmp_path, _stage(), _transfer())


def _without_empty() -> InMemoryData:
    data = wan_data()
    return InMemoryData([data[index] for index in range(len(data))])


def _causal() -> Any:
    return apply_mhla(tiny_wan(), CAUSAL)


CAUSAL = MHLAConfig((2, 2, 2), causal="block", sparse="own", block_length=1)


@pytest.mark.parametrize(
    ("model", "data", "patch", "problem"),
    [
        (lambda: apply_mhla(tiny_dit(), PATCH.replace(blocks=(2, 2))), dit_data, None, "flow matching.*DDPM"),
        (lambda: apply_mhla(tiny_wan(), PATCH), _without_empty, None, "guidance=5.0.*empty prompt"),
        (_causal, wan_data, CAUSAL, "causal='block'"),
    ],
    ids=["DDPM", "no empty prompt", "causal"],
)
def test_what_cannot_learn_few_steps(
    model: Callable[[], Any], data: Callable[[], InMemoryData], patch: MHLAConfig | None, problem: str, tmp_path: Path
) -> None:
    config = _config(tmp_path, _stage(replace(FEW, guidance=5.0)), patch=patch or PATCH)
    with pytest.raises(ValueError, match=problem):
        train(model(), data(), config)
    assert not is_patched(tiny_wan())


def test_card_and_description_tell_the_steps(tmp_path: Path) -> None:
    pipe = load_mhla(wan_pipeline(), _trained(tmp_path, **LORA))
    folder = save_mhla(pipe, tmp_path / "again")
    card = model_card(pipe, "me/mine", read_record(folder))
    for text in (str(describe(pipe)), card):
        assert "3 steps" in text
        assert "1, 0.9, 0.5" in text
    assert "num_inference_steps=3, guidance_scale=1.0" in card
    # what was saved again is the same patch
    other = load_mhla(wan_pipeline(), folder)
    assert torch.equal(*(_sample(one, ["a cat"], [0], num_inference_steps=3) for one in (pipe, other)))


def test_damaged_lora_of_a_patch_is_refused(tmp_path: Path) -> None:
    result = _trained(tmp_path, **LORA)
    (file,) = result.glob("lora-*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    model = tiny_wan()
    with pytest.raises(ValueError, match=file.name):
        load_mhla(model, result)
    assert not is_patched(model)


def test_fused_lora_must_be_unfused_before_the_patch_goes(tmp_path: Path) -> None:
    pipe = load_mhla(wan_pipeline(), _trained(tmp_path, **LORA))
    pipe.fuse_lora(components=["transformer"])
    with pytest.raises(ValueError, match="unfuse_lora"):
        remove_mhla(pipe)
    assert is_patched(pipe)


def test_copied_pipeline_gets_its_scheduler_back(tmp_path: Path) -> None:
    pipe = wan_pipeline()
    before = _sample(pipe, ["a cat"], [0])
    load_mhla(pipe, _trained(tmp_path, **LORA))
    copied = remove_mhla(copy.deepcopy(pipe))
    assert few_steps_of(copied) is None
    assert torch.equal(_sample(copied, ["a cat"], [0]), before)
    assert few_steps_of(pipe) is not None


def test_pipelines_that_share_a_transformer_get_their_scheduler_back(tmp_path: Path) -> None:
    pipe = load_mhla(wan_pipeline(), _trained(tmp_path, **LORA))
    other = type(pipe)(**pipe.components)
    remove_mhla(other)
    assert few_steps_of(pipe) is None
    assert few_steps_of(other) is None


def test_a_lora_that_was_unloaded_is_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = load_mhla(wan_pipeline(), _trained(tmp_path, **LORA))
    pipe.fuse_lora(components=["transformer"])
    pipe.unload_lora_weights()
    with caplog.at_level(logging.WARNING, "mhla_diffusers"):
        save_mhla(pipe, tmp_path / "saved")
    assert "LoRA 'mhla'" in caplog.text
    assert "weights='changed'" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "mhla_diffusers"):
        remove_mhla(pipe)
    assert "LoRA 'mhla'" in caplog.text
    assert "from_pretrained" in caplog.text


def test_another_lora_of_the_same_name_is_in_the_way(tmp_path: Path) -> None:
    result, pipe = _trained(tmp_path, **LORA), wan_pipeline()
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), adapter_name="mhla")
    with pytest.raises(ValueError, match=r"'mhla'.*delete_adapters\('mhla'\)"):
        load_mhla(pipe, result)
    assert not is_patched(pipe)
    assert few_steps_of(pipe) is None


@pytest.mark.parametrize("settings", [LORA, {"trainable": "all"}], ids=["LoRA", "all"])
def test_training_does_not_start_from_a_patch_with_a_lora(settings: dict[str, Any], tmp_path: Path) -> None:
    result = _trained(tmp_path / "first", **LORA)
    model = load_mhla(tiny_wan(), result)
    with pytest.raises(ValueError, match="LoRA 'mhla'.*stages of one run"):
        train(model, wan_data(), _config(tmp_path / "second", _stage(**settings), patch=str(result)))
    assert not (tmp_path / "second").exists()


def test_unpatched_model_is_distilled_too(tmp_path: Path) -> None:
    result, pipe = _trained(tmp_path, patch=None), wan_pipeline()
    load_result(pipe, result)
    assert few_steps_of(pipe) == FewSteps((1.0, 0.9, 0.5), 2.0)
    assert not is_patched(pipe)


@pytest.mark.parametrize("settings", [{"num_inference_steps": 20}, {"guidance_scale": 5.0}])
def test_generation_refuses_settings_that_contradict(settings: dict[str, Any], tmp_path: Path) -> None:
    wan_pipeline().save_pretrained(tmp_path / "model")
    chosen = {"model": str(tmp_path / "model"), "weights": str(_trained(tmp_path / "run"))}
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name}={settings[name]} contradicts"):
        PipelineChoice("wan", **chosen, settings=settings).load()
    choice = PipelineChoice("wan", **chosen, settings={**CALL, "output_type": "latent"})
    pipe = choice.load()
    generator = torch.Generator().manual_seed(0)
    torch.testing.assert_close(
        choice.call(pipe, ["a cat"], [generator]), _sample(pipe, ["a cat"], [0], num_inference_steps=3)
    )


@pytest.mark.parametrize("order", ["before", "after"])
def test_public_lora_goes_under_a_patch(order: str) -> None:
    """Random weights by the names that LoRAs for Wan's own code have."""
    torch.manual_seed(0)
    parts = {"self_attn": "qkvo", "cross_attn": "qkvo"}
    layers = [f"{part}.{name}" for part, names in parts.items() for name in names]
    sizes = {**dict.fromkeys(layers, (24, 24)), "ffn.0": (24, 32), "ffn.2": (32, 24)}
    lora = {}
    for block in range(2):
        for name, (inputs, outputs) in sizes.items():
            key = f"diffusion_model.blocks.{block}.{name}"
            lora[f"{key}.lora_down.weight"] = 0.3 * torch.randn(4, inputs)
            lora[f"{key}.lora_up.weight"] = 0.3 * torch.randn(outputs, 4)
    pipe, plain = wan_pipeline(), wan_pipeline()
    apply_mhla(plain, PATCH)
    for step in (order == "after", order == "before"):
        if step:
            apply_mhla(pipe, PATCH)
        else:
            pipe.load_lora_weights(dict(lora))
    for one in (pipe, plain):
        one.scheduler = FewStepScheduler([1.0, 0.9375, 0.8333, 0.625])
    assert is_patched(pipe)
    with_lora, without = (_sample(one, ["a cat"], [0], num_inference_steps=4) for one in (pipe, plain))
    assert not torch.allclose(with_lora, without, atol=1e-2)
    remove_mhla(pipe)
    other = wan_pipeline()
    other.load_lora_weights(dict(lora))
    other.scheduler = FewStepScheduler([1.0, 0.9375, 0.8333, 0.625])
    torch.testing.assert_close(*(_sample(one, ["a cat"], [0], num_inference_steps=4) for one in (pipe, other)))


@BOTH
def test_dry_run_counts_student_and_critic(settings: dict[str, Any]) -> None:
    def dry_run(**changes: Any) -> StageEstimate:
        with torch.device("meta"):
            model = apply_mhla(tiny_wan(), PATCH)
        stage = _stage(replace(FEW, **changes), **settings)
        return estimate(model, wan_data()[0], _config(Path("unused"), stage)).stages[0]

    with torch.device("meta"):
        plain = tiny_wan()
        model = apply_mhla(tiny_wan(), PATCH)
    whole = sum(parameter.numel() for parameter in plain.parameters())
    counted = dry_run()
    if settings["trainable"] == "all":
        own = sum(parameter.numel() for parameter in model.parameters())
        assert counted.trainable_parameters == own + whole
        assert counted.training_bytes == 12 * (own + whole) + 4 * whole
    else:
        assert dry_run(critic_rank=4).trainable_parameters > counted.trainable_parameters
    assert counted.activation_bytes > 0
    # a student that is updated more rarely, or has fewer steps before, costs less
    assert dry_run(critic_updates=4).flops < counted.flops < dry_run(times=(1.0, 0.9, 0.5)).flops


def test_dry_run_on_prompts_alone() -> None:
    sample = wan_data()[0]
    zeros = {**sample, "latents": torch.zeros_like(sample["latents"], dtype=torch.uint8)}
    counts = []
    for one in (sample, zeros):
        with torch.device("meta"):
            model = apply_mhla(tiny_wan(), PATCH)
        counts.append(estimate(model, one, _config(Path("unused"), _stage())).stages[0])
    assert counts[0] == counts[1]


def test_prompts_alone_are_enough(tmp_path: Path) -> None:
    pipe = wan_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    clip = Clip(frames=5, fps=8, sizes=((32, 32),))
    index = synthesize(pipe, str(tmp_path / "model"), ["a cat", "a dog"], tmp_path / "prompts", clip, steps=0)
    assert len(index.samples) == 2
    few = _stage(replace(FEW, guidance=2.0))
    shared = {"model": str(tmp_path / "model"), "data": str(tmp_path / "prompts"), "clip": clip}
    patch = PATCH.replace(blocks=(2, 1, 1))
    with pytest.raises(ValueError, match="prompts without latents"):
        finetune(_config(tmp_path / "refused", _transfer(), few, patch=patch, **shared))
    validation = ValidationConfig(prompts=("a cat",), every=100)
    result = finetune(_config(tmp_path / "run", few, patch=patch, validation=validation, **shared))
    assert result.finished
    assert sorted(path.name for path in (tmp_path / "run/samples").iterdir()) == ["step-00000000", "step-00000006"]
    # a configuration without a clip generates what the data holds, and not the long clips of the family
    shared["clip"] = None
    found = ResolvedRun.of(_config(tmp_path / "again", few, patch=patch, **shared)).clip
    assert (found.frames, found.sizes) == (clip.frames, clip.sizes)


def test_a_pipeline_is_saved_and_loaded_with_its_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = wan_pipeline()
    pipe.scheduler = FewStepScheduler([1.0, 0.8, 0.4], guidance=3.0)
    pipe.save_pretrained(tmp_path)
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("diffusers.configuration_utils"), "warning", said.append)
    loaded = type(pipe).from_pretrained(tmp_path)
    assert few_steps_of(loaded) == FewSteps((1.0, 0.8, 0.4), 3.0)
    assert loaded.scheduler.config.shift == 1.0
    assert not said
