"""Checks before training: settings, processes, transformer and data must fit each other."""

import math
from pathlib import Path
from typing import Any

import torch

from ..attention.layout import check_layout
from ..config import check
from ..devices import launched_processes
from ..families import DiffusionProcess, FlowMatching, classes_that_are_split, get_family
from ..families.processes import KNOWN_FRAMES
from ..patching import find_patched, mhla_layers
from .config import ContextParallel, FewStepsConfig, TrainingConfig
from .distributed import Groups, sharding_is_asked_for
from .latents.data import TrainingData
from .latents.times import frames_together
from .optimizer import optimizer_class
from .run_folder import RunFolder
from .trainable import STUDENT, patched_attentions


def check_start(config: TrainingConfig, resume: str | None) -> Path | None:
    """Check what needs neither the model nor the data, and return the checkpoint to resume from, if any.

    Raises:
        ValueError: a new run in a folder that holds one, unsupported sharding, or processes that make no whole groups.
        FileNotFoundError: no checkpoint to resume from.
        ImportError: bitsandbytes is missing for ``optimizer: adamw8bit``.
    """
    checkpoint = RunFolder(config.output).find(resume)
    check(
        not sharding_is_asked_for(config) or config.few_steps is None,
        "few_steps does not train sharded weights (FSDP2), since student, teacher and critic share them; use one "
        "device, or finetune/accelerate/ddp.yaml.",
    )
    optimizer_class(config.optimizer)
    Groups.of(config.context_parallel, 0, launched_processes())
    return checkpoint


def check_fits(transformer: Any, data: TrainingData, config: TrainingConfig) -> None:
    """Raise ValueError unless transformer, data and configuration fit each other; does not look at values."""
    layers = mhla_layers(transformer)
    if layers and config.patch is None:
        raise ValueError("The transformer is patched, but the configuration says patch: null; set patch to its patch.")
    if not layers and config.patch is not None:
        raise ValueError(f"The configuration has patch={config.patch!r}, but the transformer is not patched.")
    for patched in find_patched(transformer).values():
        check(
            patched.lora in (None, STUDENT),
            f"patch={config.patch!r} has the LoRA {patched.lora!r}, and training begins from the original model. "
            "Give all stages as the stages of one run, or start from a patch without a LoRA.",
        )
    frames_together(transformer)  # raises where it cannot be trained
    family = get_family(transformer)
    channels, axes = family.channels(transformer.config), 4 if family.makes_videos else 3
    for shape in sorted(set(data.shapes)):
        if len(shape) != axes or shape[0] != channels:
            raise ValueError(
                f"The data holds latents of shape {shape}, but {type(transformer).__name__} takes {channels} channels "
                f"and {axes - 1} further axes. Was the data encoded for another model?"
            )
        grid = family.token_grid(transformer, torch.empty(1, *shape, device="meta"))
        for layer in layers.values():
            patch = layer.config
            patch.check_whole(grid)
            check_layout(grid, patch.blocks_on(grid), is_causal=patch.causal is not None)
            check(
                patch.sparse != "content" or math.prod(grid) > patch.block_size,
                f"block_size={patch.block_size} makes one block of the {math.prod(grid)} tokens of a sample, and "
                "every query lists it: that is softmax attention, and nothing of the patch would be trained. Choose "
                "a smaller block_size, or sparse='none'.",
            )
    if config.few_steps is not None:
        check_few_steps(family.process(transformer, config.flow_shift), data, config.few_steps)
        check(
            frames_together(transformer) is None,
            "few_steps cannot be trained with causal='block', whose frames have times of their own; use a patch "
            "without causal.",
        )
    check_guidance(data, config)
    check_splits(transformer, data, config)


def check_few_steps(process: DiffusionProcess, data: TrainingData, few_steps: FewStepsConfig) -> FlowMatching:
    """The process, if a model that was trained with it can learn to sample in few steps from this data.

    Raises:
        ValueError: it is no flow matching from noise at σ = 1, the data lacks the empty prompt that guidance needs, or
            samples have frames that are given.
    """
    if type(process) is not FlowMatching:
        raise ValueError(
            f"few_steps needs flow matching whose time is σ, and this model was trained with {type(process).__name__}; "
            "train it with objectives instead."
        )
    check(
        few_steps.guidance == 1 or data.empty is not None,
        f"few_steps.guidance={few_steps.guidance} needs the empty prompt's conditioning, which the data lacks; encode "
        "the data with it, or set guidance: 1.0.",
    )
    check(
        KNOWN_FRAMES not in data[0],
        "few_steps does not train models whose first latent frames are given, as by a picture; use text-to-video data.",
    )
    return process


