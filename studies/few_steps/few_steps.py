"""Four steps on the tiny Wan pipeline, beside its usual twenty.

python studies/few_steps/few_steps.py --output outputs/few-steps
Every student is distilled from the same pipeline on the same prompts, once per seed, and all generate the same clips
from the same noise. One row is written as it is finished, and a command that was interrupted goes on where it was. The
digits that a small classifier recognises are counted, and their Fréchet distance to real ones is taken. Training is
timed in CPU time of one thread. --time, on an idle machine, then measures the clips of all of them in turns.
"""

import argparse
import csv
import json
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch

from mhla_diffusers.config import SparseConfig, patch_folder
from mhla_diffusers.demo.adaptation import ADAPTED_RECORD, digit_latents, train_or_go_on
from mhla_diffusers.demo.judging import Yardstick, generate_scenes
from mhla_diffusers.devices import threads
from mhla_diffusers.evaluation.metrics import frechet_distance
from mhla_diffusers.files import write_json, write_text
from mhla_diffusers.generation import load_result
from mhla_diffusers.patching import apply_mhla, load_mhla, save_mhla
from mhla_diffusers.patching.few_step_scheduler import few_steps_of
from mhla_diffusers.reporting import text_table
from mhla_diffusers.tiny import TINY, load_tiny
from mhla_diffusers.training import ObjectiveWeights, StageConfig, TrainingConfig
from mhla_diffusers.training.config import FewStepsConfig

TINY_WAN = TINY["wan"]
SPARSE = SparseConfig(density=0.05, block_size=TINY_WAN.block_size, refresh=None)
TIMES = (1.0, 0.9, 0.75, 0.5)
"""σ of four even steps, shifted by 3 as the pipeline's scheduler shifts them."""
GUIDANCE: float = TINY_WAN.call_settings["guidance_scale"]
MATCHED_GUIDANCE = 2.0
"""Guidance of the teacher in distribution matching: less than it samples with, see ``few-steps-tried.csv``."""
CLIPS, PROMPTS, BOOTSTRAPS = 100, 512, 200
TIMED_CLIPS, ROUNDS = 10, 5
"""Generated together; how often."""
GUIDED, WARMUP, UPDATES = 250, 40, 60
"""Updates of distillation of the teacher's guidance, after which the student samples without; of the critic alone; of
student and critic.
"""


@dataclass(frozen=True)
class Student:
    """One way to distil."""

    name: str
    patch: SparseConfig | None
    trainable: str = "all"
    factor: float = 1.0
    """On all learning rates; LoRA takes higher ones."""
    guided: int = GUIDED
    updates: int = UPDATES


STUDENTS = {
    "sparse": Student("sparse at 5 %, copies", SPARSE),
    "softmax": Student("softmax, copies", None),
    "sparse-lora": Student("sparse at 5 %, two LoRAs", SPARSE, "lora", 2.0, guided=350, updates=100),
}


@dataclass(frozen=True)
class Row:
    """One pipeline on all clips."""

    name: str
    seed: int | None
    steps: int
    guidance: float
    digits: float
    """Part that is recognised."""
    distance: float
    distance_spread: float
    """Standard deviation over clips that are drawn again."""
    seconds_per_clip: float | None = None
    """Wall clock, on one thread; None before it is measured."""
    minutes: float | None = None
    """CPU minutes of training."""


