"""MHLA's attention processor, which reads tensors from before RoPE through the family's adapter."""

import math
import warnings
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ..attention import BACKENDS, mhla_attention
from ..attention.layout import Shape, check_grid
from ..attention.rope import rotated
from ..attention.split import share_of
from ..config import LinearConfig, PatchConfig, kind_of
from ..errors import check, check_choice
from ..families import AttentionAdapter, AttentionInputs, Family, family_of_attention
from ..families.mhla import Arguments
from .call import Seen, held
from .layer import make_layer

_PARALLEL = "_parallel_config"


class MHLAProcessor:
    """Runs MHLA in place of self-attention, and leaves cross-attention as the model has it.

    A plain object without weights, as diffusers' processors are; those of every attention live in ``attn.mhla``. One
    instance may therefore serve all attentions of a model::

        pipe.transformer.set_attn_processor(MHLAProcessor(blocks=(7, 3, 5)))

    diffusers does not pass the model to a processor. Set in that way, it makes ``attn.mhla`` when the attention first
    runs, and reads the grid off the tables of RoPE, as Wan's allow, or needs ``grid``.
    :func:`mhla_diffusers.apply_mhla` reads the grid of every input.

    Args:
        config: settings; keywords replace their fields.
        grid: token grid of every input, not validated: portrait for landscape gives wrong blocks.
    """

    # read and written by diffusers' set_attention_backend; used for the attention that is passed on
    _attention_backend: Any = None
    # written by its enable_parallelism; handed on to original processors
    _parallel_config: Any = None

    def __init__(
        self, config: PatchConfig | None = None, *, grid: Shape | None = None, backend: str = "auto", **settings: Any
    ) -> None:
        check_choice("backend", backend, BACKENDS)
        if isinstance(config, PatchConfig | None):
            config = kind_of(settings)(**settings) if config is None else config.replace(**settings)
        if not isinstance(config, LinearConfig):
            raise ValueError(
                f"MHLAProcessor needs settings of MHLA, such as blocks=(7, 3, 5), got {config!r}; apply_mhla(pipe) "
                "runs sparse attention."
            )
        self.config: LinearConfig = config
        self.grid = None if grid is None else check_grid(grid, "grid")
        self.backend = backend
        # diffusers' hooks look a processor's class up to learn how it is skipped
        from diffusers.hooks._helpers import AttentionProcessorMetadata, AttentionProcessorRegistry

        AttentionProcessorRegistry.register(type(self), AttentionProcessorMetadata(skip_processor_output_fn=_skip))

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Any:
        """Run one attention of a diffusers model, which calls it with those of these arguments that it has.

        ``attention_mask`` of a self-attention is a key-padding mask, (B, N), (B, 1, N) or (B, 1, 1, N): bool, or the
        bias that softmax attention would add. Wan's RoPE is (cos, sin), each (1, N, 1, D).

        Raises:
            ValueError: the token grid is unknown or does not fit, or the mask is not a key-padding mask.
        """
        layer, call = getattr(attn, "mhla", None), held().call
        own_form = layer is None or layer.original_processor is None
        if own_form and call is not None and all(attn is not one for one in call.patch.attentions.values()):
            call = None  # of another model, in whose forward this one runs
        family = call.patch.family if call is not None and layer is not None else family_of_attention(attn)
        adapter = layer.adapter if layer is not None else _adapter(attn, family)
        arguments = adapter.arguments(hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        if "encoder_hidden_states" in arguments:
            return adapter.run(self.with_choices(adapter.own_cross_processor(attn)), attn, arguments)
        is_dense = call is not None and layer is not None and (call.is_dense or not call.grid)
        if is_dense or (call is None and not own_form):
            if not (is_dense or held().off or torch.compiler.is_compiling()):
                warnings.warn(
                    "This attention was called outside transformer(...), for example by transformer.forward(), so it "
                    f"runs the model's own attention, not {self.config.attention}. Call the transformer itself: "
                    "transformer(...).",
                    stacklevel=2,
                )
            original = getattr(layer, "original_processor", None) or adapter.own_processor(attn)
            return adapter.run(self.with_choices(original), attn, arguments)
        grid = call.grid if call is not None and layer is not None else self._grid(attn, adapter, arguments)
        if own_form and (call is None or layer is None):  # change_mhla has given others their hooks
            self._check_own_form()
        if layer is not None and layer.config is not self.config and layer.config != self.config:
            raise ValueError(
                f"This attention was patched with {layer.config}, but its processor was made for {self.config}. "
                "Call remove_mhla() before patching with other settings."
            )
        split = None if call is None else call.split
        tokens = None if split is None else share_of(math.prod(grid), split)[1]
        inputs = adapter.read(attn, arguments, grid, tokens)
        if layer is None:  # now that the first forward is not refused
            attn.mhla = make_layer(attn, self.config, family)
        if _skips_scores(attn):
            return adapter.project_output(attn, inputs.value, inputs)
        output = attn.mhla(inputs, backend=self.backend, split=split)
        if call is not None and call.watch is not None:
            patch = call.patch
            exact = partial(exact_attention, inputs, patch.family)
            shown = inputs.query, inputs.key, inputs.value, grid, (0, 0), inputs.key_mask
            name = next(name for name, one in patch.attentions.items() if one is attn)
            seen = Seen(name, *shown, exact, partial(_reference, attn, inputs), output)
            output = call.watch(seen)
        return adapter.project_output(attn, output, inputs)

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
        """Raise ValueError for what needs more than diffusers' own ``set_attn_processor`` keeps or passes."""
        for refused, is_set in {
            "Context parallelism": self._parallel_config is not None,
            f"layers={self.config.layers!r}": self.config.layers != "all",
            self.config.dense_words: self.config.has_dense_steps,
        }.items():
            check(not is_set, f"{refused} does not work with diffusers' own set_attn_processor; use apply_mhla(pipe).")


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


def _skips_scores(attn: Any) -> bool:
    """Whether a hook of diffusers asks this attention to return its values, as perturbed-attention guidance does."""
    registry = getattr(attn, "_diffusers_hook", None)
    return registry is not None and any(
        getattr(hook, "skip_attention_scores", False) for hook in registry.hooks.values()
    )


def _skip(attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return hidden_states
