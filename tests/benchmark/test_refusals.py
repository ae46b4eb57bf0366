"""What no command of ``mhla bench`` takes is said before anything is measured."""

import pytest

from ..refusals import refused
from .commands import bench


@pytest.mark.parametrize(
    ("asked", "offending"),
    [
        ("op --model wan", "'wan'...wan2.1-1.3b"),
        ("op --model tiny-dit --size 8xa", "'8xa'"),
        ("op --device gpu", "'gpu'"),
        ("transformer --model wan", "'wan'...wan2.1-1.3b"),
        ("transformer --model tiny-wan --size 480x850", "width=850...848...864"),
        ("transformer --model tiny-dit --size 64x80", "64x80"),
        ("transformer --model tiny-wan --frames 80", "frames=80...77...81"),
        ("transformer --model tiny-dit --frames 9", "--frames 9...tiny-dit"),
        ("transformer --model tiny-dit --size big", "'big'"),
        ("transformer --model tiny-dit --size 64x64x9", "64x64x9"),
        ("pipeline --size 64", "'height'"),
        ("pipeline --patch fast --dense-first 1.2", "dense_first...1.2"),
        ("pipeline --patch fast --density 2", "density=2"),
        ("pipeline --patch tiny-dit-sparze", "'tiny-dit-sparze'...tiny-dit-sparse"),
        ("pipeline --patch .", "'.'"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, monkeypatch, asked, offending):
    monkeypatch.chdir(tmp_path)
    with refused(offending):
        bench(*asked.split(), *(() if "--device" in asked else ("--device", "cpu")), "--output", tmp_path)
    assert not list(tmp_path.rglob("*.csv"))


def test_a_folder_without_a_pipeline_is_refused(tmp_path):
    with refused("model_index.json", error=OSError):
        bench("pipeline", "--model", tmp_path, "--device", "cpu", "--output", tmp_path)
