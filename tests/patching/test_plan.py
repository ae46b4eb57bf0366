"""Which layers are replaced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mhla_diffusers as mhla
from mhla_diffusers.patching.settings import choose_layers

from ..models import FAMILIES, assert_changed, inputs, output, patched

LAYER_CHOICES = [
    ("all", [0, 1, 2, 3]),
    ("2/3", [1, 2]),
    (0.5, [1, 3]),
    ([2, 0], [0, 2]),
    ([-1], [3]),
    ([1, -4], [0, 1]),
]


@pytest.mark.parametrize("name", ["wan", "dit"])
@pytest.mark.parametrize(("layers", "indices"), LAYER_CHOICES)
def test_layers_choose_what_is_replaced(name, layers, indices):
    """The others keep their processor and get no weights."""
    model = FAMILIES[name].build()
    before = mhla.attn_processors(model)
    mhla.apply_mhla(model, layers=layers, sparse="none", blocks=FAMILIES[name].blocks)
    prefix = "blocks" if name == "wan" else "transformer_blocks"
    chosen = [f"{prefix}.{index}.attn1" for index in indices]
    assert list(mhla.mhla_layers(model)) == [f"{path}.mhla" for path in chosen]
    for path, processor in mhla.attn_processors(model).items():
        if path.removesuffix(".processor") in chosen:
            assert isinstance(processor, mhla.MHLAProcessor)
        else:
            assert processor is before[path]


def test_control_layers_of_vace_count_on_after_the_main_ones():
    model = patched("wan_vace", layers=[0, 3])
    assert list(mhla.mhla_layers(model)) == ["blocks.0.attn1.mhla", "vace_blocks.0.attn1.mhla"]


def test_two_thirds_is_the_hybrid_of_the_paper():
    """Every third layer is kept, beginning with layer 0, in a 30-layer and a 40-layer model."""
    for count in (30, 40):
        assert choose_layers("2/3", count) == [index for index in range(count) if index % 3]


def test_a_layer_that_was_kept_counts():
    """Replacing fewer layers changes the output less than replacing all, and differs from it."""
    original = output(FAMILIES["wan"].build(), inputs("wan"))
    some = output(patched("wan", layers=[3]), inputs("wan"))
    every = output(patched("wan"), inputs("wan"))
    assert_changed(some, original)
    assert (some - original).norm() < (every - original).norm()


def test_the_paper_s_hybrid_keeps_every_third_layer_from_the_first():
    kept = sorted(set(range(30)) - set(choose_layers("2/3", 30)))
    assert kept == list(range(0, 30, 3))
    assert sorted(set(range(28)) - set(choose_layers("2/3", 28))) == list(range(0, 28, 3))
    assert choose_layers(2 / 3, 30) == choose_layers("2/3", 30)


def test_other_choices():
    assert choose_layers("all", 4) == [0, 1, 2, 3]
    assert choose_layers("1/2", 6) == [1, 3, 5]
    assert choose_layers([0, -1, 2], 5) == [0, 2, 4]
    with pytest.raises(ValueError, match="Layer 5 is out of range: the model has 5 layers, -5 to 4"):
        choose_layers([1, 5], 5)


@given(st.fractions(min_value="1/10", max_value=1, max_denominator=20), st.integers(1, 60))
def test_a_fraction_replaces_about_that_many_layers(fraction, count):
    replaced = choose_layers(str(fraction), count)
    assert abs(len(replaced) - fraction * count) <= 1
