"""ComfyUI node that gives the self-attention of a model sparse attention.

ComfyUI loads ``pipelines/comfyui-mhla``, or any file in ``custom_nodes`` with the line
``from mhla_diffusers.engines.comfyui import comfy_entrypoint``. The node sets three things on a clone of the model: an
attention override, which attends; a wrapper of the diffusion model, which reads token grid, text length and step once
per call; and a wrapper of the sampler, which ends the count of :class:`.engine.Engine`.

ComfyUI has one attention override per model. Its node Model Attention Backend, which calls
``ModelPatcher.set_model_optimized_attention``, replaces the one before; its Model Sparse Attention, in
``comfy_extras/nodes_sparse_attention.py``, puts itself on top again at every step and hands on what it does not take.
"""

import inspect
import logging
import math
import threading
from collections.abc import Callable, Hashable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..config import PROFILES, SparseConfig, Step
from ..patching.call import Call
from ..patching.route import Request
from ..settings import check
from .engine import Engine
from .settings import EngineSettings, read_settings

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
class _Forward:
    """What the attentions know of one forward of the diffusion model."""

    call: Call = field(default_factory=Call)
    references: tuple[str, ...] = ()
    """Names of inputs that add tokens of other pictures to the sequence."""
    double_blocks: int = 0
    attended: int = 0
    """Self-attentions over the grid so far."""


