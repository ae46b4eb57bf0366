"""Generating from a patched Llama: with a state instead of keys and values, and with transformers' own cache."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

import mhla_diffusers as mhla
from mhla_diffusers import MHLACache

from ..models import wan
from .models import LONGEST, ROUNDING, llama, logits, patch, patched, text

KINDS = {
    "softmax": {"own": "softmax"},
    "linear": {"own": "linear"},
    "hybrid": {"own": "softmax", "layers": [1], "output_gate": True},
}
CACHES = {"MHLA": MHLACache, "Dynamic": lambda model: DynamicCache(config=model.config)}


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return patched(**KINDS[request.param])


@pytest.fixture(scope="module")
def one():
    """For what does not depend on the kind."""
    return patched()


def piece_by_piece(model, ids, cache, lengths):
    return torch.cat([logits(model, part, past_key_values=cache) for part in ids.split(lengths, dim=1)], dim=1)


def greedy(model, prompt, **arguments):
    return model.generate(prompt, max_new_tokens=20, do_sample=False, **arguments)


@pytest.mark.parametrize("cache", CACHES)
@settings(max_examples=4, deadline=None)
@given(cuts=st.lists(st.integers(1, LONGEST - 1), max_size=6, unique=True))
def test_any_cut_of_a_text_gives_what_the_whole_gives(model, cache, cuts):
    ids, ends, cache = text(length=LONGEST), [0, *sorted(cuts), LONGEST], CACHES[cache](model)
    lengths = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    torch.testing.assert_close(piece_by_piece(model, ids, cache, lengths), logits(model, ids), **ROUNDING)
    assert cache.get_seq_length() == LONGEST


def test_generation_is_that_of_full_forwards(model):
    """Greedy and by beams, with a batch of prompts of one length, each cache, and none."""
    prompts = text(batch=3, length=13)
    expected = prompts
    for _ in range(20):
        expected = torch.cat([expected, logits(model, expected)[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(greedy(model, prompts, past_key_values=MHLACache(model)), expected)
    assert torch.equal(greedy(model, prompts), expected)
    assert torch.equal(greedy(model, prompts, use_cache=False), expected)
    beams = greedy(model, prompts, num_beams=3, use_cache=False)
    assert torch.equal(greedy(model, prompts, num_beams=3, past_key_values=MHLACache(model)), beams)


def test_a_cache_is_reset_copied_repeated_and_picked(model):
    """A copy is the recipe of transformers' documentation for prompts that begin alike."""
    ids, other, cache = text(length=30), text(length=30, seed=2), MHLACache(model)
    other[:, :20] = ids[:, :20]
    torch.testing.assert_close(piece_by_piece(model, ids, cache, [11, 19]), logits(model, ids), **ROUNDING)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    logits(model, ids[:, :20], past_key_values=cache)
    for one in (ids, other):
        found = logits(model, one[:, 20:], past_key_values=copy.deepcopy(cache))
        torch.testing.assert_close(found, logits(model, one)[:, 20:], **ROUNDING)
    assert cache.get_seq_length() == 20
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    found = logits(model, ids[:, 20:].flip(0), past_key_values=cache)
    torch.testing.assert_close(found, logits(model, ids)[:, 20:].flip(0), **ROUNDING)


@pytest.mark.parametrize("cache", CACHES)
def test_weights_may_be_offloaded_between_the_steps(cache):
    model, ids = patched(output_gate=True, output_norm=True), text(length=30)
    expected = logits(model, ids)
    cpu_offload(model, execution_device=torch.device("cpu"))
    torch.testing.assert_close(piece_by_piece(model, ids, CACHES[cache](model), [11, 1, 18]), expected, **ROUNDING)


def test_every_step_may_be_trained():
    """With a past that has no gradients; the weights change after each step."""
    model, ids = patched(), text(length=20)
    cache = MHLACache(model)
    logits(model, ids[:, :18], past_key_values=cache)
    layer = mhla.mhla_layers(model)["model.layers.0.self_attn.mhla"]
    for _ in range(2):
        model(ids[:, 18:], past_key_values=copy.deepcopy(cache)).logits.square().sum().backward()
        assert layer.mixing.grad[2, :2].all() and layer.linear_log_weight.grad.all()
        with torch.no_grad():
            layer.linear_log_weight.add_(0.5)
        model.zero_grad()


