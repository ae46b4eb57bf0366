"""``mhla bench train`` on tiny configurations."""

import pytest
import torch

from mhla_diffusers.benchmark.train import STAGE

from .commands import measure, medians

LINEAR = {"plain linear", "MHLA", "MHLA hybrid 2/3"}


@pytest.mark.parametrize("options", [("tiny-dit",), ("tiny-dit", "--checkpointing", "--layers", 2)])
def test_a_step_of_every_attention(tmp_path, options):
    run = measure(tmp_path, "train", "--model", *options)
    measured = medians(run, STAGE)
    assert {"softmax native", "plain linear", "MHLA"} <= set(measured)
    assert ("MHLA hybrid 2/3" in measured) == ("--layers" not in options)
    row = next(row for row in run.rows if row.variant == "MHLA")
    assert (row.whole_seconds == row.median) == ("--layers" not in options)


def test_weights_stay_as_they_are(tmp_path, monkeypatch):
    """Every repetition must do the same work, so a step moves nothing, but each weight has its gradient."""
    seen = []
    step = torch.optim.AdamW.step

    def watched(optimizer, *args):
        before = [weight.detach().clone() for group in optimizer.param_groups for weight in group["params"]]
        step(optimizer, *args)
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        seen.append(sum(weight.grad is not None for weight in weights))
        assert all(torch.equal(one, other) for one, other in zip(before, weights, strict=True))

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    measure(tmp_path, "train", "--model", "tiny-dit", "--layers", 1)
    assert max(seen) > 10
