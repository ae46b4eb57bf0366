"""A full disk, by a limit on the size of files: errors name the file, and what is half made does not count."""

import resource
import sys
from contextlib import contextmanager

import pytest
import torch

from mhla_diffusers.files import write_json, write_tensors, write_text, write_whole_folder
from mhla_diffusers.generation.generate import SampleSet, generate, plan_samples

from .refusals import refused

FAST = {"num_inference_steps": 1}


@contextmanager
def full_disk(free=1000):
    """Within the context no file grows beyond some bytes; Python ignores the signal that comes with it."""
    limits, caching = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    # Python would keep the beginning of a module that is first imported here, and fail at every later import
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = caching


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("x.txt", lambda file: write_text("x" * 5000, file)),
        ("x.json", lambda file: write_json(["x"] * 5000, file)),
        ("x.safetensors", lambda file: write_tensors({"x": torch.zeros(5000)}, file)),
        # not what a folder is written to first
        ("x/a.txt", lambda file: write_whole_folder(file.parent, lambda x: write_text("x" * 5000, x / file.name))),
        ("before/x", lambda file: write_whole_folder(file, lambda aside: None)),
    ],
)
def test_files_are_named_and_the_one_before_stays(tmp_path, name, write):
    before, file = tmp_path / ("before" if "/" in name else name), tmp_path / name
    before.write_text("before")
    with full_disk(), refused(f" {file}: ", "choose another folder", error=OSError):
        write(file)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


@pytest.mark.parametrize(("family", "suffix"), [("dit", ".png"), ("wan", ".mp4")])
def test_what_is_generated_in_part_is_no_sample(tmp_path, family, suffix):
    settings = FAST if family == "dit" else {**FAST, "num_frames": 2}
    config = SampleSet(family, plan_samples([("seven", None)], suffix), tmp_path / "out", settings=settings)
    with full_disk(), refused(f"out/0000-0-seven{suffix}: ", "another folder", error=OSError):
        list(generate(config))
    assert not list(tmp_path.glob(f"out/*{suffix}"))
    assert [made for _, made in generate(config)] == [True]
