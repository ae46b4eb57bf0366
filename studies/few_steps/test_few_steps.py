"""The study of few steps, on clips and updates that take seconds."""

import csv

import torch
from few_steps import GUIDANCE, TINY_WAN, distil_guidance, guided, main, velocity

from mhla_diffusers.tiny import load_tiny
from studies.adaptation.adaptation import digit_latents


def test_every_pipeline_gets_a_row(tmp_path):
    small = "--clips 2 --steps 2 --seeds 1 --guided 1 --warmup 1 --updates 1"
    main(["--output", str(tmp_path), *small.split()])
    with (tmp_path / "few-steps.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["steps"], row["guidance"]) for row in rows] == [
        ("teacher", "2", "3.0"),
        ("teacher in four steps", "4", "3.0"),
        ("softmax, distilled", "4", "1.0"),
        ("sparse, distilled", "4", "1.0"),
    ]
    assert all(0 <= float(row["digits"]) <= 1 and float(row["distance"]) > 0 for row in rows)
    assert (tmp_path / "few-steps.md").read_text(encoding="utf-8").count("\n") == 6


def test_a_student_learns_its_teachers_guidance():
    pipe, teacher = load_tiny("wan"), load_tiny("wan").transformer.requires_grad_(False)
    data = digit_latents(pipe, TINY_WAN, 8, 1, 0)
    noise, sigma = torch.randn(1, *data[0]["latents"].shape, generator=torch.Generator().manual_seed(0)), torch.ones(1)
    text, empty = data[0]["encoder_hidden_states"][None], data.empty["encoder_hidden_states"][None]

    def error() -> float:
        with torch.no_grad():
            target = guided(teacher, noise, sigma, text, empty, GUIDANCE)
            return float((velocity(pipe.transformer, noise, sigma, text) - target).square().mean())

    before = error()
    distil_guidance(pipe.transformer, teacher, data, updates=20, seed=0)
    assert error() < 0.7 * before
