"""What a pipeline is called with: an attention, and beside it LoRA, quantised weights, a step cache, fewer steps."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import adapted_patch_folder, load_patch
from ..devices import FLOAT_TYPES, choose_device
from ..families import get_family
from ..generation import PipelineChoice, family_of, generator_for, load_result
from ..patching import CONFIG_NAME, apply_mhla, change_mhla, find_transformers, remove_mhla
from ..patching.few_step_scheduler import few_steps_of
from ..tiny import tiny_pipeline
from .caches import cache_configs, cached, parse_cache
from .cases import CLASSIFIERS, LINEAR_KINDS, PATCHES, patch_settings
from .models import models
from .results import CONTENT, Recorder, Row
from .timing import Outcome

UNPATCHED = "unpatched"
_TINY = "tiny-"
QUANTIZED = ("int8", "float8")
"""Types of weights that torchao quantises to; they are multiplied in the pipeline's type."""


@dataclass(frozen=True)
class PipelineVariant:
    """One row: an attention and what is added to it. None adds nothing."""

    attention: str = UNPATCHED
    """Unpatched, one of ``PATCHES``, or a patch: name, YAML file, or folder or Hub id of a saved one."""
    lora: str | None = None
    """Folder, file or Hub id."""
    quantized: str | None = None
    """One of ``QUANTIZED``."""
    cache: str | None = None
    """See :func:`parse_cache`."""
    steps: int | None = None
    """Of the sampler; None for those of the plain pipeline."""

    @property
    def name(self) -> str:
        """As rows name it, such as "MHLA + int8 + 4 steps"."""
        steps = None if self.steps is None else f"{self.steps} step{'s' if self.steps > 1 else ''}"
        return " + ".join(filter(None, (self.attention, self.lora, self.quantized, self.cache, steps)))

    @property
    def is_plain(self) -> bool:
        """Whether this is the pipeline as it comes, which all others are compared with."""
        return self == PipelineVariant()


@dataclass(frozen=True)
class Additions:
    """What every attention is measured with and without, alone and together.

    Raises:
        ValueError: an unknown cache or type, or no number of steps.
        ImportError: quantised weights, and torchao is missing.
    """

    loras: tuple[str, ...] = ()
    quantized: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    """Other numbers of steps than the plain pipeline's."""

    def __post_init__(self) -> None:
        for text in self.caches:
            parse_cache(text)
        for steps in self.steps:
            if steps < 1:
                raise ValueError(f"steps={steps} must be 1 or more.")
        for name in self.quantized:
            if name not in QUANTIZED:
                raise ValueError(f"quantize={name!r} is unknown; allowed: {', '.join(QUANTIZED)}.")
            if find_spec("torchao") is None:
                raise ImportError(
                    f"Weights in {name} are quantised by torchao, which is missing: pip install "
                    "mhla_diffusers[quantize]"
                )

    def variants(self, attentions: tuple[str, ...]) -> tuple[PipelineVariant, ...]:
        """Every attention with every choice of at most one of each; the first is the first attention alone."""
        choices = [dict.fromkeys((None, *of)) for of in (self.loras, self.quantized, self.caches, self.steps)]
        return tuple(PipelineVariant(*one) for one in product(dict.fromkeys(attentions), *choices))


NOTHING = Additions()


def is_saved_patch(name: str) -> bool:
    """Whether a patch comes with weights: the name of one that ships, a folder or a Hub id.

    Raises:
        ValueError: an unknown name, or a folder without a saved patch.
        FileNotFoundError: no such YAML file.
    """
    if Path(name).is_dir() and not Path(name, CONFIG_NAME).is_file():
        raise ValueError(f"patch={name!r} holds no saved patch: {CONFIG_NAME} is missing; save one with save_mhla.")
    is_file = Path(name).suffix in (".yaml", ".yml")
    if adapted_patch_folder(name) is not None or (not is_file and "/" in name) or Path(name).is_dir():
        return True
    load_patch(name)
    return False


