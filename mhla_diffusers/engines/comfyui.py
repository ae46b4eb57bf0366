"""ComfyUI node that gives the self-attention of a model sparse attention.

ComfyUI loads ``pipelines/comfyui-mhla``, or any file in ``custom_nodes`` with the line
``from mhla_diffusers.engines.comfyui import comfy_entrypoint``. The node sets three things on a clone of the model: an
attention override, which attends; a wrapper of the diffusion model, which reads token grid, text length and step once
per call; and a wrapper of the sampler, which ends the count of :class:`.attend.EngineAttention`.

ComfyUI has one attention override per model. Its node Model Attention Backend, which calls
``ModelPatcher.set_model_optimized_attention``, replaces the one before; its Model Sparse Attention, in
``comfy_extras/nodes_sparse_attention.py``, puts itself on top again at every step and hands on what it does not take.
"""

import inspect
import logging
import math
from collections.abc import Callable, Hashable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..attention.layout import Extra
from ..config import SparseConfig, Step
from ..patching.attend import EngineAttention, EngineSettings, read_layers
from ..settings import check
from .environment import read_value

Override = Callable[..., torch.Tensor]
"""Attention that ComfyUI calls with its own attention, query, key, value, number of heads and options."""

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
_WRAPPER_KEY = "mhla"
_OVERRIDE = "optimized_attention_override"
_PREVIOUS = "mhla_previous"
"""Attribute of our override: the override before it."""


@dataclass
class _ModelCall:
    """What the attentions know of one call of the diffusion model."""

    grid: tuple[int, ...] | None = None
    extra: Extra = (0, 0)
    references: tuple[str, ...] = ()
    """Names of inputs that add tokens of other pictures to the sequence."""
    double_blocks: int = 0
    step: Step | None = None
    attended: int = 0
    """Self-attentions over the grid so far."""


@dataclass
class _Patch:
    """State that the override and the wrappers of one patched model share."""

    attention: EngineAttention
    window: tuple[float, float]
    """Where of a sampling sparse attention begins and ends, 0 to 1."""
    sigmas: tuple[float, float] = (math.inf, 0.0)
    """Its sigmas in the present sampling."""
    call: ContextVar[_ModelCall | None] = field(default_factory=lambda: ContextVar("mhla_call", default=None))
    calls: int = 0
    """Calls of the diffusion model in the present sampling."""
    reached: bool = False
    """Whether any attention came to the override in the present sampling."""


def patch_model(model: Any, settings: EngineSettings, *, start_percent: float = 0.0, end_percent: float = 1.0) -> Any:
    """Return a clone of a model whose self-attention is sparse.

    An override that the model already has becomes the dense attention; one of ours is replaced.

    Args:
        model: ComfyUI's ``ModelPatcher``, which stays as it is.
        settings: what to do.
        start_percent: where of the sampling, by the model's sigmas, sparse attention begins: 0 to 1.
        end_percent: where it ends; dense attention runs before and after.

    Raises:
        ValueError: the start is not before the end, or ComfyUI's Model Sparse Attention is on the model.
    """
    check(
        0 <= start_percent < end_percent <= 1,
        f"start_percent={start_percent:g} must be below end_percent={end_percent:g}, both from 0 to 1.",
    )
    clone = model.clone()
    options = dict(clone.model_options.get("transformer_options", {}))
    previous = options.get(_OVERRIDE)
    _refuse_core_sparse(previous)
    attention = EngineAttention(settings, logging.getLogger(__name__), finds_ends=False)
    patch = _Patch(attention, (start_percent, end_percent))
    wrappers = {kind: dict(by_key) for kind, by_key in options.get("wrappers", {}).items()}
    for kind, wrapper in (  # kinds of ComfyUI's WrappersMP
        ("diffusion_model", _wrap_diffusion_model(patch)),
        ("outer_sample", _wrap_sampling(patch)),
    ):
        wrappers.setdefault(kind, {})[_WRAPPER_KEY] = [wrapper]
    options["wrappers"] = wrappers
    options[_OVERRIDE] = _make_override(patch, getattr(previous, _PREVIOUS, previous))
    clone.model_options = {**clone.model_options, "transformer_options": options}
    return clone


