"""The processor: masks, and diffusers' own form that puts one instance on every attention."""

import math

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.patching import register_mixing_clip

from ..models import FAMILIES, assert_changed, inputs, output, patched
from ..refusals import refused
from .shared import own_form


def masked_attention(name, tokens, mask, **settings):
    """First self-attention of ``name`` on the first ``tokens`` of 64 tokens on a grid 8 wide, by default with MHLA."""
    case = FAMILIES[name]
    if len(case.blocks) == 3:
        grid, blocks = (2, tokens // 16, 8), (1, 2, 2)
    else:
        grid, blocks = (tokens // 8, 8), (2, 2)
    model = FAMILIES[name].build()
    attn = next(module for path, module in model.named_modules() if path.endswith("attn1"))
    attn.set_processor(mhla.MHLAProcessor(grid=grid, **settings or {"blocks": blocks}))
    width = model.config.num_attention_heads * model.config.attention_head_dim
    x = torch.randn(2, *(grid[:-2] or (1,)), 8, 8, width, generator=torch.Generator().manual_seed(0))
    x = x[..., : grid[-2], :, :].reshape(2, tokens, width)
    with torch.no_grad():
        return attn(x, attention_mask=mask)


def bias(keep, value):
    """The bias that diffusers adds to the scores of keys that are masked out."""
    return torch.zeros(keep.shape).masked_fill_(~keep, value)


MASKS = {
    "bool": lambda keep: keep,
    "bool (B, 1, N)": lambda keep: keep[:, None],
    "bias (B, 1, N) of -10000": lambda keep: bias(keep, -10000.0)[:, None],
    "bias (B, 1, 1, N) of -inf": lambda keep: bias(keep, -math.inf)[:, None, None],
}


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("name", ["wan", "sana", "dit"])
def test_key_padding_masks_equal_dropping_the_tokens(name, form):
    """The last row of every frame is masked out: the other tokens see what they see without it."""
    frames = 2 if name == "wan" else 1
    rows = 64 // 8 // frames
    keep = (torch.arange(64) // 8 % rows < rows - 1).expand(2, 64)
    found = masked_attention(name, 64, MASKS[form](keep))[:, keep[0]]
    expected = masked_attention(name, 64 - 8 * frames, None)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert_changed(masked_attention(name, 64, None)[:, keep[0]], expected)


@pytest.mark.parametrize("shape", [(2, 64, 64), (2, 2, 64, 64), (64, 64), (3, 64), (2, 63)])
@pytest.mark.parametrize("name", ["wan", "sana"])
def test_masks_that_differ_between_queries_are_refused(name, shape):
    with refused((2, 64), shape):
        masked_attention(name, 64, torch.ones(shape, dtype=torch.bool))
    with refused("int64"):
        masked_attention(name, 64, torch.ones(2, 64, dtype=torch.int64))


def single_instance(name, **settings):
    """Model ``name`` with one MHLAProcessor set on every attention by diffusers' own method, and told the grid."""
    return own_form(name, blocks=FAMILIES[name].blocks, grid=FAMILIES[name].grid, **settings)


def test_a_grid_that_was_read_once_is_not_read_from_the_device_again():
    """On the meta device, where nothing can be read."""
    model = own_form("wan", blocks=(2, 2, 3))
    output(model, inputs("wan"))
    model.to("meta")
    arguments = {key: value.to("meta") for key, value in inputs("wan").items()}
    assert output(model, arguments).shape == inputs("wan")["hidden_states"].shape


def test_diffusers_own_form_names_the_line_that_gives_the_grid():
    """SANA's attention is told nothing of it, nor is a compiled graph."""
    message = "token grid...apply_mhla(pipe, ...)"
    model = own_form("sana", blocks=(4, 2))
    with refused(message):
        output(model, inputs("sana"))
    model = own_form("wan", blocks=(2, 2, 3))
    output(model, inputs("wan"))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with refused(message, error=Exception):
        output(compiled, inputs("wan"))
    torch._dynamo.reset()


def test_a_refused_first_forward_leaves_no_weights_behind():
    model = FAMILIES["wan"].build()
    keys = list(model.state_dict())
    model.set_attn_processor(mhla.MHLAProcessor(blocks=(2, 2, 3), grid=(4, 4, 7)))
    with refused(112, 96):
        output(model, inputs("wan"))
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize(
    ("settings", "words"), [({"layers": [1]}, "layers=(1,)"), ({"dense_first": 1}, "dense_first=1")]
)
def test_diffusers_own_form_does_not_ignore_what_it_cannot_do(settings, words):
    with refused(words, "apply_mhla"):
        output(single_instance("wan", **settings), inputs("wan"))


def test_weights_made_under_inference_mode_can_be_trained():
    model = single_instance("wan")
    with torch.inference_mode():
        model(**inputs("wan"))
    model(**inputs("wan")).sample.sum().backward()
    assert all(layer.mixing.grad is not None for layer in mhla.mhla_layers(model).values())


def test_processor_of_other_settings_on_a_patched_attention_is_refused():
    model = patched("wan")
    model.set_attn_processor(mhla.MHLAProcessor(blocks=(1, 1, 1), grid=FAMILIES["wan"].grid))
    with refused("blocks=(2, 2, 3)", "blocks=(1, 1, 1)", "remove_mhla"):
        output(model, inputs("wan"))


REFUSED = [
    ((3,), {}, "got 3"),
    ((), {"density": 0.1}, "density=0.1...apply_mhla(pipe)"),
    ((mhla.MHLAConfig(blocks=(2, 2)),), {"density": 0.1}, "density"),
    ((), {"grid": (2, 2)}, "blocks=(7, 3, 5)...SparseConfig"),
    ((), {"blocks": (2, 2, 2), "grid": (4, -8, 8)}, "grid=(4, -8, 8)"),
    ((), {"blocks": (2, 2), "backend": "eagr"}, "'eagr'...auto...eager"),
]


@pytest.mark.parametrize(("args", "kwargs", "value"), REFUSED, ids=lambda value: str(value)[:20])
def test_processor_arguments_are_checked(args, kwargs, value):
    with refused(value):
        mhla.MHLAProcessor(*args, **kwargs)


def test_before_its_first_forward_diffusers_own_form_says_what_is_missing(tmp_path):
    model = single_instance("wan")
    assert all(layer.blocks == (2, 2, 3) for layer in mhla.describe(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for use in (lambda: mhla.save_mhla(model, tmp_path), lambda: register_mixing_clip(optimizer, model)):
        with refused("first forward"):
            use()


def test_a_bias_of_minus_infinity_throughout_masks_a_sample():
    """Its heads give 0, as PyTorch's do, so only the output projection's bias is left; the other sample is as alone."""
    mask = bias(torch.tensor([[False], [True]]).expand(2, 64), -math.inf)
    found = masked_attention("sana", 64, mask)
    attn = FAMILIES["sana"].build().transformer_blocks[0].attn1
    torch.testing.assert_close(found[0], attn.to_out[0].bias.detach().expand(64, -1))
    torch.testing.assert_close(found[1], masked_attention("sana", 64, None)[1])