def check_enough(data: TrainingData, config: TrainingConfig) -> None:
    """Raise ValueError unless data has a batch to train on, and an empty prompt if prompts are dropped."""
    held_out = config.validation.samples
    left = len(data) - held_out
    check(
        left > 0,
        f"The data holds {len(data)} samples and validation.samples={held_out} of them are held out, which leaves none "
        "to train on.",
    )
    check(
        config.batch_size <= left,
        f"batch_size={config.batch_size} is more than the {left} samples to train on, of which every batch would hold "
        f"some several times. Choose batch_size={left} or less, or encode more data.",
    )
    check(
        config.prompt_dropout == 0 or data.empty is not None,
        f"prompt_dropout={config.prompt_dropout} needs the empty prompt's conditioning, which the data lacks; encode "
        "the data with it, or set prompt_dropout: 0.",
    )


def check_guidance(data: TrainingData, config: TrainingConfig) -> None:
    """Raise ValueError unless data has the empty prompt where the teacher's guidance is distilled in."""
    for index, stage in enumerate(config.stages):
        check(
            stage.guidance == 1 or data.empty is not None,
            f"stages.{index}.guidance={stage.guidance} needs the empty prompt's conditioning, which the data lacks; "
            "encode the data with it, or set guidance: 1.0.",
        )


def check_splits(transformer: Any, data: TrainingData, config: TrainingConfig) -> None:
    """Raise ValueError unless the tokens can be split over processes as configured."""
    if getattr(transformer, "_parallel_config", None) is not None:
        raise ValueError(
            "transformer.enable_parallelism() was called before training, which would weigh gradients wrongly; instead "
            "set context_parallel: {ring: …, ulysses: …} in the configuration."
        )
    degrees = config.context_parallel
    if degrees.processes == 1:
        return
    family = get_family(transformer)
    if family.why_never_split is not None:
        raise ValueError(f"context_parallel cannot be set for this transformer: {family.why_never_split}.")
    if getattr(transformer, "_cp_plan", None) is None:
        raise ValueError(
            f"diffusers does not define how to split the tokens of {type(transformer).__name__} over processes "
            f"(_cp_plan), so context_parallel cannot be set for it; it does for {', '.join(classes_that_are_split())}."
        )
    attentions, layers = family.self_attentions(transformer), mhla_layers(transformer)
    for heads in sorted({int(attn.heads) for attn in attentions.values()}):
        if heads % degrees.ulysses:
            allowed = [degree for degree in range(2, heads + 1) if heads % degree == 0]
            raise ValueError(
                f"context_parallel.ulysses={degrees.ulysses} does not divide the {heads} heads of this transformer; "
                f"allowed is one of {', '.join(map(str, allowed))}, with context_parallel.ring for the rest."
            )
    for shape in sorted(set(data.shapes)):
        tokens = math.prod(family.token_grid(transformer, torch.empty(1, *shape, device="meta")))
        _check_divides(tokens, degrees, f"latents of shape {shape} make {tokens} tokens")
    text = data[0].get("encoder_hidden_states") if any(layer.adapter.has_extra for layer in layers.values()) else None
    if text is not None:
        _check_divides(len(text), degrees, f"the text, which self-attention attends to as well, is {len(text)} tokens")
    if degrees.ring == 1:
        return
    keeps_softmax = len(layers) < len(attentions)
    if config.needs_teacher or keeps_softmax:
        _check_softmax_goes_round(transformer)
    check(
        not (config.gradient_checkpointing and keeps_softmax and config.needs_prediction),
        "gradient_checkpointing: true does not work with softmax attention that is trained round a ring "
        "(context_parallel.ring > 1): diffusers' backward pass reads what was recomputed more than once. Use "
        "context_parallel.ulysses alone, a patch of all layers, or gradient_checkpointing: false.",
    )


def _check_divides(tokens: int, degrees: ContextParallel, what: str) -> None:
    # unequal shares would weigh tokens unequally in attention transfer
    size = degrees.processes
    check(
        tokens % size == 0,
        f"context_parallel splits tokens over {size} processes evenly, but {what}; use a number of processes that "
        f"divides it, such as {math.gcd(tokens, size)}, or another size or number of frames.",
    )


def _check_softmax_goes_round(transformer: Any) -> None:
    """Raise unless the softmax backend returns its log-sum-exp; only PyTorch's default one may not."""
    from diffusers.models import attention_dispatch
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    chosen = {getattr(attn.processor, "_attention_backend", None) for attn in patched_attentions(transformer).values()}
    active, _ = _AttentionBackendRegistry.get_active_backend()
    if AttentionBackendName.NATIVE not in {active if name is None else AttentionBackendName(name) for name in chosen}:
        return
    x = torch.zeros(1, 1, 1, 8)
    try:
        attention_dispatch._native_attention_forward_op(None, x, x, x, None, 0.0, False, None, False, True, False)
    except ValueError as error:
        raise ValueError(
            "Softmax attention, of the teacher and of layers without a patch, cannot run round a ring "
            f"(context_parallel.ring > 1) with PyTorch's default backend: {error} Use context_parallel.ulysses alone, "
            "or a backend that returns its log-sum-exp, by the environment variable "
            "DIFFUSERS_ATTN_BACKEND=_native_cudnn or =flash, with precision: bf16."
        ) from error
