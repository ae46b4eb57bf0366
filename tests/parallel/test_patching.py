"""A patch over several processes: in whatever order it is made, removed, compiled, offloaded, adapted; and refusals."""

import pytest

from .processes import Processes
from .test_families import ROUNDING
from .transformers import (
    error_of_another_with_the_same_processor,
    error_when_offloaded,
    error_when_patched_after,
    error_with_lora,
    errors_after_inference_mode,
    errors_when_compiled,
    errors_without_patch,
    message_of,
    message_of_what_is_set,
    of_masked_text,
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


@either
def test_compiled(two: Processes, degrees: tuple[int, int]) -> None:
    for found in two.run(errors_when_compiled, degrees):
        assert max(found) < ROUNDING, found


@either
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offloading(two: Processes, degrees: tuple[int, int], kind: str) -> None:
    assert max(two.run(error_when_offloaded, degrees, kind)) < ROUNDING


@either
def test_gradients_of_an_adapter(two: Processes, degrees: tuple[int, int]) -> None:
    for found in two.run(error_with_lora, degrees):
        assert max(found.values()) < ROUNDING, found


@pytest.mark.parametrize(("different", "words"), [("blocks", "settings or layers"), ("weights", "weights")])
def test_patches_that_differ_are_found_at_the_first_call(two: Processes, different: str, words: str) -> None:
    for message in two.run(message_of, (2, 1), different=different):
        assert f"{words} of the patch of process 1 are not those of process 0" in message


def test_what_cannot_be_shared_out(two: Processes, four: Processes) -> None:
    for message in two.run(message_of, (2, 1), name="flux", ragged=True):
        assert "35 tokens" in message and "ring_anything=True" in message
    for message in four.run(message_of, (1, 4)):
        assert "ulysses_degree=4 does not divide the 2 heads" in message and "such as 2" in message


@either
def test_gradients_after_a_call_without_them(two: Processes, degrees: tuple[int, int]) -> None:
    """Tables of blocks, which outlive a call, can be kept for a backward pass."""
    for found in two.run(errors_after_inference_mode, degrees):
        assert max(found.values()) < ROUNDING, found


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
        assert "encoder_attention_mask leaves tokens of the text out" in message
