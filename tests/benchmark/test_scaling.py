"""``mhla bench scaling``."""

from dataclasses import replace

import pytest

from mhla_diffusers.benchmark.operation import default_scaling, fitted_exponent, mixing_overhead

from .commands import bench, measure

SMALL = ("scaling", "--heads", 1, "--head-dim", 8)


def test_every_n_and_m_is_measured(tmp_path):
    run = measure(
        tmp_path, *SMALL, "--tokens", 16, "--tokens", 64, "--blocks", 4, "--blocks", 64, "--softmax-tokens", 16
    )
    found = {(row.tokens, row.variant): row.status for row in run.rows}
    assert found == {
        (16, "softmax"): "measured",
        (16, "plain linear"): "measured",
        (16, "MHLA M=4"): "measured",
        (64, "softmax"): "absent",
        (64, "plain linear"): "measured",
        (64, "MHLA M=4"): "measured",
        (64, "MHLA M=64"): "measured",
    }
    row = run.rows[2]
    assert mixing_overhead(run, row) == pytest.approx(row.median / run.rows[1].median - 1)
    assert mixing_overhead(run, run.rows[1]) is None


def test_the_summary_marks_few_blocks(tmp_path):
    shown = bench(*SMALL, "--tokens", 16, "--blocks", 4, "--blocks", 16, "--seconds", 0.01, "--output", tmp_path)
    (few,) = [line for line in shown.splitlines() if line.startswith("│ 4 ")]
    (many,) = [line for line in shown.splitlines() if line.startswith("│ 16 ")]
    assert "*" in few and "*" not in many and "%" in many


def test_the_exponent_is_that_of_the_times(tmp_path):
    row = measure(tmp_path, *SMALL, "--tokens", 16, "--blocks", 4).rows[1]
    rows = [replace(row, tokens=n, median=3e-9 * n**1.5) for n in (16, 8192, 32768, 131072)]
    rows[0] = replace(rows[0], median=1.0)  # too few tokens to count
    assert fitted_exponent(rows, "plain linear") == pytest.approx(1.5)
    assert fitted_exponent(rows[:2], "plain linear") is None


def test_sizes_that_make_no_square_are_refused(tmp_path):
    with pytest.raises(ValueError, match="tokens=1000 is no square number.*961"):
        bench(*SMALL, "--tokens", 1000, "--output", tmp_path)


def test_a_gpu_goes_to_a_million_tokens():
    config = default_scaling("cuda")
    assert max(config.tokens) == 2**20
    assert (min(config.blocks), max(config.blocks)) == (4, 1024)
