"""Attentions on a video model of 12,288 tokens that is trained from scratch on one GPU.

timeout --signal=TERM 9m python studies/length/length.py --output outputs/length   # on a GPU; the same command goes on
python studies/length/length.py --toy --output outputs/length-toy                  # on a CPU, at toy size
python studies/length/length.py --report --output outputs/length                   # table and plot alone, elsewhere

In order: a classifier of digits; a Wan transformer with softmax attention, trained on clips that grow longer; then
attentions in its place, a few without training, eight adapted, and the rest of the grid without training. SIGTERM ends
training with a checkpoint, from which the same command goes on, and after a kill from the last one; what is finished is
a file, written aside and renamed. length.md and length.csv hold the table, length.png the quality over the cost.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file
from scenes import Clips, ColourClassifier, Scenes, fine_detail, look, train_classifier

from mhla_diffusers import MHLAConfig, SparseConfig, apply_mhla, load_mhla
from mhla_diffusers.benchmark import measure
from mhla_diffusers.config import NOTHING_DENSE, PatchConfig
from mhla_diffusers.devices import choose_device
from mhla_diffusers.evaluation.metrics import frechet_distance
from mhla_diffusers.families import get_family, predict
from mhla_diffusers.files import read_json, write_json, write_tensors, written_aside
from mhla_diffusers.patching import find_patched
from mhla_diffusers.reporting import require_matplotlib
from mhla_diffusers.training import ObjectiveWeights, TrainingConfig, ValidationConfig, begin_with, train
from studies.adaptation.adaptation import DIFFUSION
from studies.tables import write_table

TEXT_DIM, DIGITS = 64, 3
"""Channels of a caption's words, and digits of a scene."""
FLOW_SHIFT, GUIDANCE, DROPOUT = 3.0, 2.5, 0.1
SCENES = 50_000
"""Training scenes that are drawn as they are needed."""


# ---- what is studied -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """One size of the study."""

    pixels: int = 128
    patch: int = 4
    frames: int = 12
    layers: int = 8
    heads: int = 6
    head_dim: int = 64
    blocks: tuple[int, int, int] = (4, 4, 4)
    """MHLA blocks on the token grid."""
    block_sizes: tuple[int, int, int] = (16, 64, 128)
    """Tokens of a block of sparse attention; the second for adapted rows, the third for the one with larger blocks."""
    densities: tuple[float, ...] = (0.02, 0.05, 0.1, 0.15, 0.25)
    """The second and third are adapted."""
    curriculum: tuple[tuple[int, int, int], ...] = ((1, 32, 2000), (4, 8, 900), (12, 4, 450))
    """Frames of a clip, clips of an update, and updates of softmax."""
    classifier: tuple[int, int] = (2000, 64)
    """Updates, and frames of each."""
    transfer_steps: int = 60
    adapted_steps: int = 150
    clips: int = 24
    """Clips that are generated for a row."""
    held_out: int = 16
    """Clips of the held-out loss."""
    sampler_steps: int = 20
    timing_seconds: float = 0.5


REAL = Size()
TOY = Size(
    pixels=32,
    frames=4,
    layers=2,
    heads=2,
    head_dim=16,
    blocks=(2, 2, 2),
    block_sizes=(4, 8, 16),
    densities=(0.05, 0.1, 0.25),
    curriculum=((1, 8, 20), (4, 2, 10)),
    classifier=(60, 32),
    transfer_steps=3,
    adapted_steps=5,
    clips=4,
    held_out=4,
    sampler_steps=4,
    timing_seconds=0.02,
)


@dataclass(frozen=True)
class Row:
    """One attention."""

    name: str
    config: PatchConfig | None = None
    """None for softmax."""
    generated: bool = True
    """Whether clips are generated, which for all rows would take too long."""
    adapted: bool = False

    @property
    def file_name(self) -> str:
        """Name without spaces, commas, percent signs and slashes."""
        kept = f"{self.name} adapted" if self.adapted else self.name
        return "-".join(kept.replace("/", "-").translate({ord(mark): None for mark in ",%"}).split())


