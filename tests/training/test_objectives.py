from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mhla_diffusers import MHLAConfig, apply_mhla, mhla_layers
from mhla_diffusers.families import NoisedBatch, get_family, predict
from mhla_diffusers.training import InMemoryData, ObjectiveWeights, TrainingConfig, read_metrics, train
from mhla_diffusers.training.latents.data import NoisedBatches
from mhla_diffusers.training.objectives import (
    Objectives,
    Place,
    distillation_loss,
    guided,
    teacher_prediction,
    transfer_attention,
)
from mhla_diffusers.training.teacher import Teacher
from mhla_diffusers.training.trainable import add_adapters, changed_names, set_trainable

from .models import dit_data, one_stage, sana_data, tiny_dit, tiny_sana, tiny_wan, wan_data

FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[], InMemoryData], tuple[int, ...]]] = {
    "wan": (tiny_wan, wan_data, (2, 2, 2)),
    "sana": (tiny_sana, sana_data, (2, 2)),
    "dit": (tiny_dit, dit_data, (2, 2)),
}


def _losses(output: Path, name: str) -> list[float]:
    return [record[name] for record in read_metrics(output / "metrics.jsonl") if name in record]


def _one_batch(transformer: Any, data: InMemoryData) -> NoisedBatch:
    process = get_family(transformer).process(transformer, 3.0)
    config = one_stage("unused", batch_size=2)
    return next(NoisedBatches(data, process, config, torch.device("cpu")).from_step(0))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("objective", ["diffusion", "distillation", "transfer"])
def test_every_objective_decreases(family: str, objective: str, tmp_path: Path) -> None:
    make, data, blocks = FAMILIES[family]
    # SANA's own attention is linear, and a fresh DiT's output does not depend on its attention
    patch = MHLAConfig(blocks=blocks, mixing_init="identity")
    config = one_stage(
        tmp_path,
        steps=25,
        objectives={objective: 1.0},
        trainable="all" if objective == "diffusion" else "attention",
        patch=patch,
        batch_size=4,
        learning_rate=3e-3,
        max_gradient_norm=100.0,
        validation={"samples": 2, "every": 25},
    )
    transformer = make()
    if family == "dit":
        torch.nn.init.normal_(transformer.proj_out_2.weight, std=0.1)
    train(apply_mhla(transformer, patch), data(), TrainingConfig.from_dict(config.to_dict()))
    losses = _losses(tmp_path, objective)
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])


