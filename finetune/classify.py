"""Image classifiers with MHLA: train one, compare kinds of attention, run ablations, measure accuracy over a folder.

python finetune/classify.py train --config finetune/configs/classify-digits.yaml --variant MHLA --output outputs/one
python finetune/classify.py compare --config finetune/configs/classify-digits.yaml --output outputs/digits
python finetune/classify.py ablate --config finetune/configs/classify-digits.yaml --output outputs/digits
python finetune/classify.py evaluate --model facebook/deit-tiny-patch16-224 --pictures imagenet/val
Settings of a configuration are overridden by key=value, for example: steps=100 warmup=10
"""

import argparse
import inspect
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np
import torch
import trainer
import transformers
from PIL import Image
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForImageClassification, PreTrainedConfig, ViTConfig, ViTForImageClassification
from transformers.image_processing_base import ImageProcessingMixin

from mhla_diffusers import apply_mhla, load_mhla, models
from mhla_diffusers.analysis import analyze_layers
from mhla_diffusers.analysis.pictures import draw_attention_maps, middle_of
from mhla_diffusers.config import PatchConfig
from mhla_diffusers.devices import choose_device, launched_processes
from mhla_diffusers.families import find_family
from mhla_diffusers.files import IMAGE_SUFFIXES
from mhla_diffusers.generation.pixels import UnreadableMediaError, read_picture
from mhla_diffusers.patching import CONFIG_NAME, TransformerCall
from mhla_diffusers.reporting import mean_and_spread, require_matplotlib, show_progress, write_table
from mhla_diffusers.settings import Settings, allow, check, check_names
from mhla_diffusers.tiny.digits import load_digits

Variant = Mapping[str, Any] | str
"""Settings of a patch, of a VLT those of its configuration instead, or "softmax"."""
Sample = dict[str, torch.Tensor]
"""``pixel_values`` (3, H, W), and ``labels``, int64 ()."""

SOFTMAX, DIGITS = "softmax", "digits"
PROCESSOR = "preprocessor_config.json"
"""As transformers names it: how the pictures were cut and normalised that a model was trained on."""

# --- configuration ---

FRESH: dict[str, tuple[Any, Any]] = {
    "vit": (ViTForImageClassification, ViTConfig),
    "pooled-vit": (models.PooledViTForImageClassification, models.PooledViTConfig),
    "deit-t": (models.PooledViTForImageClassification, models.PooledViTConfig.deit_t),
    "deit-s": (models.PooledViTForImageClassification, models.PooledViTConfig.deit_s),
    "vlt": (models.VLTForImageClassification, models.VLTConfig),
    "vlt-t": (models.VLTForImageClassification, models.VLTConfig.vlt_t),
    "vlt-s": (models.VLTForImageClassification, models.VLTConfig.vlt_s),
}
"""Models with random weights → class and what makes its configuration; other names are of the Hub, or folders."""


