"""Checks before training: settings, processes, transformer and data must fit each other."""

import logging
import math
from pathlib import Path
from typing import Any

import torch

from ..config import LinearConfig, SparseConfig
from ..devices import launched_processes
from ..errors import check
from ..families import get_family, trained_family
from ..patching import MHLALayer, find_patched, mhla_layers
from ..patching.advice import advice_on
from .changes import find_changes
from .config import TrainingConfig
from .distributed import check_groups, uses_fsdp2
from .latents.data import TrainingData
from .latents.times import frames_together
from .optimizer import optimizer_class
from .roles import STUDENT, lora_targets, quantization
from .run_folder import RunFolder, read_state

logger = logging.getLogger(__name__)


def check_start(config: TrainingConfig, resume: str | None) -> Path | None:
    """Check what needs neither the model nor the data, and return the checkpoint to resume from, if any.

    Raises:
        ValueError: a new run in a folder that holds one, changes that a checkpoint does not take, unsupported sharding,
            or processes that make no whole groups.
        FileNotFoundError: no checkpoint to resume from.
        ImportError: as :func:`check_installed`.
    """
    checkpoint = RunFolder(config.output).find(resume)
    if checkpoint is not None:  # what the run finds of data, patch and weights is compared later
        find_changes(checkpoint, read_state(checkpoint), {"config": config.to_dict()})
    uses_fsdp2(config)
    check(
        config.base_dtype is None or launched_processes() == 1,
        f"base_dtype={config.base_dtype!r} runs in one process, but {launched_processes()} were launched; remove it.",
    )
    check_installed(config)
    check_groups(config.context_parallel, launched_processes())
    return checkpoint


def check_installed(config: TrainingConfig) -> None:
    """Raise ImportError if the library of the tracker, of the optimizer or of ``base_dtype`` is missing."""
    from accelerate.utils import is_tensorboard_available, is_wandb_available

    optimizer_class(config.optimizer)
    if config.base_dtype is not None:
        quantization(config.base_dtype)
    available = {"tensorboard": is_tensorboard_available, "wandb": is_wandb_available}
    if config.tracker is not None and not available[config.tracker]():
        raise ImportError(
            f"tracker={config.tracker} is not installed: pip install {config.tracker}, or set tracker: null. "
            "metrics.jsonl holds the same numbers."
        )


def check_fits(transformer: Any, data: TrainingData, config: TrainingConfig) -> None:
    """Raise ValueError unless transformer, data and configuration fit each other; reads no weights.

    Warns where other settings of the patch would do better on the largest samples.
    """
    patches, family = list(find_patched(transformer).values()), trained_family(transformer)
    check(
        bool(patches) == (config.patch is not None),
        f"patch={config.patch!r}, but the transformer is {'patched' if patches else 'not patched'}; both must have the "
        "same patch, or none.",
    )
    if any(patched.lora is not None for patched in patches):
        _check_lora(transformer, config)
    frames_together(transformer)  # raises where it cannot be trained
    channels, axes = family.inputs.channels(transformer.config), 4 if family.makes_videos else 3
    grids = []
    for shape in sorted(set(data.shapes)):
        if len(shape) != axes or shape[0] != channels:
            raise ValueError(
                f"The data holds latents of shape {shape}, but {type(transformer).__name__} takes {channels} channels "
                f"and {axes - 1} further axes. Was the data encoded for another model?"
            )
        grid = family.token_grid(transformer, torch.empty(1, *shape, device="meta"))
        grids.append(grid)
        for patch in (patched.config for patched in patches):
            if isinstance(patch, SparseConfig):
                rule = patch.rule_on(grid)
                check(
                    patch.density == 1 or rule.listed_on(grid) < 1,
                    f"block_size={rule.block_size} makes one block of the {math.prod(grid)} tokens of a sample, and "
                    "every query lists it: that is softmax attention, and nothing would be adapted. Choose a smaller "
                    "block_size.",
                )
            elif isinstance(patch, LinearConfig):
                patch.layout_on(grid)  # raises if the blocks cannot cut the grid
    for patched in patches:
        for words in advice_on(patched, max(grids, key=math.prod)).values():
            logger.warning("%s", words)
    for index, stage in enumerate(config.stages):
        check(
            stage.trainable != "mhla"
            or any(isinstance(layer, MHLALayer) for layer in mhla_layers(transformer).values()),
            f"stages.{index}.trainable='mhla' trains the patch's own parameters, and this patch has none, as sparse "
            "attention; choose 'attention', 'lora' or 'all'.",
        )
    _check_data(data, config)
    _check_split(transformer, data, config)


