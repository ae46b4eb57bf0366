"""Run the demo from beginning to end."""

import gc
import platform
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ..analysis import attention_matrices, mean_entropy, mean_rank
from ..analysis.pictures import mean_over_heads
from ..config import MHLAConfig
from ..evaluation.metrics import frechet_distance
from ..families import Family, NoisedBatch, get_family
from ..files import check_writable, write_json
from ..patching import mhla_layers
from ..reporting import require_matplotlib
from ..tiny import TinyPipeline, load_tiny, tiny_pipeline
from ..tiny.digits import Scene, load_digits
from .adaptation import Adaptation, Recipe, held_out_curve
from .figures import draw_loss_curves, draw_mixing, draw_pictures, file_name, write_page
from .judging import (
    DigitClassifier,
    digit_accuracy,
    digit_features,
    generate_scenes,
    load_classifier,
    real_scenes,
)
from .latents import digit_latents
from .results import Outcome, Row, format_table


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
        tiny_pipeline(self.family)
        for name, least in (("steps", 4), ("scenes", 2), ("samples", 16), ("held_out", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}.")


@dataclass(frozen=True)
class Variant:
    """One row of the demo's table."""

    name: str
    patch: MHLAConfig | None
    """None for the pipeline as it ships."""


def variants(tiny: TinyPipeline, family: Family) -> list[Variant]:
    """The pipeline as it ships, then plain linear attention, MHLA, and MHLA in two thirds of the layers."""
    own = "softmax" if family.own_attention == "softmax" else f"own {family.own_attention} attention"
    one_block = (1,) * len(tiny.blocks)
    mhla = MHLAConfig(blocks=tiny.blocks, mixing_per_head=tiny.mixing_per_head)
    return [
        Variant(own, None),
        Variant("plain linear", MHLAConfig(blocks=one_block, mixing_learnable=False, mixing_clip=False)),
        Variant("MHLA", mhla),
        Variant("MHLA hybrid 2/3", mhla.replace(layers="2/3")),
    ]


def shipped_recipe(family: Family, steps: int) -> Recipe:
    """The recipe of ``finetune/configs/tiny-*.yaml``, shortened: attention transfer, then all weights end to end.

    A model that was trained with linear attention, which MHLA begins close to, has no softmax attention to transfer
    from.
    """
    transfer = steps // 4 if family.own_attention == "softmax" else 0
    return Recipe(steps - transfer, transfer)


@dataclass(frozen=True)
class _Yardstick:
    """What all variants are measured with."""

    adaptation: Adaptation
    recipe: Recipe
    variants: list[Variant]
    scenes: list[Scene]
    real: list[torch.Tensor]
    """The scenes composed of real digits: (F, 64, 64) each."""
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
    for variant in yardstick.variants:
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
    tiny, pipe = tiny_pipeline(config.family), load_tiny(config.family)
    family = get_family(pipe.transformer)
    chance = random.Random(config.seed)
    scenes = [tiny.random_scene(chance) for _ in range(config.scenes)]
    return _Yardstick(
        Adaptation(
            tiny,
            digit_latents(pipe, tiny, config.samples, config.held_out, config.seed),
            held_out=config.held_out,
            seed=config.seed,
            validate_every=max(1, config.steps // 5),
            batch_size=tiny.batch_size,
            device=config.device,
        ),
        shipped_recipe(family, config.steps),
        variants(tiny, family),
        scenes,
        real_scenes(scenes, tiny, load_digits("held-out"), config.seed),
        load_classifier(),
    )


def _examine(variant: Variant, yardstick: _Yardstick) -> Outcome:
    """Patch and adapt a fresh pipeline, and measure it."""
    adaptation, scenes, classifier = yardstick.adaptation, yardstick.scenes, yardstick.classifier
    tiny, seed = adaptation.tiny, adaptation.seed
    pipe = adaptation.patched(variant.patch)
    before, losses = _mixing(pipe), []
    if variant.patch is not None:
        with tempfile.TemporaryDirectory() as folder:
            adaptation.adapt(pipe, yardstick.recipe, Path(folder))
            losses = held_out_curve(Path(folder))
    pictures = generate_scenes(pipe, tiny, scenes, seed)
    features = [digit_features(some, scenes, tiny, classifier) for some in (yardstick.real, pictures)]
    last = len(adaptation.data) - 1
    batch = adaptation.batch(pipe.transformer, (last - 1, last), torch.tensor([0.5, 0.5]))
    matrices = attention_matrices(pipe.transformer, batch)
    row = Row(
        name=variant.name,
        held_out_loss=fmean(adaptation.held_out_losses(pipe)),
        digit_accuracy=digit_accuracy(pictures, scenes, tiny, classifier),
        frechet_distance=frechet_distance(*features),
        rank=mean_rank(matrices),
        entropy=mean_entropy(matrices),
        seconds_per_step=_seconds(pipe.transformer, batch),
    )
    after = {name: matrix for name, matrix in _mixing(pipe).items() if len(matrix) > 1}
    return Outcome(row, pictures, losses, {name: (before[name], matrix) for name, matrix in after.items()})


def _mixing(pipe: Any) -> dict[str, torch.Tensor]:
    """Layer → its mixing matrix, the mean over heads where each has its own."""
    return {name: mean_over_heads(layer.mixing) for name, layer in mhla_layers(pipe).items()}


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
            blocks = tiny_pipeline(config.family).blocks
            figures[f"Mixing matrices of {outcome.row.name}"] = draw_mixing(outcome, blocks, file)
    title, rows = f"MHLA on tiny-{config.family}", [outcome.row for outcome in outcomes]
    write_page(config.output / "index.html", title, rows, figures, circumstances)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
