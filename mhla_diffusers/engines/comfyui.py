"""ComfyUI node that makes the self-attention of a model sparse.

It sets three things on a clone of the model: an attention override, which attends; a wrapper of the diffusion model,
which reads token grid, text length and step once per call; and a wrapper of the sampler, which ends the count.
"""

import inspect
import logging
import math
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..config import PROFILES, Step
from ..patching.call import Call
from ..patching.route import Request
from .engine import Engine
from .settings import EngineSettings, read_settings

Override = Callable[..., torch.Tensor]
_TEXT_INPUTS: dict[str, tuple[str, ...]] = {
    "Flux": ("context",),
    "HunyuanVideo": ("context", "txt_byt5", "clip_fea"),
    "LTXVModel": (),
    "MiniMaxH3Model": (),
    "QwenImageTransformer2DModel": ("context",),
    "WanModel": (),
}
"""Models whose token grid is known, in raster order, and their inputs that share the sequence with it."""
_REFERENCE_INPUTS = ("ref_latents", "ref_latent", "reference_latent", "reference_motion", "context_latents")
_OVERRIDE = "optimized_attention_override"
"""Key of a function that ComfyUI calls with its own attention, query, key, value, number of heads and options."""
_PREVIOUS = "mhla_previous"


@dataclass
class _Forward:
    call: Call
    references: str = ""
    """Says which inputs add tokens of other pictures, which have no place on the grid, to the sequence."""
    double_blocks: int = 0
    attended: int = 0


