"""What a patched attention computes: Eq. 4 on the grid of the input, with its options."""

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.attention import MHLACall, reference_attention

from ..models import FAMILIES, assert_changed, inputs, output, patched
from ..refusals import refused


def layer_calls(model, arguments):
    """Arguments and result of every MHLA layer in one forward, by layer name."""
    calls = {}
    handles = [
        layer.register_forward_hook(lambda _, args, result, path=path: calls.update({path: (args, result)}))
        for path, layer in mhla.mhla_layers(model).items()
    ]
    output(model, arguments)
    for handle in handles:
        handle.remove()
    return calls


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_computes_equation_4_on_the_grid_of_the_input(name, ragged):
    """Also where the block counts do not divide a grid that is not square."""
    model, case = patched(name), FAMILIES[name]
    grid = case.ragged_grid if ragged else case.grid
    with torch.no_grad():
        for seed, layer in enumerate(mhla.mhla_layers(model).values()):
            noise = torch.rand(layer.mixing.shape, generator=torch.Generator().manual_seed(seed))
            layer.mixing.mul_(0.2).add_(noise)
    calls = layer_calls(model, inputs(name, ragged=ragged))
    assert len(calls) == case.self_attentions
    for path, (arguments, result) in calls.items():
        inputs_of, mixing = arguments[0], mhla.mhla_layers(model)[path].mixing.detach()
        parts = {name: getattr(inputs_of, name) for name in ("query", "key", "value", "rotary")}
        expected = reference_attention(MHLACall(**parts, mixing=mixing, grid=grid, blocks=case.blocks))
        # float32 sums of at most 96 tokens; RoPE makes the numerator's terms cancel, hence the absolute part
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)
        assert (inputs_of.rotary is not None) == name.startswith("wan")


@pytest.mark.parametrize("name", ["wan", "sana", "dit"])
@pytest.mark.parametrize("option", [{"output_gate": True}, {"convolution": 3}, {"output_gate": True, "convolution": 5}])
def test_a_fresh_gate_and_convolution_change_nothing(name, option):
    """Within the rounding of SiLU; trained, they do."""
    expected = output(patched(name), inputs(name))
    model = patched(name, **option)
    torch.testing.assert_close(output(model, inputs(name)), expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        for layer in mhla.mhla_layers(model).values():
            for module in filter(None, (layer.gate, layer.convolution)):
                module.weight.add_(0.3)
    assert_changed(output(model, inputs(name)), expected)


def test_blocks_clamp_to_a_small_grid_where_the_setting_says_so(tmp_path):
    """As the patch opened at fewer blocks, and with gradients."""
    model = patched("wan", blocks=(6, 1, 1), clamp_blocks=True)
    small = inputs("wan", ragged=True)  # 3 latent frames
    mixing = next(iter(mhla.mhla_layers(model).values())).mixing
    with torch.no_grad():
        for layer in mhla.mhla_layers(model).values():
            layer.mixing.mul_(torch.rand(layer.mixing.shape, generator=torch.Generator().manual_seed(0)))
    mhla.save_mhla(model, tmp_path)
    fewer = mhla.load_mhla(FAMILIES["wan"].build(), tmp_path, blocks=(3, 1, 1))
    assert torch.equal(output(model, small), output(fewer, small))
    assert mhla.describe(model)[0].blocks == (3, 1, 1)
    model.train()(**small).sample.square().mean().backward()
    assert mixing.grad.abs().sum() > 0
    strict = mhla.load_mhla(FAMILIES["wan"].build(), tmp_path)
    mhla.change_mhla(strict, clamp_blocks=False)
    with refused("frames...3...6"):
        output(strict, small)


@pytest.mark.parametrize("name", ["wan", "sana", "dit"])
def test_the_convolution_runs_over_the_token_grid(name):
    """A kernel with a single 1 beside its centre shifts the values by one token along the last axis of the grid."""
    model, case = patched(name, convolution=3), FAMILIES[name]
    plain = layer_calls(model, inputs(name, ragged=True))
    with torch.no_grad():
        for layer in mhla.mhla_layers(model).values():
            layer.convolution.weight.view(layer.convolution.weight.shape[0], -1)[:, -2 - 3 ** len(case.grid) // 2] = 0
            layer.convolution.weight[(..., *[1] * (len(case.grid) - 1), 2)] = 1
    first = next(iter(plain))
    shifted = layer_calls(model, inputs(name, ragged=True))[first][1] - plain[first][1]
    value = plain[first][0][0].value.unflatten(1, case.ragged_grid)
    axis = len(case.ragged_grid)
    width = value.shape[axis]
    expected = torch.zeros_like(value)
    expected.narrow(axis, 0, width - 1).copy_(value.narrow(axis, 1, width - 1))
    torch.testing.assert_close(shifted, expected.flatten(1, axis), rtol=1e-4, atol=1e-4)
