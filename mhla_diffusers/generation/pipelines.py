"""Choosing, loading and patching a pipeline; reading facts about a pipeline without loading it."""

import inspect
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from pydantic import StrictFloat

from ..config import PatchConfig, adapted_patches, load_patch
from ..devices import FLOAT_TYPES, choose_device, device_and_type
from ..errors import check, check_names, nearest
from ..families import Clip, Family, families, get_family
from ..files import file_hash, fingerprint, read_json
from ..patching import PATCH_FILE, apply_mhla, change_mhla, load_mhla
from ..settings import PositiveInteger, check_value
from ..tiny import TINY, TinyPipeline, pipeline_folder, tiny_pipeline
from ..tiny.pipelines import FRAMES_PER_SECOND

_GIVEN = r"self|prompt|class_labels|generator|output_type|return_dict|num_\w+_per_prompt"
_GIVEN += r"|callback\w*|latents|\w+_embeds\w*|\w+_mask"
"""Arguments of a pipeline's call that are set elsewhere, change what it returns, or take functions and tensors."""
_WHOLE = ("num_inference_steps", "height", "width", "num_frames", "video_length")


@dataclass(frozen=True)
class PipelineChoice:
    """The pipeline to generate with, and the arguments of its call."""

    family: str
    """dit, sana, wan, or the name of a registered family."""
    _: KW_ONLY
    model: str = ""
    """Hub id, folder, or name of a tiny pipeline that ships with the package; by default the family's."""
    patch: str | None = None
    """Profile, preset or YAML file, untrained; or with weights: name, folder or Hub id."""
    patch_settings: dict[str, Any] = field(default_factory=dict)
    """Settings that change those of the patch, such as density; alone they are of the family's own patch."""
    device: str = "cpu"
    dtype: str = ""
    """By default bfloat16 on a GPU, float32 on a CPU."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline's call, such as height or num_inference_steps."""

    def __post_init__(self) -> None:
        family_named(self.family)
        object.__setattr__(self, "model", self.model or f"tiny-{tiny_pipeline(self.family).name}")
        dtype = str(device_and_type(self.device, self.dtype)[1]).removeprefix("torch.")
        object.__setattr__(self, "dtype", dtype)
        if self.patch is None:
            self.of_family.complete(self.patch_settings)
        elif not has_weights(self.patch):
            load_patch(self.patch).patch.replace(**self.patch_settings)
        self.check()

    @property
    def of_family(self) -> Family:
        """The registered family."""
        return family_named(self.family)

    @property
    def choices(self) -> dict[str, Any]:
        """Everything but prompt and seed that determines a result, with the content of model, patch and weights."""
        content: Any = None
        if self.patch is not None and has_weights(self.patch):
            content = fingerprint(adapted_patches().get(self.patch, Path(self.patch)))
        elif self.patch is not None:
            content = load_patch(self.patch).patch.to_dict()
        names = ("family", "model", "patch", "patch_settings", "dtype", "settings")
        given = {name: getattr(self, name) for name in names}
        return {**given, "model_content": fingerprint(Path(self.model)), "patch_content": content}

    @property
    def known_arguments(self) -> dict[str, Any]:
        """Steps, size, frames and guidance of the call, as far as they are known before it, defaults included."""
        guidance = self.of_family.calling.guidance_arguments(1.0)
        parameters = inspect.signature(pipeline_class(self.model).__call__).parameters
        found = {name: x.default for name, x in parameters.items()}
        if tiny := tiny_of(self.model):
            found |= tiny.call_settings | ({"num_frames": tiny.frames} if tiny.is_video else {})
        found |= self.settings
        return {name: found[name] for name in (*_WHOLE, *guidance) if isinstance(found.get(name), int | float)}

    @property
    def summary(self) -> str:
        """Model, device, type, what is known of the call, and patch in one line."""
        changes = [f"{name} {value}" for name, value in self.patch_settings.items()]
        runs = f"patch {self.patch or f'of {self.family}'}" if self.patch or changes else "unpatched"
        call = [f"{name} {value:g}" for name, value in self.known_arguments.items()]
        return ", ".join([f"{self.model} on {choose_device(self.device)} in {self.dtype}", runs, *changes, *call])

    def check(self, *more: str) -> None:
        """Check the settings of the pipeline's call and ``more`` arguments by its class alone.

        Raises ValueError for a model of another family, and for a value that must be a number and is not.
        """
        found = family_of(self.model).name
        check(found == self.family, f"{self.model} belongs to {found}, but family={self.family!r} was asked for.")
        pipeline = pipeline_class(self.model)
        defaults = {name: x.default for name, x in inspect.signature(pipeline.__call__).parameters.items()}
        known = [name for name in defaults if not re.fullmatch(_GIVEN, name)]
        check_names([*self.settings, *more], known, f"setting of a call of {pipeline.__name__}")
        for name, value in self.settings.items():
            is_number = name.startswith("guidance_scale") or type(defaults[name]) in (int, float)
            check_value(name, value, PositiveInteger if name in _WHOLE else StrictFloat if is_number else Any)

    def load(self, prompts: Sequence[str] = ()) -> Any:
        """Load the pipeline onto its device, check the prompts, and patch it; ValueError for what does not fit."""
        pipe = load_pipeline(self.model, self.family, self.device, FLOAT_TYPES[self.dtype])
        self.of_family.calling.prompt_arguments(pipe, prompts)  # raises for an unknown class
        if self.patch is not None or self.patch_settings:
            put_on(pipe, self.patch, **self.patch_settings)
        return pipe

    def call(self, pipe: Any, prompts: Sequence[str], generators: Sequence[torch.Generator], **arguments: Any) -> Any:
        """Call the pipeline and return a sample per prompt; ``num_frames`` is how many frames come out."""
        tiny = tiny_of(self.model)
        settings = {**(tiny.call_settings if tiny else {}), **self.settings, **arguments}
        if (frames := self.settings.get("num_frames")) is not None:
            settings["num_frames"] = self.of_family.calling.asked_frames(pipe, frames)
        return self.of_family.calling.call(pipe, prompts, generators, **settings)