def train_student(student: Student, seed: int, run: Path) -> float | None:
    """Distil, or go on with it. Returns minutes of CPU time; None where an earlier call did a part."""
    is_new = not (run / "checkpoints").is_dir()
    pipe = load_tiny("wan")
    data = digit_latents(pipe, TINY_WAN, PROMPTS, 1, seed)
    if student.patch is not None:
        apply_mhla(pipe, student.patch)
    lora: dict[str, Any] = {"lora_rank": 32, "lora_layers": "blocks"} if student.trainable == "lora" else {}
    few_steps = FewStepsConfig(
        TIMES,
        guidance=MATCHED_GUIDANCE,
        critic_updates=1,
        critic_warmup=WARMUP,
        critic_learning_rate=3e-4 * student.factor,
    )
    shared: dict[str, Any] = {"trainable": student.trainable, **lora}
    distil = StageConfig(
        student.guided,
        5e-4 * student.factor,
        objectives=ObjectiveWeights(distillation=1.0),
        guidance=GUIDANCE,
        scheduler="cosine",
        **shared,
    )
    few = StageConfig(WARMUP + student.updates, 6e-5 * student.factor, few_steps=few_steps, **shared)
    config = TrainingConfig(
        str(run), (distil, few), patch=student.patch, seed=seed, batch_size=4, ema_decay=0.9, checkpoint_every=20
    )
    started = time.process_time()
    train_or_go_on(pipe.transformer, data, config)
    return (time.process_time() - started) / 60 if is_new else None


def judge(name: str, pipe: Any, yardstick: Yardstick, seed: int | None = None, **settings: Any) -> Row:
    """Generate all clips and judge them."""
    if few_steps_of(pipe) is not None:
        settings = {"num_inference_steps": len(TIMES), "guidance_scale": 1.0}
    call = {**TINY_WAN.call_settings, **settings}
    pictures = yardstick.generate(pipe, **settings)
    features, real = yardstick.features(pictures), torch.cat(yardstick.features(yardstick.real))
    generator, distances = torch.Generator().manual_seed(0), []
    for _ in range(BOOTSTRAPS):
        drawn = torch.randint(len(features), (len(features),), generator=generator).tolist()
        distances.append(frechet_distance(real, torch.cat([features[place] for place in drawn])))
    return Row(
        name,
        seed,
        call["num_inference_steps"],
        call["guidance_scale"],
        fmean(float(one.double().mean()) for one in yardstick.recognised(pictures)),
        yardstick.distance(pictures),
        stdev(distances),
    )


def trained_pipeline(run: Path) -> Any:
    """The tiny pipeline with a finished student."""
    pipe = load_tiny("wan")
    load_result(pipe, run / "result")
    pipe.transformer.eval()
    return pipe


def measure_times(output: Path, yardstick: Yardstick) -> None:
    """Generate some clips with all pipelines in turns, and add the median of the wall clock to their rows."""
    rows = read_rows(output)
    pipes = {key: load_tiny("wan") if row.seed is None else trained_pipeline(output / key) for key, row in rows.items()}
    seconds: dict[str, list[float]] = {key: [] for key in rows}
    for _ in range(ROUNDS + 1):  # the first is a warm-up
        for key, row in rows.items():
            settings = {"num_inference_steps": row.steps, "guidance_scale": row.guidance}
            started = time.perf_counter()
            generate_scenes(pipes[key], TINY_WAN, yardstick.scenes[:TIMED_CLIPS], yardstick.seed, **settings)
            seconds[key].append((time.perf_counter() - started) / TIMED_CLIPS)
    for key, row in rows.items():
        write_json(asdict(replace(row, seconds_per_clip=median(seconds[key][1:]))), output / "rows" / f"{key}.json")


def read_rows(output: Path) -> dict[str, Row]:
    """Those that are finished, by the folder of the run; teachers and then students in the order of ``STUDENTS``."""
    rows = {file.stem: Row(**json.loads(file.read_text())) for file in sorted((output / "rows").glob("*.json"))}
    names = [student.name for student in STUDENTS.values()]

    def place(row: Row) -> tuple[int, int, int]:
        return (names.index(row.name) if row.name in names else -1, -row.steps, row.seed or 0)

    return dict(sorted(rows.items(), key=lambda item: place(item[1])))


