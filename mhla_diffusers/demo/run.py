"""Run the demo from beginning to end."""

import gc
import platform
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..analysis import attention_matrices, mean_entropy, mean_rank
from ..analysis.pictures import mean_over_heads
from ..config import MHLAConfig
from ..evaluation.metrics import frechet_distance
from ..files import write_json
from ..patching import apply_mhla, mhla_layers
from ..reporting import require_matplotlib
from ..generation.folder import check_writable
from .building import check_family
from .classifier import DigitClassifier, load_classifier
from ..tiny.digits import Scene, load_digits, random_scene
from .judging import digit_accuracy, digit_features, generate_scenes, real_scenes
from .latents import digit_latents
from ..tiny.loading import load_tiny
from ..training import InMemoryData, TrainingConfig, read_metrics, train
from ..training.latents.batches import ValidationLoss
from ..training.latents.data import stack_samples
from ..families.processes import NoisedBatch, diffusion_process
from .figures import draw_loss_curves, draw_mixing, draw_pictures
from .page import write_page
from .table import format_table
from .variants import BLOCKS, Variant, adaptation, file_name, variants


@dataclass(frozen=True)
class DemoConfig:
    """What the demo does.

    Raises:
        ValueError: a value that is not allowed.
    """

    output: Path = Path("outputs/demo")
    family: str = "wan"
    device: str = "cpu"
    seed: int = 0
    steps: int = 120
    """Updates that adapt each patched variant."""
    scenes: int = 12
    """Scenes that every variant generates."""
    samples: int = 256
    """Scenes to adapt on."""
    held_out: int = 16
    """Scenes of held-out digits for the loss."""

    def __post_init__(self) -> None:
        check_family(self.family)
        for name, least in (("steps", 4), ("scenes", 2), ("samples", 16), ("held_out", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}.")


@dataclass
class Row:
    """What was measured of one variant."""

    name: str
    held_out_loss: float
    digit_accuracy: float
    frechet_distance: float
    rank: float
    entropy: float
    seconds_per_step: float


@dataclass
class Outcome:
    """One variant: its row, what it generated, and how its adaptation went."""

    row: Row
    pictures: list[torch.Tensor]
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(step, held-out loss)."""
    mixing: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Layer → its mixing matrix before and after."""


@dataclass(frozen=True)
class _Yardstick:
    """What all variants are measured with."""

    config: DemoConfig
    data: InMemoryData
    scenes: list[Scene]
    real: list[torch.Tensor]
    classifier: DigitClassifier


def run_demo(config: DemoConfig) -> list[Row]:
    """Compare the attentions and write table, pictures and page into ``config.output``.

    Returns:
        The rows of the table. With the same seed they are the same on the same CPU, but for the seconds.

    Raises:
        OSError: the output folder cannot be written; said before any work.
        ImportError: matplotlib or scikit-learn is missing.
        DamagedAssetError: files of the tiny pipeline are missing or damaged.
    """
    check_writable(config.output)
    require_matplotlib()
    started = time.perf_counter()
    _say(f"Preparing digits for tiny-{config.family} …")
    yardstick = _prepare(config)
    outcomes = []
    for variant in variants(config.family):
        _say(f"{variant.name} …")
        outcomes.append(_examine(variant, yardstick))
        gc.collect()
    rows = [outcome.row for outcome in outcomes]
    circumstances = {
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, {config.device}",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "minutes": f"{(time.perf_counter() - started) / 60:.1f}",
    }
    _write_folder(config, yardstick.scenes, outcomes, circumstances)
    _say(f"\n{format_table(rows)}\n\n{config.output / 'index.html'} shows all of it.")
    return rows


def _prepare(config: DemoConfig) -> _Yardstick:
    pipe = load_tiny(config.family)
    data = digit_latents(pipe, config.family, config.samples, config.held_out, config.seed)
    chance = random.Random(config.seed)
    scenes = [random_scene(config.family, chance) for _ in range(config.scenes)]
    real = real_scenes(scenes, config.family, load_digits("held-out"), config.seed)
    return _Yardstick(config, data, scenes, real, load_classifier())


def _examine(variant: Variant, yardstick: _Yardstick) -> Outcome:
    """Patch and adapt a fresh pipeline, and measure it."""
    config = yardstick.config
    pipe = load_tiny(config.family, config.device)
    losses: list[tuple[int, float]] = []
    before: dict[str, torch.Tensor] = {}
    patch = variant.patch
    # the held-out loss takes the same settings for every row, the unpatched one too
    any_patch = patch or MHLAConfig(blocks=BLOCKS[config.family])
    settings = adaptation(config.family, any_patch, config.steps, config.held_out, Path(), config.seed)
    if patch is not None:
        apply_mhla(pipe, patch)
        before = _mixing(pipe)
        losses = _adapt(pipe, yardstick, patch)
    pipe.transformer.eval()
    after = _mixing(pipe)
    loss = _held_out_loss(pipe.transformer, yardstick.data, settings, config)
    pictures = generate_scenes(pipe, config.family, yardstick.scenes, config.seed)
    batch = _fixed_batch(pipe.transformer, yardstick.data, settings, config)
    matrices = attention_matrices(pipe.transformer, batch)
    row = Row(
        name=variant.name,
        held_out_loss=loss,
        digit_accuracy=digit_accuracy(pictures, yardstick.scenes, config.family, yardstick.classifier),
        frechet_distance=_distance(pictures, yardstick),
        rank=mean_rank(matrices),
        entropy=mean_entropy(matrices),
        seconds_per_step=_seconds(pipe.transformer, batch),
    )
    learnt = variant.patch is not None and len(next(iter(after.values()))) > 1
    mixing = {name: (before[name], after[name]) for name in after} if learnt else {}
    return Outcome(row, pictures, losses, mixing)


def _mixing(pipe: Any) -> dict[str, torch.Tensor]:
    """Layer → its mixing matrix, the mean over heads where each has its own."""
    return {name: mean_over_heads(layer.mixing) for name, layer in mhla_layers(pipe).items()}


def _adapt(pipe: Any, yardstick: _Yardstick, patch: MHLAConfig) -> list[tuple[int, float]]:
    config = yardstick.config
    with tempfile.TemporaryDirectory() as folder:
        settings = adaptation(config.family, patch, config.steps, config.held_out, Path(folder) / "run", config.seed)
        train(pipe.transformer, yardstick.data, settings)
        records = read_metrics(Path(settings.output) / "metrics.jsonl")
    return [(record["step"], record["validation_loss"]) for record in records if "validation_loss" in record]


def _held_out_loss(transformer: Any, data: InMemoryData, settings: TrainingConfig, config: DemoConfig) -> float:
    loss = ValidationLoss(data, diffusion_process(transformer, settings.flow_shift), settings)
    return float(loss.sum_over_samples(transformer, torch.device(config.device), 0, 1)) / config.held_out


def _fixed_batch(transformer: Any, data: InMemoryData, settings: TrainingConfig, config: DemoConfig) -> NoisedBatch:
    """Two held-out samples, half way to the noise."""
    stacked = {
        name: tensor.to(config.device)
        for name, tensor in stack_samples([data[len(data) - 2], data[len(data) - 1]]).items()
    }
    latents = stacked.pop("latents")
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(config.seed)).to(config.device)
    process = diffusion_process(transformer, settings.flow_shift)
    return process.make_batch(latents, noise, torch.tensor([0.5, 0.5], device=config.device), stacked)


