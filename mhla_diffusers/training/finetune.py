"""Adapt a pipeline by name; model, patch and data are checked before any weights are loaded."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..config import load_patch
from ..devices import FLOAT_TYPES, dtype_name, is_first_process, launched_on_cpus
from ..errors import check
from ..families import Clip, trained_family
from ..files import folder_for_results, read_json
from ..generation.pipelines import (
    family_of,
    load_pipeline,
    pipeline_file,
    pipeline_source,
    tiny_of,
    transformers_of,
    usual_clip,
)
from ..patching import apply_mhla, read_record
from .config import TrainingConfig
from .data.cache import INDEX_NAME, LatentCache
from .data.clips import Clips
from .data.encode import encode_folder, model_header
from .data.media import contents_of
from .data.sources import read_sources
from .data.summary import DataModel
from .recipe import Recipe, TrainingResult, check_fits, check_start, content_of_run
from .run_folder import find_checkpoint, read_state, read_tensors, write_whole
from .validation import PromptSampler
from .weights import begin_with, prepare_for_training, write_weights

logger = logging.getLogger(__name__)


def finetune(config: TrainingConfig, resume: str | None = None) -> TrainingResult:
    """Adapt the transformer of a pipeline.

    Model, patch, data and the checkpoint to resume from are checked against each other before weights are loaded.
    Raises as :class:`NamedRun` and :func:`train`.

    Args:
        config: with ``model`` and ``data``.
        resume: "latest" or the path of a checkpoint.
    """
    if config.model is not None:  # a tiny pipeline is named by its folder
        config = replace(config, model=pipeline_source(config.model))
    checkpoint = check_start(config, resume)
    run = NamedRun(config)
    with folder_for_results(Path(config.output), lock=is_first_process()):
        data = run.open_data(resuming=checkpoint is not None)
        check_fits(run.transformer(with_weights=False), data, config)
        sampler = run.sampler() if config.validation.prompts else None
        return Recipe(run.transformer(with_weights=True), data, config, checkpoint, sampler).run()


def export_checkpoint(checkpoint: str | Path, output: str | Path, transformer: Any = None) -> None:
    """Write the weights of a checkpoint in the form of a run's result, bit for bit what the run would have written.

    That is a patch for :func:`mhla_diffusers.load_mhla`, with the moving average of the weights where there is one; for
    a run without a patch a whole transformer.

    Args:
        checkpoint: its folder, or that of a run, whose latest one is meant.
        output: folder to write; it must not hold anything.
        transformer: with the weights and the patch that the run began with, which is changed; None for those that the
            run's configuration names.

    Raises:
        FileNotFoundError: no checkpoint, or one that lacks files.
        ValueError: a damaged checkpoint, an output that holds files, or model or patch have changed since.
        CheckpointError: the output cannot be written.
    """
    folder, output = find_checkpoint(Path(checkpoint)), Path(output)
    taken = output.exists() and (not output.is_dir() or any(output.iterdir()))
    check(not taken, f"{output} exists already; give the name of a new folder to export into.")
    state = read_state(folder, with_files=True)
    config = TrainingConfig.read(state["config"])
    if transformer is None:
        check(
            config.model is not None,
            f"The run of {checkpoint} names no model, since train() was called with a transformer; pass that too.",
        )
        for name, found in content_of_run(config).items():
            check(
                found == state[name],
                f"{name.capitalize()} has changed since the run of {checkpoint} started; restore it. Large files are "
                "compared by size and time, so copy weights with cp --preserve=timestamps.",
            )
        transformer = NamedRun(config).transformer(with_weights=True)
    prepare_for_training(transformer, config)
    parameters, average = dict(transformer.named_parameters()), read_tensors(folder, "average")
    for name, value in (read_tensors(folder, "weights") | average).items():
        parameters[name].data = value  # in the checkpoint's type: trained weights are float32 also under bfloat16
    write_whole(output, lambda aside: write_weights(transformer, config, aside))
    of_average = ", its moving average," if average else ""
    logger.info("Exported update %d of %d%s from %s.", state["step"], config.steps, of_average, folder)


class NamedRun:
    """Model, family and data of a configuration, found and checked against each other without reading weights.

    Args:
        config: with ``model`` and ``data``.

    Raises:
        ValueError: no model or data, a patch for another family, or a cache of another model or resolution.
        FileNotFoundError: no such model.
    """

    def __init__(self, config: TrainingConfig) -> None:
        if config.model is None or config.data is None:
            raise ValueError("The configuration must name model and data, for example model=Wan-AI/… data=latents/….")
        self.config, self.model, self.data = config, config.model, Path(config.data)
        tiny = tiny_of(config.model)
        self.name = config.model if tiny is None else f"tiny-{tiny.family}"
        """As commands take it."""
        self.family = family = trained_family(family_of(config.model, config.component).name)
        if isinstance(config.patch, str) and Path(config.patch).is_dir():
            read_record(Path(config.patch))
        elif isinstance(config.patch, str):
            patch = load_patch(config.patch)
            check(
                patch.family in ("", family.name),  # a profile is for any
                f"patch={config.patch!r} is for the {patch.family!r} family (made for {patch.base_model}), but "
                f"{self.name} belongs to {family.name!r}.",
            )
        self._dtype = FLOAT_TYPES[dtype_name(config.precision)]
        self._settings = read_json(pipeline_file(config.model, f"{config.component}/config.json"))
        self.is_encoded = (self.data / INDEX_NAME).is_file()
        is_file = not self.is_encoded and self.data.is_file()
        self.clips = config.clip or (read_sources(self.data).clip if is_file else None)
        usual = usual_clip(self.model, family)
        self.clip = (self.clips or Clips.of(usual)).longest(usual)
        """As prompts are generated."""
        if self.is_encoded:
            self._check_cache(LatentCache(self.data), usual.fps)

    def _check_cache(self, cache: LatentCache, fps: float) -> None:
        """Raise unless the latents fit the model and configuration; validate at the most common size of the longest."""
        described, clip = DataModel(self.model), self.config.clip
        cache.check_made_for(self.name, model_header(self.model, self.family), described.begins_with_picture)
        if clip is not None:
            cache.check_cut_as(described.fitted(clip) if isinstance(clip.sizes, str) else clip)
            return
        buckets = Counter(sample.bucket for sample in cache.samples)
        frames, height, width = max(buckets, key=lambda bucket: (bucket[0], buckets[bucket]))
        self.clip = Clip(frames, cache.settings.get("fps", fps), ((height, width),))

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
                return begin_with(Path(patch), model)
            with _without_warnings():  # that MHLA is not adapted yet
                return model if patch is None else apply_mhla(model, patch)

    def open_data(self, resuming: bool = False) -> LatentCache:
        """Open the latents; videos or images are encoded into the output folder first.

        Raises:
            FileNotFoundError: no data; the message has the commands that make it.
            ValueError: ``resuming``, and files have changed since the run encoded them.
        """
        if self.is_encoded:
            return LatentCache(self.data)
        try:
            contents = contents_of(read_sources(self.data).media())
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error} Make the data from videos or images with captions, `mhla encode --model {self.name} --source "
                f"FOLDER --output {self.data}`, or from prompts, `mhla synthesize --model {self.name} --prompts "
                f"PROMPTS.txt --output {self.data}`, with the frames and sizes of clip."
            ) from error
        folder = Path(self.config.output) / "latents"
        if resuming:
            cache = LatentCache(folder)
            changed = [name for name, _ in cache.index.contents.items() ^ contents.items()]
            check(
                not changed,
                f"Files or captions in {self.data} have changed since this run encoded them, such as "
                f"{', '.join(changed[:1])}. Restore them, or start a run in another output folder.",
            )
            return cache
        state = _process_state()
        with state.main_process_first():
            if state.is_main_process:
                logger.info("%s holds no latents; encoding its files into %s.", self.data, folder)
                pipe = load_pipeline(self.model, self.family.name, "auto", self._dtype, transformers_of(self.model))
                encode_folder(pipe, self.model, self.data, folder, self.clips, self.config.workers)
        return LatentCache(folder)

    def sampler(self) -> PromptSampler:
        """Make what generates at every validation."""
        validation = self.config.validation
        device, component = str(_process_state().device), self.config.component
        # the one in training takes the place of its transformer
        pipe = load_pipeline(self.model, self.family.name, device, self._dtype, [component])
        return PromptSampler(pipe, validation.prompts, self.clip, validation.inference_steps, component)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Context in which patching logs nothing but errors."""
    patching = logging.getLogger("mhla_diffusers.patching")
    before = patching.level
    patching.setLevel(logging.ERROR)
    try:
        yield
    finally:
        patching.setLevel(before)


def _process_state() -> Any:
    """Return the state of this process in accelerate, which the training's accelerator reuses."""
    from accelerate import PartialState

    return PartialState(cpu=launched_on_cpus())