@dataclass
class _Patch:
    """State that the override and the wrappers of one patched model share."""

    engine: Engine
    forward: ContextVar[_Forward | None] = field(default_factory=lambda: ContextVar("mhla_forward", default=None))
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a forward finds its branches, as ComfyUI may give every GPU a thread."""
    forwards: int = 0
    """Those of the diffusion model in the present sampling."""
    reached: bool = False
    """Whether any attention came to the override in the present sampling."""


def patch_model(model: Any, settings: EngineSettings) -> Any:
    """Return a clone of a model whose self-attention is sparse.

    An override that the model already has becomes the dense attention; one of ours is replaced.

    Args:
        model: ComfyUI's ``ModelPatcher``, which stays as it is.
        settings: what to do.

    Raises:
        ValueError: the start is not before the end, or ComfyUI's Model Sparse Attention is on the model.
    """
    clone = model.clone()
    options = dict(clone.model_options.get("transformer_options", {}))
    previous = options.get(_OVERRIDE)
    _refuse_core_sparse(previous)
    patch = _Patch(Engine(settings, logging.getLogger(__name__)))
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

    @torch._disable_dynamo  # type: ignore[attr-defined]  # in a graph layer and step would be constants
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
        forward = patch.forward.get() or _Forward(Call(patch.engine, tally=patch.engine.tally))
        call = _placed(forward.call, options)
        head_dim = q.shape[-1] if skip_reshape else q.shape[-1] // heads
        keywords = {"mask": mask, "attn_precision": attn_precision, **kwargs}
        keywords |= {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}

        def tokens_first(x: torch.Tensor) -> torch.Tensor:
            return x.transpose(1, 2) if skip_reshape else x.unflatten(2, (-1, head_dim))

        def attend_densely() -> torch.Tensor:
            return previous(func, q, k, v, heads, **keywords) if previous else func(q, k, v, heads, **keywords)

        def own(*_: torch.Tensor) -> torch.Tensor:
            output = attend_densely()
            return output.transpose(1, 2) if skip_output_reshape else output.unflatten(2, (-1, head_dim))

        query, key, value = tokens_first(q), tokens_first(k), tokens_first(v)
        if not _is_over_grid(query, key, mask, call.grid):
            return attend_densely()
        by_head = mask[:, None] if mask is not None and mask.ndim == 3 else mask
        request = Request(by_head, scale=kwargs.get("scale"), own=own)
        layer, reason = _layer(forward, options), _references(forward, call, query)
        forward.attended += 1
        output = patch.engine.attend(query, key, value, call, layer, request, reason)
        return output.transpose(1, 2) if skip_output_reshape else output.flatten(2)

    setattr(override, _PREVIOUS, previous)
    return override


def _names(options: Mapping[str, Any], batch: int) -> list[Hashable]:
    """Return the name of every equal part of a batch: the prompt and, where a video is sampled in windows, its frames.

    ComfyUI puts prompts into one batch or not, by the memory that is free at each call.
    """
    prompts = options.get("uuids") or ("",)
    window = tuple(getattr(options.get("context_window"), "index_list", ()))
    is_split = batch % len(prompts) == 0 and len(set(prompts)) == len(prompts)
    return [(name, window) for name in (prompts if is_split else (tuple(prompts),))]


def _placed(call: Call, options: Mapping[str, Any]) -> Call:
    """Return a call with what its attentions alone know of the grid and of the tokens before and after it."""
    packed = options.get("minimax_h3_layout")
    if packed is not None:
        start, end = next((start, end) for start, end, kind in packed.segments if kind == "video")
        return call._replace(extra=(start, packed.seq_len - end))
    sizes = options.get("grid_sizes")  # of Wan
    return call if sizes is None else call._replace(grid=tuple(map(int, sizes)))


def _is_over_grid(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, grid: tuple[int, ...]) -> bool:
    """Whether an attention is over the token grid, and not over text or audio, nor from one to another.

    With guides, LTX attends from some tokens of the grid to all, with a mask.
    """
    tokens = math.prod(grid) if grid else 0
    if query.shape[1] == key.shape[1]:
        return key.shape[1] >= tokens
    return mask is not None and 0 < tokens <= key.shape[1]


def _layer(forward: _Forward, options: Mapping[str, Any]) -> int:
    """Return the number of the layer, single blocks behind double ones.

    LTX, and Wan before ComfyUI 0.11, do not name the block; they attend over the grid once in each.
    """
    index = options.get("block_index")
    if index is None:
        return forward.attended
    return int(index) + (forward.double_blocks if options.get("block_type") == "single" else 0)


def _references(forward: _Forward, call: Call, query: torch.Tensor) -> str:
    """Return that reference tokens, which have no place on the grid, share the sequence; empty if none do."""
    known = math.prod(call.grid) + sum(count or 0 for count in call.extra)
    if not forward.references or query.shape[1] == known:
        return ""
    return f"reference tokens ({', '.join(forward.references)}) share the sequence"


def _wrap_diffusion_model(patch: _Patch) -> Callable[..., Any]:
    """Return the wrapper that reads every call of the diffusion model for its attentions."""

    def diffusion_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = inspect.signature(executor.original).bind(*args, **kwargs).arguments
        inputs |= inputs.pop("kwargs", {})
        options = inputs.get("transformer_options") or {}
        override = options.get(_OVERRIDE)
        _refuse_core_sparse(override)
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
    """Return the wrapper that logs one line per sampling, also where nothing reached the override."""

    def outer_sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
        patch.forwards, patch.reached = 0, False
        tally = patch.engine.tally
        try:
            output = executor(*args, **kwargs)
            if tally.dense and not tally.sparse:
                tally.logger.warning(
                    "MHLA changed nothing in this sampling: %s. dense_first and dense_last lower leave more steps "
                    "sparse; a smaller min_tokens takes shorter sequences.",
                    tally.summary(),
                )
            return output
        finally:
            patch.engine.end()
            if patch.forwards and not patch.reached:
                tally.logger.warning(
                    "MHLA: no attention reached the node, so all were dense: a node behind it set another attention, "
                    "which then goes before it, or this ComfyUI is older than attention overrides (0.3.60)."
                )

    return outer_sample


def _read_forward(
    patch: _Patch, model: Any, inputs: Mapping[str, Any], options: Mapping[str, Any], latent: Any
) -> _Forward:
    """Read the inputs of a diffusion model, by their names in its ``_forward``."""
    latent = latent[0] if isinstance(latent, list | tuple) else latent  # video before audio
    step, engine = _step(options), patch.engine
    with patch.lock:
        if step is not None:
            engine.run.begin(step)
        branches = tuple(engine.run.named(name) for name in _names(options, len(latent)))
    known = [base.__name__ for base in type(model).__mro__ if base.__name__ in _TEXT_INPUTS]
    if not known:
        return _Forward(engine.filled((), (0, 0), step, ()))
    text = [inputs[name] for name in _TEXT_INPUTS[known[0]] if inputs.get(name) is not None]
    length = sum(one.shape[1] for one in text)
    double_blocks = getattr(model, "double_blocks", ())
    # before ComfyUI 0.14 HunyuanVideo has its text behind the grid, and its blocks say so
    flipped = any(getattr(block, "flipped_img_txt", False) for block in double_blocks)
    grid = _token_grid(latent, getattr(model, "patch_size", 1))
    call = engine.filled(grid, (0, length) if flipped else (length, 0), step, branches)
    if step is not None:  # the sampler may evaluate its last step once more, and the residuals end with the sampling
        call = call._replace(step=replace(step, count=0))
    return _Forward(call, tuple(name for name in _REFERENCE_INPUTS if inputs.get(name) is not None), len(double_blocks))


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


def make_node() -> Any:
    """Return the node's class, which needs ComfyUI."""
    from comfy_api.latest import io

    def share(name: str, step: float, tooltip: str) -> Any:
        return io.Float.Input(name, default=-1.0, min=-1.0, max=1.0, step=step, tooltip=tooltip)

    def count(name: str, tooltip: str) -> Any:
        return io.Int.Input(name, default=-1, min=-1, max=1000, tooltip=tooltip)

    inputs = [
        io.Model.Input("model"),
        io.Combo.Input("profile", options=list(PROFILES), default="faithful", tooltip="faithful keeps the first fifth "
                       "of the steps dense, balanced a tenth, fast one step. -1 below takes the profile's value."),
        share("density", 0.005, "Share of all pairs of token blocks that attend exactly; the others take "
              "part through their means and states. Less is faster, more is closer, 1 is dense."),
        share("dense_first", 0.01, "Share of the first steps with dense attention: there the layout of the "
              "picture forms."),
        count("dense_last", "Last steps with dense attention."),
        count("dense_every", "Dense attention again after so many steps; these steps correct those that follow. 0 for "
              "never."),
        count("dense_layers", "First layers with dense attention; single blocks count on from the double ones."),
        io.Combo.Input("block_size", options=["auto", "16", "32", "64", "128"], default="auto",
                       tooltip="Tokens per block. auto fits it to the number of tokens: 64 for videos."),
        io.Combo.Input("order", options=["content", "curve"], default="content", tooltip="Which keys share a block. "
                       "content: keys that are alike, sorted in every head. curve: neighbours."),
        io.Int.Input("min_tokens", default=EngineSettings.min_tokens, min=0, max=1_000_000,
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
            given = {name: value for name, value in inputs.items() if value not in ("auto", -1)}
            return io.NodeOutput(patch_model(model, read_settings(given, SparseConfig(**PROFILES[profile]))))

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