def _distance(pictures: list[torch.Tensor], yardstick: _Yardstick) -> float:
    features = [
        digit_features(some, yardstick.scenes, yardstick.config.family, yardstick.classifier)
        for some in (yardstick.real, pictures)
    ]
    return frechet_distance(*features)


@torch.no_grad()
def _seconds(transformer: Any, batch: NoisedBatch) -> float:
    """Median time of a forward with a batch of two, as classifier-free guidance needs it."""
    times = []
    for _ in range(7):
        started = time.perf_counter()
        batch.predict(transformer)
        if batch.latents.device.type == "cuda":
            torch.cuda.synchronize(batch.latents.device)
        times.append(time.perf_counter() - started)
    return sorted(times)[3]


def _write_folder(
    config: DemoConfig, scenes: list[Scene], outcomes: list[Outcome], circumstances: dict[str, str]
) -> None:
    results = {
        "config": {**asdict(config), "output": str(config.output)},
        "circumstances": circumstances,
        "rows": [asdict(outcome.row) for outcome in outcomes],
        "losses": {outcome.row.name: outcome.losses for outcome in outcomes if outcome.losses},
    }
    write_json(results, config.output / "results.json")
    figures = {"What each attention generates from the same noise": draw_pictures(outcomes, scenes, config.output)}
    figures["Held-out loss during adaptation"] = draw_loss_curves(outcomes, config.output / "loss.png")
    for outcome in outcomes:
        if outcome.mixing:
            file = config.output / f"mixing-{file_name(outcome.row.name)}.png"
            figures[f"Mixing matrices of {outcome.row.name}"] = draw_mixing(outcome, config.family, file)
    write_page(config.output / "index.html", config.family, [o.row for o in outcomes], figures, circumstances)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
