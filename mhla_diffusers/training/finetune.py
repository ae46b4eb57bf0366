"""Adapt a pipeline by name; model, patch and data are checked before any weights are loaded."""

import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..config import check, load_patch
from ..devices import FLOAT_TYPES, dtype_name, launched_on_cpus
from ..families import Clip, Family
from ..files import read_json
from ..generation import family_of, load_pipeline, pipeline_file
from ..patching import apply_mhla, load_mhla, read_record
from .checks import check_enough, check_fits, check_start
from .config import TrainingConfig
from .estimate import Estimate, estimate
from .latents.cache import INDEX_NAME, LatentCache
from .latents.data import InMemoryData
from .latents.encode import encode_folder, model_header
from .latents.media import find_media
from .loop import TrainingResult, train
from .validation import PromptSampler

logger = logging.getLogger(__name__)


def finetune(config: TrainingConfig, resume: str | None = None) -> TrainingResult:
    """Adapt the transformer of a pipeline.

    Model, patch, data and the checkpoint to resume from are checked against each other before weights are loaded.
    Raises as :meth:`ResolvedRun.of` and :func:`train`.

    Args:
        config: with ``model`` and ``data``.
        resume: "latest" or the path of a checkpoint.
    """
    check_start(config, resume)
    run = ResolvedRun.of(config)
    data = run.open_data()
    check_fits(run.without_weights(), data, config)
    check_enough(data, config)
    return train(run.with_weights(), data, config, resume=resume, sampler=run.sampler())


def dry_run(config: TrainingConfig, processes: int | None = None) -> Estimate:
    """Trainable parameters, memory and FLOPs of a run, without weights and without data.

    Uses the shapes of the encoded data if it exists, else of ``config.clip`` or the family's default.

    Args:
        config: with ``model`` and ``data``.
        processes: that FSDP2 shards weights, gradients and optimizer state over; None for no sharding.
    """
    run = ResolvedRun.of(config)
    transformer = run.without_weights()
    data: LatentCache | InMemoryData
    if run.is_encoded:
        data = run.open_data()
        check_enough(data, config)
    else:
        vae = read_json(pipeline_file(run.model, "vae/config.json"))
        latents = torch.empty(run.family.latent_shape(transformer.config, vae, run.clip), device="meta")
        shapes = run.family.conditioning_shapes(transformer.config)
        data = InMemoryData([{"latents": latents, **shapes}], shapes)
    check_fits(transformer, data, config)
    return estimate(transformer, data[0], config, processes)


