"""Training patched models in a loop of one's own: checkpointing, gradients, batches."""

from contextlib import nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

import mhla_diffusers as mhla
from mhla_diffusers.patching import register_mixing_clip

from ..models import inputs, patched, relative_change
from .shared import EVERYTHING, ONE_PER_CLASS, mixings


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_a_training_step_reaches_every_weight_of_every_layer(name):
    """And the matrix stays inside (0, 1)."""
    model = patched(name, **EVERYTHING).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    register_mixing_clip(optimizer, model)
    model(**inputs(name)).sample.square().mean().backward()
    optimizer.step()
    for key, value in model.state_dict().items():
        if ".mhla." in key:
            assert value.isfinite().all() and not torch.equal(value, before[key]), key
    assert all(((mixing > 0) & (mixing < 1)).all() for mixing in mixings(model))


class CudasFloat32Operations(TorchFunctionMode):
    """What autocast does on CUDA and not on a CPU: some operations run in float32, and give float32.

    From PyTorch's page on autocasting, with the norms that later versions added.
    """

    OPERATIONS = frozenset(
        {
            *(torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.exp, torch.Tensor.exp, torch.log),
            *(torch.sum, torch.Tensor.sum, torch.prod, torch.cumsum, torch.norm, torch.rsqrt, torch.Tensor.rsqrt),
            *(torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax, torch.nn.functional.mse_loss),
            *(torch.nn.functional.layer_norm, torch.nn.functional.group_norm, torch.nn.functional.rms_norm),
            *(torch.layer_norm, torch.rms_norm),
        }
    )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.OPERATIONS and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(torch.Tensor, _raised, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _raised(x):
    return x.float() if x.is_floating_point() and x.dtype != torch.float64 else x


@pytest.mark.parametrize("as_on_cuda", [False, True])
@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_a_training_step_under_autocast(name, as_on_cuda):
    """Weights in float32, products in bfloat16: near the step without autocast, and in the type of the weights."""

    def step(context):
        model = patched(name, **EVERYTHING)
        with context:
            loss = model(**inputs(name)).sample.float().square().mean()
        loss.backward()
        return loss.detach(), {path: layer.mixing.grad for path, layer in mhla.mhla_layers(model).items()}

    expected, gradients = step(nullcontext())
    with CudasFloat32Operations() if as_on_cuda else nullcontext():
        loss, found = step(torch.autocast("cpu", torch.bfloat16))
    # bfloat16 keeps 8 bits, and its roundings add up over layers
    assert abs(loss - expected) <= 0.05 * expected
    for path, gradient in gradients.items():
        assert found[path].dtype == torch.float32
        assert relative_change(found[path], gradient) < 0.5, path


def test_projections_have_one_type_under_autocast():
    """The norm of query and key gives float32 there, as CUDA's rms_norm does."""
    seen = []
    model = patched("sana_qk_norm")
    for layer in mhla.mhla_layers(model).values():
        layer.register_forward_pre_hook(
            lambda _, args: seen.append([args[0].query.dtype, args[0].key.dtype, args[0].value.dtype])
        )
    with torch.autocast("cpu", torch.bfloat16), CudasFloat32Operations():
        model(**inputs("sana_qk_norm"))
    assert seen and all(types == [torch.bfloat16] * 3 for types in seen)
