"""Tests that run on a GPU where there is one carry the marker, so that ``make gpu`` runs them."""

from pathlib import Path


def test_tests_that_take_the_device_that_is_there_carry_the_marker():
    texts = {path.name: path.read_text() for path in Path(__file__).parent.glob("test_*.py")}
    marked = {name for name, text in texts.items() if "\npytestmark = " in text and "pytest.mark.gpu" in text}
    taking = {name for name, text in texts.items() if any(word in text for word in ("DEVICE", "on_device", "GPU ="))}
    assert marked == taking - {Path(__file__).name} != set()
