"""A classifier trained by transformers' ``Trainer``: its pictures, its model, and what is saved of it."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from ...config import check
from ...files import read_json, write_json
from ..comparing import check_same, settings_of
from ..recipe import run_trainer, save_result
from .blending import SoftLabels, soft_cross_entropy
from .config import DIGITS, ClassifyConfig
from .digits import SUMS, Sample, SumsOfDigits
from .folders import CentreView, ImageFolder, Normalised, RandomView, check_classes, subfolders_of
from .models import FRESH, Variant, as_variant, fresh_model
from .saving import name_classes, processor_of
from .sizes import call_settings

_PIXELS = "preprocessor_config.json"
"""As transformers names it: mean and standard deviation of the pixels that a model was trained on."""
_STARTED = "classify.json"


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
    return SumsOfDigits("train", config.steps * config.accumulate * config.batch_size, config.size, seed)


def _folder(config: ClassifyConfig, which: str) -> ImageFolder:
    pixels = Normalised() if config.model in FRESH else pixels_of(config.model)
    view = RandomView(config.size, pixels) if which == "train" else CentreView(config.size, pixels=pixels)
    folders: Any = config.data
    return ImageFolder(Path(folders[which]), view, classes_of(config))


def pixels_of(name: str) -> Normalised:
    """The normalisation of pixels that goes with a model of the Hub, or of a folder.

    Raises:
        OSError: it tells none.
        ValueError: it tells no mean and standard deviation.
    """
    from transformers.image_processing_base import ImageProcessingMixin

    found = ImageProcessingMixin.get_image_processor_dict(name)[0]
    missing = [key for key in ("image_mean", "image_std") if key not in found]
    check(not missing, f"{_PIXELS} of {name} lacks {', '.join(missing)}; add the values that it was trained with.")
    return Normalised(tuple(found["image_mean"]), tuple(found["image_std"]))


def build(config: ClassifyConfig, variant: Variant, seed: int) -> Any:
    """A fresh model of a variant; all variants of a seed begin with the same weights, as far as they have them.

    Raises:
        ValueError: settings that the model's configuration does not have.
    """
    torch.manual_seed(seed)
    if config.model in FRESH:
        return fresh_model(config.model, config.settings, variant, len(classes_of(config)), config.size)
    from transformers import AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(
        config.model, num_labels=len(classes_of(config)), ignore_mismatched_sizes=True
    )
    return as_variant(model, variant)


def train(model: Any, config: ClassifyConfig, seed: int, output: Path | None = None) -> Any:
    """Train a model in place.

    Args:
        model: from :func:`build`.
        config: of the training.
        seed: of the order of pictures.
        output: folder of transformers' checkpoints, from the last of which it goes on; None for none.

    Returns:
        The model.
    """
    labels = SoftLabels(len(classes_of(config)), config.smoothing, config.mixup, config.cutmix)
    settings = call_settings(model, config.size)
    return run_trainer(
        model,
        config,
        pictures_of(config, seed),
        seed=seed,
        steps=config.steps,
        output=output,
        collate=partial(_batch, labels, settings),
        loss=soft_cross_entropy,
        dataloader_num_workers=config.workers,
        save_steps=config.save_every,
        remove_unused_columns=False,
    )


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
    left_out = ("variants", "ablations", "workers", "save_every", "batch_size", "accumulate")
    settings = settings_of(config, left_out) | {"variant": variants[name]}
    started = output / _STARTED
    if started.is_file():
        check_same(read_json(started), settings, started)
    write_json(settings, started)
    seed = config.seeds[0]
    model = train(build(config, variants[name], seed), config, seed, output)
    pixels = Normalised() if config.model in FRESH else pixels_of(config.model)
    view = CentreView(config.size, crop=1.0 if config.data == DIGITS else CentreView.crop, pixels=pixels)
    write_json(processor_of(view), output / "result" / _PIXELS)
    name_classes(model, classes_of(config))
    return save_result(model, output / "result")
