"""Tables as wide as a terminal, and progress, which needs none."""

import io
import sys

import diffusers.utils.logging
import pytest
import transformers.utils.logging
from huggingface_hub.utils import are_progress_bars_disabled

from mhla_diffusers import reporting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, seconds: float = 30.0) -> str:
    """What is written to standard error of two steps by a bar and of two by a count."""
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(reporting, "_SECONDS", seconds)
    bar = reporting.progress(total=2, unit="step")
    for done in (1, 2):
        bar.set_postfix(loss=done, refresh=False)
        bar.update()
    bar.close()
    return stderr.getvalue()


def test_progress_is_a_bar_on_a_terminal_and_lines_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "100%|##########| 2/2 [" in shown(monkeypatch, Terminal())
    assert shown(monkeypatch, io.StringIO()) == "", "of what takes no half minute"
    lines = shown(monkeypatch, io.StringIO(), seconds=0.0)
    assert "\r" not in lines and "##" not in lines
    last = lines.splitlines()[-1]
    assert "2/2 [" in last and "loss=2" in last


@pytest.mark.parametrize("stderr", [io.StringIO(), Terminal()])
def test_quiet_shows_none(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO) -> None:
    libraries = diffusers.utils.logging, transformers.utils.logging
    reporting.set_quiet(True)
    try:
        assert shown(monkeypatch, stderr, seconds=0.0) == ""
        assert are_progress_bars_disabled() and not any(library.is_progress_bar_enabled() for library in libraries)
    finally:
        reporting.set_quiet(False)
    assert all(library.is_progress_bar_enabled() for library in libraries), "and those of loading come back"


def test_a_table_too_wide_goes_on_in_further_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "28")
    rows = [["a", "one two three four", "1.5"], ["a-long-name", "five", "12"]]
    assert reporting.text_table(["name", "words", "ms"], rows, right=True).splitlines() == [
        "name              words   ms",
        "a               one two  1.5",
        "             three four",
        "a-long-name        five   12",
    ]
    monkeypatch.setenv("COLUMNS", "4")  # words stay whole
    assert "a-long-name" in reporting.text_table(["name", "words", "ms"], rows)