def load_pipeline(model: str, family: str, device: str, dtype: torch.dtype, without_weights: Iterable[str] = ()) -> Any:
    """Load a pipeline by Hub id, folder or name, without progress bars.

    Of ``without_weights``, transformers, no weights are read; they stay on the meta device.
    """
    source = pipeline_source(model)
    import_module(family_named(family).library)  # diffusers loads classes only from imported modules
    absent = {name: transformer_without_weights(source, family, name) for name in without_weights}
    # DiffusionPipeline would also load a transformer that its own class need not have, as Wan's
    pipe = pipeline_class(source).from_pretrained(source, dtype=dtype, **absent)  # reads sizes of its transformer
    for name in absent:  # cannot be moved
        setattr(pipe, name, None)
    pipe.to(choose_device(device))
    for name, transformer in absent.items():
        setattr(pipe, name, transformer)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pipeline_class(model: str) -> Any:
    """Return the class of a pipeline, read without its weights; raises ValueError if diffusers lacks it."""
    import diffusers

    name = str(_index(model).get("_class_name"))
    check(hasattr(diffusers, name), f"{model} is a {name}, which diffusers {diffusers.__version__} lacks.")
    return getattr(diffusers, name)


def transformer_without_weights(model: str, family: str, component: str = "transformer") -> Any:
    """Return a transformer of a pipeline on the meta device, by its configuration alone."""
    settings = read_json(pipeline_file(model, f"{component}/config.json"))
    with torch.device("meta"):
        return family_named(family).transformer_class(settings["_class_name"]).from_config(settings)


def has_weights(patch: str) -> bool:
    """Whether a patch, as a user gives it, is the name of an adapted one, a folder, or a Hub id."""
    is_file = Path(patch).suffix in (".yaml", ".yml")
    return patch in adapted_patches() or Path(patch).is_dir() or ("/" in patch and not is_file)


