"""The call of attention is answered: where it fits the grid, on what backend, and what is said where it stays dense."""

import copy
import logging
import math
import pickle
import re
from functools import partial
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mhla_diffusers as mhla
from mhla_diffusers.config import NOTHING_DENSE
from mhla_diffusers.patching import find_patched

from .. import models
from ..models import FAMILIES, assert_changed, seeded
from ..refusals import refused
from .shared import SPARSE, in_threads, own_form, seen_by

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
GRID, HEADS, HEAD_DIM, TEXT = (4, 6, 8), 2, 16, 5
TOKENS = math.prod(GRID) + TEXT
WHERE = NOTHING_DENSE | {"grid": GRID, "extra": (0, TEXT)}
INSIDE = {None: "cross", "wan": "blocks.0.attn1.to_out.0", "dit": "transformer_blocks.0.attn1.to_out.0"}


class Plain(nn.Module):
    """A transformer of nobody: text behind the video in one sequence, and cross-attention to a caption."""

    def __init__(self, layers=3, **options):
        super().__init__()
        size = HEADS * HEAD_DIM
        self.layers = nn.ModuleList(nn.Linear(size, 3 * size) for _ in range(layers))
        self.cross, self.options, self.checkpointed = nn.Linear(size, size), options, None

    def forward(self, hidden_states, caption, mask=None):
        if self.checkpointed is not None and torch.is_grad_enabled():
            return checkpoint(self.blocks, hidden_states, caption, mask, use_reentrant=self.checkpointed)
        return self.blocks(hidden_states, caption, mask)

    def blocks(self, hidden_states, caption, mask):
        def split(x):
            return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

        for layer in self.layers:
            query, key, value = map(split, layer(hidden_states).chunk(3, dim=-1))
            attended = functional.scaled_dot_product_attention(query, key, value, mask, **self.options)
            hidden_states = hidden_states + attended.transpose(1, 2).flatten(2)
            crossed = functional.scaled_dot_product_attention(split(self.cross(hidden_states)), *[split(caption)] * 2)
            hidden_states = hidden_states + crossed.transpose(1, 2).flatten(2)
        return hidden_states


def plain(patch=None, **options):
    """With a patch where its settings are given."""
    model = seeded(Plain, **options)
    return model if patch is None else mhla.apply_mhla(model, **WHERE | patch)


def inputs(tokens=TOKENS):
    torch.manual_seed(1)
    return torch.randn(2, tokens, HEADS * HEAD_DIM), torch.randn(2, 7, HEADS * HEAD_DIM)


def run(model, arguments=None):
    with torch.no_grad():
        return model(*(inputs() if arguments is None else arguments))


def tally(model):
    return str(find_patched(model)["transformer"].tally)


# What is sparse


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}], ids=str)
def test_density_1_is_the_model_itself_and_removal_leaves_nothing(options):
    model = plain(**options)
    before, expected = (dict(vars(model)), type(model)), run(model)
    mhla.apply_mhla(model, **WHERE, density=1.0)
    torch.testing.assert_close(run(model), expected, atol=1e-5, rtol=1e-5)
    assert "all pairs listed" in str(mhla.describe(model)) and "sparse in 3 of 6" in str(mhla.describe(model))
    mhla.change_mhla(model, density=0.2)
    for one in seen_by(model, lambda: run(model)):
        # float32 sums of some hundred tokens, with softmax
        torch.testing.assert_close(one.output.double(), one.reference(), rtol=1e-4, atol=1e-5)
        assert_changed(one.output, one.exact())
    mhla.remove_mhla(model)
    assert (dict(vars(model)), type(model)) == before and not mhla.is_patched(model)
    assert torch.equal(run(model), expected)


