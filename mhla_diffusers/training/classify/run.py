"""A classifier trained by transformers' ``Trainer``: its pictures, its model, and what is saved of it."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from ...config import check
from ...devices import launched_processes
from ..comparing import settings_of_one
from ..output import train_into
from ..recipe import Job, run_trainer
from .blending import SoftLabels, soft_cross_entropy
from .config import DIGITS, ClassifyConfig
from .digits import SUMS, Sample, SumsOfDigits
from .folders import CentreView, ImageFolder, Normalised, RandomView, check_classes, subfolders_of
from .models import FRESH, Variant, as_variant, fresh_model
from .saving import PROCESSOR, cutting_of, name_classes, processor_of
from .sizes import call_settings


def classes_of(config: ClassifyConfig) -> list[str]:
    """Names of the classes in the order of their labels, of digits the sums, of folders those that are trained on.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the folders have other classes each.
    """
    if isinstance(config.data, str):
        return [str(value) for value in range(SUMS)]
    train, held_out = (Path(config.data[which]) for which in ("train", "held_out"))
    classes = subfolders_of(train)
    check_classes(held_out, classes)
    return classes


def pictures_of(config: ClassifyConfig, seed: int, held_out: bool = False) -> Dataset[Sample]:
    """What is trained on, or judged on; all seeds are judged on the same pictures.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: pictures that are too small for two digits, or folders that have other classes each.
    """
    if config.data != DIGITS:
        return _folder(config, "held_out" if held_out else "train")
    if held_out:
        return SumsOfDigits("held-out", config.held_out, config.size, seed=0)
    of_a_step = config.accumulate * config.batch_size * launched_processes()
    return SumsOfDigits("train", config.steps * of_a_step, config.size, seed)


def _folder(config: ClassifyConfig, which: str) -> ImageFolder:
    pixels = normalisation_of(config)
    view = RandomView(config.size, pixels) if which == "train" else CentreView(config.size, pixels=pixels)
    folders: Any = config.data
    return ImageFolder(Path(folders[which]), view, classes_of(config))


def normalisation_of(config: ClassifyConfig) -> Normalised:
    """Of the pixels that are trained on, digits in [-1, 1] for any model; raises what :func:`cutting_of` raises."""
    if config.data == DIGITS:
        return Normalised((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    return Normalised() if config.model in FRESH else cutting_of(config.model).pixels


def build(config: ClassifyConfig, variant: Variant, seed: int) -> Any:
    """A model of a variant, float32; all variants of a seed begin with the same weights, as far as they have them.

    Raises:
        OSError: there is no such model.
        ValueError: settings that the model's configuration does not have, or a model to begin from that lacks more
            than a classifier of so many classes.
    """
    torch.manual_seed(seed)
    if config.model in FRESH:
        return fresh_model(config.model, config.settings, variant, len(classes_of(config)), config.size)
    from transformers import AutoModelForImageClassification

    model, found = AutoModelForImageClassification.from_pretrained(
        config.model,
        num_labels=len(classes_of(config)),
        ignore_mismatched_sizes=True,
        dtype=torch.float32,
        output_loading_info=True,
    )
    fresh = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
    others = sorted(name for name in fresh if "classifier" not in name)
    check(
        not others,
        f"{config.model} lacks {', '.join(others[:3])}{' and more' if others[3:] else ''}, or in this shape; give a "
        "model that lacks nothing but the classifier, for what it lacks begins at random.",
    )
    return as_variant(model, variant)


def train(model: Any, config: ClassifyConfig, seed: int, output: Path | None = None) -> float:
    """Train a model in place.

    Args:
        model: from :func:`build`.
        config: of the training.
        seed: of the order of pictures.
        output: folder of transformers' checkpoints, from the last of which it goes on; None for none.

    Returns:
        CPU seconds, see :func:`run_trainer`.

    Raises:
        ValueError: the model takes pictures of its own size alone, or several GPUs and no launcher.
    """
    labels = SoftLabels(len(classes_of(config)), config.smoothing, config.mixup, config.cutmix)
    job = Job(
        data=pictures_of(config, seed),
        seed=seed,
        steps=config.steps,
        collate=partial(_batch, labels, call_settings(model, config.size)),
        loss=soft_cross_entropy,
        workers=config.workers,
        save_every=config.save_every,
    )
    return run_trainer(model, config, job, output)


def _batch(labels: SoftLabels, settings: Mapping[str, Any], samples: list[Sample]) -> dict[str, Any]:
    return {**labels(samples), **settings}


def train_one(config: ClassifyConfig, name: str, output: Path) -> Path:
    """Train one variant, from the last checkpoint in the folder if there is one, and save it.

    Args:
        config: of the training; its first seed is taken.
        name: of the variant.
        output: folder of the checkpoints, and of ``result``, which ``evaluate`` reads.

    Returns:
        The folder of the result.

    Raises:
        ValueError: no such variant, or the folder is of another configuration.
    """
    variants = config.all_variants()
    check(name in variants, f"variant {name!r} is unknown; allowed: {', '.join(variants)}.")
    seed = config.seeds[0]

    def trained(folder: Path) -> Any:
        model = build(config, variants[name], seed)
        train(model, config, seed, folder)
        name_classes(model, classes_of(config))
        return model

    settings = settings_of_one(config, variants[name], ("ablations", "held_out", "analysed", "workers", "save_every"))
    crop = 1.0 if config.data == DIGITS else CentreView.crop
    processor = processor_of(CentreView(config.size, crop=crop, pixels=normalisation_of(config)))
    return train_into(output, settings, trained, {PROCESSOR: processor})
