"""MHLA's attention processor; it reads tensors from before RoPE and the gate's input through the family's adapter."""

import math
import warnings
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..attention import BACKENDS, mhla_attention
from ..attention.layout import Shape, check_grid
from ..attention.rope import rotated
from ..attention.split import share_of
from ..config import NOTHING_DENSE, LinearConfig, PatchConfig, SparseConfig
from ..errors import check_choice
from ..families import AttentionAdapter, AttentionInputs, Family, family_of_attention
from ..families.mhla import Arguments
from .call import Call, Seen, held, within
from .layer import layer_of, make_layer

_PARALLEL = "_parallel_config"


class MHLAProcessor:
    """Runs MHLA in place of self-attention, and leaves cross-attention as the model has it.

    A plain object without weights, as diffusers' processors are; those of every attention live in ``attn.mhla``. One
    instance may therefore serve all attentions of a model::

        pipe.transformer.set_attn_processor(MHLAProcessor(blocks=(7, 3, 5)))

    diffusers does not pass the model to a processor. Set in that way, it makes ``attn.mhla`` when the attention first
    runs, and reads the grid off the tables of RoPE, as Wan's allow, or needs ``grid``. Sparse settings run the model's
    own processor and answer its call. :func:`mhla_diffusers.set_attn_processor` and :func:`mhla_diffusers.apply_mhla`
    read the grid of every input; DiT, which has no ``set_attn_processor`` of its own, needs one of these.

    Args:
        config: settings; keywords replace their fields. Without any it is a placeholder, as diffusers makes them when
            it (un)loads adapters; the next forward restores the real one.
        *call: rejected; catches the class being set instead of an instance.
        grid: token grid of every input, not validated: portrait for landscape gives wrong blocks.
    """

    # read and written by diffusers' set_attention_backend; used for the attention that is passed on
    _attention_backend: Any = None
    # written by its enable_parallelism; handed on to original processors
    _parallel_config: Any = None
    fused: Any = None
    """The processor of fused projections in whose place diffusers' unfusing puts another; None while not fused."""

    def __init__(
        self,
        config: PatchConfig | None = None,
        *call: Any,
        grid: Shape | None = None,
        backend: str = "auto",
        **settings: Any,
    ) -> None:
        if call or not isinstance(config, PatchConfig | None):
            raise ValueError(
                "MHLAProcessor takes a MHLAConfig, SparseConfig or CausalConfig, or settings as keywords, got "
                f"{type(config).__name__}. Pass set_attn_processor an instance, such as MHLAProcessor(blocks=(7, 3, "
                "5)), not the class."
            )
        check_choice("backend", backend, BACKENDS)
        is_blank = config is None and not settings and grid is None and backend == "auto"
        if config is None and not is_blank:  # sparse attention in every step and layer, unless settings say otherwise
            config = PatchConfig.read((NOTHING_DENSE if "density" in settings else {}) | settings)
        elif config is not None and settings:
            config = config.replace(**settings)
        self._config = config
        self.grid = None if grid is None else check_grid(grid, "grid")
        self.backend = backend
        # diffusers' hooks look a processor's class up to learn how it is skipped
        from diffusers.hooks._helpers import AttentionProcessorMetadata, AttentionProcessorRegistry

        AttentionProcessorRegistry.register(type(self), AttentionProcessorMetadata(skip_processor_output_fn=_skip))

    @property
    def is_blank(self) -> bool:
        """Whether it has no settings."""
        return self._config is None

    @property
    def config(self) -> PatchConfig:
        """Its settings; ValueError if it has none."""
        if self._config is None:
            raise ValueError(
                "This MHLAProcessor has no settings; give some, for example MHLAProcessor(blocks=(7, 3, 5)). diffusers "
                "makes one without settings when it loads or unloads an adapter: then set yours again."
            )
        return self._config

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Run one attention of a diffusers model, which calls it with those of these arguments that it has.

        ``attention_mask`` of a self-attention is a key-padding mask, (B, N), (B, 1, N) or (B, 1, 1, N): bool, or the
        bias that softmax attention would add. RoPE comes by one of two names; Wan's is (cos, sin), each (1, N, 1, D).

        Raises:
            ValueError: the token grid is unknown or does not fit, or the mask is not a key-padding mask.
        """
        layer, call = layer_of(attn), held().call
        family = call.patch.family if call is not None and layer is not None else family_of_attention(attn)
        adapter = layer.adapter if layer is not None else _adapter(attn, family)
        given = hidden_states, encoder_hidden_states, attention_mask, rotary_emb
        arguments = adapter.arguments(given, {"image_rotary_emb": image_rotary_emb})
        if "encoder_hidden_states" in arguments:
            return adapter.run(self.with_choices(adapter.own_cross_processor(attn)), attn, arguments)
        own_form = layer is None or layer.original_processor is None
        is_dense = call is not None and layer is not None and (call.is_dense or not call.grid)
        if is_dense or (call is None and not own_form):
            if not (is_dense or held().off or torch.compiler.is_compiling()):
                warnings.warn(
                    "This attention was called outside transformer(...), for example by transformer.forward(), so it "
                    f"runs the model's own attention, not {self.config.attention}. Call the transformer itself: "
                    "transformer(...).",
                    stacklevel=2,
                )
            original = replaced_processor(attn) or adapter.own_processor(attn)
            return adapter.run(self.with_choices(original), attn, arguments)
        grid = call.grid if call is not None and layer is not None else self._grid(attn, adapter, arguments)
        if own_form:
            self._check_own_form()
        if layer is not None and layer.config is not self.config and layer.config != self.config:
            raise ValueError(
                f"This attention was patched with {layer.config}, but its processor was made for {self.config}. "
                "Call remove_mhla() before patching with other settings."
            )
        if isinstance(self.config, SparseConfig):
            return self._answer(attn, adapter, arguments, grid)
        split = None if call is None else call.split
        tokens = None if split is None else share_of(math.prod(grid), split)[1]
        inputs = adapter.read(attn, arguments, grid, tokens)
        if layer is None:  # now that the first forward is not refused
            assert isinstance(self.config, LinearConfig)
            attn.mhla = make_layer(attn, self.config, family)
        if _skips_scores(attn):
            return adapter.project_output(attn, inputs.value, inputs)
        output = attn.mhla(inputs, backend=self.backend, split=split)
        if call is not None and call.watch is not None:
            patch = call.patch
            exact = partial(exact_attention, inputs, patch.family)
            shown = inputs.query, inputs.key, inputs.value, grid, (0, 0), inputs.key_mask
            seen = Seen(patch.name_of(attn), *shown, exact, partial(_reference, attn, inputs), output)
            output = call.watch(seen)
        return adapter.project_output(attn, output, inputs)

    def _answer(self, attn: Any, adapter: AttentionAdapter, arguments: Arguments, grid: Shape) -> Any:
        """Run the model's own processor, and answer its call of attention, in diffusers' own form."""
        from .route import BACKEND, Mode, register_backend

        register_backend()
        own = adapter.own_processor(attn)
        dispatches = hasattr(own, "_attention_backend")
        state = held()
        if dispatches:
            own._attention_backend = BACKEND
        with within(Call(self, grid)), Mode():
            state.layer, state.part, state.backend = torch.tensor(0), 0, self._attention_backend
            try:
                return adapter.run(own, attn, arguments)
            finally:
                state.layer = None

    def with_choices(self, processor: Any) -> Any:
        """Return a processor with what diffusers has set on this one: backend and processes."""
        for name in ("_attention_backend", _PARALLEL):
            if getattr(self, name) is not None and hasattr(processor, name):
                setattr(processor, name, getattr(self, name))
        return processor

    def _grid(self, attn: Any, adapter: AttentionAdapter, arguments: Arguments) -> Shape:
        """Return the grid outside of a patched transformer's forward: the one given, or read off RoPE's tables."""
        if self.grid is not None:
            return self.grid
        rotary = adapter.rotary(attn, arguments)
        if rotary is not None and not torch.compiler.is_compiling():  # a compiled graph reads no values
            grid = adapter.grid_of(attn, rotary)
            if grid is not None:
                return grid
        raise ValueError(
            "MHLAProcessor does not know the token grid: this model, or torch.compile, does not pass it to "
            "attentions. Use mhla_diffusers.apply_mhla(pipe, ...), or give the processor grid=(frames, height, "
            "width) or (height, width), in tokens."
        )

    def _check_own_form(self) -> None:
        """Raise ValueError for settings that need what diffusers' own ``set_attn_processor`` does not keep or pass."""
        config = self.config
        if self._parallel_config is not None:
            raise ValueError(
                "In diffusers' own form MHLAProcessor does not know how context parallelism splits the token grid; use "
                "apply_mhla(pipe, ...)."
            )
        if config.layers != "all" or config.has_dense_steps:
            refused = config.dense_words if config.layers == "all" else f"layers={config.layers!r}"
            raise ValueError(
                f"{refused} does not work with diffusers' own set_attn_processor, which replaces the processor of "
                "every layer; use apply_mhla(pipe, ...)."
            )


