"""Adapt a pipeline by name; model, patch and data are checked before any weights are loaded."""

import logging
import shlex
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..config import load_patch
from ..devices import FLOAT_TYPES, dtype_name, is_first_process, launched_on_cpus
from ..errors import check
from ..families import Clip, Model, families, trained_family
from ..files import folder_for_results, read_json
from ..generation import family_of, load_pipeline, pipeline_file
from ..generation.pipelines import pipeline_source, tiny_of, transformers_of, usual_clip
from ..patching import apply_mhla, find_patched, load_mhla, read_record
from ..reporting import times
from .checks import check_fits, check_installed, check_start
from .config import TrainingConfig
from .estimate import Estimate, estimate
from .export import export_checkpoint
from .latents.cache import INDEX_NAME, LatentCache
from .latents.clips import Clips
from .latents.data import InMemoryData
from .latents.encode import encode_folder, model_header
from .latents.media import contents_of
from .latents.sources import read_sources
from .latents.summary import DataModel
from .loop import TrainingResult, content_of_run, train_checked
from .roles import plain_name
from .validation import PromptSampler

logger = logging.getLogger(__name__)


def finetune(config: TrainingConfig, resume: str | None = None) -> TrainingResult:
    """Adapt the transformer of a pipeline.

    Model, patch, data and the checkpoint to resume from are checked against each other before weights are loaded.
    Raises as :class:`NamedRun` and :func:`train`.

    Args:
        config: with ``model`` and ``data``.
        resume: "latest" or the path of a checkpoint.
    """
    config = _with_folder(config)
    checkpoint = check_start(config, resume)
    run = NamedRun(config)
    with folder_for_results(Path(config.output), lock=is_first_process()):
        data = run.open_data(resuming=checkpoint is not None)
        check_fits(run.transformer(with_weights=False), data, config)
        sampler = run.sampler() if config.validation.prompts else None
        return train_checked(run.transformer(with_weights=True), data, config, checkpoint, sampler)


def export(checkpoint: str | Path, output: str | Path) -> None:
    """Write the weights of a checkpoint for use, with the model and the patch that its run names.

    Raises as :func:`export_checkpoint` and :class:`NamedRun`, and ValueError if model or patch have changed since.
    """

    def begin(config: TrainingConfig, content: dict[str, Any]) -> Any:
        check(
            config.model is not None,
            f"The run of {checkpoint} names no model, since train() was called with a transformer; pass that to "
            "mhla_diffusers.training.export_checkpoint().",
        )
        for name, found in content_of_run(config).items():
            check(
                found == content[name],
                f"The content of {name}={getattr(config, name)} is not what the run of {checkpoint} began with; put it "
                "back. Large files are compared by size and time: copy weights with cp --preserve=timestamps.",
            )
        return NamedRun(config).transformer(with_weights=True)

    export_checkpoint(checkpoint, output, begin)


def dry_run(config: TrainingConfig, processes: int | None = None) -> Estimate:
    """Estimate trainable parameters, memory and FLOPs of a run, without weights and without data.

    Uses the shapes of the encoded data if it exists, else of ``config.clip`` or the model's own clip. Of a model whose
    configuration ships with the package, the Hub is not asked.

    Args:
        config: with ``model`` and ``data``.
        processes: that FSDP2 shards weights, gradients and optimizer state over; None for no sharding.
    """
    config = _with_folder(config)
    check_installed(config)
    shipped = (model for family in families() for model in family.models if model.source == config.model)
    run = NamedRun(config, next(shipped, None) if config.component == "transformer" else None)
    transformer = run.transformer(with_weights=False)
    data: LatentCache | InMemoryData
    if run.is_encoded:
        data = run.open_data()
    else:
        if run.shipped is None:
            vae: dict[str, Any] = read_json(pipeline_file(run.model, "vae/config.json"))
        else:
            strides = run.shipped.temporal_stride, run.shipped.stride
            vae = dict(zip(("scale_factor_temporal", "scale_factor_spatial"), strides, strict=True))
        latents = torch.empty(run.family.inputs.latent_shape(transformer.config, vae, run.clip), device="meta")
        shapes = run.family.inputs.conditioning_shapes(transformer.config)
        count = config.batch_size + config.validation.samples  # as many as there have to be
        data = InMemoryData([{"latents": latents, **shapes}] * count, shapes)
    check_fits(transformer, data, config)
    largest = max(range(len(data)), key=lambda index: prod(data.shapes[index]))
    return estimate(transformer, data[largest], config, processes)


