"""The attention matrices and what is told of them, on real activations of the tiny pipelines."""

import pytest
import torch

from mhla_diffusers import apply_mhla
from mhla_diffusers.analysis import analyze_layers, attention_matrices, each_attention_matrix, entropy, rank
from mhla_diffusers.families import get_family
from mhla_diffusers.families.adapters import project_tokens
from mhla_diffusers.patching import TransformerCall, record_calls
from mhla_diffusers.tiny import TINY, load_tiny

from .. import models
from ..refusals import refused
from .tiny import run_tiny

HEAD_DIM = 32


def attended(model, call):
    """What every self-attention hands to its output projection: name → (B, H, N, D), and its value in that shape."""
    found, values = {}, {}
    handles = []
    for name, attn in get_family(model).attention.self_attentions(model).items():

        def note(_, args, name=name, attn=attn):
            found[name] = args[0].unflatten(-1, (attn.heads, -1)).transpose(1, 2)

        def note_value(_, args, kwargs, name=name, attn=attn):
            values[name] = project_tokens(attn, (args or [kwargs["hidden_states"]])[0])[2].transpose(1, 2)

        handles += [
            attn.to_out[0].register_forward_pre_hook(note),
            attn.register_forward_pre_hook(note_value, with_kwargs=True),
        ]
    with torch.no_grad():
        call.predict(model)
    for handle in handles:
        handle.remove()
    return found, values


PATCHES = {
    "none": None,
    "mhla": {},
    "rope before": {"rope": "before"},
    "no normaliser": {"normalize": False, "output_norm": True},
    "sparse": {"density": 0.2, "block_size": 8},
    "sparse, means": {"density": 0.2, "block_size": 8, "far": "means", "order": "curve"},
    "sparse, all pairs": {"density": 1.0},
}


@pytest.mark.parametrize(
    ("name", "patch"),
    [(name, patch) for name in ("dit", "sana", "wan") for patch in PATCHES if name != "sana" or "sparse" not in patch],
)
def test_the_matrix_times_the_value_is_what_the_attention_gives(name, patch):
    settings = PATCHES[patch]
    model = models.FAMILIES[name].build()
    if settings is not None:
        apply_mhla(model, **({"blocks": models.FAMILIES[name].blocks} if "sparse" not in patch else {}), **settings)
    call = TransformerCall((), models.inputs(name))
    found, values = attended(model, call)
    matrices = attention_matrices(model, call)
    assert set(found) == set(matrices)
    for layer, matrix in matrices.items():
        expected = matrix @ values[layer].double()
        if settings is not None and settings.get("output_norm"):
            expected = torch.nn.functional.rms_norm(expected, expected.shape[-1:], eps=1e-6)
        # float32 against float64; RoPE makes the numerator's terms cancel, hence the absolute part
        torch.testing.assert_close(found[layer].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("sparse", {"density": 0.1, "block_size": 8}), ("causal MHLA", {"blocks": (2, 2, 3), "block_length": 2})],
)
def test_softmax_over_some_pairs_can_have_full_rank(kind, settings):
    model = apply_mhla(models.wan(), **settings)
    for layer in analyze_layers(model, TransformerCall((), models.inputs("wan"))):
        assert (layer.attention, layer.rank_bound) == (kind, layer.tokens)
        assert layer.rank <= layer.rank_bound


def test_entropy_of_a_query_that_attends_to_nothing_is_zero():
    assert entropy(torch.zeros(1, 1, 2, 4, dtype=torch.float64)) == 0


def real_call(pipe):
    return record_calls({"transformer": pipe.transformer}, run_tiny(pipe, steps=2))["transformer"][1]


@pytest.mark.parametrize("family", TINY)
def test_rank_of_mhla_exceeds_the_head_dim_and_that_of_linear_attention_never_does(family):
    axes = get_family(load_tiny(family).transformer).axes
    ranks = {}
    for name, blocks in {"linear": (1,) * axes, "MHLA": (4,) * 2 if axes == 2 else (3, 4, 4)}.items():
        pipe = load_tiny(family)
        apply_mhla(pipe, blocks=blocks)
        call = real_call(pipe)
        layers = analyze_layers(pipe.transformer, call)
        for layer, (_, matrix) in zip(layers, each_attention_matrix(pipe.transformer, call), strict=True):
            assert layer.rank <= layer.rank_bound
            # of every sample and head, and with all digits of float64
            assert int(torch.linalg.matrix_rank(matrix, rtol=1e-11).max()) <= layer.rank_bound
        ranks[name] = layers
    assert all(layer.rank_bound == HEAD_DIM for layer in ranks["linear"])
    assert all(layer.rank > HEAD_DIM for layer in ranks["MHLA"])


@pytest.mark.parametrize(("blocks", "bound"), [((2, 1, 1), 24), ((2, 2, 3), 96)])
def test_bound_counts_tokens_of_blocks_where_they_are_fewer_than_the_head_dim(blocks, bound):
    model = models.wan()
    call = TransformerCall((), models.inputs("wan"))
    apply_mhla(model, blocks=blocks)
    for layer in analyze_layers(model, call):
        assert layer.rank_bound == bound
        assert layer.rank <= bound
        assert (layer.tokens, layer.attention) == (96, "MHLA")


def test_unpatched_attention_is_told_by_its_kind():
    (softmax, *_) = analyze_layers(models.dit(), TransformerCall((), models.inputs("dit")))
    assert (softmax.attention, softmax.rank_bound) == ("softmax", 64)
    assert softmax.rank > 12
    (linear, *_) = analyze_layers(models.sana(), TransformerCall((), models.inputs("sana")))
    assert (linear.attention, linear.rank_bound) == ("linear", 16)
    assert linear.rank <= 16
    assert 0 < linear.entropy < torch.tensor(64.0).log()


def test_rank_is_relative_to_the_largest_singular_value():
    matrix = 1e6 * torch.diag(torch.tensor([1.0, 2e-4, 0.5e-4], dtype=torch.float64))[None, None]
    assert rank(matrix) == 2
    assert rank(matrix, tolerance=1e-5) == 3


def test_unknown_layers_and_large_grids_are_refused():
    call = TransformerCall((), models.inputs("dit"))
    with refused("'blocks.9'", "transformer_blocks.0.attn1"):
        analyze_layers(models.dit(), call, ["blocks.9"])
    large = TransformerCall((), {**models.inputs("dit"), "hidden_states": torch.zeros(1, 4, 160, 160)})
    with refused(6400):
        analyze_layers(models.dit(), large)
