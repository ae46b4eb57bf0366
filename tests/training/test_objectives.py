from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mhla_diffusers import MHLAConfig, apply_mhla
from mhla_diffusers.families import NoisedBatch, get_family, predict
from mhla_diffusers.patching import find_patched
from mhla_diffusers.training import InMemoryData, ObjectiveWeights, StageConfig, read_metrics, train
from mhla_diffusers.training.latents.data import NoisedBatches
from mhla_diffusers.training.objectives import stage_losses
from mhla_diffusers.training.roles import Roles, Teacher, make_trainable, prepare_for_training

from ..refusals import refused
from .models import dit_data, one_stage, sana_data, tiny_dit, tiny_sana, tiny_wan, wan_data

FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[], InMemoryData], tuple[int, ...]]] = {
    "wan": (tiny_wan, wan_data, (2, 2, 2)),
    "sana": (tiny_sana, sana_data, (2, 2)),
    "dit": (tiny_dit, dit_data, (2, 2)),
}
TRANSFER = StageConfig(1, 1e-3, "attention", ObjectiveWeights(transfer=1.0))


def _one_batch(transformer: Any, data: InMemoryData) -> NoisedBatch:
    process = get_family(transformer).training.process(transformer, 3.0)
    config = one_stage("unused", batch_size=2)
    return next(NoisedBatches(data, process, config, torch.device("cpu")).from_step(0))


def _patched_wan(trainable: Any = "attention") -> tuple[Any, Roles]:
    """A student that takes gradients, and its teacher."""
    transformer, objectives = apply_mhla(tiny_wan(), blocks=(2, 2, 2)), {"distillation": 1.0}
    rank = 2 if trainable == "lora" else None
    config = one_stage("unused", trainable=trainable, lora_rank=rank, objectives=objectives, patch="unused")
    names = prepare_for_training(transformer, config)
    roles = Roles.of(transformer.eval(), config, names, None)
    make_trainable(transformer, names)
    return transformer, roles


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("objective", ["diffusion", "distillation", "transfer"])
def test_every_objective_decreases(family: str, objective: str, tmp_path: Path) -> None:
    make, data, blocks = FAMILIES[family]
    # SANA's own attention is linear, and a fresh DiT's output does not depend on its attention
    patch = MHLAConfig(blocks=blocks, mixing_init="identity")
    trainable = "all" if objective == "diffusion" else "attention"
    settings: dict[str, Any] = {"batch_size": 4, "learning_rate": 3e-3, "max_gradient_norm": 100.0}
    config = one_stage(tmp_path, 25, objectives={objective: 1.0}, trainable=trainable, patch=patch, **settings)
    transformer = make()
    if family == "dit":
        torch.nn.init.normal_(transformer.proj_out_2.weight, std=0.1)
    train(apply_mhla(transformer, patch), data(), config)
    losses = [record[objective] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])


def test_transfer_compares_each_student_layer_on_the_teachers_activations_and_in_its_own_graph() -> None:
    transformer, roles = _patched_wan()
    batch = _one_batch(transformer, wan_data())
    seen: list[tuple[torch.Tensor, Any, torch.Tensor]] = []
    handles = [
        block.attn1.register_forward_hook(lambda _, args, output: seen.append((args[0], args[3], output)))
        for block in transformer.blocks
    ]
    roles.teacher.predict(batch)
    for handle in handles:
        handle.remove()
    grid = get_family(transformer).token_grid(transformer, batch.hidden_states)
    with torch.no_grad(), find_patched(transformer)["transformer"].on_grid(grid):
        for block in transformer.blocks:
            block.attn1.to_v.weight.mul_(1.5)
        errors = [
            (block.attn1(given, None, None, rotary) - expected).square().mean()
            for block, (given, rotary, expected) in zip(transformer.blocks, seen, strict=True)
        ]
    found = []
    for index, (loss, parts) in enumerate(stage_losses(roles, TRANSFER, transformer, batch)):
        before = {name for name, p in transformer.named_parameters() if p.grad is not None}
        loss.backward()
        names = {name for name, p in transformer.named_parameters() if p.grad is not None} - before
        assert names and all(name.startswith(f"blocks.{index}.attn1.") for name in names)
        found.append(float(parts["transfer"].detach()))
    torch.testing.assert_close(torch.tensor(found), torch.stack(errors) / len(errors))


@pytest.mark.parametrize("family", FAMILIES)
def test_guidance_is_distilled_in(family: str) -> None:
    """A DiT also predicts variances, which its pipeline does not guide."""
    make, data, blocks = FAMILIES[family]
    original, transformer = make(), apply_mhla(make(), blocks=blocks)
    if family == "dit":
        for model in (original, transformer):
            torch.manual_seed(0)
            torch.nn.init.normal_(model.proj_out_2.weight, std=0.1)
    batch, empty = _one_batch(transformer, data()), data().empty
    assert empty is not None
    without = replace(batch, conditioning={name: torch.stack([x] * len(batch.latents)) for name, x in empty.items()})
    teacher = Teacher(transformer, [])
    with torch.no_grad():
        conditional, free = predict(original, batch), predict(original, without)
        expected = free + 3.0 * (conditional - free)
        noised = batch.latents.shape[1]
        expected[:, noised:] = conditional[:, noised:]
        torch.testing.assert_close(teacher.predict(batch, 3.0, empty), expected)
        loss = (predict(transformer, batch) - expected).square().mean()
    roles = Roles(transformer, get_family(transformer).training.process(transformer, 3.0), teacher, empty=empty)
    stage = StageConfig(1, 1e-3, "all", ObjectiveWeights(distillation=1.0), guidance=3.0)
    ((found, _),) = stage_losses(roles, stage, transformer, batch)
    torch.testing.assert_close(found, loss)


def test_guidance_needs_distillation_and_the_empty_prompt(tmp_path: Path) -> None:
    without = wan_data()
    without.empty = None
    with refused("guidance=3.0"):
        one_stage(tmp_path, objectives={"transfer": 1.0}, guidance=3.0)
    guided = one_stage(tmp_path, objectives={"distillation": 1.0}, guidance=3.0)
    with refused("stages.0.guidance=3.0"):
        train(tiny_wan(), without, guided)


@pytest.mark.parametrize("trainable", ["mhla", "attention", "all", "lora"])
def test_teacher_stays_the_original_model_while_the_student_changes(trainable: Any) -> None:
    transformer, roles = _patched_wan(trainable)
    batch = _one_batch(transformer, wan_data())
    with torch.no_grad():
        for parameter in transformer.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
        student = predict(transformer, batch)
        assert torch.equal(roles.teacher.predict(batch), predict(tiny_wan().eval(), batch))
        assert torch.equal(predict(transformer, batch), student)
    assert bool(roles.teacher.extra_parameters) == (trainable in ("attention", "all"))


def test_an_unpatched_model_learns_guidance(tmp_path: Path) -> None:
    config = one_stage(tmp_path, steps=15, objectives={"distillation": 1.0}, guidance=3.0, learning_rate=3e-3)
    train(tiny_wan(), wan_data(), config)
    losses = [record["distillation"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
