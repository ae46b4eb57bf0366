from pathlib import Path
from typing import Any

import pytest
import torch

from mhla_diffusers import MHLAConfig, apply_mhla
from mhla_diffusers.families import get_family, predict
from mhla_diffusers.patching import find_patched
from mhla_diffusers.training import read_metrics, train
from mhla_diffusers.training.objectives import transfer_losses
from mhla_diffusers.training.weights import Original, prepare_for_training

from .models import FAMILIES, one_batch, settings, tiny_wan, wan_data


def _patched_wan(trainable: str = "attention") -> tuple[Any, Original]:
    """A model that takes gradients, and its original."""
    transformer = apply_mhla(tiny_wan(), blocks=(2, 2, 2))
    rank = 2 if trainable == "lora" else None
    config = settings("unused", trainable=trainable, lora_rank=rank, objectives={"distillation": 1.0}, patch="unused")
    trained = prepare_for_training(transformer, config)
    return transformer.eval(), Original(transformer, trained)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("objective", ["diffusion", "distillation", "transfer"])
def test_every_objective_decreases(family: str, objective: str, tmp_path: Path) -> None:
    make, data = FAMILIES[family]
    # SANA's own attention is linear, and a fresh DiT's output does not depend on its attention
    patch = MHLAConfig(blocks=(2, 2, 2) if family == "wan" else (2, 2), mixing_init="identity")
    trainable = "all" if objective == "diffusion" else "attention"
    usual: dict[str, Any] = {"batch_size": 4, "learning_rate": 3e-3, "max_gradient_norm": 100.0}
    config = settings(tmp_path, 25, objectives={objective: 1.0}, trainable=trainable, patch=patch, **usual)
    transformer = make()
    if family == "dit":
        torch.nn.init.normal_(transformer.proj_out_2.weight, std=0.1)
    train(apply_mhla(transformer, patch), data(), config)
    losses = [record[objective] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])


def test_transfer_compares_each_student_layer_on_the_teachers_activations_and_in_its_own_graph() -> None:
    transformer, original = _patched_wan()
    batch = one_batch(transformer, wan_data())
    seen: list[tuple[torch.Tensor, Any, torch.Tensor]] = []
    handles = [
        block.attn1.register_forward_hook(lambda _, args, output: seen.append((args[0], args[3], output)))
        for block in transformer.blocks
    ]
    with original.at_work():
        predict(transformer, batch)
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
    for index, (loss, parts) in enumerate(transfer_losses(transformer, original, 1.0, batch)):
        before = {name for name, p in transformer.named_parameters() if p.grad is not None}
        loss.backward()
        names = {name for name, p in transformer.named_parameters() if p.grad is not None} - before
        assert names and all(name.startswith(f"blocks.{index}.attn1.") for name in names)
        found.append(float(parts["transfer"].detach()))
    torch.testing.assert_close(torch.tensor(found), torch.stack(errors) / len(errors))


@pytest.mark.parametrize("trainable", ["mhla", "attention", "all", "lora"])
def test_the_original_model_stays_while_the_patched_one_changes(trainable: str) -> None:
    transformer, original = _patched_wan(trainable)
    batch = one_batch(transformer, wan_data())
    with torch.no_grad():
        for parameter in transformer.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
        student = predict(transformer, batch)
        with original.at_work():
            assert torch.equal(predict(transformer, batch), predict(tiny_wan().eval(), batch))
        assert torch.equal(predict(transformer, batch), student)