@dataclass(frozen=True)
class PictureFolders(Settings):
    """Folders with a subfolder per class."""

    train: str
    held_out: str


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(trainer.Recipe):
    """What is trained, on what, and how.

    Raises:
        ValueError: an unknown kind of attention or data, or numbers that are not allowed.
    """

    model: str
    """One of ``FRESH``, or a classifier of the Hub or a folder to begin from."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of the configuration class of a model of ``FRESH``; nothing for a model to begin from."""
    data: Literal["digits"] | PictureFolders = DIGITS
    """Digits of scikit-learn, or folders."""
    size: int = field(metadata=trainer.COUNT)
    """Height and width of a picture in pixels."""
    variants: dict[str, Variant] = field(metadata=allow(is_filled=True))
    """Name → kind of attention."""
    ablations: dict[str, dict[str, Variant]] = field(default_factory=dict)
    """Name of a table → names of its rows → kind of attention, or the name of a variant."""
    smoothing: float = field(default=0.0, metadata=allow(at_least=0, below=1, example=0.1))
    """Part of a label that all classes share."""
    mixup: float = field(default=0.0, metadata=trainer.ZERO_OR_MORE)
    """α of the Beta distribution by which pictures are blended; 0 for none."""
    cutmix: float = field(default=0.0, metadata=trainer.ZERO_OR_MORE)
    """α of the one by which they are pasted into each other; 0 for none."""
    held_out: int = field(default=1000, metadata=trainer.COUNT)
    """Pictures of digits that are judged; of folders it is all."""
    analysed: int = field(default=8, metadata=trainer.COUNT)
    """Held-out pictures whose attention matrices are looked at."""
    workers: int = field(default=0, metadata=trainer.ZERO_OR_MORE)
    """Processes that read pictures."""
    save_every: int = field(default=1000, metadata=trainer.COUNT)
    """Steps between two checkpoints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            not self.settings or self.model in FRESH,
            f"settings are those of a model with random weights, and model={self.model!r} has its own; leave them out, "
            f"or choose one of {', '.join(FRESH)}.",
        )
        for name, variant in self.all_variants().items():
            if isinstance(variant, str):
                allowed = f"allowed: {SOFTMAX!r}, or settings of a patch."
                check(variant == SOFTMAX, f"variant {name!r} is {variant!r}; {allowed}")
            elif not self.model.startswith("vlt"):
                PatchConfig.read(variant)
        for table, rows in self.ablations.items():
            for row, variant in rows.items():
                check(
                    not isinstance(variant, str) or variant in self.variants,
                    f"{row!r} of the ablation {table!r} is {variant!r}, which is none of the variants "
                    f"{', '.join(self.variants)}; give the name of one, or settings of a patch.",
                )
        trainer.check_file_names(self.all_variants())
        trainer.check_file_names(self.ablations, taken=("comparison",))

    def all_variants(self) -> dict[str, Variant]:
        """Those of the comparison, and those that stand in ablations alone, which are named by table and row."""
        of_ablations = {
            f"{table}, {row}": variant
            for table, rows in self.ablations.items()
            for row, variant in rows.items()
            if not isinstance(variant, str)
        }
        return {**self.variants, **of_ablations}

    def ablation_tables(self) -> dict[str, dict[str, str]]:
        """Name of a table → its rows → names in :meth:`all_variants`; raises ValueError if there is none."""
        check(bool(self.ablations), "The configuration has no ablations: tables of rows with settings of a patch each.")
        return {
            table: {row: one if isinstance(one, str) else f"{table}, {row}" for row, one in rows.items()}
            for table, rows in self.ablations.items()
        }


# --- data ---

SUMS = 19
"""Classes of the digits: sums from 0 to 18."""
STEP, SIZE = 8, 16
"""Digits of 16 pixels lie at multiples of 8: with patches of that size a model learns in minutes."""


class SumsOfDigits(Dataset[Sample]):
    """Pictures whose class is the sum of two handwritten digits, composed as they are asked for.

    Args:
        split: of the handwritten digits, "train" or "held-out"; no digit is in both.
        count: of pictures.
        size: of a picture in pixels, at least 48, where two digits fit wherever the first one lies.
        seed: every picture follows from it and the index.

    Raises:
        ValueError: unknown split, or a size that is too small.
    """

    def __init__(self, split: Any, count: int, size: int, seed: int) -> None:
        check(size >= 3 * SIZE, f"size={size} is too small for two digits at any places; give at least {3 * SIZE}.")
        self.digits = load_digits(split)
        self.split, self.count, self.size, self.seed = split, count, size, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.count:
            raise IndexError(index)
        picture, total = torch.zeros(self.size, self.size), 0
        chance, places = self._draw(index)
        for top, left, label in places:
            digit = self.digits.pick(label, chance)[None, None]
            drawn = functional.interpolate(digit, size=(SIZE, SIZE), mode="bilinear")
            picture[top : top + SIZE, left : left + SIZE] = drawn[0, 0]
            total += label
        return {"pixel_values": (2 * picture - 1).expand(3, -1, -1), "labels": torch.tensor(total)}

    def places(self, index: int) -> list[tuple[int, int, int]]:
        """Return top, left and label of the two digits of a picture."""
        return self._draw(index)[1]

    def _draw(self, index: int) -> tuple[random.Random, list[tuple[int, int, int]]]:
        chance = random.Random(f"{self.split} {self.seed} {index}")
        ends = 0, self.size - SIZE + 1, STEP
        while True:
            one, other = [(chance.randrange(*ends), chance.randrange(*ends), chance.randrange(10)) for _ in range(2)]
            if abs(one[0] - other[0]) >= SIZE or abs(one[1] - other[1]) >= SIZE:
                return chance, [one, other]


@dataclass(frozen=True)
class View:
    """What a model sees of a picture: a square of it, its pixels normalised.

    Args:
        size: height and width in pixels.
        crop: part of the shorter side that is kept around the middle, 0.875 for 224 of 256 pixels; None for a random
            part of the picture, flipped every other time, as models are trained.
        mean: of each channel, of pixels from 0 to 1; by default ImageNet's.
        std: likewise.

    Raises:
        ValueError: a crop that is no part of a picture.
    """

    size: int
    crop: float | None = 0.875
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        check(
            self.crop is None or 0 < self.crop <= 1,
            f"crop={self.crop} must be above 0 and at most 1, the part of a picture's shorter side that is kept.",
        )

    def __call__(self, picture: Image.Image) -> torch.Tensor:
        """A picture in RGB as (3, size, size)."""
        turned = False
        if self.crop is None:
            # torch's generator: every process that reads has its own state
            chance = random.Random(int(torch.randint(2**62, ()).item()))
            box, turned = random_box(*picture.size, chance), chance.random() < 0.5
        else:
            box = middle_box(*picture.size, self.crop * min(picture.size))
        resized = picture.resize((self.size, self.size), Image.Resampling.BICUBIC, box=box)
        pixels = torch.from_numpy(np.array(resized, dtype=np.float32)).movedim(-1, 0) / 255
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        seen = (pixels - mean) / std
        return seen.flip(-1) if turned else seen

    def processor(self) -> dict[str, Any]:
        """Settings of transformers' ``BitImageProcessor``, which cuts likewise but for rounding: it resizes first."""
        return {
            "image_processor_type": "BitImageProcessor",
            "do_convert_rgb": True,
            "size": {"shortest_edge": round(self.size / (self.crop or 1.0))},
            "resample": int(Image.Resampling.BICUBIC),
            "crop_size": {"height": self.size, "width": self.size},
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }


def middle_box(width: int, height: int, side: float) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the square in the middle."""
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, chance: random.Random) -> tuple[float, float, float, float]:
    """Draw a box of 8 to 100 % of the area, 3:4 to 4:3, as in DeiT; a square where ten tries do not fit."""
    for _ in range(10):
        area, ratio = chance.uniform(0.08, 1.0) * width * height, 3 / 4 * (16 / 9) ** chance.random()
        wide, high = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if wide <= width and high <= height:
            left, top = chance.uniform(0, width - wide), chance.uniform(0, height - high)
            return left, top, left + wide, top + high
    return middle_box(width, height, min(width, height))


def subfolders_of(folder: Path) -> list[str]:
    """Names of the classes of a folder in their order; raises FileNotFoundError without such a folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}; give one with a subfolder of pictures per class.")
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")


def check_classes(folder: Path, classes: Sequence[str]) -> None:
    """Raise ValueError unless a folder has a subfolder for each class, and no other."""
    others = sorted({*subfolders_of(folder)} ^ {*classes})
    check(
        not others,
        f"The subfolders of {folder} are not the classes that the model is trained to tell apart: "
        f"{', '.join(others[:5])} {'is' if len(others) == 1 else 'are'} in one of the two alone; give a folder with a "
        "subfolder for each class, by the same names.",
    )