def rows_of(size: Size) -> list[Row]:
    """Return all rows in the order in which they are made: what matters most comes first."""
    mhla = MHLAConfig(blocks=size.blocks, mixing_per_head=True)
    plain = MHLAConfig(blocks=(1, 1, 1), mixing_learnable=False, mixing_clip=False)
    _, usual, large = size.block_sizes

    def sparse(density: float, block_size: int = usual) -> SparseConfig:
        return SparseConfig(density=density, block_size=block_size, **NOTHING_DENSE)

    first = [Row("softmax"), Row("plain linear", plain), Row("MHLA", mhla)]
    first += [Row(f"sparse {density:.0%}", sparse(density)) for density in size.densities]
    low, high = size.densities[1:3]
    adapted = [
        Row("softmax, trained on"),
        Row(f"sparse {low:.0%}", sparse(low)),
        Row("MHLA", mhla),
        Row(f"sparse {high:.0%}", sparse(high)),
        Row("plain linear", plain),
        Row(f"sparse {low:.0%}, blocks of {large}", sparse(low, large)),
        Row("MHLA hybrid 2/3", mhla.replace(layers="2/3")),
    ]
    rest = []
    for block_size in size.block_sizes:
        for density in size.densities:
            name = f"sparse {density:.0%}" + (f", blocks of {block_size}" if block_size != usual else "")
            rest.append(Row(name, sparse(density, block_size), generated=False))
    known = {row.name for row in first}
    return [*first, *(replace(row, adapted=True) for row in adapted), *(row for row in rest if row.name not in known)]


class Captions:
    """Training data of the package's loop: scenes, drawn as they are needed, with a word for the digit of every colour.

    Args:
        size: of the study.
        frames: of a clip.
        device: where scenes are drawn.
    """

    def __init__(self, size: Size, frames: int, device: torch.device) -> None:
        self.splits = {
            split: Scenes(split, size.pixels, size.frames, DIGITS, device) for split in ("train", "held-out")
        }
        self.frames, self.shapes = frames, [(3, frames, size.pixels, size.pixels)] * (SCENES + size.held_out)
        self.weights = [1.0] * len(self.shapes)
        self._words = torch.randn(10 * DIGITS, TEXT_DIM, generator=torch.Generator().manual_seed(0)).to(device)
        self.empty = {"encoder_hidden_states": torch.zeros(DIGITS, TEXT_DIM, device=device)}

    def captions(self, labels: torch.Tensor) -> torch.Tensor:
        """Return words (B, DIGITS, TEXT_DIM) for labels (B, DIGITS)."""
        return self._words[labels + 10 * torch.arange(DIGITS, device=labels.device)]

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        clips = self.splits["train" if index < SCENES else "held-out"].draw(index, 1, self.frames)
        return {"latents": clips.pixels[0], "encoder_hidden_states": self.captions(clips.labels)[0]}


# ---- the parts -------------------------------------------------------------------------------------------------------


