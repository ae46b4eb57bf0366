"""Distil the tiny Wan from twenty guided denoising steps to four unguided ones, with and without a sparse patch.

python studies/few_steps/few_steps.py --output outputs/few-steps

A student first learns its teacher's guidance, so that it samples without. Then it learns to sample in four steps by
distribution matching (DMD2, https://arxiv.org/abs/2405.14867, in the form for flow matching). Its samples are noised to
a random time, where two models denoise them: the guided teacher, and a critic, which learns the distribution of the
student's own samples. The difference of the two is the student's gradient. All of it is a loop upon apply_mhla and
models of diffusers. A small classifier counts the digits that it recognises in the clips; their Fréchet distance is to
real ones. Everything runs on one thread, and times are CPU time.
"""

import argparse
import copy
import csv
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

from mhla_diffusers import SparseConfig, apply_mhla
from mhla_diffusers.config import NOTHING_DENSE
from mhla_diffusers.tiny import load_tiny
from studies.adaptation.adaptation import digit_latents
from studies.adaptation.digits import TINY
from studies.adaptation.judging import Yardstick

TINY_WAN = TINY["wan"]
PATCHES = {"softmax": None, "sparse": SparseConfig(density=0.05, block_size=TINY_WAN.block_size, **NOTHING_DENSE)}
"""Student → its patch; None for the model's own attention."""
TIMES = (1.0, 0.9, 0.75, 0.5)
"""σ of four even steps, shifted by 3 as the pipeline's scheduler shifts them."""
SHIFT = 3.0
GUIDANCE, MATCHED_GUIDANCE = 3.0, 2.0
"""Scale that the teacher samples with and the student learns first; scale in distribution matching, where a teacher
guided as for sampling loses variety.
"""
PROMPTS, BATCH = 512, 4
GUIDANCE_RATE, STUDENT_RATE, CRITIC_RATE = 5e-4, 6e-5, 3e-4
LEAST, MOST = 0.02, 0.98
"""σ that samples are noised to; near 0 and 1 the difference between teacher and critic is uninformative."""


@dataclass(frozen=True)
class Row:
    """One pipeline on all clips."""

    name: str
    seed: int | None
    """Seed of the distillation; None for the teacher, which is not distilled."""
    steps: int
    guidance: float
    digits: float
    """Fraction that is recognised."""
    distance: float
    """Fréchet distance to real digits, in the classifier's features."""
    seconds_per_clip: float
    """CPU time."""
    minutes: float | None
    """CPU time of the distillation."""


class FourSteps(FlowMatchEulerDiscreteScheduler):
    """Flow matching at TIMES, with fresh noise after every step but the last."""

    def set_timesteps(self, num_inference_steps: int | None = None, device: Any = None, **_: Any) -> None:
        """Set TIMES, whatever number of steps the pipeline asks for."""
        super().set_timesteps(sigmas=list(TIMES), device=device)


# ---- one model, at one time ------------------------------------------------------------------------------------------


def along(values: Tensor, like: Tensor) -> Tensor:
    """Return values of samples (B,) as (B, 1, ...)."""
    return values.view(-1, *[1] * (like.ndim - 1))