class ImageFolder(Dataset[Sample]):
    """The pictures of a folder with one subfolder per class.

    Args:
        folder: which.
        view: of every picture.
        classes: names of the subfolders in the order of their labels; None for the order of the names.

    Raises:
        FileNotFoundError: no such folder, or one without pictures in subfolders.
        ValueError: the subfolders are not those of the classes.
    """

    def __init__(self, folder: Path, view: View, classes: Sequence[str] | None = None) -> None:
        self.folder, self.view = folder, view
        self.classes = subfolders_of(folder) if classes is None else list(classes)
        check_classes(folder, self.classes)
        # arrays: every worker would copy a list of paths, since looking at an object counts a reference in it
        names = []
        for name in self.classes:
            files = [file for file in sorted((folder / name).rglob("*")) if file.suffix.lower() in IMAGE_SUFFIXES]
            shown = [os.fsencode(file.relative_to(folder / name)) for file in files if file.name[0] != "."]
            names.append(np.array(shown, np.bytes_))
        self.labels = np.repeat(np.arange(len(names)), [len(one) for one in names])
        if not len(self.labels):
            raise FileNotFoundError(
                f"{folder} has no subfolder per class with pictures ({', '.join(IMAGE_SUFFIXES)}) in it."
            )
        self.names = np.concatenate(names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Sample:
        label = int(self.labels[index])
        file = self.folder / self.classes[label] / os.fsdecode(self.names[index])
        try:
            picture = read_picture(file, upright=False)
        except UnreadableMediaError as error:
            raise UnreadableMediaError(f"{file} is {error}.") from error
        return {"pixel_values": self.view(picture), "labels": torch.tensor(label)}


def classes_of(config: ClassifyConfig) -> list[str]:
    """Names of the classes in the order of their labels; raises as :func:`check_classes`."""
    if isinstance(config.data, str):
        return [str(value) for value in range(SUMS)]
    classes = subfolders_of(Path(config.data.train))
    check_classes(Path(config.data.held_out), classes)
    return classes


def view_of(config: ClassifyConfig, crop: float | None) -> View:
    """Make the view of a configuration's pictures; any model sees digits whole and in [-1, 1]."""
    if config.data == DIGITS:
        return View(config.size, 1.0, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    if config.model in FRESH:
        return View(config.size, crop)
    found = processor_of(config.model)
    return View(config.size, crop, tuple(found["image_mean"]), tuple(found["image_std"]))


def pictures_of(config: ClassifyConfig, seed: int, held_out: bool = False) -> Dataset[Sample]:
    """What is trained on, or judged on; all seeds are judged on the same pictures."""
    if not isinstance(config.data, str):
        which, crop = ("held_out", 0.875) if held_out else ("train", None)
        return ImageFolder(Path(getattr(config.data, which)), view_of(config, crop), classes_of(config))
    if held_out:
        return SumsOfDigits("held-out", config.held_out, config.size, seed=0)
    of_a_step = config.accumulate * config.batch_size * launched_processes()
    return SumsOfDigits("train", config.steps * of_a_step, config.size, seed)


def make_batch(config: ClassifyConfig, classes: int, call: Mapping[str, Any], samples: list[Sample]) -> dict[str, Any]:
    """``pixel_values`` (B, 3, H, W) and ``labels``, probabilities (B, classes), with further arguments of the model.

    mixup (Zhang et al., 2018) blends every picture with one from the other end of the batch, λ to 1 - λ; cutmix (Yun et
    al., 2019) pastes a rectangle of 1 - λ of the area from it. λ is drawn per batch from Beta(α, α), and of both kinds
    one; labels are shared alike.
    """
    pictures = torch.stack([sample["pixel_values"] for sample in samples])
    hard = functional.one_hot(torch.stack([sample["labels"] for sample in samples]), classes)
    labels = hard * (1 - config.smoothing) + config.smoothing / classes
    kinds = [name for name in ("mixup", "cutmix") if getattr(config, name)]
    if kinds:
        kind = kinds[int(torch.randint(len(kinds), ()))]
        alpha = torch.tensor(float(getattr(config, kind)))
        share = float(torch.distributions.Beta(alpha, alpha).sample())
        if kind == "mixup":
            pictures = share * pictures + (1 - share) * pictures.flip(0)
        else:
            ends = []
            for length in pictures.shape[-2:]:
                middle, half = float(torch.rand(())) * length, (1 - share) ** 0.5 * length / 2
                ends.append((round(max(0.0, middle - half)), round(min(float(length), middle + half))))
            (top, bottom), (left, right) = ends
            others, pictures = pictures.flip(0), pictures.clone()
            pictures[..., top:bottom, left:right] = others[..., top:bottom, left:right]
            share = 1 - (bottom - top) * (right - left) / pictures[0, 0].numel()  # a part may lie beyond the picture
        labels = share * labels + (1 - share) * labels.flip(0)
    return {"pixel_values": pictures, "labels": labels, **call}


# --- model ---


def build(config: ClassifyConfig, variant: Variant, seed: int) -> Any:
    """A model of a variant, float32; all variants of a seed begin with the same weights, as far as they have them.

    Raises:
        OSError: there is no such model.
        ValueError: settings that the model's configuration or a patch does not have, or a model to begin from that
            lacks more than a classifier of so many classes.
    """
    torch.manual_seed(seed)
    classes = len(classes_of(config))
    cls, make = FRESH.get(config.model, (None, None))
    is_vlt = cls is models.VLTForImageClassification
    if cls is None:
        model, found = AutoModelForImageClassification.from_pretrained(
            config.model,
            num_labels=classes,
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
        fresh = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
        others = sorted(one for one in fresh if "classifier" not in one)
        check(
            not others,
            f"{config.model} lacks {', '.join(others[:3])}{' and more' if others[3:] else ''}, or in this shape; give "
            "a model that lacks nothing but the classifier, for what it lacks begins at random.",
        )
    else:
        # MHLA is built into a VLT, so its variants are settings of its own; softmax is none in any stage
        of_variant = variant if is_vlt and not isinstance(variant, str) else {}
        # configurations of transformers take any name
        own = {one.name for one in fields(models.VLTConfig if is_vlt else ViTConfig)} - {"image_size"}
        known = sorted(own - {one.name for one in fields(PreTrainedConfig)})
        check_names(config.settings, known, "setting", "settings")
        check_names(of_variant, known, "setting", "variants")
        given = {**config.settings, **of_variant, "num_labels": classes}
        if not is_vlt:
            given["image_size"] = config.size
        elif variant == SOFTMAX:
            given["mhla"] = [None] * len(make(**given).depths)
        model = cls(make(**given))
    return model if is_vlt or isinstance(variant, str) else apply_mhla(model, **variant)


def own_size(model: Any) -> int | None:
    """Height and width in pixels that a classifier's configuration tells; None if it tells none, as VLT's.

    Raises:
        ValueError: its pictures are not square.
    """
    family = find_family(model)
    config = model.config if family is None else family.attention.trunk(model).config  # of SigLIP the vision model's
    size = getattr(config, "image_size", None)
    if not isinstance(size, Sequence):
        return size
    check(
        len(set(size)) == 1,
        f"{type(model).__name__} takes pictures of {' x '.join(map(str, size))} pixels; only squares can be cut here.",
    )
    return int(size[0])


def call_settings(model: Any, size: int) -> dict[str, Any]:
    """What a forward needs beside pictures of a size: whether positions are interpolated, where the model asks.

    Raises:
        ValueError: the model takes pictures of its own size alone.
    """
    own = own_size(model)
    if own in (size, None):
        return {}
    if "interpolate_pos_encoding" in inspect.signature(model.forward).parameters:
        return {"interpolate_pos_encoding": True}
    check(  # models of the families that do not ask interpolate by themselves, as DINOv2
        find_family(model) is not None,
        f"{type(model).__name__} takes pictures of {own} pixels, and size={size}; give that size.",
    )
    return {}


# --- training ---


def soft_cross_entropy(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None) -> torch.Tensor:
    """Mean over the pictures of an optimizer step, as ``Trainer`` asks for it (``compute_loss_func``).

    Args:
        outputs: of a classifier, logits (B, classes).
        labels: probabilities, (B, classes).
        num_items_in_batch: labels of the whole step, each class of a picture counted; None for those of this batch.
    """
    pictures = len(labels) if num_items_in_batch is None else num_items_in_batch / labels.shape[-1]
    return functional.cross_entropy(outputs.logits.float(), labels, reduction="sum") / pictures


def train(model: Any, config: ClassifyConfig, seed: int, output: Path | None = None) -> float:
    """Train a model in place; the CPU seconds that it took, see :func:`trainer.run_trainer`."""
    return trainer.run_trainer(
        model,
        config,
        pictures_of(config, seed),
        seed=seed,
        collate=partial(make_batch, config, len(classes_of(config)), call_settings(model, config.size)),
        loss=soft_cross_entropy,
        workers=config.workers,
        save_every=config.save_every,
        output=output,
    )


def train_one(config: ClassifyConfig, name: str, output: Path) -> Path:
    """Train one variant with the first seed, from the last checkpoint in the folder if there is one, and save it.

    Returns:
        The folder of the result, ``result`` in the output folder.

    Raises:
        ValueError: no such variant, or the folder is of another configuration.
    """
    variants = config.all_variants()
    check(name in variants, f"variant {name!r} is unknown; allowed: {', '.join(variants)}.")
    no_matter = ("ablations", "held_out", "analysed", "workers", "save_every")
    trainer.start(output, trainer.settings_of_one(config, variants[name], no_matter))
    model = build(config, variants[name], config.seeds[0])
    train(model, config, config.seeds[0], output)
    model.config.id2label = dict(enumerate(classes_of(config)))
    model.config.label2id = {name: label for label, name in model.config.id2label.items()}
    return trainer.save_result(model, output / "result", {PROCESSOR: view_of(config, 0.875).processor()})


# --- evaluation ---


@torch.no_grad()
def accuracy(model: Any, data: Dataset[Sample], size: int, batch_size: int = 64, workers: int = 0) -> dict[str, Any]:
    """Parts of the pictures whose class has the largest logit (``top1``) or one of the five largest (``top5``)."""
    call = call_settings(model, size)
    pictures = first = among = 0
    loader = DataLoader(data, batch_size=batch_size, num_workers=workers)
    for done, batch in enumerate(loader, start=1):
        logits = model(batch["pixel_values"].to(model.device, model.dtype), **call).logits.float()
        best = logits.topk(min(5, logits.shape[-1]), dim=-1).indices
        found = best == batch["labels"].to(best.device)[:, None]
        pictures, first, among = pictures + len(found), first + int(found[:, 0].sum()), among + int(found.sum())
        show_progress(done, len(loader))
    return {"top1": first / pictures, "top5": among / pictures, "pictures": pictures}


def processor_of(name: str) -> dict[str, Any]:
    """Settings of the image processor of a model of the Hub or of a folder.

    Raises:
        OSError: it has none.
        ValueError: it tells no mean and standard deviation.
    """
    found: dict[str, Any] = ImageProcessingMixin.get_image_processor_dict(name)[0]
    missing = [key for key in ("image_mean", "image_std") if key not in found]
    check(not missing, f"{PROCESSOR} of {name} lacks {', '.join(missing)}; add the values that it was trained with.")
    return found


def load_classifier(name: str, patch: Path | None = None) -> Any:
    """A classifier of the Hub or of a folder: of transformers, of the paper, or what ``train`` saved.

    Raises:
        OSError: there is no such model.
        ValueError: it is not a classifier of images, or the patch does not fit.
    """
    found: str = (PreTrainedConfig.get_config_dict(name)[0].get("architectures") or ["nothing"])[0]
    check(
        "ForImageClassification" in found,
        f"{name} is a {found} by its configuration; give a classifier, such as a ViTForImageClassification.",
    )
    own = [one for one in models.__all__ if "ForImageClassification" in one]
    cls: Any = getattr(models if found in own else transformers, found, None)
    check(
        cls is not None,
        f"{name} is a {found} by its configuration, which neither transformers {transformers.__version__} nor this "
        f"package has; allowed beside transformers' own: {', '.join(own)}.",
    )
    if (Path(name) / CONFIG_NAME).is_file():
        model = load_mhla(cls(cls.config_class.from_pretrained(name)), name)
    else:
        model = cls.from_pretrained(name)
    return (model if patch is None else load_mhla(model, patch)).eval()


def evaluate(
    name: str,
    folder: Path,
    *,
    patch: Path | None = None,
    size: int | None = None,
    crop: float = 0.875,
    batch_size: int = 64,
    workers: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Accuracy of a saved classifier over a folder with one subfolder per class.

    Subfolders have the names of the model's classes, as in what ``train`` saves. If none has one, the order of their
    names is that of the classes, as ImageNet's synsets have it in the models of the Hub. The size is that of the
    model's image processor (``crop_size``) unless it is given, or else its configuration's.

    Raises:
        FileNotFoundError: no such folder of pictures.
        OSError: no such model.
        ValueError: a model that is not a classifier, has other classes or another number of them, or tells no size.
    """
    model = load_classifier(name, patch).to(device)
    processor = processor_of(name)
    sides = processor.get("crop_size")
    if size is None and isinstance(sides, dict) and sides.get("height") == sides.get("width"):
        size = sides.get("height")  # what it was trained on last, which its configuration need not tell
    size = size or own_size(model)
    if size is None:
        raise ValueError(f"Neither {name} nor its image processor tells a size; give the one that it is judged at.")
    names = [model.config.id2label[label] for label in sorted(model.config.id2label)]
    named = not {*names}.isdisjoint(subfolders_of(folder))
    view = View(size, crop, tuple(processor["image_mean"]), tuple(processor["image_std"]))
    data = ImageFolder(folder, view, names if named else None)
    check(
        len(data.classes) == len(names),
        f"{folder} has {len(data.classes)} subfolders and {name} knows {len(names)} classes; give a folder with a "
        "subfolder for each, in the order of its classes.",
    )
    return accuracy(model, data, size, batch_size, workers)


# --- comparison ---

Results = dict[str, list[dict[str, Any]]]
"""Name of a variant → what was found of it, one for every seed."""


def look_at_attention(model: Any, config: ClassifyConfig, most: int) -> dict[str, Any]:
    """Rank and entropy of attention, averaged over layers, heads and the first held-out pictures (paper, Fig. 3b).

    Returns:
        As JSON has it: ``rank``, ``entropy`` in nats, the token ``grid``, and ``map``, what the token in the middle of
        the first picture gives to all tokens in the layer in the middle, its mean over heads; nothing of a model of no
        family, such as VLT, whose attention is built in.
    """
    data: Any = pictures_of(config, 0, held_out=True)
    pictures = torch.stack([data[index]["pixel_values"] for index in range(min(most, len(data)))]).to(model.device)
    family = find_family(model)
    call = TransformerCall((pictures,), call_settings(model, config.size))
    if family is None:
        return {}
    grid, names = call.grid(model), list(family.attention.self_attentions(model))
    rows: dict[str, torch.Tensor] = {}

    def keep(name: str, matrix: torch.Tensor) -> None:
        rows[name] = matrix[0, :, middle_of(grid)].mean(dim=0)

    layers = analyze_layers(model, call, each=keep)
    return {
        "rank": fmean(layer.rank for layer in layers),
        "entropy": fmean(layer.entropy for layer in layers),
        "grid": list(grid),
        "map": [round(weight, 6) for weight in rows[names[len(names) // 2]].tolist()],
    }


def draw(results: Results, output: Path) -> None:
    """``rank-and-entropy.png``, bars, and ``attention-maps.png``, of the first seed; of what has a rank."""
    known = {name: found for name, found in results.items() if "rank" in found[0]}
    if not known:
        return
    grid = next(iter(known.values()))[0]["grid"]
    rows = {name: torch.tensor(found[0]["map"]) for name, found in known.items()}
    draw_attention_maps(rows, grid, middle_of(grid), output / "attention-maps.png")
    plt, names = require_matplotlib(), list(known)
    figure, axes = plt.subplots(1, 2, figsize=(9, 1.2 + 0.4 * len(names)), sharey=True, layout="constrained")
    for axis, key, label in zip(axes, ("rank", "entropy"), ("rank", "entropy in nats"), strict=True):
        values = [[float(one[key]) for one in known[name]] for name in names]
        spreads = [stdev(found) if len(found) > 1 else 0.0 for found in values]
        axis.barh(names, [fmean(found) for found in values], xerr=spreads, color="tab:blue", capsize=3)
        axis.set_xlabel(label)
    axes[0].invert_yaxis()
    figure.savefig(output / "rank-and-entropy.png", dpi=110)
    plt.close(figure)


def train_and_judge(config: ClassifyConfig, name: str, seed: int, checkpoints: Path) -> dict[str, Any]:
    """The result of one variant and seed."""
    model = build(config, config.all_variants()[name], seed)
    seconds = train(model, config, seed, checkpoints)
    found = accuracy(model, pictures_of(config, seed, held_out=True), config.size, workers=config.workers)
    return {
        "name": name,
        "seed": seed,
        "top-1": found["top1"],
        "top-5": found["top5"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": seconds,
        **look_at_attention(model, config, config.analysed),
    }


def compare(config: ClassifyConfig, tables: Mapping[str, Mapping[str, str]], output: Path) -> tuple[str, Results]:
    """Train the variants of some tables with every seed; what is finished is kept.

    Args:
        config: of the comparison.
        tables: name → what stands in the first column → name of a variant.
        output: folder of a JSON file per variant and seed, and of each table as Markdown and CSV.

    Returns:
        The tables as Markdown, and the results behind them.

    Raises:
        ValueError: settings that a model does not have, or the folder has results of another configuration.
    """
    names = list(dict.fromkeys(name for rows in tables.values() for name in rows.values()))
    no_matter = ("seeds", "variants", "ablations", "workers", "save_every")
    parts = {}
    for name in names:
        variant = config.all_variants()[name]
        look_at_attention(build(config, variant, 0).eval(), config, 1)  # says what is not allowed, before all training
        settings = trainer.settings_of(config, no_matter) | {"variant": variant}
        for seed in config.seeds:
            file = output / f"{trainer.file_name_of(name)}-seed-{seed}.json"
            parts[name, seed] = trainer.Part(file, settings, partial(train_and_judge, config, name, seed))
    found = dict(zip(parts, trainer.results_of(list(parts.values())), strict=True))
    results = {name: [found[name, seed] for seed in config.seeds] for name in names}
    return "\n".join(write_results(table, rows, results, output) for table, rows in tables.items()), results


def write_results(table: str, rows: Mapping[str, str], results: Results, output: Path) -> str:
    """One table; the comparison's own first column is the kind of attention."""

    def spread(name: str, key: str, style: str, times: float = 1) -> str:
        return mean_and_spread([times * one[key] for one in results[name]], style) if key in results[name][0] else "-"

    first = "attention" if table == "comparison" else table
    header = [first, "parameters", "top-1, %", "rank", "entropy, nats", "CPU seconds"]
    cells = [
        [
            row,
            f"{results[name][0]['parameters']:,}",
            spread(name, "top-1", ".1f", 100),
            spread(name, "rank", ".1f"),
            spread(name, "entropy", ".2f"),
            spread(name, "seconds", ".0f"),
        ]
        for row, name in rows.items()
    ]
    return write_table(header, cells, output, trainer.file_name_of(table))


# --- main ---


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments and do what they ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("train", "compare", "ablate"):
        command = commands.add_parser(name)
        command.add_argument("--config", type=Path, required=True)
        command.add_argument("--output", type=Path, required=True)
        if name == "train":
            command.add_argument("--variant", required=True, help="which one is trained")
    command = commands.add_parser("evaluate")
    command.add_argument("--model", required=True, help="Hub id or folder of a classifier")
    command.add_argument("--patch", type=Path, help="folder of a patch")
    command.add_argument("--pictures", type=Path, required=True, help="folder with a subfolder per class")
    command.add_argument("--size", type=int, help="pixels; the model's own if left out")
    command.add_argument("--crop", type=float, default=0.875, help="part of the shorter side that is kept")
    command.add_argument("--batch-size", type=int, default=64)
    command.add_argument("--workers", type=int, default=0, help="processes that read pictures")
    command.add_argument("--device", default="auto")
    # not an argument of the commands: argparse finds none that stand behind their options
    given, overrides = parser.parse_known_args(arguments)
    unknown = [word for word in overrides if given.command == "evaluate" or word[0] == "-" or "=" not in word]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        if given.command == "evaluate":
            found = evaluate(
                given.model,
                given.pictures,
                patch=given.patch,
                size=given.size,
                crop=given.crop,
                batch_size=given.batch_size,
                workers=given.workers,
                device=choose_device(given.device),
            )
            sys.stdout.write(json.dumps(found) + "\n")
            return
        config = ClassifyConfig.from_yaml(given.config, overrides)
        if given.command == "train":
            sys.stdout.write(f"{train_one(config, given.variant, given.output)}\n")
        elif given.command == "ablate":
            sys.stdout.write(compare(config, config.ablation_tables(), given.output)[0])
        else:
            require_matplotlib()  # which draws the result, after all the training
            text, results = compare(config, {"comparison": {name: name for name in config.variants}}, given.output)
            draw(results, given.output)
            sys.stdout.write(text)
    except (ValueError, OSError, ImportError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