@dataclass(frozen=True)
class ResolvedRun:
    """Model, family and data of a configuration, found without reading weights."""

    config: TrainingConfig
    model: str
    """Hub id or folder of the pipeline."""
    family: Family
    data: Path
    """Folder of latents, or files to encode."""
    clip: Clip
    """The configuration's; else that of the latents, or of the family where there are none yet."""
    settings: Mapping[str, Any]
    """``config.json`` of the transformer."""

    @classmethod
    def of(cls, config: TrainingConfig) -> "ResolvedRun":
        """Find model, family and data, and check that they fit each other and the patch.

        Raises:
            ValueError: no model or data, a patch for another family, or a cache of another model or resolution.
            FileNotFoundError: no such model.
        """
        import diffusers

        if config.model is None or config.data is None:
            raise ValueError("The configuration must name model and data, for example model=Wan-AI/… data=latents/….")
        family = family_of(config.model, config.component)
        if isinstance(config.patch, str) and Path(config.patch).is_dir():
            if read_record(Path(config.patch)).weights != "mhla":
                raise ValueError(
                    f"patch={config.patch!r} was saved with weights of the model, which would replace those of "
                    "the teacher, the original model; start from a patch saved with weights='mhla', such as a "
                    "calibrated one."
                )
        elif isinstance(config.patch, str):
            patch = load_patch(config.patch)
            if patch.family != family.name:
                raise ValueError(
                    f"patch={config.patch!r} is for the {patch.family!r} family (made for {patch.base_model}), but "
                    f"{config.model} belongs to {family.name!r}."
                )
        settings = read_json(pipeline_file(config.model, f"{config.component}/config.json"))
        run = cls(config, config.model, family, Path(config.data), config.clip or family.default_clip, settings)
        if run.is_encoded:
            cache = LatentCache(run.data)
            cache.check_made_for(run.model, model_header(run.model, family))
            name = read_json(pipeline_file(run.model, "model_index.json"))["_class_name"]
            pipeline = getattr(diffusers, name, None)
            if pipeline is not None:  # else one of the user's own, of which nothing is known
                cache.check_begins(run.model, family.keeps_first_frame(pipeline, settings))
            if config.clip is not None:
                cache.check_cut_as(config.clip)
            else:  # prompts are generated as the data was cut
                run = replace(run, clip=cache.cut_as(family.default_clip))
            check(
                cache.index.header.settings.get("steps") != 0 or all(stage.few_steps for stage in config.stages),
                f"{run.data} holds prompts without latents (mhla synthesize --steps 0), which only few_steps is "
                "trained on; make latents for the other stages, with --steps 50.",
            )
        return run

    @property
    def is_encoded(self) -> bool:
        """Whether the data holds latents."""
        return (self.data / INDEX_NAME).is_file()

    def without_weights(self) -> Any:
        """The transformer, patched, on the meta device."""
        with torch.device("meta"):
            return self._patched(self.family.transformer_class(self.settings["_class_name"]).from_config(self.settings))

    def with_weights(self) -> Any:
        """The transformer, patched, on the CPU."""
        cls: Any = self.family.transformer_class(self.settings["_class_name"])
        return self._patched(cls.from_pretrained(self.model, subfolder=self.config.component, dtype=self._dtype))

    def _patched(self, transformer: Any) -> Any:
        patch = self.config.patch
        if patch is None:
            return transformer
        if isinstance(patch, str) and Path(patch).is_dir():
            return load_mhla(transformer, patch)
        return apply_mhla(transformer, patch)

    @property
    def _dtype(self) -> torch.dtype:
        """Of the frozen weights."""
        return FLOAT_TYPES[dtype_name(self.config.precision)]

    def open_data(self) -> LatentCache:
        """The latents; videos or images are encoded into the output folder first.

        Raises:
            FileNotFoundError: no data; the message has the commands that make it.
        """
        if self.is_encoded:
            return LatentCache(self.data)
        try:
            find_media(self.data)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error} {self._ways_to_data()}") from error
        folder = Path(self.config.output) / "latents"
        logger.info("%s holds no latents; encoding its files into %s.", self.data, folder)
        with _processes().main_process_first():
            pipe = load_pipeline(self.model, self.family.name, "auto", self._dtype)
            encode_folder(pipe, self.model, self.data, folder, self.clip, self.config.workers)
        return LatentCache(folder)

    def _ways_to_data(self) -> str:
        """The commands that make the data."""
        common = ["--model", self.model, "--output", str(self.data), "--precision", self.config.precision]
        encoding = ["mhla", "encode", "--source", "FOLDER", *common]
        synthesizing = ["mhla", "synthesize", "--prompts", "PROMPTS.txt", *common]
        if self.config.clip is not None:
            sizes = [f"{height}x{width}" for height, width in self.clip.sizes]
            encoding += ["--frames", str(self.clip.frames), "--fps", str(self.clip.fps)]
            encoding += [word for size in sizes for word in ("--size", size)]
            synthesizing += ["--frames", str(self.clip.frames), "--size", sizes[0]]
        return (
            f"Make the data from videos or images with captions in FOLDER: `{shlex.join(encoding)}`, or from prompts, "
            f"one per line of PROMPTS.txt: `{shlex.join(synthesizing)}`."
        )

    def sampler(self) -> PromptSampler | None:
        """Generates at every validation, if the configuration has prompts."""
        validation = self.config.validation
        if not validation.prompts:
            return None
        pipe = load_pipeline(self.model, self.family.name, str(_processes().device), self._dtype)
        few_steps = None if self.config.few_steps is None else self.config.few_steps.sampling
        component, steps = self.config.component, validation.inference_steps
        return PromptSampler(pipe, validation.prompts, self.clip, steps, component, few_steps)


def _processes() -> Any:
    """State of this process in accelerate, which the training's accelerator reuses."""
    from accelerate import PartialState

    return PartialState(cpu=launched_on_cpus())
