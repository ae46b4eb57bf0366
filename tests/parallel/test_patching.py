"""A patch over several processes: in whatever order it is made, removed, compiled, offloaded, adapted; and refusals."""

from typing import Any

import pytest

from .processes import Processes
from .test_families import ROUNDING
from .transformers import (
    FEATURES,
    add_adapter,
    compile_forward,
    compile_one_block,
    error_of_another_with_the_same_processor,
    error_under_cache,
    error_when_patched_after,
    errors,
    errors_without_patch,
    message_of,
    message_of_what_is_set,
    of_masked_text,
    offload_blocks,
    offload_leaves,
    run_without_gradients,
)

either = pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=["ring", "heads"])


@either
def test_patching_what_is_spread_already(two: Processes, degrees: tuple[int, int]) -> None:
    assert max(two.run(error_when_patched_after, degrees)) < ROUNDING


@either
def test_what_was_before_attends_over_the_processes(two: Processes, degrees: tuple[int, int]) -> None:
    """Processors that were replaced when diffusers told all of the processes are told of them when they come back."""
    for found in two.run(errors_without_patch, degrees):
        assert max(found) < ROUNDING, found


CHANGES: dict[str, dict[str, Any]] = {
    "blocks offloaded": {"settings": FEATURES, "after": offload_blocks, "gradients_too": False},
    "leaves offloaded": {"settings": FEATURES, "after": offload_leaves, "gradients_too": False},
    "an adapter": {"before": add_adapter},
    # tables of blocks, which outlive a call, can be kept for a backward pass
    "run without gradients first": {"after": run_without_gradients},
}


@either
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_two_processes_equal_one_after(two: Processes, degrees: tuple[int, int], change: dict[str, Any]) -> None:
    for found in two.run(errors, "wan", degrees, **change):
        assert max(found.values()) < ROUNDING, found


@either
@pytest.mark.parametrize("name", ["MagCache", "TaylorSeer"])
def test_a_cache_that_goes_by_the_number_of_the_step(two: Processes, degrees: tuple[int, int], name: str) -> None:
    assert max(two.run(error_under_cache, degrees, name)) < ROUNDING


@pytest.mark.parametrize(
    ("degrees", "compiled", "gradients_too"), [((2, 1), compile_one_block, True), ((1, 2), compile_forward, False)]
)
def test_compiled(two: Processes, degrees: tuple[int, int], compiled: Any, gradients_too: bool) -> None:
    """One block of a ring, and the whole where heads are exchanged."""
    for found in two.run(errors, "wan", degrees, FEATURES, after=compiled, gradients_too=gradients_too):
        assert max(found.values()) < ROUNDING, found


@pytest.mark.parametrize(("different", "words"), [("blocks", "settings or layers"), ("weights", "weights")])
def test_patches_that_differ_are_found_at_the_first_call(two: Processes, different: str, words: str) -> None:
    for message in two.run(message_of, (2, 1), different=different):
        assert f"{words} of the patch of process 1 are not those of process 0" in message


def test_what_cannot_be_shared_out(two: Processes, four: Processes) -> None:
    for message in two.run(message_of, (1, 2), name="flux", ragged=True):
        assert "35 tokens" in message and "ulysses_anything=True" in message
    for changes in ({"name": "flux"}, {"density": 0.1}):
        for message in two.run(message_of, (2, 1), **changes):
            assert "ring_degree=2" in message and "ulysses_degree" in message
    for message in four.run(message_of, (1, 4)):
        assert "ulysses_degree=4 does not divide the 2 heads" in message and "such as 2" in message


def test_a_processor_of_two_transformers(two: Processes) -> None:
    assert max(two.run(error_of_another_with_the_same_processor, (2, 1))) == 0


@pytest.mark.parametrize(
    ("what", "words"), [("cache", "First Block Cache decides"), ("form", "use mhla_diffusers.set_attn_processor")]
)
def test_what_does_not_know_its_tokens_is_refused(two: Processes, what: str, words: str) -> None:
    for message in two.run(message_of_what_is_set, (2, 1), what):
        assert words in message


def test_a_mask_that_hides_text_is_refused(two: Processes) -> None:
    for error, message in two.run(of_masked_text, (2, 1)):
        assert error < ROUNDING
        assert "encoder_attention_mask masks text tokens" in message