@pytest.mark.parametrize(
    "shaped",
    [lambda mask: mask, lambda mask: mask.expand(-1, HEADS, TOKENS, -1), lambda mask: torch.where(mask, 0.0, -9.0)],
    ids=["keys", "expanded", "bias"],
)
def test_masks_of_keys_are_taken(shaped):
    mask = shaped(torch.arange(TOKENS).expand(2, 1, 1, -1) < torch.tensor([TOKENS, TOKENS - 2]).view(2, 1, 1, 1))
    expected = run(plain(), (*inputs(), mask))
    model = plain({"density": 1.0, "extra": (0, None)})
    torch.testing.assert_close(run(model, (*inputs(), mask)), expected, atol=1e-4, rtol=1e-4)
    assert "sparse in 3 of 6" in tally(model)
    assert_changed(run(mhla.change_mhla(model, density=0.2), (*inputs(), mask)), expected)


def test_grid_and_extra_as_functions_of_the_arguments():
    """By the names that the forward gives them."""
    fixed = {"grid": lambda caption, **_: (4, 6, 8), "extra": lambda hidden_states, **_: (0, 5)}
    read = {
        "grid": lambda hidden_states, caption: (hidden_states.shape[1] // 48, 6, 8),
        "extra": lambda hidden_states, caption: (0, hidden_states.shape[1] % 48),
    }
    expected = run(plain({}))
    assert all(torch.equal(run(plain(one)), expected) for one in (fixed, read, {"extra": [0, None]}))
    shorter = inputs(3 * 48 + 2)
    assert torch.equal(run(plain(read), shorter), run(plain({"grid": (3, 6, 8), "extra": (0, 2)}), shorter))


# What stays dense


class Mixed(nn.Module):
    """Asks for attention in ways that have no sparse form."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.own = kind, nn.MultiheadAttention(HEADS * HEAD_DIM, HEADS, batch_first=True)

    def forward(self, x, _):
        if self.kind == "values":
            x = x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
            return functional.scaled_dot_product_attention(x, x, x[..., :8])
        return self.own(x, x, x)[0] if self.kind == "own" else functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    ("make", "arguments", "reason"),
    [
        (partial(plain, is_causal=True), inputs(), "causal attention"),
        (plain, (*inputs(), torch.ones(TOKENS, TOKENS, dtype=torch.bool)), "a mask between tokens"),
        (plain, inputs(180), "180 tokens are not those of the grid 4x6x8 and 0 others"),
        (partial(Mixed, "own"), inputs(), "nn.MultiheadAttention"),
        (partial(Mixed, "flat"), inputs(), "3 axes"),
        (partial(Mixed, "values"), inputs(), "values have head dim 8, queries 16"),
    ],
    ids=["causal", "mask", "tokens", "MultiheadAttention", "no heads", "values"],
)
def test_what_does_not_fit_stays_dense_is_counted_and_logged_once(make, arguments, reason, caplog):
    model = make().eval()
    expected = run(model, arguments)
    mhla.apply_mhla(model, **WHERE)
    for _ in range(2):
        torch.testing.assert_close(run(model, arguments), expected, atol=1e-6, rtol=1e-5)
    lines = [one for one in caplog.records if reason in one.getMessage()]
    assert len(lines) == 1 and lines[0].levelno == logging.WARNING
    assert reason in str(mhla.describe(model)) and "sparse in 0 of" in tally(model)


def test_cross_attention_is_counted_and_no_warning(caplog):
    model = plain({})
    with caplog.at_level(logging.INFO):
        run(model)
    words = "197 queries of 7 keys are not over the grid, as in cross-attention"
    assert tally(model) == f"sparse in 3 of 6 attentions, 3 dense: {words}"
    assert {one.levelno for one in caplog.records if words in one.getMessage()} == {logging.INFO}


def test_the_first_attentions_stay_dense_where_that_is_asked_for():
    """As of a family, by the order in which they run; cross-attentions are not counted."""
    model = plain({"dense_layers": 2, "density": 0.2})
    assert_changed(run(model), run(plain()))
    assert "sparse in 1 of 6" in tally(model) and "2 dense: dense_layers=2" in tally(model)
    model = mhla.apply_mhla(plain(), "faithful", grid=GRID, extra=(0, TEXT))
    run(model)
    assert "sparse in 2 of 6" in tally(model)


def test_the_first_attentions_stay_dense_with_gradients_in_a_compiled_model():
    for layers in (2, 3):
        model = plain({"dense_layers": layers, "density": 0.2})
        expected = run(model)
        model.compile(backend="eager")
        torch.testing.assert_close(model(*inputs()).detach(), expected, atol=1e-6, rtol=1e-5)
        assert f"sparse in {3 - layers} of 6" in tally(model)
    torch._dynamo.reset()


def test_a_forward_without_an_attention_is_told(caplog):
    model = mhla.apply_mhla(nn.Identity(), **WHERE)
    with pytest.raises(TypeError):
        model()
    assert "no attention" not in caplog.text
    for _ in range(2):
        run(model, inputs()[:1])
    assert caplog.text.count("no attention") == 1 and "no attention" in str(mhla.describe(model))


@pytest.mark.parametrize("reentrant", [True, False])
def test_attentions_that_are_recomputed_give_the_gradients_of_both_passes(reentrant):
    """Dense, since nothing tells the second pass of which call it is."""

    def gradients(model, predict=None):
        hidden_states, caption = inputs()
        hidden_states.requires_grad_()
        (predict or model)(hidden_states, caption).square().mean().backward()
        return hidden_states.grad, model.layers[0].weight.grad

    expected, model = gradients(plain()), plain({})
    model.checkpointed = reentrant
    assert all(map(torch.equal, gradients(model), expected)) and "gradient checkpointing" in tally(model)
    assert_changed(run(model), run(plain()))  # without gradients nothing is recomputed
    model, other = plain({}), plain({})
    whole = gradients(model, partial(checkpoint, model, use_reentrant=reentrant))  # which is of its call again
    assert_changed(whole[0], expected[0])
    assert all(map(torch.equal, whole, gradients(other)))


# Whose forward it is


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_forward_that_something_else_replaces(order):
    """The patch runs within it, and removal leaves it in place."""
    model = plain()
    expected, own, calls = run(model), model.forward, []

    def replaced(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    if order == "before":
        model.forward = replaced
    mhla.apply_mhla(model, **WHERE, density=0.2)
    model.forward = replaced
    assert_changed(run(model), expected)
    assert len(calls) == 1 and find_patched(model)["transformer"].latest_grid
    mhla.remove_mhla(model)
    assert torch.equal(run(model), expected) and len(calls) == 2 and model.forward is replaced


def test_threads_copies_and_other_models_are_left_alone():
    model, other, expected, found = plain({}), plain(), run(plain()), []
    clone, sparse, arguments = copy.deepcopy(model), run(model), inputs()
    assert torch.equal(run(pickle.loads(pickle.dumps(model))), sparse)  # noqa: S301 - with the facts that were given
    in_threads(*(lambda one=one: found.append(run(one, arguments)) for one in (model, clone, other)))
    assert sorted(torch.equal(one, sparse) for one in found) == [False, True, True]
    assert torch.equal(run(other), expected)
    mhla.remove_mhla(model)
    assert torch.equal(run(clone), sparse)


def test_a_model_within_a_model():
    """Each answers its own attentions; a part that is patched is not patched again with the whole."""
    model, arguments = hidream()
    block = model.double_stream_blocks[0]
    mhla.apply_mhla(block, **NOTHING_DENSE, grid=(8, 12), extra=(0, None), density=0.2)
    with torch.no_grad():
        model(**arguments)
    assert tally(block).startswith("sparse in 1 of 1 attentions")
    with refused(type(block).__name__):
        mhla.apply_mhla(model, grid=GRID)
    with refused(type(block).__name__):
        mhla.describe(block, height=64)
    outer, inner, own = plain({}), plain({}), own_form("wan", blocks=(2, 2, 3))
    of_wan = models.output(own, models.inputs("wan"))
    expected = run(outer)
    found = []
    outer.cross.register_forward_pre_hook(
        lambda *_: found.extend((run(inner), models.output(own, models.inputs("wan")))) or None
    )
    assert torch.equal(run(outer), expected)
    assert all(map(torch.equal, found, (expected, of_wan) * 3))


CASES = [(None, None), (None, "after"), ("wan", None), ("wan", "before"), ("dit", None), ("dit", "after")]


@pytest.mark.parametrize(("name", "compiled"), CASES, ids=str)
def test_an_interrupt_in_a_layer_leaves_no_trace(name, compiled):
    """In models that were never patched, or by diffusers' own setter, in this one, and in it without its patch."""
    never, model = (plain() if name is None else FAMILIES[name].build() for _ in range(2))
    predict = run if name is None else partial(models.output, arguments=models.inputs(name))
    wan, arguments, is_stopped = own_form("wan", blocks=(2, 2, 3)), models.inputs("wan", ragged=True), []

    @torch.compiler.disable
    def stop(*_):
        if is_stopped:
            raise KeyboardInterrupt

    for one in (never, model):
        one.get_submodule(INSIDE[name]).register_forward_hook(stop)
        if compiled == "before":
            one.compile(backend="eager")
    mhla.apply_mhla(model, **WHERE if name is None else NOTHING_DENSE, density=0.2)
    for one in (never, model) if compiled == "after" else ():
        one.compile(backend="eager")
    calls = {
        "never patched": lambda: predict(never),
        "own form": lambda: models.output(wan, arguments),
        "patched": lambda: predict(model),
        "removed": lambda: predict(mhla.remove_mhla(model)),
    }
    expected = {what: call() for what, call in calls.items() if what != "removed"}
    assert_changed(expected["patched"], expected["never patched"])
    expected["removed"] = expected["never patched"]
    for what, call in calls.items():
        is_stopped.append(True)
        with pytest.raises(KeyboardInterrupt):
            predict(model)
        is_stopped.clear()
        assert torch.equal(call(), expected[what]), what
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["without a family", "wan", "dit"])
def test_disabled_within_the_context_in_this_thread_alone(name):
    if name in FAMILIES:
        model, original = models.patched(name, density=0.2), FAMILIES[name].build()
        predict = partial(models.output, arguments=models.inputs(name))
    else:
        model, original, predict = plain({}), plain(), run
    expected, dense, found = predict(model), predict(original), []
    with mhla.mhla_disabled(model):
        assert torch.equal(predict(model), dense)
        in_threads(lambda: found.append(predict(model)))
        assert torch.equal(found[0], expected) and torch.equal(predict(copy.deepcopy(model)), expected)
    first, second = mhla.mhla_disabled(model), mhla.mhla_disabled(model)
    for step in (first.__enter__, second.__enter__):
        step()
    first.__exit__(None, None, None)  # as generators may end, in any order
    assert torch.equal(predict(model), dense)
    second.__exit__(None, None, None)
    with pytest.raises(KeyError), mhla.mhla_disabled(model):
        raise KeyError
    assert torch.equal(predict(model), expected)
    with mhla.mhla_disabled(model):
        mhla.remove_mhla(model)
    assert torch.equal(predict(model), dense)


