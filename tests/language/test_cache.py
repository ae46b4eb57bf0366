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
from .models import LONGEST, llama, logits, patch, patched, text

ROUNDING = {"rtol": 1e-4, "atol": 2e-5}
"""Of float32, of logits of the order of 1 after three layers that sum in another order."""
KINDS = [{"sparse": "own"}, {"sparse": "none"}, {"sparse": "own", "layers": [1], "output_gate": True}]


def _piece_by_piece(model, ids, cache, lengths):
    return torch.cat([logits(model, part, past_key_values=cache) for part in ids.split(lengths, dim=1)], dim=1)


@pytest.fixture(scope="module", params=KINDS, ids=["own", "none", "hybrid"])
def model(request):
    return patched(**request.param)


@pytest.mark.parametrize("own", [True, False], ids=["MHLACache", "DynamicCache"])
@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(1, LONGEST - 1), max_size=6, unique=True))
def test_any_cut_of_a_text_gives_what_the_whole_gives(model, own, cuts):
    ids, ends = text(length=LONGEST), [0, *sorted(cuts), LONGEST]
    cache = MHLACache(model) if own else DynamicCache(config=model.config)
    lengths = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    torch.testing.assert_close(_piece_by_piece(model, ids, cache, lengths), logits(model, ids), **ROUNDING)
    assert cache.get_seq_length() == LONGEST


def _greedy(model, prompt, **arguments):
    return model.generate(prompt, max_new_tokens=20, do_sample=False, **arguments)


