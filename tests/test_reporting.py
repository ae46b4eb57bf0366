"""Tables as wide as a terminal, and progress, which needs none."""

import io
import sys

import pytest

from mhla_diffusers import reporting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stderr", "shown"), [(Terminal(), "100%|##########| 2/2 ["), (io.StringIO(), "")])
def test_progress_is_a_bar_on_a_terminal_and_silent_without_one_for_half_a_minute(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, shown: str
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    assert list(reporting.progress(range(2))) == [0, 1]
    assert shown in stderr.getvalue() and bool(stderr.getvalue()) == bool(shown)


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