def exact_attention(inputs: AttentionInputs, family: Family) -> torch.Tensor:
    """Return what the model's own attention gives for the inputs of MHLA, (B, N, H, D)."""
    query, key, mask = rotated(inputs.query, inputs.rotary), rotated(inputs.key, inputs.rotary), inputs.key_mask
    if family.computes == "linear":
        ones = torch.ones(1, 1, device=query.device)
        blocks = (1,) * len(inputs.grid)
        return mhla_attention(query, key, inputs.value, ones, inputs.grid, blocks, eps=family.eps, key_mask=mask)
    bias = None if mask is None else mask.to(query.dtype).log()[:, None, None]
    query, key, value = (x.transpose(1, 2) for x in (query, key, inputs.value))
    return functional.scaled_dot_product_attention(query, key, value, bias).transpose(1, 2)


def _reference(attn: Any, inputs: AttentionInputs) -> torch.Tensor:
    weights: torch.Tensor = attn.mhla.weights(inputs)
    return torch.einsum("bhqk,bkhd->bqhd", weights, inputs.value.to(weights.dtype))


def _adapter(attn: Any, family: Family | None) -> AttentionAdapter:
    if family is not None and family.mhla is not None:
        return family.mhla
    if getattr(attn, "add_q_proj", None) is None and hasattr(attn, "to_out"):
        return AttentionAdapter()
    raise ValueError(
        f"MHLAProcessor does not support this {type(attn).__name__}, only SANA, DiT, Wan and models that share their "
        "attention. apply_mhla(pipe) runs sparse attention in every family."
    )


def replaced_processor(attn: Any) -> Any:
    """Return the processor that an attention had before its patch; None if no record was kept."""
    if (fused := getattr(attn.processor, "fused", None)) is not None:
        return fused
    module: Any = getattr(attn, "mhla", None)
    layer = getattr(module, "original_module", module)
    return None if layer is None else layer.original_processor


def is_fused(processor: Any) -> bool:
    """Whether it is one of diffusers' that run projections fused into one."""
    return type(processor).__name__.startswith("Fused")


def holds_weights(processor: Any) -> bool:
    """Whether a processor has weights, as an IP-Adapter's, which lets an attention look at a picture besides."""
    return isinstance(processor, nn.Module) and next(processor.parameters(), None) is not None


def _skips_scores(attn: Any) -> bool:
    """Whether a hook of diffusers asks this attention to return its values, as perturbed-attention guidance does."""
    registry = getattr(attn, "_diffusers_hook", None)
    return registry is not None and any(
        getattr(hook, "skip_attention_scores", False) for hook in registry.hooks.values()
    )


def _skip(attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return hidden_states
