"""Attention matrices, their rank and entropy."""

import pytest
import torch

from mhla_diffusers import apply_mhla
from mhla_diffusers.auditing import TransformerCall
from mhla_diffusers.families import get_family
from studies.analysis.matrices import each_attention_matrix, entropy, rank

from .. import models


def attended(model, call):
    """What every self-attention hands to its output projection: name → (B, H, N, D), and its value in that shape."""
    found, values = {}, {}

    def record(seen, name, heads):
        def hook(_, args, output=None):
            seen[name] = (args[0] if output is None else output).unflatten(-1, (heads, -1)).transpose(1, 2)

        return hook

    with torch.no_grad():
        for name, attn in get_family(model).self_attentions(model).items():
            attn.to_v.register_forward_hook(record(values, name, attn.heads))
            attn.to_out[0].register_forward_pre_hook(record(found, name, attn.heads))
        call.predict(model)
    return found, values


PATCHES = {
    "none": None,
    "mhla": {},
    "rope before": {"rope": "before"},
    "no normaliser": {"normalize": False, "output_norm": True},
    "sparse": {"density": 0.2, "block_size": 8},
    "sparse, means": {"density": 0.2, "block_size": 8, "far": "means", "order": "curve"},
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
    matrices = dict(each_attention_matrix(model, call))
    assert set(found) == set(matrices)
    for layer, matrix in matrices.items():
        expected = matrix @ values[layer].double()
        if settings is not None and settings.get("output_norm"):
            expected = torch.nn.functional.rms_norm(expected, expected.shape[-1:], eps=1e-6)
        # float32 against float64; RoPE makes the numerator's terms cancel, hence the absolute part
        torch.testing.assert_close(found[layer].double(), expected, rtol=1e-4, atol=1e-5)


def test_rank_is_relative_to_the_largest_singular_value_and_no_weights_have_no_entropy():
    matrix = 1e6 * torch.diag(torch.tensor([1.0, 2e-4, 0.5e-4], dtype=torch.float64))[None, None]
    assert rank(matrix) == 2
    assert entropy(torch.zeros_like(matrix)) == 0
