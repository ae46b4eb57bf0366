"""Adapt a pipeline by name; model, patch and data are checked before any weights are loaded."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..devices import is_first_process, launched_on_cpus
from ..errors import check
from ..families import Clip, trained_family
from ..files import folder_for_results, write_whole_folder
from ..generation.pipelines import family_of, load_pipeline, pipeline_source, transformer_without_weights, usual_clip
from ..patching import apply_mhla
from ..patching.patch import logger as patching_log
from .config import TrainingConfig
from .data.cache import LatentCache, check_made_with
from .data.model import DataModel
from .recipe import Recipe, TrainingResult, check_fits, check_start, content_of_run
from .run_folder import AVERAGE, WEIGHTS, find_changes, find_checkpoint, read_state
from .validation import Sampler, prompt_sampler
from .weights import begin_with, prepare_for_training, write_weights

logger = logging.getLogger(__name__)


def finetune(config: TrainingConfig, resume: str | None = None) -> TrainingResult:
    """Adapt the transformer of the pipeline in ``config.model`` to the latents in ``config.data``, as :func:`train`.

    Model, patch, data and the checkpoint to resume from are checked against each other before weights are loaded.
    """
    checkpoint, run = check_start(config, resume), NamedRun(config)
    with folder_for_results(Path(config.output), lock=is_first_process()):
        planned, data = run.transformer(with_weights=False), run.open_data()
        check_fits(planned, data, config)
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
        find_changes(folder, state, content_of_run(config))
        transformer = NamedRun(config).transformer(with_weights=True)
    saved = load_file(folder / WEIGHTS)
    for name, parameter in prepare_for_training(transformer, config).items():
        parameter.data = saved.get(f"{AVERAGE}{name}", saved[name])
    write_whole_folder(output, lambda aside: write_weights(transformer, config, aside))
    logger.info("Exported update %d of %d from %s.", state["step"], config.steps, folder)


class NamedRun:
    """The model and latents that a configuration names; they are checked without reading weights."""

    def __init__(self, config: TrainingConfig) -> None:
        if config.model is None or config.data is None:
            raise ValueError("The configuration must name model and data, for example model=Wan-AI/… data=latents/….")
        self.config, self.model, self.data = config, pipeline_source(config.model), config.data
        self.family = trained_family(family_of(self.model, config.component).name)
        self._dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32

    def transformer(self, with_weights: bool) -> Any:
        """Make the transformer, patched, on the CPU, or without weights on the meta device."""
        component, patch = self.config.component, self.config.patch
        model = transformer_without_weights(self.model, self.family.name, component)
        if with_weights:
            model = type(model).from_pretrained(self.model, subfolder=component, dtype=self._dtype)
        if isinstance(patch, str) and Path(patch).is_dir():
            return begin_with(Path(patch), model)
        patching_log.disabled = True  # it would warn that MHLA is not adapted yet
        try:
            return model if patch is None else apply_mhla(model, patch)
        finally:
            patching_log.disabled = False

    def open_data(self) -> LatentCache:
        """Open the folders of latents; ValueError for another model's."""
        data, made_with = LatentCache(self.data), DataModel(self.model).header({})
        for folder, header in data.headers.items():
            check_made_with(folder, header, made_with)
        return data

    def sampler(self, data: LatentCache) -> Sampler:
        """Return the function that generates validation samples, at the most common size of the longest clips."""
        from accelerate import PartialState

        validation, component = self.config.validation, self.config.component
        device = str(PartialState(cpu=launched_on_cpus()).device)  # which the training's accelerator reuses
        # the one in training takes the place of its transformer
        pipe = load_pipeline(self.model, self.family.name, device, self._dtype, [component])
        usual = usual_clip(self.model, self.family).fps
        clips = Counter((clip.bucket, data.headers[folder].get("fps", usual)) for folder, clip in data.clips)
        (frames, height, width), fps = max(clips, key=lambda clip: (clip[0][0], clips[clip]))
        clip = Clip(frames=frames, fps=fps, sizes=((height, width),))
        return prompt_sampler(pipe, validation.prompts, clip, validation.inference_steps, component)