def test_greedy_generation_is_that_of_full_forwards(model):
    """With a batch of prompts of one length, each cache, and none."""
    prompts = text(batch=3, length=13)
    expected = prompts
    for _ in range(20):
        expected = torch.cat([expected, logits(model, expected)[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(_greedy(model, prompts, past_key_values=MHLACache(model)), expected)
    assert torch.equal(_greedy(model, prompts), expected)
    assert torch.equal(_greedy(model, prompts, use_cache=False), expected)


def test_beam_search_is_that_without_a_cache(model):
    prompts = text(length=10)
    expected = _greedy(model, prompts, num_beams=3, use_cache=False)
    assert torch.equal(_greedy(model, prompts, num_beams=3, past_key_values=MHLACache(model)), expected)


def test_a_cache_goes_on_after_generate_and_begins_anew_after_reset(model):
    ids = text(length=30)
    cache = MHLACache(model)
    for _ in range(2):
        torch.testing.assert_close(_piece_by_piece(model, ids, cache, [11, 19]), logits(model, ids), **ROUNDING)
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.nbytes == 0


def test_samples_are_repeated_and_picked(model):
    ids = text(length=20)
    cache = MHLACache(model)
    logits(model, ids[:, :12], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    found = logits(model, ids[:, 12:].flip(0), past_key_values=cache)
    torch.testing.assert_close(found, logits(model, ids)[:, 12:].flip(0), **ROUNDING)


def test_a_copy_of_the_cache_of_a_prompt_goes_on(model):
    """The recipe of transformers' documentation for prompts that begin alike."""
    ids, other = text(length=30), text(length=30, seed=2)
    other[:, :20] = ids[:, :20]
    cache = MHLACache(model)
    logits(model, ids[:, :20], past_key_values=cache)
    for one in (ids, other):
        found = logits(model, one[:, 20:], past_key_values=copy.deepcopy(cache))
        torch.testing.assert_close(found, logits(model, one)[:, 20:], **ROUNDING)
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("cache", [MHLACache, lambda model: DynamicCache(config=model.config)], ids=["MHLA", "Dynamic"])
def test_weights_may_be_offloaded_between_the_steps(cache):
    model, ids = patched(sparse="own", output_gate=True, output_norm=True), text(length=30)
    expected = logits(model, ids)
    cpu_offload(model, execution_device=torch.device("cpu"))
    torch.testing.assert_close(_piece_by_piece(model, ids, cache(model), [11, 1, 18]), expected, **ROUNDING)


def test_every_step_may_be_trained():
    """With a past that has no gradients; the weights change after each step."""
    model, ids = patched(sparse="own"), text(length=20)
    cache = MHLACache(model)
    logits(model, ids[:, :18], past_key_values=cache)
    layer = mhla.mhla_layers(model)["model.layers.0.self_attn.mhla"]
    for _ in range(2):
        model(ids[:, 18:], past_key_values=copy.deepcopy(cache)).logits.square().sum().backward()
        assert layer.mixing.grad[2, :2].all() and layer.linear_log_weight.grad.all()
        with torch.no_grad():
            layer.linear_log_weight.add_(0.5)
        model.zero_grad()


def test_a_cache_does_not_go_on_with_another_layer():
    model, ids = patched(), text()
    cache = MHLACache(model)
    logits(model, ids, past_key_values=cache)
    mhla.change_mhla(model, block_length=16)
    with pytest.raises(ValueError, match=r"Layer 0 has another MHLA layer.*reset\(\)"):
        logits(model, ids[:, :1], past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(logits(model, ids, past_key_values=cache), logits(model, ids), **ROUNDING)


def test_after_a_call_that_failed_a_cache_is_to_be_reset(model):
    ids, cache = text(), MHLACache(model)
    logits(model, ids[:, :20], past_key_values=cache)

    def fail(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        logits(model, ids[:, 20:], past_key_values=cache)
    handle.remove()
    with pytest.raises(ValueError, match=r"last call .* failed .* 20 or 40 tokens; reset\(\)"):
        logits(model, ids[:, 20:], past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(logits(model, ids, past_key_values=cache), logits(model, ids), **ROUNDING)


def test_what_a_state_takes_does_not_grow_with_the_text():
    """The same at the ends of blocks from the trained length on, where keys and values grow with every token."""
    model = patched(beyond="relative")
    sizes = []
    cache = MHLACache(model)
    for part in text(length=4 * LONGEST).split(LONGEST, dim=1):
        logits(model, part, past_key_values=cache)
        sizes.append(cache.nbytes)
    heads, head_dim, closed = 4, 8, 5
    # KV states (head_dim + 1) x head_dim of five blocks in float32, of every head, layer and text
    assert sizes == [3 * 2 * heads * closed * (head_dim + 1) * head_dim * 4] * 4


def test_a_text_goes_on_beyond_the_trained_blocks_by_the_rule():
    ids = text(length=2 * LONGEST + 3)
    model = patched()
    cache = MHLACache(model)
    logits(model, ids[:, :40], past_key_values=cache)
    with pytest.raises(ValueError, match="go beyond the 48 tokens.*beyond='relative'"):
        logits(model, ids[:, 40:], past_key_values=cache)
    model = patched(beyond="relative")
    found = _piece_by_piece(model, ids, MHLACache(model), [40, 1, 20, 38])
    torch.testing.assert_close(found, logits(model, ids), **ROUNDING)


def test_another_batch_size_is_refused(model):
    cache = MHLACache(model)
    logits(model, text(batch=2), past_key_values=cache)
    with pytest.raises(ValueError, match=r"goes on with a batch of 2 texts, and the model was given 3.*reset\(\)"):
        logits(model, text(batch=3, length=4), past_key_values=cache)


def test_taking_tokens_back_is_refused(model):
    cache = MHLACache(model)
    logits(model, text(), past_key_values=cache)
    assert not cache.is_croppable
    with pytest.raises(ValueError, match=r"crop\(-1\) would take tokens out of an MHLACache"):
        cache.crop(-1)
    assert [layer.get_seq_length() for layer in cache.layers] == [40] * 3


def test_prompts_padded_on_the_left_are_refused(model):
    mask = torch.arange(12).expand(2, -1) >= torch.tensor([[0], [3]])
    for cache in ({}, {"past_key_values": MHLACache(model)}):
        with pytest.raises(ValueError, match="prompts of one length together, or one by one"):
            _greedy(model, text(length=12), attention_mask=mask.long(), **cache)


def test_a_prompt_padded_on_the_right_does_not_go_on(model):
    mask = torch.arange(12).expand(2, -1) < torch.tensor([[12], [9]])
    with pytest.raises(ValueError, match="padding on the left or between tokens"):
        _greedy(model, text(length=12), attention_mask=mask.long(), past_key_values=MHLACache(model))


def test_a_static_cache_is_refused(model):
    cache = StaticCache(config=model.config, max_cache_len=LONGEST)
    with pytest.raises(ValueError, match=r"past_key_values=MHLACache\(model\)"):
        logits(model, text(length=9), past_key_values=cache)
    with pytest.raises(ValueError, match=r"past_key_values=MHLACache\(model\)"):
        _greedy(model, text(length=9), cache_implementation="static")


def test_a_cache_of_another_model_is_refused():
    """Before anything wrong is computed: also where that model is not patched, or no longer."""
    model, other = patched(), patched()
    with pytest.raises(ValueError, match="made from another model"):
        logits(other, text(), past_key_values=MHLACache(model))
    cache = MHLACache(model)
    mhla.remove_mhla(other)
    torch.testing.assert_close(logits(other, text(), past_key_values=cache), logits(llama(), text()))
    with pytest.raises(ValueError, match="does not run MHLA in the layers that it was made for"):
        logits(other, text(length=1), past_key_values=cache)
    cache = MHLACache(patch(other, layers=[1]))
    mhla.change_mhla(other, layers=[0, 1])
    with pytest.raises(ValueError, match="before this layer was patched"):
        logits(other, text(), past_key_values=cache)


def test_a_cache_needs_a_patched_language_model():
    with pytest.raises(ValueError, match="not patched with MHLA"):
        MHLACache(llama())
    with pytest.raises(ValueError, match="WanTransformer3DModel is a diffusion model"):
        MHLACache(wan())