def test_what_a_state_takes_does_not_grow_with_the_text():
    """The same at the ends of blocks from the trained length on, where keys and values grow with every token."""
    model, sizes = patched(beyond="relative"), []
    cache = MHLACache(model)
    for part in text(length=4 * LONGEST).split(LONGEST, dim=1):
        logits(model, part, past_key_values=cache)
        sizes.append(cache.nbytes)
    heads, head_dim, closed = 4, 8, 5
    # KV states (head_dim + 1) x head_dim of five blocks in float32, of every head, layer and text
    assert sizes == [3 * 2 * heads * closed * (head_dim + 1) * head_dim * 4] * 4
    ids = text(length=2 * LONGEST + 3)
    found = piece_by_piece(model, ids, MHLACache(model), [40, 1, 20, 38])
    torch.testing.assert_close(found, logits(model, ids), **ROUNDING)


def test_a_cache_that_cannot_go_on_is_to_be_reset():
    """After the layer was changed, and after a call that failed."""
    model, ids = patched(), text()
    cache = MHLACache(model)
    logits(model, ids, past_key_values=cache)
    mhla.change_mhla(model, block_length=16)
    refused("layer 0 of this model", model, ids[:, :1], cache)
    cache = MHLACache(model)
    logits(model, ids[:, :20], past_key_values=cache)

    def fail(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        logits(model, ids[:, 20:], past_key_values=cache)
    handle.remove()
    refused(r"20 or 40 tokens; reset\(\)", model, ids[:, 20:], cache)
    cache.reset()
    torch.testing.assert_close(logits(model, ids, past_key_values=cache), logits(model, ids), **ROUNDING)


def test_a_cache_of_another_model_is_refused():
    """Before anything wrong is computed: also where that model is not patched, or no longer."""
    model, other = patched(), patched()
    refused("layer 0 of this model", other, text(), MHLACache(model))
    cache = MHLACache(model)
    mhla.remove_mhla(other)
    torch.testing.assert_close(logits(other, text(), past_key_values=cache), logits(llama(), text()))
    refused("made for", other, text(length=1), cache)
    cache = after(model)
    mhla.remove_mhla(model)
    refused("After remove_mhla", model, text(length=1), cache)
    cache = MHLACache(patch(other, layers=[1]))
    mhla.change_mhla(other, layers=[0, 1])
    refused("layer 0 of this model", other, text(), cache)


def refused(named, model, ids, cache):
    with pytest.raises(ValueError, match=named):
        logits(model, ids, past_key_values=cache)


def after(model, **size):
    """A cache that has seen a text."""
    cache = MHLACache(model)
    logits(model, text(**size), past_key_values=cache)
    return cache


def padded(lengths, side):
    places, ends = torch.arange(12).expand(2, -1), torch.tensor(lengths)[:, None]
    return (places < ends if side == "right" else places >= 12 - ends).long()


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda m: logits(m, text(length=20), past_key_values=after(m)), "48 tokens.*beyond='relative'"),
        (lambda m: logits(m, text(batch=3, length=4), past_key_values=after(m)), r"2 .* 3.*reset\(\)"),
        (lambda m: after(m).crop(-1), r"crop\(-1\)"),
        (lambda m: greedy(m, text(length=12), attention_mask=padded([12, 9], "left")), "prompts of one length"),
        (
            lambda m: greedy(
                m, text(length=12), attention_mask=padded([12, 9], "left"), past_key_values=MHLACache(m)
            ),
            "prompts of one length",
        ),
        (
            lambda m: greedy(
                m, text(length=12), attention_mask=padded([12, 9], "right"), past_key_values=MHLACache(m)
            ),
            "padding on the left or between tokens",
        ),
        (
            lambda m: logits(m, text(length=9), past_key_values=StaticCache(config=m.config, max_cache_len=LONGEST)),
            r"past_key_values=MHLACache\(model\)",
        ),
        (lambda m: greedy(m, text(length=9), cache_implementation="static"), r"past_key_values=MHLACache\(model\)"),
        (lambda m: MHLACache(wan()), "WanTransformer3DModel is a diffusion model"),
    ],
)  # fmt: skip
def test_what_is_refused(one, use, words):
    with pytest.raises(ValueError, match=words):
        use(one)


def test_a_cache_from_which_tokens_cannot_be_taken_says_so(one):
    cache = after(one)
    assert not cache.is_croppable and [layer.get_seq_length() for layer in cache.layers] == [40] * 3