# The backend that the user has chosen


def test_a_patch_runs_on_the_backend_that_is_asked_for():
    """No kernel has blocks of 4."""
    model = mhla.apply_mhla(models.wan(), **SPARSE, backend="triton")
    with refused('backend="triton" cannot run this call'):
        models.output(model, models.inputs("wan"))
    models.output(mhla.change_mhla(model, backend="eager"), models.inputs("wan"))


def kernels(model):
    """How often the two implementations of softmax attention ran."""
    with torch.profiler.profile() as profile:
        models.output(model, models.inputs("wan"))
    names = [event.name for event in profile.events()]
    return tuple(
        names.count(f"aten::_scaled_dot_product_{kind}") for kind in ("flash_attention_for_cpu", "attention_math")
    )


def test_attentions_that_share_a_processor_run_on_the_backend_of_their_model():
    """Also those before the first one that is patched, and after another model has run."""
    found = []
    for backend in ("_native_math", None):
        model = models.wan()
        model.set_attn_processor(WanAttnProcessor())
        model.blocks[0].attn1.processor._attention_backend = backend
        found.append(kernels(mhla.apply_mhla(model, **SPARSE, layers=[1])))
    assert found == [(1, 7), (8, 0)]


@pytest.mark.parametrize("settings", [SPARSE, {"blocks": (2, 2, 3)}], ids=["sparse", "MHLA"])
def test_a_backend_holds_for_what_stays_dense_and_the_patch_stays(settings):
    """By diffusers' context manager and by its method: two layers of four, and four cross-attentions."""
    model = models.wan()
    mhla.apply_mhla(model, **settings, layers=[0, 1])
    expected, own = models.output(model, models.inputs("wan")), 2 if "density" in settings else 0  # of the operator
    assert kernels(model) == (6 + own, 0)
    with attention_backend("_native_math"):
        assert kernels(model) == (own, 6)
    for backend, math_ones in (("_native_math", 6), ("native", 0)):
        model.set_attention_backend(backend)
        assert kernels(model) == (6 - math_ones + own, math_ones)
        torch.testing.assert_close(models.output(model, models.inputs("wan")), expected, rtol=1e-4, atol=2e-5)
        with mhla.mhla_disabled(model):
            assert kernels(model) == ((0, 8) if math_ones else (8, 0))
    model.reset_attention_backend()
    torch.testing.assert_close(models.output(model, models.inputs("wan")), expected, rtol=1e-4, atol=2e-5)
    model.set_attention_backend("_native_math")
    mhla.remove_mhla(model)
    mhla.remove_mhla(mhla.apply_mhla(model, **settings))
    assert {one._attention_backend for one in model.attn_processors.values()} == {"_native_math"}


