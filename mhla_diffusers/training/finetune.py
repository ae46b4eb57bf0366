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
from ..devices import PRECISIONS, is_first_process, launched_on_cpus
from ..errors import check
from ..families import Clip, trained_family
from ..files import folder_for_results, read_json
from ..generation.pipelines import family_of, load_pipeline, pipeline_file, pipeline_source, tiny_of, usual_clip
from ..patching import apply_mhla, read_record
from .config import TrainingConfig
from .data.cache import LatentCache, check_made_with
from .data.model import DataModel
from .recipe import Recipe, TrainingResult, check_fits, check_start, content_of_run
from .run_folder import find_checkpoint, read_state, read_tensors, write_whole
from .validation import PromptSampler
from .weights import begin_with, prepare_for_training, write_weights

logger = logging.getLogger(__name__)


def finetune(config: TrainingConfig, resume: str | None = None) -> TrainingResult:
    """Adapt the transformer of the pipeline in ``config.model`` to the latents in ``config.data``, as :func:`train`.

    Model, patch, data and the checkpoint to resume from are checked against each other before weights are loaded.
    """
    if config.model is not None:  # a tiny pipeline is named by its folder
        config = replace(config, model=pipeline_source(config.model))
    checkpoint = check_start(config, resume)
    run = NamedRun(config)
    with folder_for_results(Path(config.output), lock=is_first_process()):
        data = run.open_data()
        check_fits(run.transformer(with_weights=False), data, config)
        sampler = run.sampler(data) if config.validation.prompts else None
        return Recipe(run.transformer(with_weights=True), data, config, checkpoint, sampler).run()


def export_checkpoint(checkpoint: str | Path, output: str | Path, transformer: Any = None) -> None:
    """Write the weights of a checkpoint as the run's result, bit for bit what the run would have written.

    ``checkpoint`` is its folder, or that of a run, whose latest one is meant; ``transformer`` what the run began with,
    patched, which is changed, None for what the configuration names. ValueError for a damaged checkpoint, an output
    that holds files, or a model or patch that has changed since; OSError for what is missing or cannot be written.
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
    """The model and latents that a configuration names; they are checked without reading weights."""

    def __init__(self, config: TrainingConfig) -> None:
        if config.model is None or config.data is None:
            raise ValueError("The configuration must name model and data, for example model=Wan-AI/… data=latents/….")
        self.config, self.model, self.data = config, config.model, Path(config.data)
        tiny = tiny_of(config.model)
        self.name = config.model if tiny is None else f"tiny-{tiny.name}"
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
        self._dtype = PRECISIONS[config.precision]
        self._settings = read_json(pipeline_file(config.model, f"{config.component}/config.json"))

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

    def open_data(self) -> LatentCache:
        """Open the latents; FileNotFoundError with the commands that make them, ValueError for another model's."""
        try:
            cache = LatentCache(self.data)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error} From videos or images with captions: `mhla encode --model {self.name} --source FOLDER "
                f"--output {self.data}`. From prompts: `mhla synthesize --model {self.name} --prompts PROMPTS.txt "
                f"--output {self.data}`."
            ) from error
        remedy = f"encode the data for this model, with mhla encode --model {self.name}, into another folder."
        check_made_with(self.data, cache.header, DataModel(self.model).header({}), remedy)
        return cache

    def sampler(self, data: LatentCache) -> PromptSampler:
        """Make what generates at every validation, clips of the most common size among the longest of the data."""
        from accelerate import PartialState

        validation, component = self.config.validation, self.config.component
        device = str(PartialState(cpu=launched_on_cpus()).device)  # which the training's accelerator reuses
        # the one in training takes the place of its transformer
        pipe = load_pipeline(self.model, self.family.name, device, self._dtype, [component])
        buckets = Counter(clip.bucket for _, clip in data.clips)
        frames, height, width = max(buckets, key=lambda bucket: (bucket[0], buckets[bucket]))
        clip = Clip(frames, data.header.get("fps", usual_clip(self.model, self.family).fps), ((height, width),))
        return PromptSampler(pipe, validation.prompts, clip, validation.inference_steps, component)


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
