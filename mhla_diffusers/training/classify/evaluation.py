"""Top-1 and top-5 of a classifier, over any pictures and over a folder with one subfolder per class."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ...config import check
from ...patching import load_mhla
from ...patching.record import CONFIG_NAME
from ...reporting import show_progress
from .digits import Sample
from .folders import CentreView, ImageFolder, subfolders_of
from .saving import class_names, cutting_of
from .sizes import call_settings, own_size

_FIRST = 5
_KIND = "ForImageClassification"


@dataclass(frozen=True)
class Accuracy:
    """Of a classifier over pictures."""

    top1: float
    """Part of the pictures whose class has the largest logit."""
    top5: float
    """Part of those whose class is among the five largest, or among all where there are fewer."""
    pictures: int


@torch.no_grad()
def accuracy(model: Any, data: Dataset[Sample], size: int, batch_size: int = 64, workers: int = 0) -> Accuracy:
    """Judge a classifier.

    Args:
        model: of transformers or of the paper, on the device where it runs.
        data: pictures with their classes.
        size: height and width of the pictures in pixels.
        batch_size: pictures of a forward.
        workers: processes that read pictures.

    Raises:
        ValueError: the model takes pictures of its own size alone.
    """
    settings = call_settings(model, size)
    first = pictures = among = 0
    loader = DataLoader(data, batch_size=batch_size, num_workers=workers)
    for done, batch in enumerate(loader, start=1):
        logits = model(batch["pixel_values"].to(model.device, model.dtype), **settings).logits.float()
        best = logits.topk(min(_FIRST, logits.shape[-1]), dim=-1).indices
        found = best == batch["labels"].to(best.device)[:, None]
        first, among = first + int(found[:, 0].sum()), among + int(found.sum())
        pictures += len(found)
        show_progress(done, len(loader))
    return Accuracy(first / pictures, among / pictures, pictures)


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
) -> Accuracy:
    """Top-1 and top-5 of a saved classifier over a folder with one subfolder per class.

    Subfolders have the names of the model's classes, as in what ``train_one`` saves. If none has one, the order of
    their names is that of the classes, as ImageNet's synsets have it in the models of the Hub.

    Args:
        name: Hub id or folder of a classifier, see :func:`load_classifier`.
        folder: of the pictures.
        patch: folder of a patch; None for none.
        size: height and width in pixels that pictures are resized to; None for the one that pictures are cut to for the
            model (``crop_size``), or that its configuration tells.
        crop: part of a picture's shorter side that is kept.
        batch_size: pictures of a forward.
        workers: processes that read pictures.
        device: where the model runs.

    Raises:
        FileNotFoundError: no such folder of pictures.
        OSError: no such model.
        ValueError: a model that is no classifier, has other classes or another number of them, or tells no size.
    """
    model = load_classifier(name, patch).to(device)
    cutting = cutting_of(name)
    # what it was trained on last, which its configuration need not tell
    size = size or cutting.size or own_size(model)
    if size is None:
        raise ValueError(f"Neither {name} nor its image processor tells a size; give the one that it is judged at.")
    names = class_names(model)
    # synsets share no name with the words that a model of the Hub has for them: then it is the order that counts
    named = not {*names}.isdisjoint(subfolders_of(folder))
    data = ImageFolder(folder, CentreView(size, crop, cutting.pixels), names if named else None)
    check(
        len(data.classes) == len(names),
        f"{folder} has {len(data.classes)} subfolders and {name} knows {len(names)} classes; give a folder with a "
        "subfolder for each, in the order of its classes.",
    )
    return accuracy(model, data, size, batch_size, workers)


def load_classifier(name: str, patch: Path | None = None) -> Any:
    """A classifier of the Hub or of a folder: of transformers, of the paper, or what ``train_one`` saved.

    Args:
        name: Hub id or folder.
        patch: folder of :func:`mhla_diffusers.save_mhla`; None for none.

    Raises:
        OSError: there is no such model.
        ValueError: it is no classifier of images, or the patch does not fit.
    """
    import transformers

    from ... import models

    found: str = (transformers.PreTrainedConfig.get_config_dict(name)[0].get("architectures") or ["nothing"])[0]
    check(
        _KIND in found,
        f"{name} is a {found} by its configuration; give a classifier, such as a ViTForImageClassification.",
    )
    kind: Any = getattr(models if found in models.__all__ else transformers, found, None)
    check(
        kind is not None,
        f"{name} is a {found} by its configuration, which neither transformers {transformers.__version__} nor this "
        f"package has; allowed beside transformers' own: {', '.join(one for one in models.__all__ if _KIND in one)}.",
    )
    if (Path(name) / CONFIG_NAME).is_file():
        model = load_mhla(kind(kind.config_class.from_pretrained(name)), name)
    else:
        model = kind.from_pretrained(name)
    return (model if patch is None else load_mhla(model, patch)).eval()
