"""SANA-Video: image-to-video, and the softmax attention that stands for its linear one in measurements."""

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb

from mhla_diffusers.demo.matrices import attention_matrices
from mhla_diffusers.families import get_family, imported
from mhla_diffusers.patching import TransformerCall

from ..models import relative_change
from .cases import case_of

CASE = case_of("sana_video")


def test_softmax_in_place_of_the_own_attention_has_its_norms_and_rope():
    model = CASE.transformer()
    attn = model.transformer_blocks[0].attn1
    rotary = model.rope(CASE.inputs()["hidden_states"])
    hidden_states = torch.randn(2, rotary[0].shape[1], 48, generator=torch.Generator().manual_seed(0))
    query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
    heads = [x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in (query, key, attn.to_v(hidden_states))]
    cos_sin = [table[0, :, 0] for table in rotary]
    turned = [apply_rotary_emb(x, cos_sin) for x in heads[:2]]
    expected = F.scaled_dot_product_attention(*turned, heads[2]).transpose(1, 2).flatten(2)
    attn.set_processor(imported(get_family("sana_video").softmax_processor)())
    with torch.no_grad():
        torch.testing.assert_close(
            attn(hidden_states, rotary_emb=rotary), attn.to_out[0](expected), rtol=1e-5, atol=1e-5
        )


@torch.no_grad()
def test_matrices_are_those_of_the_own_attention():
    """A matrix times the value is what the heads give: RoPE turns the numerator alone."""
    model, arguments = CASE.transformer(), CASE.inputs()
    values, handed = {}, {}
    for name in CASE.attentions:
        attn = model.get_submodule(name)
        attn.to_v.register_forward_hook(lambda _, __, value, name=name: values.__setitem__(name, value))
        attn.to_out[0].register_forward_pre_hook(lambda _, args, name=name: handed.__setitem__(name, args[0]))
    matrices = attention_matrices(model, TransformerCall((), arguments))
    for name, matrix in matrices.items():
        found = torch.einsum("bhqk,bkhd->bqhd", matrix, values[name].unflatten(-1, (2, -1)).double())
        assert relative_change(found.flatten(2).float(), handed[name]) < 1e-5