def _with_folder(config: TrainingConfig) -> TrainingConfig:
    """Name the folder of a tiny pipeline in place of its name."""
    return config if config.model is None else replace(config, model=pipeline_source(config.model))


class NamedRun:
    """Model, family and data of a configuration, found and checked against each other without reading weights.

    Args:
        config: with ``model`` and ``data``.
        shipped: describes the model, in place of the files of its pipeline.

    Raises:
        ValueError: no model or data, a patch for another family, or a cache of another model or resolution.
        FileNotFoundError: no such model.
    """

    def __init__(self, config: TrainingConfig, shipped: Model | None = None) -> None:
        import diffusers

        if config.model is None or config.data is None:
            raise ValueError("The configuration must name model and data, for example model=Wan-AI/… data=latents/….")
        self.config, self.model, self.data = config, config.model, Path(config.data)
        self.shipped, tiny = shipped, tiny_of(config.model)
        self.name = config.model if tiny is None else f"tiny-{tiny.family}"
        """As commands take it."""
        named = None if shipped is None else trained_family(shipped.transformer)
        self.family = family = named or trained_family(family_of(config.model, config.component).name)
        if isinstance(config.patch, str) and Path(config.patch).is_dir():
            read_record(Path(config.patch))
        elif isinstance(config.patch, str):
            patch = load_patch(config.patch)
            check(
                patch.family == family.name,
                f"patch={config.patch!r} is for the {patch.family!r} family (made for {patch.base_model}), but "
                f"{self.name} belongs to {family.name!r}.",
            )
        self._dtype = FLOAT_TYPES[dtype_name(config.precision)]
        self.is_encoded = (self.data / INDEX_NAME).is_file()
        is_file = not self.is_encoded and self.data.is_file()
        self.clips = config.clip or (read_sources(self.data).clip if is_file else None)
        usual = usual_clip(self.model, family)
        self.clip = (self.clips or Clips.of(usual)).longest(usual)
        """As prompts are generated."""
        if shipped is None:
            self._settings = read_json(pipeline_file(config.model, f"{config.component}/config.json"))
        else:
            described = family.class_settings(shipped, self.clip.sizes[0][0], self.clip.frames)
            self._settings = {"_class_name": shipped.transformer, **described}
        if self.is_encoded:
            cache = LatentCache(self.data)
            if shipped is None:
                name = read_json(pipeline_file(self.model, "model_index.json"))["_class_name"]
                pipeline = getattr(diffusers, name, None)  # None for the user's own classes, which are not known here
                picture = None if pipeline is None else family.calling.begins_with_picture(pipeline, self._settings)
                cache.check_made_for(self.name, model_header(self.model, family), picture)
            if config.clip is not None:
                is_auto = isinstance(config.clip.sizes, str)
                cache.check_cut_as(DataModel(self.model).fitted(config.clip) if is_auto else config.clip)
            else:  # prompts are generated as most of the longest samples were cut
                buckets = Counter(sample.bucket for sample in cache.samples)
                frames, height, width = max(buckets, key=lambda bucket: (bucket[0], buckets[bucket]))
                self.clip = Clip(frames, cache.settings.get("fps", usual.fps), ((height, width),))

    def transformer(self, with_weights: bool) -> Any:
        """Make the transformer, patched, on the CPU, or without weights on the meta device."""
        cls: Any = self.family.transformer_class(self._settings["_class_name"])
        patch = self.config.patch
        with nullcontext() if with_weights else torch.device("meta"):
            if with_weights:
                model = cls.from_pretrained(self.model, subfolder=self.config.component, dtype=self._dtype)
            else:
                model = cls.from_config(self._settings)
            if isinstance(patch, str) and Path(patch).is_dir():
                return _begin_with(Path(patch), model)
            return model if patch is None else apply_mhla(model, patch)

    def open_data(self, resuming: bool = False) -> LatentCache:
        """Open the latents; videos or images are encoded into the output folder first.

        Raises:
            FileNotFoundError: no data; the message has the commands that make it.
            ValueError: ``resuming``, and files have changed since the run encoded them.
        """
        if self.is_encoded:
            return LatentCache(self.data)
        folder = Path(self.config.output) / "latents"
        try:
            media = read_sources(self.data).media()
        except FileNotFoundError as error:
            common = ["--model", self.name, "--output", str(self.data), "--precision", self.config.precision]
            encoding = ["mhla", "encode", "--source", "FOLDER", *common]
            synthesizing = ["mhla", "synthesize", "--prompts", "PROMPTS.txt", *common]
            if (clips := self.config.clip) is not None:
                sizes = [clips.sizes] if isinstance(clips.sizes, str) else list(map(times, clips.sizes))
                encoding += [word for length in clips.lengths for word in ("--frames", str(length))]
                encoding += ["--fps", str(clips.fps), *(word for size in sizes for word in ("--size", size))]
                encoding += ["--upscale"] * clips.upscale
                synthesizing += ["--frames", str(self.clip.frames), "--size", times(self.clip.sizes[0])]
            raise FileNotFoundError(
                f"{error} Make the data from videos or images with captions in FOLDER: `{shlex.join(encoding)}`, or "
                f"from prompts, one per line of PROMPTS.txt: `{shlex.join(synthesizing)}`."
            ) from error
        if resuming:
            cache, contents = LatentCache(folder), contents_of(media)
            changed = [name for name, content in cache.index.contents.items() if contents.get(name) != content]
            changed += [name for name in contents if name not in cache.index.contents]
            check(
                not changed,
                f"{len(changed)} files or captions in {self.data} are not those that this run has encoded, such as "
                f"{', '.join(changed[:1])}. Put them back, or start a run in another output folder.",
            )
            return cache
        logger.info("%s holds no latents; encoding its files into %s.", self.data, folder)
        state = _process_state()
        with state.main_process_first():
            if state.is_main_process:
                unused = transformers_of(self.model)
                pipe = load_pipeline(self.model, self.family.name, "auto", self._dtype, unused)
                encode_folder(pipe, self.model, self.data, folder, self.clips, self.config.workers)
        return LatentCache(folder)

    def sampler(self) -> PromptSampler:
        """Make what generates at every validation."""
        validation = self.config.validation
        device, component = str(_process_state().device), self.config.component
        # the one in training takes the place of its transformer
        pipe = load_pipeline(self.model, self.family.name, device, self._dtype, [component])
        return PromptSampler(pipe, validation.prompts, self.clip, validation.inference_steps, component)


def _begin_with(folder: Path, model: Any) -> Any:
    """Load a saved patch, such as another run's result, to train on from it, and return the model.

    What it was trained to stays in its own type, float32, also in a model in bfloat16, to which ``load_mhla`` rounds.
    """
    (patched,) = find_patched(load_mhla(model, folder)).values()
    record = read_record(folder)
    (component,) = record.transformers
    saved = load_file(folder / record.file) | (load_file(folder / record.lora.file) if record.lora else {})
    for name, parameter in model.named_parameters():
        value = saved.get(f"{component}.{plain_name(name)}")
        is_new = ".mhla." in name or plain_name(name) in (patched.replaced_weights or ())
        if value is not None and is_new and not parameter.is_meta:
            parameter.data = value
    return model


def _process_state() -> Any:
    """Return the state of this process in accelerate, which the training's accelerator reuses."""
    from accelerate import PartialState

    return PartialState(cpu=launched_on_cpus())