def write_tables(rows: list[Row], output: Path) -> None:
    """``few-steps.csv``, a line per row, and ``few-steps.md``, the mean over seeds."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / "few-steps.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(
            {name: round(x, 4) if isinstance(x, float) else x for name, x in asdict(row).items()} for row in rows
        )
    lines = []
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]
        minutes = [row.minutes for row in own if row.minutes is not None]
        seconds = [row.seconds_per_clip for row in own if row.seconds_per_clip is not None]
        lines.append(
            [
                name,
                str(own[0].steps),
                f"{own[0].guidance:g}",
                str(len(own)) if own[0].seed is not None else "–",
                _spread([100 * row.digits for row in own], 1),
                _spread([row.distance for row in own], 1),
                f"{fmean(seconds):.2f}" if seconds else "–",
                f"{fmean(minutes):.1f}" if minutes else "–",
            ]
        )
    header = ["pipeline", "steps", "guidance", "seeds", "digits recognised, % ↑", "Fréchet distance ↓"]
    header += ["s per clip", "minutes to distil"]
    table = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines)]
    write_text("\n".join(table) + "\n", output / "few-steps.md")
    sys.stdout.write(f"{text_table(header, lines)}\n")


def install(student: str, seed: int, output: Path) -> None:
    """Make a finished student the one that the package ships, in half precision, with the record of how it was made."""
    trained, base, saved = trained_pipeline(output / f"{student}-{seed}"), load_tiny("wan"), load_tiny("wan")
    folder = patch_folder() / f"tiny-wan-{len(TIMES)}-steps"
    shutil.rmtree(folder, ignore_errors=True)
    save_mhla(trained, folder, weights="changed", base=base, base_model="tiny-wan", dtype=torch.float16)
    load_mhla(saved, folder)
    row = judge(STUDENTS[student].name, saved, Yardstick(TINY_WAN, TINY_WAN.random_scenes(CLIPS, 0), 0), seed)
    record = {
        "command": f"python studies/few_steps/few_steps.py --only {student} --seeds {seed} --install",
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "updates of guided distillation": STUDENTS[student].guided,
        "updates of the critic alone": WARMUP,
        "updates of student and critic": STUDENTS[student].updates,
        "digits recognised, in half precision, as it ships": row.digits,
        "Fréchet distance, in half precision, as it ships": row.distance,
    }
    write_json(record, folder / ADAPTED_RECORD)


def _spread(values: list[float], digits: int) -> str:
    mean = f"{fmean(values):.{digits}f}"
    return f"{mean} ± {stdev(values):.{digits}f}" if len(values) > 1 else mean


def main() -> None:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/few-steps"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=["teacher", *STUDENTS], default=["teacher", *STUDENTS])
    parser.add_argument("--time", action="store_true", help="measure the clips of all finished rows in turns")
    parser.add_argument("--install", action="store_true", help="make the first of them that which the package ships")
    arguments = parser.parse_args()
    output: Path = arguments.output
    with threads(1):
        yardstick = Yardstick(TINY_WAN, TINY_WAN.random_scenes(CLIPS, 0), 0)

        def record(key: str, row: Row) -> None:
            write_json(asdict(row), output / "rows" / f"{key}.json")

        if "teacher" in arguments.only:
            for name, steps in {
                "teacher": TINY_WAN.call_settings["num_inference_steps"],
                "teacher, few steps": len(TIMES),
            }.items():
                key = f"teacher-{steps:02d}"
                if not (output / "rows" / f"{key}.json").is_file():
                    record(key, judge(name, load_tiny("wan"), yardstick, num_inference_steps=steps))
        for seed in arguments.seeds:
            for short, student in STUDENTS.items():
                run = output / f"{short}-{seed}"
                if short not in arguments.only or (output / "rows" / f"{run.name}.json").is_file():
                    continue
                minutes = None if (run / "result").is_dir() else train_student(student, seed, run)
                row = judge(student.name, trained_pipeline(run), yardstick, seed)
                record(run.name, replace(row, minutes=minutes))
        if arguments.time:
            measure_times(output, yardstick)
        if arguments.install:
            install(next(short for short in arguments.only if short in STUDENTS), arguments.seeds[0], output)
    write_tables(list(read_rows(output).values()), output)


if __name__ == "__main__":
    main()