# Classes of diffusers without a family


def hidream():
    model = seeded(
        diffusers.HiDreamImageTransformer2DModel,
        **{"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1},
        **{"attention_head_dim": 24, "num_attention_heads": 2, "caption_channels": [16, 16], "text_emb_dim": 12},
        **{"axes_dims_rope": (8, 8, 8), "max_resolution": (32, 32), "llama_layers": [0, 1]},
        force_inference_output=True,
    )
    torch.manual_seed(1)
    texts = {"encoder_hidden_states_t5": (1, 5, 16), "encoder_hidden_states_llama3": (2, 1, 6, 16)}
    sizes = {"hidden_states": (1, 4, 16, 24), **texts, "pooled_embeds": (1, 12)}
    return model, {name: torch.randn(size) for name, size in sizes.items()} | {"timesteps": torch.tensor([500])}


def qwenimage21():
    model = seeded(
        diffusers.QwenImage21Transformer2DModel,
        **{"in_channels": 16, "out_channels": 16, "num_layers": 2, "attention_head_dim": 16},
        **{"num_attention_heads": 2, "context_in_dim": 8, "axes_dims_rope": (4, 6, 6)},
    )
    torch.manual_seed(1)
    arguments = {
        "hidden_states": torch.randn(2, 192, 16),
        "encoder_hidden_states": torch.randn(2, TEXT, 8),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 16, 12)]] * 2,
        "img_mask": torch.tensor([[False] * TEXT + [True] * 48] * 2),
    }
    cache = QwenImage21KVCache(2)
    with torch.no_grad():
        model(**arguments, kv_cache=cache, kv_cache_mode="extract")
    return model, arguments | {"kv_cache": cache, "kv_cache_mode": "cached"}


