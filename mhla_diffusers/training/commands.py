"""What the command line calls: everything by name, nothing in memory yet."""

import json
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..devices import choose_device
from ..families import families
from ..config import load_patch
from ..patching import apply_mhla
from ..generation.prompts import read_prompts
from .latents.cache import INDEX_NAME, CacheIndex, LatentCache
from .checks import check_data_fits
from .config import TrainingConfig
from .latents.data import InMemoryData, Sample
from .latents.encode import encode_folder, model_header, synthesize
from .latents.encoders import ENCODERS, component_identity, pipeline_file
from .estimate import Estimate, estimate
from .folders import RunFolder
from .loop import TrainingResult, train
from .latents.media import Clip
from .optimizer import optimizer_class
from .latents.sampling import PromptSampler
from .sharding import sharding_is_asked_for
from .latents.sources import find_media
from .zero import hidden_from_accelerate, zero_is_asked_for

logger = logging.getLogger(__name__)


def finetune(config: TrainingConfig, resume: str | None = None) -> TrainingResult:
    """Adapt the transformer of a pipeline as a configuration says.

    Model, patch, data and the checkpoint to resume from are checked against each other before weights are loaded.

    Args:
        config: with ``model`` and ``data``.
        resume: "latest" or the path of a checkpoint.

    Raises:
        ValueError: what :func:`check_config` and :func:`train` raise, or a way of sharding that is not supported.
        FileNotFoundError: no such model, data or checkpoint.
        ImportError: bitsandbytes is missing for ``optimizer: adamw8bit``, or DeepSpeed where accelerate is to use it.
    """
    RunFolder(config.output).find(resume)
    sharding_is_asked_for(config)
    zero_is_asked_for(config)
    optimizer_class(config.optimizer)
    check_config(config)
    data = _open_data(config)
    check_data_fits(build_on_meta(config), data)
    transformer = _load_transformer(config)
    if config.patch is not None:
        apply_mhla(transformer, config.patch)
    return train(transformer, data, config, resume=resume, sampler=_make_sampler(config))


def dry_run(config: TrainingConfig) -> Estimate:
    """Trainable parameters, memory and FLOPs of a run, without weights and without data.

    Shapes are those of the encoded data if it is there, else those of ``config.clip`` or the family's default.

    Raises:
        ValueError: what :func:`check_config` raises.
        FileNotFoundError: no such model.
    """
    check_config(config)
    transformer = build_on_meta(config)
    sample = _sample_of_clip(transformer, config)
    if config.data is not None and Path(config.data, INDEX_NAME).is_file():
        sample = _open_data(config)[0]
    check_data_fits(transformer, InMemoryData([sample]))
    return estimate(transformer, sample, config)


def encode(
    model: str,
    source: str | Path,
    output: str | Path,
    clip: Clip | None = None,
    *,
    device: str = "auto",
    precision: str = "bf16",
    workers: int = 4,
) -> CacheIndex:
    """Encode videos or images with the parts of a pipeline; see :func:`mhla_diffusers.training.latents.encode.encode_folder`.

    Args:
        model: Hub id or folder of the pipeline.
        source: folder of videos or images with captions, or tar shards; see :func:`find_media`.
        output: folder of the cache.
        clip: what is cut out of every file; None for the family's default.
        device: where the pipeline runs; "auto" for a GPU if there is one.
        precision: "bf16" or "no" for float32.
        workers: processes that read files.

    Raises:
        ValueError: no such device here, or what ``encode_folder`` raises.
        FileNotFoundError: nothing to encode there, or no such model.
    """
    find_media(source)
    return encode_folder(_load_pipeline(model, device, precision), model, source, output, clip, workers)


def synthesize_latents(
    model: str,
    prompts: str | Path,
    output: str | Path,
    clip: Clip | None = None,
    *,
    steps: int = 50,
    guidance: float = 5.0,
    seed: int = 0,
    device: str = "auto",
    precision: str = "bf16",
) -> CacheIndex:
    """Generate latents with the unpatched pipeline; see :func:`mhla_diffusers.training.latents.encode.synthesize`.

    Args:
        model: Hub id or folder of the pipeline.
        prompts: text file with one prompt per line.
        output: folder of the cache.
        clip: frames and size; None for the family's default.
        steps: of the sampler.
        guidance: scale of classifier-free guidance.
        seed: of the noise.
        device: where the pipeline runs; "auto" for a GPU if there is one.
        precision: "bf16" or "no" for float32.

    Raises:
        OSError: no such file of prompts, or a folder.
        ValueError: a file without prompts, no such device here, or what ``synthesize`` raises.
    """
    lines = read_prompts(Path(prompts))
    pipe = _load_pipeline(model, device, precision)
    return synthesize(pipe, model, lines, output, clip, steps=steps, guidance=guidance, seed=seed)


def make_clip(
    model: str, frames: int | None, fps: float | None, sizes: Sequence[str] | None, component: str = "transformer"
) -> Clip:
    """The default clip of a model's family with some values changed.

    Args:
        model: Hub id or folder of the pipeline.
        frames: per video.
        fps: frames per second.
        sizes: such as "480x832".
        component: which transformer of the pipeline.

    Raises:
        ValueError: a size that is not of that form, or an unsupported model.
        FileNotFoundError: no such model.
    """
    clip = ENCODERS[_family_of(model, component)].default_clip
    pairs = []
    for size in sizes or ():
        height, _, width = size.partition("x")
        if not (height.isdigit() and width.isdigit()):
            raise ValueError(f"Size {size!r} must look like HEIGHTxWIDTH, for example 480x832.")
        pairs.append((int(height), int(width)))
    return Clip(
        frames=clip.frames if frames is None else frames,
        fps=clip.fps if fps is None else fps,
        sizes=tuple(pairs) or clip.sizes,
    )