def put_on(pipe: Any, patch: str | PatchConfig | None, **settings: Any) -> None:
    """Patch a pipeline with what :attr:`PipelineChoice.patch` takes or a config, and settings that change it.

    The folder of a whole trained transformer puts that in the pipeline. ValueError for another model's weights.
    """
    if not isinstance(patch, str) or not has_weights(patch):
        apply_mhla(pipe, patch, **settings)
        return
    folder, kind = Path(patch), type(pipe.transformer)
    if (folder / "config.json").is_file() and not (folder / PATCH_FILE).is_file():
        made_for = read_json(folder / "config.json").get("_class_name")
        check(made_for == kind.__name__, f"{folder} holds a {made_for}, but the pipeline has a {kind.__name__}.")
        trained = kind.from_pretrained(folder, dtype=pipe.transformer.dtype)
        pipe.transformer = trained.to(pipe.transformer.device)
    else:
        load_mhla(pipe, folder)
    if settings:
        change_mhla(pipe, **settings)


def component_identity(model: str, component: str) -> str:
    """Return class and configuration of a component, such as ``"AutoencoderKLWan (configuration 3f2a91c07d55)"``."""
    _, name = _index(model).get(component) or (None, None)
    if name is None:
        return "none"
    return f"{name} (configuration {file_hash(pipeline_file(model, f'{component}/config.json'))[:12]})"


def _index(model: str) -> dict[str, Any]:
    return dict(read_json(pipeline_file(model, "model_index.json")))


def classes_of(model: str, family: Family) -> tuple[dict[str, int], int]:
    """Return labels and number of the classes that a pipeline was trained on, read without its weights."""
    return family.calling.classes(_index(model), read_json(pipeline_file(model, "transformer/config.json")))


def family_named(name: str) -> Family:
    """Return the registered family of diffusion models of that name; ValueError if there is none."""
    check_names([name], [family.name for family in families()], "family", "mhla info")
    return get_family(name)


def family_of(model: str, component: str = "transformer") -> Family:
    """Return the family of a pipeline's transformer, by its class, without its weights."""
    parts = {part: entry[1] for part, entry in _index(model).items() if isinstance(entry, list) and entry[1]}
    check(component in parts, f"{model} has no component {component!r}; it has: {', '.join(parts)}.")
    return get_family(parts[component])


def transformers_of(model: str) -> list[str]:
    """Return the names of a pipeline's components that are supported transformers, read without their weights."""
    supported = {cls for family in families() for cls in family.transformers}
    return [part for part, entry in _index(model).items() if isinstance(entry, list) and entry[1] in supported]


def pipeline_source(model: str) -> str:
    """Return the folder of a tiny pipeline for its name, such as tiny-wan, and any other Hub id or folder as it is."""
    name = model.removeprefix("tiny-")
    is_name = name != model and name in TINY and not Path(model).is_dir()
    return str(pipeline_folder(name)) if is_name else model


def tiny_of(model: str) -> TinyPipeline | None:
    """Return the tiny pipeline with a name or folder; None for any other model."""
    source = Path(pipeline_source(model))
    return next((tiny for name, tiny in TINY.items() if source == pipeline_folder(name)), None)


def usual_clip(model: str, family: Family) -> Clip:
    """Return the default clip of a model: the tiny pipeline's own, else the family's."""
    tiny, usual = tiny_of(model), family.default_clip
    if tiny is None:
        return usual
    frames, fps = (tiny.frames, float(FRAMES_PER_SECOND)) if tiny.is_video else (usual.frames, usual.fps)
    return Clip(frames=frames, fps=fps, sizes=((tiny.picture_size, tiny.picture_size),))


def pipeline_file(model: str, name: str) -> Path:
    """Return a file of a pipeline, local or from the Hub; FileNotFoundError if there is none."""
    model = pipeline_source(model)
    if Path(model).is_dir():
        if not Path(model, name).is_file():
            raise FileNotFoundError(f"{model} is not a diffusers pipeline: {name} is missing.")
        return Path(model, name)
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    try:
        if not isinstance(try_to_load_from_cache(model, name), str):
            check(not HF_HUB_OFFLINE, "HF_HUB_OFFLINE is set, and the files are not in the cache.")
            with suppress(HTTPError):  # an answer too; without any the Hub's client would try for half a minute
                urlopen(Request(ENDPOINT, method="HEAD"), timeout=5).close()
        return Path(hf_hub_download(model, name))
    except (OSError, ValueError) as error:
        near = nearest(model, [f"tiny-{name}" for name in TINY]) if "/" not in model else ""
        raise FileNotFoundError(
            f"{model} is neither a local folder nor could it be read from {ENDPOINT}{near and f' ({near})'}: {error}"
        ) from error