def noised(latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return (1 − σ) latents + σ noise; ``sigma`` is (B,)."""
    return torch.lerp(latents, noise, along(sigma, latents))


def velocity(model: nn.Module, latents: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    """Return what the model predicts: noise − latents, like ``latents`` (B, C, F, H, W)."""
    output: Tensor = model(latents, timestep=1000 * sigma, encoder_hidden_states=text, return_dict=False)[0]
    return output


def guided(model: nn.Module, latents: Tensor, sigma: Tensor, text: Tensor, empty: Tensor, scale: float) -> Tensor:
    """Return the velocity with classifier-free guidance."""
    return torch.lerp(velocity(model, latents, sigma, empty), velocity(model, latents, sigma, text), scale)


def denoised(latents: Tensor, sigma: Tensor, predicted: Tensor) -> Tensor:
    """Return the clean latents by a velocity: x_σ − σ v."""
    return latents - along(sigma, latents) * predicted


def shifted(sigma: Tensor) -> Tensor:
    """Return σ after the shift that the model was trained with."""
    return SHIFT * sigma / (1 + (SHIFT - 1) * sigma)


# ---- distillation ----------------------------------------------------------------------------------------------------


def batches(data: Any, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield latents, text and the empty prompt's text of random samples, without end."""
    name = "encoder_hidden_states"
    while True:
        samples = [data[int(place)] for place in torch.randint(len(data), (BATCH,), generator=generator)]
        latents, text = (torch.stack([sample[key] for sample in samples]) for key in ("latents", name))
        yield latents, text, data.empty[name].expand_as(text)


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Do one update, with the gradient's norm clipped to 1."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([x for group in optimizer.param_groups for x in group["params"]], 1.0)
    optimizer.step()


def distil_guidance(student: nn.Module, teacher: nn.Module, data: Any, updates: int, seed: int) -> None:
    """Train the student to predict without guidance what the teacher predicts with it."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(student.parameters(), GUIDANCE_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5 + 0.5 * math.cos(math.pi * n / updates))
    for _, (latents, text, empty) in zip(range(updates), batches(data, generator), strict=False):
        sigma = shifted(torch.randn(BATCH, generator=generator).sigmoid())
        given = noised(latents, torch.randn(latents.shape, generator=generator), sigma)
        with torch.no_grad():
            target = guided(teacher, given, sigma, text, empty, GUIDANCE)
        update(optimizer, nn.functional.mse_loss(velocity(student, given, sigma, text), target))
        schedule.step()


def match_distribution(student: nn.Module, teacher: nn.Module, data: Any, warmup: int, updates: int, seed: int) -> None:
    """Train the student to sample in four steps what the guided teacher samples; it ends with averaged weights.

    Teacher and critic are equal at the beginning, where their difference is zero; so first the critic learns alone.
    """
    generator, critic = torch.Generator().manual_seed(seed + 1), copy.deepcopy(teacher).requires_grad_(True)
    of_student = torch.optim.AdamW(student.parameters(), STUDENT_RATE, weight_decay=0.0)
    of_critic = torch.optim.AdamW(critic.parameters(), CRITIC_RATE, weight_decay=0.0)
    average = EMAModel(student.parameters(), decay=0.9)
    for number, (latents, text, empty) in zip(range(warmup + updates), batches(data, generator), strict=False):
        trains_student = number >= warmup
        last = int(torch.randint(len(TIMES), (), generator=generator))
        noise = torch.randn((last + 3, *latents.shape), generator=generator)
        at_student, at_critic = shifted(torch.rand((2, BATCH), generator=generator)).clamp(LEAST, MOST)

        # the student samples up to one of its steps; the gradient goes through that one
        samples = noise[0]
        for step in range(last + 1):
            sigma = torch.full((BATCH,), TIMES[step])
            given = noised(samples, noise[step], sigma)
            with torch.set_grad_enabled(trains_student and step == last):
                samples = denoised(given, sigma, velocity(student, given, sigma, text))

        if trains_student:
            with torch.no_grad():
                given = noised(samples, noise[-2], at_student)
                real = guided(teacher, given, at_student, text, empty, MATCHED_GUIDANCE)
                real = denoised(given, at_student, real)
                fake = denoised(given, at_student, velocity(critic, given, at_student, text))
                size = (samples - real).abs().flatten(1).mean(dim=1).clamp_min(1e-8)
                target = samples - (fake - real) / along(size, samples)
            update(of_student, 0.5 * nn.functional.mse_loss(samples, target))
            average.step(student.parameters())

        samples = samples.detach()
        given = noised(samples, noise[-1], at_critic)
        update(of_critic, nn.functional.mse_loss(velocity(critic, given, at_critic, text), noise[-1] - samples))
    average.copy_to(student.parameters())


# ---- measuring -------------------------------------------------------------------------------------------------------


def judge(
    name: str,
    pipe: Any,
    yardstick: Yardstick,
    steps: int,
    guidance: float,
    seed: int | None = None,
    minutes: float | None = None,
) -> Row:
    """Generate all clips and judge them."""
    torch.manual_seed(0)  # of the noise between the student's steps
    started = time.process_time()
    clips = yardstick.generate(pipe, num_inference_steps=steps, guidance_scale=guidance)
    seconds = (time.process_time() - started) / len(clips)
    digits, distance = yardstick.accuracy(clips), yardstick.distance(clips)
    return Row(name, seed, steps, guidance, digits, distance, seconds, minutes)


def table(rows: Sequence[Row]) -> str:
    """Return the rows in Markdown, those of several seeds as mean ± standard deviation."""
    header = "pipeline", "steps", "guidance", "seeds", "digits recognised, % ↑", "Fréchet distance ↓"
    lines: list[Sequence[str]] = [(*header, "CPU s per clip", "CPU minutes to distil"), ["---"] * 8]

    def spread(values: Sequence[float], digits: int) -> str:
        mean = f"{fmean(values):.{digits}f}"
        return mean if len(values) == 1 else f"{mean} ± {stdev(values):.{digits}f}"

    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]
        minutes = [row.minutes for row in own if row.minutes is not None]
        cells = name, str(own[0].steps), f"{own[0].guidance:g}", str(len(minutes)) if minutes else "–"
        quality = spread([100 * row.digits for row in own], 1), spread([row.distance for row in own], 1)
        cost = f"{fmean(row.seconds_per_clip for row in own):.2f}", f"{fmean(minutes):.1f}" if minutes else "–"
        lines.append((*cells, *quality, *cost))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(words: Sequence[str] | None = None) -> None:
    """Command line of this script: distil, judge and write few-steps.csv and few-steps.md, row after row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/few-steps"))
    parser.add_argument("--students", nargs="+", choices=list(PATCHES), default=list(PATCHES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--clips", type=int, default=100, help="that every pipeline generates")
    parser.add_argument("--steps", type=int, default=20, help="of the teacher")
    parser.add_argument("--guided", type=int, default=250, help="updates of the distillation of guidance")
    parser.add_argument("--warmup", type=int, default=40, help="updates of the critic alone")
    parser.add_argument("--updates", type=int, default=60, help="updates of student and critic")
    asked = parser.parse_args(words)
    asked.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    yardstick = Yardstick(TINY_WAN, TINY_WAN.random_scenes(asked.clips, 0), 0)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        with (asked.output / "few-steps.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            rounded = ({k: round(x, 4) if isinstance(x, float) else x for k, x in asdict(one).items()} for one in rows)
            writer.writerows(rounded)
        (asked.output / "few-steps.md").write_text(table(rows), encoding="utf-8")

    teacher = load_tiny("wan").transformer.requires_grad_(False)
    add(judge("teacher", load_tiny("wan"), yardstick, asked.steps, GUIDANCE))
    add(judge("teacher in four steps", load_tiny("wan"), yardstick, len(TIMES), GUIDANCE))
    for name in asked.students:
        for seed in asked.seeds:
            pipe = load_tiny("wan")
            data = digit_latents(pipe, TINY_WAN, PROMPTS, 1, seed)
            if (patch := PATCHES[name]) is not None:
                apply_mhla(pipe, patch)
            started = time.process_time()
            distil_guidance(pipe.transformer, teacher, data, asked.guided, seed)
            match_distribution(pipe.transformer, teacher, data, asked.warmup, asked.updates, seed)
            minutes = (time.process_time() - started) / 60
            pipe.scheduler = FourSteps(shift=1.0, stochastic_sampling=True)
            add(judge(f"{name}, distilled", pipe, yardstick, len(TIMES), 1.0, seed, minutes))
    sys.stdout.write(table(rows))


if __name__ == "__main__":
    main()