def cosmos3():
    model = seeded(
        diffusers.Cosmos3OmniTransformer,
        **{"head_dim": 16, "hidden_size": 32, "intermediate_size": 32, "latent_channel": 4, "num_attention_heads": 2},
        **{"num_hidden_layers": 2, "num_key_value_heads": 1, "patch_latent_dim": 16, "vocab_size": 32},
        rope_axes_dim=(4, 2, 2),
    )
    torch.manual_seed(1)
    video = torch.arange(TEXT, TOKENS)
    places = torch.cartesian_prod(*map(torch.arange, GRID)).T + TEXT
    return model, {
        "input_ids": torch.arange(TEXT),
        "text_indexes": torch.arange(TEXT),
        "position_ids": torch.cat([torch.arange(TEXT).expand(3, -1), places], 1),
        "und_len": TEXT,
        "sequence_length": TOKENS,
        "vision_tokens": [torch.randn(1, 4, 4, 12, 16)],
        "vision_token_shapes": [GRID],
        "vision_sequence_indexes": video,
        "vision_mse_loss_indexes": video,
        "vision_timesteps": torch.full((192,), 500.0),
        "vision_noisy_frame_indexes": [torch.arange(4)],
    }


CLASSES = {"text": hidream, "cached keys of text": qwenimage21, "heads that share keys": cosmos3}


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_diffusers_without_a_family(name):
    """With the arguments that the page gives."""
    model, arguments = CLASSES[name]()

    def predict():
        with torch.no_grad():
            found = model(**arguments, return_dict=False)[0]
            return found[0] if isinstance(found, list) else found

    where = NOTHING_DENSE | eval(f"dict({re.search(rf'`{type(model).__name__}` . `(grid=.*)`', PAGE)[1]})")
    expected = predict()
    mhla.apply_mhla(model, **where, density=1.0)
    torch.testing.assert_close(predict(), expected, atol=1e-4, rtol=1e-4)
    assert_changed((mhla.change_mhla(model, density=0.2), predict())[1], expected)
    assert "sparse in 2 of" in str(mhla.describe(model))
    mhla.remove_mhla(model)
    assert torch.equal(predict(), expected)


