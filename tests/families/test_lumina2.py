"""What is particular to Lumina 2: images after texts of other lengths."""

import mhla_diffusers as mhla
from mhla_diffusers.families import get_family

from .cases import case_of, output

lumina2 = case_of("lumina2")
FAMILY = get_family("lumina2")


def test_audit_compares_tokens_of_the_image_in_every_sample():
    """Texts of other lengths: the unpatched attention's tokens are ordered as the patched one's."""
    model, arguments = lumina2.transformer(), lumina2.inputs()
    mhla.apply_mhla(model, block_size=4, density=1.0)
    found = mhla.audit(model, lambda: output(model, arguments))
    assert found.moves < 1e-4


def test_text_is_an_extra_token_where_it_is_seen():
    model, arguments = lumina2.transformer(), lumina2.inputs()
    found = {}

    def note(attn, args, kwargs, name):
        found[name] = FAMILY.adapter.read(attn, FAMILY.adapter.arguments(args, kwargs), lumina2.grid, 64).extra

    for name, attn in FAMILY.self_attentions(model).items():
        attn.register_forward_pre_hook(
            lambda attn, args, kwargs, name=name: note(attn, args, kwargs, name), with_kwargs=True
        )
    output(model, arguments)
    assert found == {"noise_refiner.0.attn": (0, 0), **{f"layers.{layer}.attn": (6, 0) for layer in range(3)}}