def _check_lora(transformer: Any, config: TrainingConfig) -> None:
    """Raise unless every stage can go on with the LoRA of the patch that the run begins with."""
    has = {
        name: module.lora_A[STUDENT].out_features
        for name, module in transformer.named_modules()
        if STUDENT in getattr(module, "lora_A", ())
    }
    rank = max(has.values())
    for index, stage in enumerate(config.stages):
        check(
            stage.trainable in ("mhla", "lora"),
            f"stages.{index}: trainable={stage.trainable!r} changes the weights that the LoRA of patch="
            f"{config.patch!r} adds to; use trainable: lora or mhla.",
        )
        targets = has if stage.lora_rank is None else lora_targets(transformer, stage.lora_layers)
        check(
            stage.lora_rank in (None, rank) and has.keys() == set(targets),
            f"stages.{index}: lora_rank={stage.lora_rank} with lora_layers={stage.lora_layers!r} does not fit the "
            f"LoRA of patch={config.patch!r}, which has rank {rank} on {len(has)} layers, not {len(targets)}; give "
            "those of the run that made it.",
        )


def _check_data(data: TrainingData, config: TrainingConfig) -> None:
    """Raise unless data has a batch to train on, and the empty prompt where a setting needs it."""
    held_out = config.validation.samples
    left = len(data) - held_out
    check(
        config.batch_size <= left,
        f"batch_size={config.batch_size} is more than the {left} samples to train on: the data holds {len(data)}, and "
        f"validation.samples={held_out} of them are held out. Give a smaller batch_size, or encode more data.",
    )
    without = {"prompt_dropout": (config.prompt_dropout, 0.0)}
    for index, stage in enumerate(config.stages):
        without[f"stages.{index}.guidance"] = stage.guidance, 1.0
    for name, (value, off) in without.items():
        check(
            value == off or data.empty is not None,
            f"{name}={value} needs the empty prompt's conditioning, which the data lacks; encode the data with it, or "
            f"set {name}: {off}.",
        )


def _check_split(transformer: Any, data: TrainingData, config: TrainingConfig) -> None:
    """Raise unless the tokens can be split over processes as configured."""
    check(
        getattr(transformer, "_parallel_config", None) is None,
        "transformer.enable_parallelism() was called before training, which would weigh gradients wrongly; instead set "
        "context_parallel in the configuration.",
    )
    size, family = config.context_parallel, get_family(transformer)
    if size == 1:
        return
    check(
        getattr(transformer, "_cp_plan", None) is not None,
        f"diffusers does not define how to split the tokens of {type(transformer).__name__} over processes "
        f"(_cp_plan), so context_parallel={size} cannot be set for it; use 1, with finetune/accelerate/fsdp2.yaml to "
        "share its weights.",
    )
    for layer in mhla_layers(transformer).values():
        check(
            isinstance(layer, MHLALayer) and getattr(layer.config, "convolution", None) is None,
            f"context_parallel={size} splits MHLA without a convolution, and the patch is {layer.config}; use "
            "context_parallel=1.",
        )
    for attn in family.self_attentions(transformer).values():
        heads, _ = family.heads(attn)
        check(
            heads % size == 0,
            f"context_parallel={size} does not divide the {heads} heads of this transformer; allowed is one of "
            f"{', '.join(str(degree) for degree in range(2, heads + 1) if heads % degree == 0)}.",
        )
    for shape in sorted(set(data.shapes)):  # unequal shares would weigh tokens unequally in attention transfer
        tokens = math.prod(family.token_grid(transformer, torch.empty(1, *shape, device="meta")))
        check(
            tokens % size == 0,
            f"context_parallel={size} splits tokens evenly, but latents of shape {shape} make {tokens} tokens; use a "
            f"number of processes that divides it, such as {math.gcd(tokens, size)}, or another size or number of "
            "frames.",
        )