class Study:
    """What all parts share.

    Args:
        size: of the study.
        device: where it runs.
        output: folder of everything.
    """

    def __init__(self, size: Size, device: torch.device, output: Path) -> None:
        self.size, self.device, self.output = size, device, output
        self.data = Captions(size, size.frames, device)
        self.precision = "bf16" if device.type == "cuda" else "no"

    def autocast(self) -> Any:
        """Return the context of all forwards that are measured."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False)

    def prepare_classifier(self) -> None:
        """Take the classifier from its file, or train it."""
        file, self.classifier = self.output / "classifier.safetensors", ColourClassifier().to(self.device)
        if not file.is_file():
            trained = train_classifier(self.data.splits["train"], *self.size.classifier)
            write_tensors({name: value.cpu() for name, value in trained.state_dict().items()}, file)
        self.classifier.load_state_dict(load_file(file))
        self.classifier.eval()

    def train(self, model: Any, name: str, data: Captions, batch_size: int, **settings: Any) -> bool:
        """Train by the package's recipe, in a folder of the output; whether it finished."""
        config = TrainingConfig(
            output=str(self.output / "runs" / name),
            patch=next((patched.config for patched in find_patched(model).values()), None),
            batch_size=batch_size,
            flow_shift=FLOW_SHIFT,
            prompt_dropout=DROPOUT,
            precision=self.precision,
            checkpoint_every=50,
            keep_checkpoints=1,
            validation=ValidationConfig(samples=self.size.held_out, every=10**9),
            **settings,
        )
        return train(model, data, config, resume="latest").finished

    def train_softmax(self) -> bool:
        """Train the model with softmax attention, short clips first; whether it finished."""
        from diffusers import WanTransformer3DModel

        size = self.size
        torch.manual_seed(0)
        model = WanTransformer3DModel(
            patch_size=(1, size.patch, size.patch),
            num_attention_heads=size.heads,
            attention_head_dim=size.head_dim,
            in_channels=3,
            out_channels=3,
            text_dim=TEXT_DIM,
            ffn_dim=4 * size.heads * size.head_dim,
            num_layers=size.layers,
        )
        for frames, batch_size, steps in size.curriculum:
            name = f"softmax-{frames}-frames"
            self.weights = self.output / "runs" / name / "result"
            if not self.weights.is_dir():
                settings: dict[str, Any] = {"steps": steps, "learning_rate": 1e-3, "trainable": "all"}
                settings |= {"objectives": DIFFUSION, "scheduler": "cosine", "warmup_steps": min(100, steps // 2)}
                if not self.train(model, name, Captions(size, frames, self.device), batch_size, **settings):
                    return False
            model = WanTransformer3DModel.from_pretrained(self.weights)
        self.softmax = model.to(self.device).eval().requires_grad_(False)
        return True

    def make(self, row: Row) -> Any:
        """Return the model with a row's attention, adapted if it says so; None if SIGTERM ended its training."""
        model = type(self.softmax).from_pretrained(self.weights).to(self.device)
        if row.config is not None:
            apply_mhla(model, row.config)
        if not row.adapted:
            return model
        common: dict[str, Any] = {"data": self.data, "batch_size": self.size.curriculum[-1][1]}
        common |= {"trainable": "attention", "mixing_learning_rate": 5e-3}
        last = {"steps": self.size.adapted_steps, "learning_rate": 5e-4, "scheduler": "cosine"}
        if row.config is None:  # nothing to learn from itself: trained on with the loss of its training
            last |= {"steps": self.size.transfer_steps + last["steps"], "learning_rate": 2e-4, "objectives": DIFFUSION}
        else:
            last["objectives"] = ObjectiveWeights(distillation=1.0)
            first = {"steps": self.size.transfer_steps, "objectives": ObjectiveWeights(transfer=1.0)}
            name = f"{row.file_name}-transfer"
            transferred = self.output / "runs" / name / "result"
            if not transferred.is_dir() and not self.train(model, name, learning_rate=2e-3, **first, **common):
                return None
            model = begin_with(transferred, type(self.softmax).from_pretrained(self.weights))
        result = self.output / "runs" / row.file_name / "result"
        if not result.is_dir() and not self.train(model, row.file_name, **last, **common):
            return None
        if row.config is None:
            return type(self.softmax).from_pretrained(result).to(self.device)
        return load_mhla(type(self.softmax).from_pretrained(self.weights).to(self.device), result)

    def batch(self, indices: Sequence[int], quantiles: torch.Tensor) -> Any:
        """Return scenes with always the same noise, at (B,) quantiles of the distribution of timesteps."""
        samples = [self.data[index] for index in indices]
        latents, captions = (torch.stack([s[key] for s in samples]) for key in ("latents", "encoder_hidden_states"))
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(indices[0])).to(self.device)
        process = get_family(self.softmax).training.process(self.softmax, FLOW_SHIFT)
        return process.make_batch(latents, noise, quantiles.to(self.device), {"encoder_hidden_states": captions})

    @torch.no_grad()
    @torch.no_grad()
    def measure(self, row: Row, model: Any) -> dict[str, Any]:
        """Return all that the table has of a row."""
        size, process = self.size, get_family(self.softmax).training.process(self.softmax, FLOW_SHIFT)
        model.eval().requires_grad_(False)
        losses = []
        for number in range(size.held_out):
            batch = self.batch([SCENES + number], torch.tensor([(number + 0.5) / size.held_out]))
            with self.autocast():
                losses.append(float(process.loss(predict(model, batch), batch)))

        def forward() -> None:
            with self.autocast():
                predict(model, batch)

        timed = {measure.Row(row.name): forward}
        (outcome,) = measure.time_interleaved(timed, self.device, size.timing_seconds, most=10)
        if outcome.median is None:
            raise RuntimeError(outcome.reason)
        found: dict[str, Any] = {
            "loss": fmean(losses),
            "error": fmean(self.attention_errors(model, batch)),
            "seconds": outcome.median,
            "peak bytes": outcome.peak_bytes,
        }
        if row.generated:
            real = self.data.splits["held-out"].draw(2 * SCENES, size.clips)
            made = Clips(self.generate(model, real.labels), real.labels)
            right, features = look(self.classifier, made)
            known, expected = look(self.classifier, real)
            found |= {
                "digits": float(right.mean()),
                "digits of real clips": float(known.mean()),
                "Fréchet distance": frechet_distance(expected, features),
                "fine detail": fine_detail(made.pixels) / fine_detail(real.pixels),
            }
        return found

    def attention_errors(self, model: Any, batch: Any) -> list[float]:
        """Return ‖output − softmax's‖ / ‖softmax's‖ of every layer, on the inputs that the softmax model gives it."""
        found, hooks, side = [], [], self.size.pixels // self.size.patch
        for name, attn in get_family(self.softmax).self_attentions(self.softmax).items():

            def compare(own: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                other = model.get_submodule(name)
                run = own.forward if other is own else other  # without this hook
                with ExitStack() as grids:
                    for patched in find_patched(model).values():  # none where the model's own attention runs
                        grids.enter_context(patched.on_grid((self.size.frames, side, side)))
                    error = run(*args, **kwargs).float() - output.float()
                found.append(float(error.norm() / output.float().norm()))

            hooks.append(attn.register_forward_hook(compare, with_kwargs=True))
        try:
            with self.autocast():
                predict(self.softmax, batch)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def generate(self, model: Any, labels: torch.Tensor) -> torch.Tensor:
        """Generate clips (B, 3, F, S, S) of captions by Euler's steps with guidance, from the same noise for all."""
        size, process = self.size, get_family(self.softmax).training.process(self.softmax, FLOW_SHIFT)
        sigmas = process.shifted(torch.linspace(1, 0, size.sampler_steps + 1, device=self.device)).tolist()
        made = []
        for place, label in enumerate(labels):
            caption = self.data.captions(label[None])
            captions = torch.cat([caption, torch.zeros_like(caption)])
            noise = torch.Generator().manual_seed(place)
            x = torch.randn(1, 3, size.frames, size.pixels, size.pixels, generator=noise).to(self.device)
            for sigma, following in zip(sigmas, sigmas[1:], strict=False):
                times = process.timestep(torch.full((2,), sigma, device=self.device))
                with self.autocast():
                    velocity = model(torch.cat([x, x]), times, captions, return_dict=False)[0].float()
                asked, empty = velocity.chunk(2)
                x = x + (following - sigma) * (empty + GUIDANCE * (asked - empty))
            made.append(x)
        return torch.cat(made)


def run(study: Study) -> bool:
    """Make all parts that are not there yet; whether everything is finished. A row that fails says why."""
    study.prepare_classifier()
    if not study.train_softmax():
        return False
    for place, row in enumerate(rows_of(study.size)):
        file = study.output / "rows" / f"{place:03d}-{row.file_name}.json"
        if file.is_file():
            continue
        found: dict[str, Any] = {"name": row.name, "adapted": row.adapted, "generated": row.generated}
        try:
            if (model := study.make(row)) is None:
                return False
            found |= study.measure(row, model)
        except torch.AcceleratorError:  # the process can do nothing more on the device; the same command goes on
            raise
        except (RuntimeError, ValueError, NotImplementedError) as error:
            found["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        write_json(found, file)
        sys.stdout.write(f"{' | '.join(cells_of(found))}\n")
        sys.stdout.flush()
    return True


# ---- the table -------------------------------------------------------------------------------------------------------

COLUMNS = {
    "loss": ("held-out loss ↓", ".4f", 1),
    "digits": ("digits recognised ↑", ".1%", 1),
    "Fréchet distance": ("Fréchet distance ↓", ".1f", 1),
    "fine detail": ("fine detail, 100 % is real", ".0%", 1),
    "error": ("error of attention ↓", ".3f", 1),
    "seconds": ("ms per step", ".2f", 1000),
    "peak bytes": ("peak memory, GB", ".2f", 1e-9),
}
"""Measure → its column, how it is written, and a factor."""


def cells_of(found: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    cells = [found["name"], "adapted" if found["adapted"] else "–"]
    for key, (_, style, factor) in COLUMNS.items():
        value = found.get(key)
        cells.append("–" if value is None or math.isnan(value) else f"{factor * value:{style}}")
    if "failed" in found:
        cells[2] = f"failed: {found['failed']}"
    return cells


def write_report(output: Path) -> None:
    """Write the table of the rows that a folder has, and the plot."""
    rows = [read_json(file) for file in sorted((output / "rows").glob("*.json"))]
    header = ["self-attention", "trained", *(column for column, _, _ in COLUMNS.values())]
    write_table(header, [cells_of(found) for found in rows], output, "length")
    plt = require_matplotlib()
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    for adapted, generated, style in (
        (False, False, {"marker": ".", "color": "0.7", "label": "the grid, without training"}),
        (False, True, {"marker": "o", "color": "tab:blue", "label": "without training"}),
        (True, True, {"marker": "*", "s": 120, "color": "tab:red", "label": "adapted"}),
    ):
        shown = [one for one in rows if (one["adapted"], one["generated"]) == (adapted, generated) and "loss" in one]
        axes.scatter([1000 * one["seconds"] for one in shown], [one["loss"] for one in shown], **style)
        for one in shown if generated else ():
            place = 1000 * one["seconds"], one["loss"]
            axes.annotate(one["name"], place, textcoords="offset points", xytext=(5, 4), fontsize=7)
    axes.set(xlabel="ms per step of one clip", ylabel="held-out loss")
    axes.legend()
    with written_aside(output / "length.png") as aside:
        figure.savefig(aside, dpi=110)
    plt.close(figure)


def main() -> None:
    """Make what is missing, and the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/length"))
    parser.add_argument("--toy", action="store_true", help="toy size on the CPU, which says nothing about quality")
    parser.add_argument("--report", action="store_true", help="table and plot of the rows in --output, and run nothing")
    arguments = parser.parse_args()
    if arguments.report and not (arguments.output / "rows").is_dir():
        parser.error(f"--output {arguments.output} holds no study; give the folder of one")
    is_finished = True
    if not arguments.report:
        arguments.output.mkdir(parents=True, exist_ok=True)
        device = choose_device("cpu" if arguments.toy else "cuda")
        is_finished = run(Study(TOY if arguments.toy else REAL, device, arguments.output))
    if (arguments.output / "rows").is_dir():
        write_report(arguments.output)
    where = f"Finished: {arguments.output / 'length.md'}" if is_finished else "Stopped; the same command goes on."
    sys.stdout.write(f"{where}\n")


if __name__ == "__main__":
    main()