# What is refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"grid": (4, 0)}, "grid=(4, 0)"),
        ({"grid": GRID, "extra": 5}, "extra=5"),
        ({"grid": GRID, "extra": (None, None)}, "extra=(None, None)"),
        ({"grid": GRID, "layers": "2/3"}, "layers='2/3'"),
        ({"grid": GRID, "blocks": (2, 2, 2)}, "sparse attention alone...docs/models.md"),
        ({"grid": GRID, "patch": "wan2.1-t2v-1.3b"}, "no family"),
        ({"grid": GRID, "model": models.wan()}, "'wan'...leave grid"),
    ],
)
def test_what_a_model_without_a_family_cannot_have(arguments, words):
    model = plain()
    with refused(words):
        mhla.apply_mhla(**{"model": model} | arguments)
    assert not mhla.is_patched(model) and type(model) is Plain


def test_other_settings_and_what_has_no_layers(tmp_path):
    model, sparse = plain({"density": 0.2}), run(plain({"density": 0.2}))
    assert mhla.change_mhla(model, density=0.5) is model
    expected = run(plain({"density": 0.5}))
    assert torch.equal(run(model), expected) and not torch.equal(sparse, expected)
    for settings, offending in (({"density": 2}, "2"), ({"layers": "2/3"}, "2/3"), ({"blocks": (1, 1)}, "blocks")):
        with refused(offending):
            mhla.change_mhla(model, **settings)
    for call in (lambda: mhla.save_mhla(model, tmp_path), lambda: mhla.load_mhla(model, "tiny-wan-mhla")):
        with refused("Plain", "grid="):
            call()
    assert torch.equal(run(model), expected) and not list(tmp_path.iterdir()) and mhla.mhla_layers(model) == {}