@dataclass(frozen=True)
class PipelineCase(PipelineChoice):
    """The pipeline, the arguments of its call, its variants, and the repetitions.

    Raises:
        ValueError: a value that is not allowed.
        FileNotFoundError: no such file of a patch.
    """

    repetitions: int = 3
    """Calls of each variant, after one to warm up."""
    softmax_steps: int | float = 0
    """First denoising steps in which every patch is disabled, see :class:`MHLAConfig`."""
    patches: tuple[str, ...] = ()
    """See :attr:`PipelineVariant.attention`; those of ``PATCHES`` that the family takes if left out."""
    additions: Additions = NOTHING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repetitions < 1:
            raise ValueError(f"repetitions={self.repetitions} must be positive.")
        self.of_family.default_config.replace(softmax_steps=self.softmax_steps)  # raises if not allowed
        for name in self.patches:
            if name == CONTENT and self.of_family.own_attention != "softmax":
                raise ValueError(
                    f"patch={name!r} is for softmax attention; that of {self.family} is {self.of_family.own_attention}."
                )
            if name not in PATCHES:
                try:
                    is_saved_patch(name)
                except ValueError as error:
                    raise ValueError(f"{error} Rows of their own: {', '.join(map(repr, PATCHES))}.") from error

    @property
    def name(self) -> str:
        """The pipeline as it was asked for."""
        return self.model or f"{_TINY}{self.family}"

    @property
    def variants(self) -> tuple[PipelineVariant, ...]:
        """What the pipeline is called with; the first is plain."""
        sparse = (CONTENT,) if self.of_family.own_attention == "softmax" else ()
        return self.additions.variants((UNPATCHED, *(self.patches or (*LINEAR_KINDS, *sparse))))

    @property
    def place(self) -> torch.device:
        """Where it runs."""
        return choose_device(self.device)

    def check(self) -> None:
        """As :meth:`PipelineChoice.check`, and whether the pipeline takes LoRA.

        Raises:
            ValueError: it does not.
        """
        super().check()
        if self.additions.loras and not hasattr(self.pipeline_class(), "load_lora_weights"):
            raise ValueError(f"lora={self.additions.loras[0]!r}: {self.pipeline_class().__name__} takes no LoRA.")

    def run(self, pipe: Any, variant: PipelineVariant) -> Any:
        """Generate one sample, always of the same prompt and noise.

        A patch that was distilled to few steps takes its own number, without guidance; it refuses any other.
        """
        prompt = "3" if self.of_family.prompts_are_classes else "a seven"
        arguments: dict[str, Any] = {}
        if (few_steps := few_steps_of(pipe)) is not None:
            arguments = {"num_inference_steps": len(few_steps.times), **self.of_family.guidance_arguments(1.0)}
        if variant.steps is not None:
            arguments["num_inference_steps"] = variant.steps
        (sample,) = self.call(pipe, [prompt], [generator_for(0)], **arguments)
        return sample

    @contextmanager
    def applied(self, pipe: Any, variant: PipelineVariant, caches: dict[PipelineVariant, Any]) -> Iterator[None]:
        """Within the context the pipeline is a variant; behind it, what it was before.

        Args:
            pipe: plain.
            variant: which.
            caches: settings of step caches, filled at the first use of each variant: MagCache's take a call.

        Raises:
            ValueError: something that the pipeline does not take.
            OSError: no such LoRA or patch.
        """
        with ExitStack() as stack:
            if variant.quantized is not None:
                stack.enter_context(_on_copies(pipe, self.place))
            self._patch(pipe, variant, stack)
            if variant.lora is not None:
                before = _adapters(pipe)
                pipe.load_lora_weights(variant.lora)
                pipe.set_adapters(sorted(_adapters(pipe)))  # one that the patch brings stays on
                if variant.quantized is None and before:
                    stack.callback(pipe.delete_adapters, sorted(_adapters(pipe) - before))
                elif variant.quantized is None:
                    stack.callback(pipe.unload_lora_weights)
            if variant.quantized is not None:
                _quantize(pipe, variant.quantized, self.place)
            if variant.cache is not None:
                if variant not in caches:
                    run = partial(self.run, pipe, variant)
                    caches[variant] = cache_configs(pipe, variant.cache, FLOAT_TYPES[self.dtype], run)
                stack.enter_context(cached(pipe, caches[variant]))
            yield

    def _patch(self, pipe: Any, variant: PipelineVariant, stack: ExitStack) -> None:
        """Give it the attention of a variant; a copy is thrown away as it is."""
        if variant.attention == UNPATCHED:
            return
        if variant.attention in PATCHES:
            apply_mhla(pipe, **patch_settings(variant.attention, self.of_family.default_config.blocks))
        elif is_saved_patch(variant.attention):
            load_result(pipe, adapted_patch_folder(variant.attention) or variant.attention)
        else:
            apply_mhla(pipe, variant.attention)
        if variant.quantized is None:
            stack.callback(remove_mhla, pipe)
        if self.softmax_steps:
            change_mhla(pipe, softmax_steps=self.softmax_steps)

    def row(self, recorder: Recorder, outcome: Outcome, stage: str, variant: PipelineVariant, **more: Any) -> Row:
        """A row of this case."""
        settings = {**self.settings, **({"softmax_steps": self.softmax_steps} if self.softmax_steps else {})}
        described = ", ".join(f"{name}={value}" for name, value in settings.items())
        return recorder.row(
            outcome,
            case=f"{self.name}, {described}" if described else self.name,
            stage=stage,
            variant=variant.name,
            baseline=variant.is_plain,
            model=self.name,
            frames=self.settings.get("num_frames"),
            height=self.settings.get("height"),
            width=self.settings.get("width"),
            **more,
        )


