"""Check that the tiny pipelines generate what they are asked for: ``mhla bench tiny``."""

import platform
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..evaluation.metrics import frechet_distance
from ..evaluation.results import write_json
from .building import FAMILIES, check_family
from .classifier import load_classifier, real_crops
from .digits import load_digits, random_scene
from .judging import digit_accuracy, digit_features, generate_scenes, real_scenes
from .loading import call_settings, load_tiny

TARGETS = {"dit": 0.90, "sana": 0.85, "wan": 0.80}
"""Digit accuracy that each tiny pipeline must reach."""
CLASSIFIER_TARGET = 0.97


def check_classifier() -> dict[str, Any]:
    """Accuracy of the classifier on the held-out digits."""
    crops, labels = real_crops(load_digits("held-out"), seed=1)
    with torch.no_grad():
        accuracy = float((load_classifier()(crops).argmax(dim=1) == labels).float().mean())
    return {"digits": len(labels), "accuracy": round(accuracy, 4), "target": CLASSIFIER_TARGET, **_circumstances()}


def check_pipeline(family: str, samples: int = 100, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Generate random scenes and let the classifier judge them.

    Args:
        family: dit, sana or wan.
        samples: how many scenes.
        seed: of scenes and noise.
        device: where the pipeline runs.

    Returns:
        Digit accuracy with its target, the same for real held-out digits, the Fréchet distance between the two in the
        classifier's feature space, seconds, and what it was measured on.
    """
    chance = random.Random(seed)
    scenes = [random_scene(family, chance) for _ in range(samples)]
    classifier = load_classifier()
    pipe = load_tiny(family, device)
    started = time.perf_counter()
    generated = generate_scenes(pipe, family, scenes, seed)
    seconds = time.perf_counter() - started
    real = real_scenes(scenes, family, load_digits("held-out"), seed)
    distance = frechet_distance(*(digit_features(p, scenes, family, classifier) for p in (real, generated)))
    return {
        "family": family,
        "samples": samples,
        "seed": seed,
        "accuracy": round(digit_accuracy(generated, scenes, family, classifier), 4),
        "target": TARGETS[family],
        "accuracy_of_real_digits": round(digit_accuracy(real, scenes, family, classifier), 4),
        "frechet_distance": round(distance, 3),
        "settings": call_settings(family),
        "seconds": round(seconds, 1),
        **_circumstances(),
    }


def _circumstances() -> dict[str, str]:
    import diffusers

    return {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def check_all(
    families: Sequence[str] | None, samples: int, device: str, output: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Check the classifier and then pipelines, one after the other, and record each.

    Args:
        families: which pipelines; all for None.
        samples: scenes per pipeline.
        device: where the pipelines run.
        output: folder for one JSON file each.

    Yields:
        Name and result.

    Raises:
        ValueError: unknown family.
        OSError: the folder cannot be written, or files of a pipeline are missing or damaged.
    """
    chosen = families or FAMILIES
    for family in chosen:
        check_family(family)
    output.mkdir(parents=True, exist_ok=True)
    for name in ("classifier", *chosen):
        result = check_classifier() if name == "classifier" else check_pipeline(name, samples, device=device)
        write_json(result, output / f"{name}.json")
        yield name, result
