"""Check that the tiny pipelines generate what they are asked for: ``python -m mhla_diffusers.tiny.benchmark``."""

import argparse
import json
import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .building import FAMILIES
from .classifier import load_classifier, real_crops
from .digits import load_digits, random_scene
from .judging import digit_accuracy, digit_features, frechet_distance, generate_scenes, real_scenes
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


def main() -> None:
    """Measure, print, record, and exit with status 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--family", choices=FAMILIES, action="append", help="may be given several times; all if left out"
    )
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path("assets/tiny"), help="folder for one JSON file each")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = {"classifier": check_classifier()}
    for family in arguments.family or FAMILIES:
        results[family] = check_pipeline(family, arguments.samples, device=arguments.device)
    for name, result in results.items():
        (arguments.output / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        verdict = "reached" if result["accuracy"] >= result["target"] else "MISSED"
        sys.stdout.write(f"{name}: accuracy {result['accuracy']:.1%}, target {result['target']:.0%} {verdict}\n")
    if any(result["accuracy"] < result["target"] for result in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