def test_transfer_needs_no_full_backward() -> None:
    transformer = apply_mhla(tiny_wan(), sparse="none", blocks=(2, 2, 2))
    set_trainable(transformer, "attention")
    teacher = Teacher(transformer, [])
    held: list[set[str]] = []

    def backward(loss: torch.Tensor) -> None:
        before = {name for name, p in transformer.named_parameters() if p.grad is not None}
        loss.backward()
        held.append({name for name, p in transformer.named_parameters() if p.grad is not None} - before)

    batch = _one_batch(transformer, wan_data())
    loss, prediction = transfer_attention(transformer, teacher, batch, backward)
    assert not prediction.requires_grad
    assert not loss.requires_grad
    for index, names in enumerate(held):
        assert names
        assert all(name.startswith(f"blocks.{index}.attn1.") for name in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_guidance_is_distilled_in(family: str) -> None:
    """A DiT also predicts variances, which its pipeline does not guide."""
    make, data, blocks = FAMILIES[family]
    original, transformer = make(), apply_mhla(make(), sparse="none", blocks=blocks)
    if family == "dit":
        for model in (original, transformer):
            torch.manual_seed(0)
            torch.nn.init.normal_(model.proj_out_2.weight, std=0.1)
    batch, empty = _one_batch(transformer, data()), data().empty
    assert empty is not None
    without = replace(batch, conditioning={name: torch.stack([x] * len(batch.latents)) for name, x in empty.items()})
    with torch.no_grad():
        conditional, free = predict(original, batch), predict(original, without)
        expected = free + 3.0 * (conditional - free)
        noised = batch.latents.shape[1]
        expected[:, noised:] = conditional[:, noised:]
        found = guided(conditional, transformer, Teacher(transformer, []), batch, 3.0, empty)
        assert not torch.equal(found, conditional)
        torch.testing.assert_close(found, expected)
        loss = distillation_loss(predict(transformer, batch), expected)
    process = get_family(transformer).process(transformer, 3.0)
    weights, teacher = ObjectiveWeights(distillation=1.0), Teacher(transformer, [])
    objectives = Objectives(weights, process, transformer, teacher, guidance=3.0, empty=empty)
    torch.testing.assert_close(
        objectives.backward(transformer, batch, Place(0, 0), torch.Tensor.backward)["loss"], loss
    )


def test_guidance_needs_distillation_and_the_empty_prompt(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="guidance=3.0 .*distillation"):
        one_stage(tmp_path, objectives={"transfer": 1.0}, guidance=3.0)
    patch = MHLAConfig(blocks=(2, 2, 2), sparse="none")
    config = one_stage(tmp_path, objectives={"distillation": 1.0}, guidance=3.0, patch=patch)
    data = wan_data()
    data.empty = None
    with pytest.raises(ValueError, match=r"stages.0.guidance=3.0 .*empty prompt"):
        train(apply_mhla(tiny_wan(), patch), data, config)


@pytest.mark.parametrize("trainable", ["mhla", "attention", "all", "lora"])
def test_teacher_stays_the_original_model_while_the_student_changes(trainable: Any) -> None:
    original = tiny_wan().eval()
    transformer = apply_mhla(tiny_wan(), sparse="none", blocks=(2, 2, 2)).eval()
    if trainable == "lora":
        add_adapters(transformer, 2, seed=0)
    lora_rank = 2 if trainable == "lora" else None
    stages = one_stage("unused", trainable=trainable, lora_rank=lora_rank, patch="unused").stages
    teacher = Teacher(transformer, changed_names(transformer, stages))
    batch = _one_batch(transformer, wan_data())
    set_trainable(transformer, trainable)
    with torch.no_grad():
        for parameter in transformer.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
        student = predict(transformer, batch)
        assert torch.equal(teacher_prediction(transformer, teacher, batch), predict(original, batch))
        assert torch.equal(predict(transformer, batch), student)
    assert bool(teacher.extra_parameters) == (trainable in ("attention", "all"))


def test_transfer_compares_the_student_layer_on_the_teachers_activations() -> None:
    transformer = apply_mhla(tiny_wan(), sparse="none", blocks=(2, 2, 2)).eval()
    set_trainable(transformer, "attention")
    teacher = Teacher(transformer, [name for name, p in transformer.named_parameters() if p.requires_grad])
    seen: dict[int, tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]] = {}

    def note(index: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
            seen.setdefault(index, (args[0], args[3], output))

        return hook

    handles = [block.attn1.register_forward_hook(note(i)) for i, block in enumerate(transformer.blocks)]
    batch = _one_batch(transformer, wan_data())
    teacher_prediction(transformer, teacher, batch)
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        for block in transformer.blocks:
            block.attn1.to_v.weight.mul_(1.5)
        errors = [
            (block.attn1(seen[i][0], None, None, seen[i][1]) - seen[i][2]).square().mean()
            for i, block in enumerate(transformer.blocks)
        ]
    loss, _ = transfer_attention(transformer, teacher, batch, lambda loss: loss.backward())
    assert torch.allclose(loss, torch.stack(errors).mean(), rtol=1e-4)


def test_distilling_the_teacher_itself_costs_nothing() -> None:
    output = torch.randn(2, 4, 3)
    assert distillation_loss(output, output) == 0


def test_mixing_matrices_stay_in_the_open_unit_interval(tmp_path: Path) -> None:
    patch = MHLAConfig(blocks=(2, 2, 2))
    transformer = apply_mhla(tiny_wan(), patch)
    train(transformer, wan_data(), one_stage(tmp_path, patch=patch, trainable="mhla", mixing_learning_rate=0.5))
    for layer in mhla_layers(transformer).values():
        assert layer.mixing.min() > 0
        assert layer.mixing.max() < 1
        assert layer.mixing.max() > 0.9


def test_an_unpatched_model_learns_guidance(tmp_path: Path) -> None:
    config = one_stage(tmp_path, steps=15, objectives={"distillation": 1.0}, guidance=3.0, learning_rate=3e-3)
    train(tiny_wan(), wan_data(), config)
    losses = _losses(tmp_path, "distillation")
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
