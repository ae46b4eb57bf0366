"""Which layers are replaced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mhla_diffusers as mhla
from mhla_diffusers.patching import attn_processors
from mhla_diffusers.patching.patch import choose_layers

from ..models import FAMILIES, assert_changed, inputs, output, patched


@pytest.mark.parametrize("name", ["wan", "dit"])
@pytest.mark.parametrize(
    ("layers", "indices"),
    [
        ("all", [0, 1, 2, 3]),
        ("2/3", [1, 2]),
        (0.5, [1, 3]),
        ([2, 0], [0, 2]),
        ([-1], [3]),
        ([1, -4], [0, 1]),
    ],
)
def test_layers_choose_what_is_replaced(name, layers, indices):
    """The others keep their processor and get no weights."""
    model = FAMILIES[name].build()
    before = attn_processors(model)
    mhla.apply_mhla(model, layers=layers, sparse="none", blocks=FAMILIES[name].blocks)
    prefix = "blocks" if name == "wan" else "transformer_blocks"
    chosen = [f"{prefix}.{index}.attn1" for index in indices]
    assert list(mhla.mhla_layers(model)) == [f"{path}.mhla" for path in chosen]
    for path, processor in attn_processors(model).items():
        is_chosen = path.removesuffix(".processor") in chosen
        assert isinstance(processor, mhla.MHLAProcessor) if is_chosen else processor is before[path]


def test_control_layers_of_vace_count_on_after_the_main_ones():
    model = patched("wan_vace", layers=[0, 3])
    assert list(mhla.mhla_layers(model)) == ["blocks.0.attn1.mhla", "vace_blocks.0.attn1.mhla"]


def test_a_layer_that_was_kept_counts():
    """Replacing fewer layers changes the output less than replacing all, and differs from it."""
    original = output(FAMILIES["wan"].build(), inputs("wan"))
    some = output(patched("wan", layers=[3]), inputs("wan"))
    every = output(patched("wan"), inputs("wan"))
    assert_changed(some, original)
    assert (some - original).norm() < (every - original).norm()


@pytest.mark.parametrize("count", [28, 30, 40])
def test_two_thirds_is_the_hybrid_of_the_paper(count):
    """Every third layer is kept, beginning with layer 0."""
    for layers in ("2/3", 2 / 3):
        assert choose_layers(layers, count) == [index for index in range(count) if index % 3]


def test_other_choices():
    assert choose_layers("all", 4) == [0, 1, 2, 3]
    assert choose_layers("1/2", 6) == [1, 3, 5]
    assert choose_layers([0, -1, 2], 5) == [0, 2, 4]
    with pytest.raises(ValueError, match="Layer 5 .*-5 to 4"):
        choose_layers([1, 5], 5)


@given(st.fractions(min_value="1/10", max_value=1, max_denominator=20), st.integers(1, 60))
def test_a_fraction_replaces_about_that_many_layers(fraction, count):
    replaced = choose_layers(str(fraction), count)
    assert abs(len(replaced) - fraction * count) <= 1