def choose_pipeline(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    repetitions: int,
    settings: Mapping[str, Any],
    softmax_steps: int | float = 0,
    patches: Sequence[str] = (),
    additions: Additions = NOTHING,
) -> PipelineCase:
    """A pipeline by name, checked with its settings before anything is loaded.

    The name is tiny-dit, tiny-sana, tiny-wan, or the Hub id or folder of one; settings are arguments of the call.

    Raises:
        FileNotFoundError: no such pipeline, or file of a patch.
        ValueError: it has no transformer that MHLA supports, or does not take a setting, a patch or LoRA, or is no
            pipeline.
    """
    is_tiny = name.startswith(_TINY)
    if name in (CLASSIFIERS.keys() | models().keys()) and not is_tiny:
        raise ValueError(
            f"{name!r} is a configuration without weights and without a pipeline, which mhla bench transformer --model "
            f"{name} measures. Give the Hub id or folder of a pipeline, or {_TINY}dit, {_TINY}sana or {_TINY}wan."
        )
    case = PipelineCase(
        tiny_pipeline(name.removeprefix(_TINY)).family if is_tiny else family_of(name).name,
        repetitions,
        softmax_steps,
        tuple(patches),
        additions,
        model=None if is_tiny else name,
        device=str(device),
        dtype=next(known for known, one in FLOAT_TYPES.items() if one == dtype),
        settings=dict(settings),
    )
    case.check()
    return case


def _adapters(pipe: Any) -> set[str]:
    """Names of its LoRA."""
    return {name for names in pipe.get_list_adapters().values() for name in names}


@contextmanager
def _on_copies(pipe: Any, place: torch.device) -> Iterator[None]:
    """Within the context the pipeline's transformers are copies; the originals wait on the CPU.

    There they take none of the device's memory, so that the peak is that of the copies.
    """
    originals, scheduler = find_transformers(pipe), pipe.scheduler
    for name, transformer in originals.items():
        setattr(pipe, name, copy.deepcopy(transformer.to("cpu")))
    try:
        yield
    finally:
        for name, transformer in originals.items():
            setattr(pipe, name, None)  # before the other one needs its memory
            setattr(pipe, name, transformer.to(place))
        pipe.scheduler = scheduler  # a patch of few steps has put its own


def _quantize(pipe: Any, name: str, place: torch.device) -> None:
    """Quantise the linear layers of all blocks but those of patch and LoRA, and move the transformers to the device."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    config = Int8WeightOnlyConfig() if name == "int8" else Float8WeightOnlyConfig()

    def is_meant(module: nn.Module, path: str) -> bool:
        added = {"mhla", "lora_A", "lora_B"} & set(path.split("."))
        return isinstance(module, nn.Linear) and not added

    for transformer in find_transformers(pipe).values():
        for block in get_family(transformer).blocks_of(transformer).values():
            quantize_(block, config, filter_fn=is_meant, device=place)
        transformer.to(place)