def check_config(config: TrainingConfig) -> None:
    """Raise unless model, patch and data of a configuration belong together; no weights are read.

    Raises:
        ValueError: no model or data named, a patch for another family, a cache of another model or
            resolution, missing captions.
        FileNotFoundError: no such model or data.
    """
    if config.model is None or config.data is None:
        raise ValueError("The configuration must name model and data, for example model=Wan-AI/… data=latents/….")
    family = _family_of(config.model, config.component)
    if isinstance(config.patch, str):
        patch = load_patch(config.patch)
        if patch.family != family:
            raise ValueError(
                f"patch={config.patch!r} is for the {patch.family!r} family (made for {patch.base_model}), but "
                f"{config.model} belongs to {family!r}."
            )
    if Path(config.data, INDEX_NAME).is_file():
        cache = LatentCache(config.data)
        cache.check_made_for(config.model, model_header(config.model, family))
        if config.clip is not None:
            cache.check_cut_as(config.clip)


def build_on_meta(config: TrainingConfig) -> Any:
    """The transformer of a configuration, patched, without values.

    Raises:
        ValueError: a patch that does not fit.
        FileNotFoundError: no such model.
    """
    cls, settings = _transformer_class(config)
    with torch.device("meta"):
        transformer = cls.from_config(settings)
    if config.patch is not None:
        apply_mhla(transformer, config.patch)
    return transformer


def _transformer_class(config: TrainingConfig) -> tuple[Any, dict[str, Any]]:
    import diffusers

    path = pipeline_file(str(config.model), f"{config.component}/config.json")
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return getattr(diffusers, settings["_class_name"]), settings


def _load_transformer(config: TrainingConfig) -> Any:
    cls, _ = _transformer_class(config)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    return cls.from_pretrained(config.model, subfolder=config.component, dtype=dtype)


def _load_pipeline(model: str, device: str, precision: str) -> Any:
    from diffusers import DiffusionPipeline

    place = choose_device(device)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return DiffusionPipeline.from_pretrained(model, dtype=dtype).to(place)


def _make_sampler(config: TrainingConfig) -> PromptSampler | None:
    if not config.validation.prompts:
        return None
    assert config.model is not None
    clip = config.clip or ENCODERS[_family_of(config.model, config.component)].default_clip
    pipe = _load_pipeline(config.model, str(_processes().device), config.precision)
    return PromptSampler(pipe, config.validation.prompts, clip, config.validation.inference_steps, config.component)


def _processes() -> Any:
    """The state that accelerate has of this process among the others; the training's accelerator takes it over."""
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    with hidden_from_accelerate():
        # an Accelerator looks at this by itself
        return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))


def _family_of(model: str, component: str) -> str:
    name = component_identity(model, component).split(" ")[0]
    for family in families():
        if name in family.transformers:
            return family.name
    supported = ", ".join(name for family in families() for name in family.transformers)
    raise ValueError(f"The {component} of {model} is {name!r}, which is not supported; supported are {supported}.")


def _open_data(config: TrainingConfig) -> LatentCache:
    """The cache of a configuration; videos or images are encoded into the output folder first."""
    assert config.model is not None
    assert config.data is not None
    folder = Path(config.data)
    if not (folder / INDEX_NAME).is_file():
        try:
            find_media(folder)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error} {_ways_to_data(config)}") from error
        folder = Path(config.output) / "latents"
        logger.info("%s holds no latents; encoding its files into %s.", config.data, folder)
        with _processes().main_process_first():
            encode(config.model, config.data, folder, config.clip, precision=config.precision, workers=config.workers)
    return LatentCache(folder)


def _ways_to_data(config: TrainingConfig) -> str:
    """The commands that make the data of a configuration."""
    common = ["--model", str(config.model), "--output", str(config.data), "--precision", config.precision]
    encoding = ["mhla", "encode", "--source", "FOLDER", *common]
    synthesizing = ["mhla", "synthesize", "--prompts", "PROMPTS.txt", *common]
    if config.clip is not None:
        sizes = [f"{height}x{width}" for height, width in config.clip.sizes]
        encoding += ["--frames", str(config.clip.frames), "--fps", str(config.clip.fps)]
        encoding += [word for size in sizes for word in ("--size", size)]
        synthesizing += ["--frames", str(config.clip.frames), "--size", sizes[0]]
    return (
        f"Make the data from videos or images with captions in FOLDER: `{shlex.join(encoding)}`, or from prompts, "
        f"one per line of PROMPTS.txt: `{shlex.join(synthesizing)}`."
    )


def _sample_of_clip(transformer: Any, config: TrainingConfig) -> Sample:
    family = _family_of(str(config.model), config.component)
    path = pipeline_file(str(config.model), "vae/config.json")
    vae = json.loads(path.read_text(encoding="utf-8"))
    encoder = ENCODERS[family]
    return encoder.sample_shapes(transformer.config, vae, config.clip or encoder.default_clip)