def _refuse_core_sparse(override: Override | None) -> None:
    """Raise where an override is that of ComfyUI's own sparse attention.

    ComfyUI names the modules of its nodes by their path.
    """
    check(
        not getattr(override, "__module__", "").endswith("nodes_sparse_attention"),
        "Model Sparse Attention and MHLA Sparse Attention are on one model, and where one of them is dense, the other "
        "would attend. Remove one. For another dense attention use Model Attention Backend.",
    )


def _make_override(patch: _Patch, previous: Override | None) -> Override:
    """Return the attention override, a function because ``ModelPatcher.clone`` deep-copies objects.

    It has no ``container_function``: ComfyUI would call that without its own attention, to which dense calls fall
    back. Without one it takes query, key and value out of their containers first.
    """

    def override(
        func: Override,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        patch.reached = True
        options = kwargs.get("transformer_options") or {}
        call = patch.call.get() or _ModelCall()
        grid, extra = _place(call, options)
        head_dim = q.shape[-1] if skip_reshape else q.shape[-1] // heads

        def tokens_first(x: torch.Tensor) -> torch.Tensor:
            return x.transpose(1, 2) if skip_reshape else x.unflatten(2, (-1, head_dim))

        query, key, value = tokens_first(q), tokens_first(k), tokens_first(v)
        keywords = {"mask": mask, "attn_precision": attn_precision, **kwargs}
        keywords |= {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}

        def attend_densely() -> torch.Tensor:
            return previous(func, q, k, v, heads, **keywords) if previous else func(q, k, v, heads, **keywords)

        def dense() -> torch.Tensor:
            output = attend_densely()
            return output.transpose(1, 2) if skip_output_reshape else output.unflatten(2, (-1, head_dim))

        output = None
        if _is_over_grid(query, key, mask, grid):
            output = patch.attention.attend(
                query,
                key,
                value,
                grid,
                extra=extra,
                layer=_layer(call, options),
                step=call.step,
                obstacle=_obstacle(call, query, mask, kwargs.get("scale"), grid, extra),
                parts=_parts(options, len(query)),
                dense=dense,
            )
            call.attended += 1
        if output is None:
            return attend_densely()
        return output.transpose(1, 2) if skip_output_reshape else output.flatten(2)

    setattr(override, _PREVIOUS, previous)
    return override


def _parts(options: Mapping[str, Any], batch: int) -> list[Hashable]:
    """Return the name of every part of a batch: the prompt and, where a video is sampled in windows, its frames.

    ComfyUI puts prompts into one batch or not, by the memory that is free at each call.
    """
    names = options.get("uuids") or options.get("cond_or_uncond") or ("",)
    window = tuple(getattr(options.get("context_window"), "index_list", ()))
    return [(name, window) for name in names] if batch % len(names) == 0 else [(tuple(names), window)]


def _place(call: _ModelCall, options: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, Extra]:
    """Return the token grid and the numbers of tokens before and after it."""
    packed = options.get("minimax_h3_layout")
    if packed is not None:
        for start, end, kind in packed.segments:
            if kind == "video":
                return call.grid, (start, packed.seq_len - end)
    told = options.get("grid_sizes")  # of Wan
    return (call.grid if told is None else tuple(told)), call.extra


def _is_over_grid(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, grid: tuple[int, ...] | None
) -> bool:
    """Whether an attention is over the token grid, and not over text or audio, nor from one to another.

    With guides, LTX attends from some tokens of the grid to all, with a mask.
    """
    tokens = math.prod(grid) if grid else 0
    if query.shape[1] == key.shape[1]:
        return key.shape[1] >= tokens
    return mask is not None and 0 < tokens <= key.shape[1]


def _layer(call: _ModelCall, options: Mapping[str, Any]) -> int:
    """Return the number of the layer, single blocks behind double ones.

    LTX, and Wan before ComfyUI 0.11, do not name the block; they attend over the grid once in each.
    """
    index = options.get("block_index")
    if index is None:
        return call.attended
    return int(index) + (call.double_blocks if options.get("block_type") == "single" else 0)


def _obstacle(
    call: _ModelCall,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    grid: tuple[int, ...] | None,
    extra: Extra,
) -> str:
    """Return why an attention cannot be sparse; empty if nothing of ComfyUI's forbids it."""
    if mask is not None:
        return "a mask"
    if scale is not None and not math.isclose(scale, query.shape[-1] ** -0.5, rel_tol=1e-6):
        return f"scale {scale:g} is not that of {query.shape[-1]} channels"
    if grid is not None and call.references and query.shape[1] != math.prod(grid) + sum(extra):
        return f"reference tokens ({', '.join(call.references)}) share the sequence"
    return ""


def _wrap_diffusion_model(patch: _Patch) -> Callable[..., Any]:
    """Return the wrapper that reads every call of the diffusion model for its attentions."""

    def diffusion_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = inspect.signature(executor.original).bind(*args, **kwargs).arguments
        inputs |= inputs.pop("kwargs", {})
        options = inputs.get("transformer_options") or {}
        override = options.get(_OVERRIDE)
        _refuse_core_sparse(override)
        patch.calls += 1
        if getattr(override, "__qualname__", "").startswith("ModelPatcher.set_model_optimized_attention."):
            # a Model Attention Backend behind the node, which knows no other override
            options[_OVERRIDE] = _make_override(patch, override)
        _choose_steps(patch, options)
        token = patch.call.set(_read_call(executor.class_obj, inputs, options, args[0]))
        try:
            return executor(*args, **kwargs)
        finally:
            patch.call.reset(token)

    return diffusion_model


def _wrap_sampling(patch: _Patch) -> Callable[..., Any]:
    """Return the wrapper that logs one line per sampling, also where nothing reached the override."""

    def outer_sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
        patch.calls, patch.reached = 0, False
        sigma_at = executor.class_obj.model_patcher.get_model_object("model_sampling").percent_to_sigma
        patch.sigmas = float(sigma_at(patch.window[0])), float(sigma_at(patch.window[1]))
        attention = patch.attention
        try:
            output = executor(*args, **kwargs)
            if attention.is_all_dense:
                attention.logger.warning(
                    "MHLA changed nothing in this sampling: %s. refresh none has no dense steps, a wider window fewer; "
                    "a smaller min_tokens takes shorter sequences.",
                    attention.summary(),
                )
            return output
        finally:
            attention.end_of_call()
            if patch.calls and not patch.reached:
                attention.logger.warning(
                    "MHLA: no attention reached the node, so all were dense: a node behind it set another attention, "
                    "which then goes before it, or this ComfyUI is older than attention overrides (0.3.60)."
                )

    return outer_sample


def _choose_steps(patch: _Patch, options: Mapping[str, Any]) -> None:
    """Make those steps of a sampler dense whose sigmas lie outside the window."""
    schedule = options.get("sample_sigmas")
    if schedule is not None:
        (start, end), settings = patch.sigmas, patch.attention.settings
        first, last = int((schedule[:-1] > start).sum()), int((schedule[:-1] < end).sum())
        config = replace(settings.config, softmax_steps=first, softmax_last=last)
        patch.attention.settings = replace(settings, config=config)


def _read_call(model: Any, inputs: Mapping[str, Any], options: Mapping[str, Any], latent: Any) -> _ModelCall:
    """Read the inputs of a diffusion model, by their names in its ``_forward``."""
    call = _ModelCall(step=_step(options))
    known = [base.__name__ for base in type(model).__mro__ if base.__name__ in _TEXT_INPUTS]
    if not known:
        return call
    latent = latent[0] if isinstance(latent, list | tuple) else latent  # video before audio
    call.grid = _token_grid(latent, getattr(model, "patch_size", 1))
    text = [inputs[name] for name in _TEXT_INPUTS[known[0]] if inputs.get(name) is not None]
    length = sum(one.shape[1] for one in text)
    double_blocks = getattr(model, "double_blocks", ())
    # before ComfyUI 0.14 HunyuanVideo has its text behind the grid, and its blocks say so
    flipped = any(getattr(block, "flipped_img_txt", False) for block in double_blocks)
    call.extra = (0, length) if flipped else (length, 0)
    call.references = tuple(name for name in _REFERENCE_INPUTS if inputs.get(name) is not None)
    call.double_blocks = len(double_blocks)
    return call


def _token_grid(latent: torch.Tensor, patch_size: int | tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """Return the tokens along each axis of a latent (B, C, H, W) or (B, C, F, H, W), padded to whole patches."""
    axes = latent.shape[2:]
    patch = (1,) * (len(axes) - 2) + (patch_size,) * 2 if isinstance(patch_size, int) else tuple(patch_size)
    return tuple(math.ceil(size / step) for size, step in zip(axes, patch, strict=True))


def _step(options: Mapping[str, Any]) -> Step | None:
    """Return the step whose sigma is nearest; None outside a sampler."""
    sigmas, schedule = options.get("sigmas"), options.get("sample_sigmas")
    if sigmas is None or schedule is None or len(schedule) < 2:
        return None
    sigma = float(sigmas.flatten()[0])  # on another GPU than the schedule where ComfyUI splits the work
    return Step(int((schedule[:-1] - sigma).abs().argmin()), len(schedule) - 1)


def read_settings(
    density: float,
    refresh: str,
    carry_device: str,
    softmax_layers: str,
    block_size: str,
    order: str,
    min_tokens: int,
) -> EngineSettings:
    """Return the settings of a node's inputs.

    Args:
        density: fraction of all pairs of blocks that attend exactly.
        refresh: after how many steps one is dense, as a number or a share of them, from the first or the dense ones at
            the start on; "auto", or "none" for never.
        carry_device: where what dense steps show is kept, "model" or "cpu".
        softmax_layers: layers that stay dense, such as "0,1" or "0-3".
        block_size: tokens per block; "auto" fits it to the grid.
        order: which keys a block holds, "content" or "curve".
        min_tokens: shorter sequences stay dense.

    Raises:
        ValueError: a value is not allowed.
    """
    chosen: dict[str, Any] = {"refresh": read_value(refresh), "carry_device": carry_device, "order": order}
    chosen |= {"density": float(density), "block_size": None if block_size == "auto" else int(block_size)}
    return EngineSettings(SparseConfig(**chosen), read_layers(softmax_layers), min_tokens)


def make_node() -> Any:
    """Return the node's class, which needs ComfyUI."""
    from comfy_api.latest import io

    def share(name: str, default: float, tooltip: str) -> Any:
        return io.Float.Input(name, default=default, min=0.0, max=1.0, step=0.01, tooltip=tooltip)

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
                inputs=[
                    io.Model.Input("model"),
                    io.Float.Input(
                        "density",
                        default=SparseConfig.density,
                        min=0.005,
                        max=1.0,
                        step=0.005,
                        tooltip="Share of all pairs of token blocks that attend exactly; the others take part through "
                        "their means and states. Less is faster, more is closer. 1 is dense attention.",
                    ),
                    share(
                        "start_percent",
                        0.0,
                        "Where of the sampling, by sigma, sparse attention begins. Before it attention is dense: there "
                        "the layout of the picture forms.",
                    ),
                    share(
                        "end_percent",
                        1.0,
                        "Where of the sampling, by sigma, sparse attention ends. After it attention is dense.",
                    ),
                    io.String.Input(
                        "refresh",
                        default="auto",
                        tooltip="Dense attention again after so many of this sampler's steps, from the first on: a "
                        "number, a share such as 0.1 for about ten dense steps, auto for five where there are 20 "
                        "steps or more, or none. What sparse attention loses there is added at the steps that follow, "
                        "fading.",
                    ),
                    io.Combo.Input(
                        "carry_device",
                        options=["model", "cpu"],
                        default="model",
                        tooltip="Where what dense steps show is kept: with the model, 3 GB for Wan 1.3B and 13 GB for "
                        "Wan 14B at 480x832x81; or in the machine's memory.",
                    ),
                    io.String.Input(
                        "softmax_layers",
                        default="",
                        tooltip="Layers with dense attention, from 0, such as 0,1 or 0-3; single blocks count on from "
                        "the double ones. Empty for none.",
                    ),
                    io.Combo.Input(
                        "block_size",
                        options=["auto", "16", "32", "64", "128"],
                        default="auto",
                        tooltip="Tokens per block. auto fits it to the number of tokens: 64 for videos.",
                    ),
                    io.Combo.Input(
                        "order",
                        options=["content", "curve"],
                        default="content",
                        tooltip="Which keys share a block. content: keys that are alike, sorted in every head. "
                        "curve: neighbours.",
                    ),
                    io.Int.Input(
                        "min_tokens",
                        default=4096,
                        min=0,
                        max=1_000_000,
                        tooltip="Shorter sequences keep dense attention, which is as fast there.",
                    ),
                ],
                outputs=[io.Model.Output()],
            )

        @classmethod
        def execute(cls, model: Any, start_percent: float, end_percent: float, **inputs: Any) -> Any:
            """Return the patched clone of a model."""
            window = {"start_percent": start_percent, "end_percent": end_percent}
            return io.NodeOutput(patch_model(model, read_settings(**inputs), **window))

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