@dataclass
class _Patch:
    engine: Engine
    forward: ContextVar[_Forward | None] = field(default_factory=lambda: ContextVar("mhla_forward", default=None))
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a forward finds its branches, as ComfyUI may give every GPU a thread."""
    forwards: int = 0
    reached: bool = False


def patch_model(model: Any, settings: EngineSettings) -> Any:
    """Return a clone of a ``ModelPatcher`` with sparse self-attention; its override becomes the dense attention."""
    clone = model.clone()
    options = dict(clone.model_options.get("transformer_options", {}))
    previous = options.get(_OVERRIDE)
    patch = _Patch(Engine(settings, logging.getLogger(__name__)))
    wrappers = {kind: dict(by_key) for kind, by_key in options.get("wrappers", {}).items()}
    # by the kinds of ComfyUI's WrappersMP
    wrappers.setdefault("diffusion_model", {})["mhla"] = [_wrap_diffusion_model(patch)]
    wrappers.setdefault("outer_sample", {})["mhla"] = [_wrap_sampling(patch)]
    options["wrappers"] = wrappers
    options[_OVERRIDE] = _make_override(patch, getattr(previous, _PREVIOUS, previous))
    clone.model_options = {**clone.model_options, "transformer_options": options}
    return clone


def _make_override(patch: _Patch, previous: Override | None) -> Override:
    """Return the attention override, a function because ``ModelPatcher.clone`` deep-copies objects.

    It has no ``container_function``, which ComfyUI would call without its own attention.
    """

    @torch._disable_dynamo  # type: ignore[attr-defined]  # in a graph layer and step would be constants
    def override(
        func: Override,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        patch.reached = True
        options = kwargs.get("transformer_options") or {}
        forward = patch.forward.get() or _Forward(Call(patch.engine, tally=patch.engine.tally))
        call = forward.call
        if (layout := options.get("minimax_h3_layout")) is not None:
            start, end = next((start, end) for start, end, kind in layout.segments if kind == "video")
            call = call._replace(extra=(start, layout.seq_len - end))
        elif (sizes := options.get("grid_sizes")) is not None:  # of Wan
            call = call._replace(grid=tuple(map(int, sizes)))
        skip_reshape, skip_output_reshape = (kwargs.get(f"skip_{what}reshape", False) for what in ("", "output_"))
        head_dim = q.shape[-1] if skip_reshape else q.shape[-1] // heads
        keywords = {"mask": mask, "attn_precision": attn_precision, **kwargs}

        def tokens_first(x: torch.Tensor) -> torch.Tensor:
            return x.transpose(1, 2) if skip_reshape else x.unflatten(2, (-1, head_dim))

        def attend_densely() -> torch.Tensor:
            return previous(func, q, k, v, heads, **keywords) if previous else func(q, k, v, heads, **keywords)

        def own(*_: torch.Tensor) -> torch.Tensor:
            output = attend_densely()
            return output.transpose(1, 2) if skip_output_reshape else output.unflatten(2, (-1, head_dim))

        query, key, value = tokens_first(q), tokens_first(k), tokens_first(v)
        tokens, keys = math.prod(call.grid) if call.grid else 0, key.shape[1]
        # over text or audio, or from one to another; LTX attends from guided tokens of the grid to all, with a mask
        if keys < tokens or (query.shape[1] != keys and (mask is None or not tokens)):
            return attend_densely()
        by_head = mask[:, None] if mask is not None and mask.ndim == 3 else mask
        layer = options.get("block_index")
        if layer is None:  # LTX, and Wan before ComfyUI 0.11, which attend over the grid once in each block
            layer = forward.attended
        elif options.get("block_type") == "single":
            layer += forward.double_blocks
        forward.attended += 1
        shared = "" if keys == tokens + sum(count or 0 for count in call.extra) else forward.references
        request = Request(by_head, scale=kwargs.get("scale"), own=own)
        output = patch.engine.attend(query, key, value, call, layer, request, shared)
        return output.transpose(1, 2) if skip_output_reshape else output.flatten(2)

    setattr(override, _PREVIOUS, previous)
    return override


def _wrap_diffusion_model(patch: _Patch) -> Callable[..., Any]:
    def diffusion_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = inspect.signature(executor.original).bind(*args, **kwargs).arguments
        inputs |= inputs.pop("kwargs", {})
        options = inputs.get("transformer_options") or {}
        override = options.get(_OVERRIDE)
        patch.forwards += 1
        if getattr(override, "__qualname__", "").startswith("ModelPatcher.set_model_optimized_attention."):
            # a Model Attention Backend behind the node, which knows no other override
            options[_OVERRIDE] = _make_override(patch, override)
        token = patch.forward.set(_read_forward(patch, executor.class_obj, inputs, options, args[0]))
        try:
            return executor(*args, **kwargs)
        finally:
            patch.forward.reset(token)

    return diffusion_model


def _wrap_sampling(patch: _Patch) -> Callable[..., Any]:
    """Return the wrapper that logs a summary of each sampling, or that no attention reached the override."""

    def outer_sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
        patch.forwards, patch.reached = 0, False
        try:
            return executor(*args, **kwargs)
        finally:
            patch.engine.end()
            if patch.forwards and not patch.reached:
                patch.engine.log.logger.warning(
                    "MHLA: no attention reached the node, so all were dense. Put nodes that set another attention "
                    "before it, and use ComfyUI 0.3.60 or newer."
                )

    return outer_sample


def _read_forward(
    patch: _Patch, model: Any, inputs: Mapping[str, Any], options: Mapping[str, Any], latent: Any
) -> _Forward:
    latent = latent[0] if isinstance(latent, list | tuple) else latent  # video before audio
    sigmas, schedule = options.get("sigmas"), options.get("sample_sigmas")
    step, engine = None, patch.engine
    if sigmas is not None and schedule is not None and len(schedule) > 1:
        sigma = float(sigmas.flatten()[0])  # on another GPU than the schedule where ComfyUI splits the work
        step = Step(int((schedule[:-1] - sigma).abs().argmin()), len(schedule) - 1)
    # by the memory that is free, ComfyUI puts prompts into one batch or not, so each has a branch of its own; a video
    # that is sampled in windows has one for each window
    prompts = options.get("uuids") or ("",)
    window = tuple(getattr(options.get("context_window"), "index_list", ()))
    is_split = len(latent) % len(prompts) == 0 and len(set(prompts)) == len(prompts)
    with patch.lock:
        if step is not None:
            engine.run.begin(step)
        names = prompts if is_split else (tuple(prompts),)
        branches = tuple(engine.run.named((name, window)) for name in names)
    known = [base.__name__ for base in type(model).__mro__ if base.__name__ in _TEXT_INPUTS]
    if not known:
        return _Forward(engine.filled((), (0, 0), step, ()))
    text = sum(inputs[name].shape[1] for name in _TEXT_INPUTS[known[0]] if inputs.get(name) is not None)
    double_blocks = getattr(model, "double_blocks", ())
    # before ComfyUI 0.14 HunyuanVideo has its text behind the grid, and its blocks say so
    flipped = any(getattr(block, "flipped_img_txt", False) for block in double_blocks)
    axes, size = latent.shape[2:], getattr(model, "patch_size", 1)
    sizes = (1,) * (len(axes) - 2) + (size,) * 2 if isinstance(size, int) else size
    grid = tuple(math.ceil(axis / length) for axis, length in zip(axes, sizes, strict=True))
    call = engine.filled(grid, (0, text) if flipped else (text, 0), step, branches)
    if step is not None:  # the sampler may evaluate its last step once more, and the residuals end with the sampling
        call = call._replace(step=replace(step, count=0))
    others = ", ".join(name for name in _REFERENCE_INPUTS if inputs.get(name) is not None)
    references = f"reference tokens ({others}) share the sequence" if others else ""
    return _Forward(call, references, len(double_blocks))


def make_node() -> Any:
    """Return the node's class, which needs ComfyUI."""
    from comfy_api.latest import io

    share = {"default": -1.0, "min": -1.0, "max": 1.0, "step": 0.005}
    count = {"default": -1, "min": -1, "max": 1000}
    inputs = [
        io.Model.Input("model"),
        io.Combo.Input("profile", options=list(PROFILES), default="faithful", tooltip="faithful keeps the first fifth "
                       "of the steps dense, balanced a tenth, fast one step. -1 below takes the profile's value."),
        io.Float.Input("density", **share, tooltip="Share of all pairs of token blocks that attend exactly; the others "
                       "take part through their means and states. Less is faster, more is closer, 1 is dense."),
        io.Float.Input("dense_first", **share, tooltip="Share of the first steps with dense attention: there the "
                       "layout of the picture forms."),
        io.Int.Input("dense_every", **count, tooltip="One dense step every this many steps; it corrects those that "
                     "follow. 0 for never."),
        io.Int.Input("dense_layers", **count, tooltip="First layers with dense attention; single blocks count on from "
                     "the double ones."),
        io.Int.Input("min_tokens", default=EngineSettings().min_tokens, min=0, max=1_000_000,
                     tooltip="Shorter sequences keep dense attention, which is as fast there."),
    ]  # fmt: skip

    class MHLASparseAttention(io.ComfyNode):
        """Makes the self-attention of a model sparse."""

        @classmethod
        def define_schema(cls) -> Any:
            """Return what the node shows and takes."""
            return io.Schema(
                node_id="MHLASparseAttention",
                display_name="MHLA Sparse Attention",
                category="advanced/model",
                description="Sparse attention, without training, in the self-attention of Wan, Flux, HunyuanVideo, "
                "LTX, Qwen-Image and MiniMax-H3. Cross-attention is untouched. The log says after every sampling how "
                "many attentions were sparse, and why the others were not.",
                inputs=inputs,
                outputs=[io.Model.Output()],
            )

        @classmethod
        def execute(cls, model: Any, profile: str, **inputs: Any) -> Any:
            """Return the patched clone of a model."""
            given = {name: value for name, value in inputs.items() if value != -1}
            return io.NodeOutput(patch_model(model, read_settings(profile, given)))

    return MHLASparseAttention


async def comfy_entrypoint() -> Any:
    """Return the extension that ComfyUI takes the node from."""
    from comfy_api.latest import ComfyExtension

    class MHLAExtension(ComfyExtension):
        """Extension with the one node."""

        async def get_node_list(self) -> list[Any]:
            """Return the node's class."""
            return [make_node()]

    return MHLAExtension()
