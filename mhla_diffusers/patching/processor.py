"""The attention processor: what a patched attention does instead of softmax attention."""

import math
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..attention import BACKENDS
from ..attention.layout import check_grid
from ..attention.rope import SteadyRotary, steady
from ..attention.split import share_of
from ..config import LinearConfig, PatchConfig, SparseConfig
from ..families import Family, cross_attention_processor, family_of_attention, grid_of_attention
from ..families.mhla import Arguments, AttentionAdapter, AttentionInputs
from ..settings import check_choice
from . import carry
from .context import current, is_off
from .layer import FLOAT32_PARAMETERS, MHLALayer, PatchedLayer, SparseLayer, layer_of, replaced_processor
from .weights import OFFLOADED

_BACKEND = "_attention_backend"
"""Attribute that diffusers' set_attention_backend writes into processors."""
_PARALLEL = "_parallel_config"
"""Attribute that diffusers' enable_parallelism writes into processors."""


class MHLAProcessor:
    """Runs self-attention as a patch says and leaves cross-attention as the model has it.

    A plain object without weights, as diffusers' processors are: the weights of every attention live in its own
    submodule ``attn.mhla``. One instance may therefore serve all attentions of a model::

        pipe.transformer.set_attn_processor(MHLAProcessor(blocks=(7, 3, 5)))

    diffusers does not pass the model to a processor. Set in that way, it makes ``attn.mhla`` when the attention first
    runs, and reads the grid off the tables of RoPE, as Wan's allow, or needs ``grid``.
    :func:`mhla_diffusers.set_attn_processor` and :func:`mhla_diffusers.apply_mhla` make the weights at once and read
    the grid of every input; DiT, Mochi and others have no ``set_attn_processor`` of their own and need one of these.

    Args:
        config: settings; or give the fields of one of :class:`MHLAConfig`, :class:`SparseConfig` and
            :class:`CausalConfig` as keywords, whose names say which attention runs.
        *call: refused: what an attention gives that the class was set on.
        grid: token grid of every input; None to find it out. It is believed: of an input with as many tokens in
            another shape, such as portrait for landscape, the blocks would be wrong.
        backend: see :func:`mhla_diffusers.attention.mhla_attention`.
        **settings: such fields; unknown ones are an error. Without any argument it is a placeholder:
            diffusers instantiates processor classes when it (un)loads adapters, and the next forward restores the real
            one.

    Raises:
        ValueError: settings that are not allowed, or both ``config`` and settings.
    """

    # read and written by diffusers' set_attention_backend; used for the cross-attention that is passed on
    _attention_backend: Any = None
    # written by its enable_parallelism; handed on to original processors
    _parallel_config: Any = None

    def __init__(
        self,
        config: PatchConfig | None = None,
        *call: Any,
        grid: tuple[int, ...] | None = None,
        backend: str = "auto",
        **settings: Any,
    ) -> None:
        if call or not isinstance(config, PatchConfig | None):
            raise ValueError(
                f"MHLAProcessor takes MHLAConfig, SparseConfig or CausalConfig, or single settings as keywords, got "
                f"{type(config).__name__}. If an attention called it so, its processor is the class: set an instance, "
                "such as MHLAProcessor(blocks=(7, 3, 5))."
            )
        if config is not None and settings:
            raise ValueError(
                f"Give either config or single settings, not both (got config and {', '.join(settings)}); "
                "config.replace(...) changes a configuration."
            )
        check_choice("backend", backend, BACKENDS)
        is_blank = config is None and not settings and grid is None and backend == "auto"
        self._config = config if config is not None or is_blank else PatchConfig.read(settings)
        self.grid = None if grid is None else check_grid(grid, "grid")
        self.backend = backend
        self._left: WeakKeyDictionary[Any, tuple[Any, AttentionAdapter]] = WeakKeyDictionary()
        """Attention whose patch was removed → its original processor and adapter, in case this one is set again."""
        # diffusers' hooks look a processor's class up to learn how it is skipped
        from diffusers.hooks._helpers import AttentionProcessorMetadata, AttentionProcessorRegistry

        AttentionProcessorRegistry.register(type(self), AttentionProcessorMetadata(skip_processor_output_fn=_skip))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to attentions that are not copied."""
        return {name: value for name, value in vars(self).items() if name != "_left"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copied or pickled processor."""
        vars(self).update(state, _left=WeakKeyDictionary())

    def enter(self, attn: Any) -> Any:
        """Begin to belong to a patch of an attention; return the processor that the attention had before."""
        before = attn.processor
        if isinstance(before, MHLAProcessor) and attn in before._left:
            before, _ = before._left[attn]
        self._left.pop(attn, None)
        return before

    def leave(self, attn: Any, original: Any) -> None:
        """Belong to no patch of an attention any more, and run its original processor if it is set again."""
        layer = layer_of(attn)
        if layer is not None:
            self._left[attn] = original, layer.adapter

    @property
    def is_blank(self) -> bool:
        """Whether it has no settings."""
        return self._config is None

    @property
    def is_off(self) -> bool:
        """Whether its model is within ``mhla_disabled`` in this thread."""
        return is_off(self)

    @property
    def config(self) -> PatchConfig:
        """Its settings.

        Raises:
            ValueError: it has none.
        """
        if self._config is None:
            raise ValueError(
                "This MHLAProcessor has no settings: give it some, for example MHLAProcessor(blocks=(7, 3, 5)). If "
                "diffusers made it while it loaded or unloaded an adapter, set one with settings again."
            )
        return self._config

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
        key_rotary_emb: Any = None,
        *,
        image_rotary_emb: Any = None,
        freqs_cis: Any = None,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        perturbation_mask: torch.Tensor | None = None,
        all_perturbed: Any = None,
        rotary_emb_kv: Any = None,
        attn_mask: torch.Tensor | None = None,
        sparse_params: Any = None,
    ) -> Any:
        """Run one attention of a diffusers model, which calls it with those of these arguments that it has.

        Args:
            attn: an ``Attention``, ``WanAttention`` or the like.
            hidden_states: (B, N, hidden size).
            encoder_hidden_states: of a cross-attention, and the context of joint attention.
            attention_mask: for self-attention a key-padding mask, (B, N), (B, 1, N) or (B, 1, 1, N): bool, or the
                bias that softmax attention would add.
            rotary_emb: what the model hands over for RoPE; Wan's is (cos, sin), each (1, N, 1, D).
            key_rotary_emb: RoPE of a cross-attention's keys, if it is not that of the queries.
            image_rotary_emb: RoPE by another name.
            freqs_cis: the same by another name.
            encoder_hidden_states_mask: (B, n), which tokens of the context take part.
            perturbation_mask: (B, 1, 1), 0 for samples that skip this attention, as guidance asks for.
            all_perturbed: whether all of them do, as the mask also says.
            rotary_emb_kv: RoPE of the keys by another name; of a self-attention it is that of the queries.
            attn_mask: ``attention_mask`` by another name.
            sparse_params: None, Kandinsky 5 passes it always; its family refuses any other.

        Returns:
            (B, N, hidden size); where the model's own attention returns the context as well, the pair of both.

        Raises:
            ValueError: the token grid is unknown or does not fit, or the mask is not a key-padding mask.
        """
        layer = layer_of(attn)
        original, adapter = self._left.get(attn, (None, None)) if layer is None else (None, layer.adapter)
        family = family_of_attention(attn) if adapter is None else None
        adapter = adapter_of(attn, family) if adapter is None else adapter
        by_name = {
            "key_rotary_emb": key_rotary_emb,  # of a self-attention what else its model passes by place, as Helios'
            "image_rotary_emb": image_rotary_emb,
            "freqs_cis": freqs_cis,
            "encoder_hidden_states_mask": encoder_hidden_states_mask,
            "perturbation_mask": perturbation_mask,
            "attention_mask": attn_mask,
        }
        arguments = adapter.arguments((hidden_states, encoder_hidden_states, attention_mask, rotary_emb), by_name)
        if original is not None:
            warnings.warn(
                "A MHLAProcessor was set again whose patch was removed, so the attentions run what they ran before the "
                "patch. Set those processors, or patch again with apply_mhla() or a new MHLAProcessor(...).",
                stacklevel=2,
            )
            return adapter.run(original, attn, arguments)
        if "encoder_hidden_states" in arguments and not adapter.has_extra:
            if layer is None and family is None and getattr(attn, "is_cross_attention", True) is False:
                raise _unknown_model(attn)
            rotated = {} if image_rotary_emb is None else {"image_rotary_emb": image_rotary_emb}
            if key_rotary_emb is not None:
                rotated = {"query_rotary_emb": rotary_emb, "key_rotary_emb": key_rotary_emb}
            return self._cross_processor(attn)(attn, hidden_states, encoder_hidden_states, attention_mask, **rotated)
        # identity first: under torch.compile(dynamic=True) numbers inside an equality would become symbols
        if layer is None or (layer.config is not self.config and layer.config != self.config):
            self._check_layer(layer)
        context, skips_scores = current(), _skips_scores(attn)
        if skips_scores or not (context.disabled or self.is_off):
            output = self._run_patched(attn, arguments, adapter, family, skips_scores)
            if layer is None or skips_scores or attn.training or not self._carries:
                return output
            return carry.add(output, layer.number)
        dense = adapter.run(self._own_processor(attn, family), attn, arguments)
        if layer is None or not context.shows or self.is_off:
            return dense
        return carry.show(dense, self._run_patched(attn, arguments, adapter, family, skips_scores=False), layer.number)

    def _cross_processor(self, attn: Any) -> Any:
        """Return what runs a cross-attention, which has this processor in diffusers' own form."""
        processor = default_cross_attention_processor(attn)
        processor._attention_backend = self._attention_backend
        processor._parallel_config = self._parallel_config
        return processor

    def _own_processor(self, attn: Any, family: Family | None) -> Any:
        """Return what ran a self-attention before the patch; diffusers' own form keeps none, and its family says it."""
        original = replaced_processor(attn)
        if original is None:
            family = family or family_of_attention(attn)
            if family is None:
                raise _unknown_model(attn)
            original = family.adapter.own_processor(attn)
        return with_backend_of(self, original)

    @property
    def _carries(self) -> bool:
        """Whether a forward may add what a dense step has shown; gradients are wanted where no setting asks for it."""
        config = self.config
        is_asked_for = config.asks_for_dense_steps or not torch.is_grad_enabled()
        return config.carry and config.has_dense_steps and is_asked_for

    def _run_patched(
        self,
        attn: Any,
        arguments: Arguments,
        adapter: AttentionAdapter,
        family: Family | None,
        skips_scores: bool,
    ) -> Any:
        """Run one self-attention as the patch says, or without scores, and its output projection."""
        adapter.check_order(arguments, self.config)
        context = current()
        grid, split = self.grid or context.grid, context.split
        layer = layer_of(attn)
        is_alone = context.of is None and layer is not None and layer.original_processor is not None
        if is_alone and self.config.has_dense_steps and not torch.compiler.is_compiling():
            warnings.warn(
                "This attention runs outside of its transformer's call, as in a wrapper of transformer.forward(): the "
                "denoising step is unknown, and "
                f"{self.config.dense_words or 'refresh=' + repr(self.config.refresh)} has no effect. "
                "Call the transformer itself: transformer(...).",
                stacklevel=2,
            )
        if grid is None:
            grid = _grid_of_rotary(attn, adapter, arguments)
        if context.grid is None and self._parallel_config is not None:
            raise ValueError(
                "Under context parallelism a MHLAProcessor that diffusers' own set_attn_processor has put in place "
                "does not know its tokens; use mhla_diffusers.set_attn_processor(pipe.transformer, processor) or "
                "mhla_diffusers.apply_mhla(pipe, ...)."
            )
        tokens = math.prod(grid) if split is None else share_of(math.prod(grid), split)[1]
        inputs = adapter.read(attn, _with_tables(adapter, attn, arguments), grid, tokens)
        if layer is None:  # a refused first forward leaves no weights behind
            attn.mhla = make_layer(attn, self.config, family)
        if skips_scores:
            return adapter.project_output(attn, inputs.value, inputs)
        output = attn.mhla(inputs, backend=self.backend, split=split)
        return adapter.project_output(attn, output, inputs)

    def _check_layer(self, layer: PatchedLayer | None) -> None:
        if layer is None and (self.config.layers != "all" or self.config.asks_for_dense_steps):
            refused = self.config.dense_words if self.config.layers == "all" else f"layers={self.config.layers!r}"
            raise ValueError(
                f"{refused} cannot be honoured when diffusers' own set_attn_processor puts the processor on every "
                "layer and drops the original ones; use apply_mhla(pipe, ...), which keeps them."
            )
        if layer is not None:
            raise ValueError(
                f"This attention was patched with {layer.config}, but its processor was made for {self.config}. "
                "Call remove_mhla() before patching with other settings."
            )


def runs_mhla(attn: Any) -> bool:
    """Whether an attention runs MHLA now, in this thread."""
    return has_mhla_processor(attn) and not attn.processor.is_off


def has_mhla_processor(attn: Any) -> bool:
    """Whether an attention has the processor of a patch, and not of one that was removed."""
    processor = getattr(attn, "processor", None)
    return isinstance(processor, MHLAProcessor) and (layer_of(attn) is not None or attn not in processor._left)


class PerturbedMHLAProcessor(MHLAProcessor):
    """MHLA under perturbed-attention guidance: the last part of the batch attends to itself alone.

    Args:
        processor: of the other parts.
        parts: of the batch: 3 with classifier-free guidance, 2 without.
    """

    def __init__(self, processor: MHLAProcessor, parts: int) -> None:
        super().__init__(processor.config, grid=processor.grid, backend=processor.backend)
        self.parts = parts

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
        key_rotary_emb: Any = None,
        *,
        image_rotary_emb: Any = None,
        **others: Any,
    ) -> Any:
        """Run one self-attention; arguments as of :class:`MHLAProcessor`.

        diffusers' ``Attention`` drops arguments that a processor's signature does not name.

        Raises:
            ValueError: a batch that is not cut into so many parts, as after a call of guidance that was interrupted.
        """
        if len(hidden_states) % self.parts:
            raise ValueError(
                f"This layer is set up for perturbed-attention guidance with a batch of {self.parts} parts, but got "
                f"{len(hidden_states)} samples: a guided call was interrupted. change_mhla(model) sets it up again."
            )
        *parts, perturbed = hidden_states.chunk(self.parts)
        mask = attention_mask[: -len(perturbed)] if attention_mask is not None else None
        others |= {"image_rotary_emb": image_rotary_emb}
        attended = super().__call__(
            attn, torch.cat(parts), encoder_hidden_states, mask, rotary_emb, key_rotary_emb, **others
        )
        adapter, tokens = adapter_of(attn), perturbed.shape[1]
        alone = adapter.read(attn, {"hidden_states": perturbed}, (tokens,), tokens)
        return torch.cat([attended, adapter.project_output(attn, alone.value, alone)])


def is_fused(processor: Any) -> bool:
    """Whether it is one of diffusers' that run projections fused into one."""
    return type(processor).__name__.startswith("Fused")


def holds_weights(processor: Any) -> bool:
    """Whether a processor has weights, as an IP-Adapter's, which lets an attention look at a picture besides."""
    return isinstance(processor, nn.Module) and next(processor.parameters(), None) is not None


def with_backend_of(processor: MHLAProcessor, original: Any) -> Any:
    """The original processor with what diffusers has set on the patched one meanwhile: backend and processes."""
    if processor._parallel_config is not None and hasattr(original, _PARALLEL):
        setattr(original, _PARALLEL, processor._parallel_config)
    meanwhile = vars(processor).get(_BACKEND, original)
    if meanwhile is not original and getattr(original, _BACKEND, meanwhile) != meanwhile:
        setattr(original, _BACKEND, meanwhile)
    return original


def adapter_of(attn: Any, family: Family | None = None) -> AttentionAdapter:
    """The adapter of a self-attention: that of its layer, or if it has none, of a family, or else the common one.

    Raises:
        ValueError: joint attention, of an unknown model.
    """
    layer = layer_of(attn)
    if layer is not None:
        return layer.adapter
    if family is not None:
        return family.adapter_of(attn)
    if getattr(attn, "add_q_proj", None) is not None:
        raise _unknown_model(attn)
    return AttentionAdapter()


def _unknown_model(attn: Any) -> ValueError:
    return ValueError(
        f"This {type(attn).__name__} is joint attention of a model that a processor does not know; use "
        "mhla_diffusers.set_attn_processor(transformer, processor) or mhla_diffusers.apply_mhla(pipe, ...), which know "
        "the model."
    )


def make_layer(attn: Any, config: PatchConfig, family: Family | None) -> PatchedLayer:
    """Make a fresh layer that fits an attention, on its device; mixing matrix and λ are float32.

    Gate, norm and convolution take the type that the attention computes in.

    Args:
        attn: the attention.
        config: settings.
        family: of the model; None where it is unknown.

    Raises:
        ValueError: if the weights of the attention are offloaded, so that its device is not known, or the attention
            does what MHLA has no part for.
    """
    for norm in ("group_norm", "spatial_norm"):
        if getattr(attn, norm, None) is not None:
            raise ValueError(
                f"This {type(attn).__name__} has a {norm}, which MHLA does not run; leave its layer as it is with "
                "layers=[...]."
            )
    adapter = adapter_of(attn, family)
    projection, (heads, head_dim) = getattr(attn, adapter.inputs[0]), adapter.heads(attn)
    if hasattr(projection, "_hf_hook") and any(weight.is_meta for weight in attn.parameters()):
        raise ValueError(OFFLOADED)
    tensors = [*attn.parameters(), *attn.buffers()]
    # the type that the attention computes in: that of its weights, or what a layer says whose weights are quantised
    hooks = getattr(projection, "_diffusers_hook", None)
    casting = hooks.get_hook("layerwise_casting") if hooks is not None else None
    weight = next((tensor for tensor in tensors if tensor.is_floating_point() and tensor.dtype.itemsize > 1), None)
    if casting is not None:
        dtype = casting.compute_dtype
    else:
        dtype = weight.dtype if weight is not None else getattr(projection, "compute_dtype", None) or torch.float32
    # in any mode and on any default device, the weights of a patch are real ones that can be trained
    with torch.inference_mode(False), torch.device("cpu"):
        layer: PatchedLayer
        if isinstance(config, SparseConfig):
            layer = SparseLayer(config, heads, head_dim, adapter)
        else:
            assert isinstance(config, LinearConfig)
            layer = MHLALayer(config, heads, head_dim, int(projection.in_features), adapter)
        if tensors:
            layer.to(device=tensors[0].device)
            for name, parameter in layer.named_parameters():
                if name not in FLOAT32_PARAMETERS:
                    parameter.data = parameter.data.to(dtype)
    return layer.train(attn.training)


def _skips_scores(attn: Any) -> bool:
    """Whether a hook of diffusers asks this attention to return its values, as perturbed-attention guidance does."""
    registry = getattr(attn, "_diffusers_hook", None)
    return registry is not None and any(
        getattr(hook, "skip_attention_scores", False) for hook in registry.hooks.values()
    )


def _skip(
    attn: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """What diffusers' layer skipping runs in place of a patched attention: nothing."""
    is_pair = isinstance(encoder_hidden_states, torch.Tensor) and adapter_of(attn).has_extra
    return (hidden_states, encoder_hidden_states) if is_pair else hidden_states


def default_cross_attention_processor(attn: Any, family: Family | None = None) -> Any:
    """A processor that does what diffusers' own does for this cross-attention.

    Args:
        attn: whose class has a default processor, or else its family has.
        family: of the model; None where it is unknown, to ask all families.
    """
    default = getattr(attn, "_default_processor_cls", None)
    if default is not None:
        return default()
    return cross_attention_processor(attn, family)


def attention_inputs(
    attn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    adapter: AttentionAdapter | None = None,
    grid: tuple[int, ...] | None = None,
) -> AttentionInputs:
    """What a self-attention attends with, from the arguments of its forward, as a hook gets them.

    Args:
        attn: the attention.
        args: by place.
        kwargs: by name.
        adapter: of the attention; None of a patched one, which knows.
        grid: token grid; None within a forward of a patched transformer, whose context has it.
    """
    adapter = adapter if adapter is not None else adapter_of(attn)
    arguments, layer = adapter.arguments(args, kwargs), layer_of(attn)
    adapter.check_order(arguments, None if layer is None else layer.config)
    grid = grid or current().grid or _grid_of_rotary(attn, adapter, arguments)
    return adapter.read(attn, arguments, grid, math.prod(grid))


def tokens_of_grid(attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """Those of the grid, of what a patched self-attention computes (B, N, ...) for these arguments of its forward."""
    adapter = adapter_of(attn)
    arguments = adapter.arguments(args, kwargs)
    tokens = math.prod(current().grid or _grid_of_rotary(attn, adapter, arguments))
    before, x = adapter.extra(arguments, tokens)[0], adapter.ordered(arguments, x)
    return x[:, before : before + tokens] if x.shape[1] > tokens else x


def _with_tables(adapter: AttentionAdapter, attn: Any, arguments: Arguments) -> Arguments:
    """Add the tables of RoPE, which layers of a forward that get the same tensors from the model share."""
    given, known = arguments.get("rotary_emb"), current().tables
    if given is None or known is None or torch.compiler.is_compiling():
        return arguments
    tensors = tuple(given) if isinstance(given, tuple | list) else (given,)
    count = sum(arguments[name].shape[1] for name in ("hidden_states", "encoder_hidden_states") if name in arguments)
    place = id(adapter), count, *map(id, tensors)
    if place not in known:
        tables = steady(adapter.tables(attn, arguments))
        if not isinstance(tables, SteadyRotary):
            return {**arguments, "tables": tables}
        known[place] = tables, tensors  # which keeps their ids theirs
    return {**arguments, "tables": known[place][0]}


def _grid_of_rotary(attn: Any, adapter: AttentionAdapter, arguments: Arguments) -> tuple[int, ...]:
    """Read the token grid of a call off the tables of RoPE, outside of a patched transformer's forward."""
    if not torch.compiler.is_compiling():  # a compiled graph reads no values
        grid = grid_of_attention(attn, adapter.rotary(attn, arguments))
        if grid is not None:
            return grid
    layer = layer_of(attn)
    if layer is not None and layer.original_processor is not None:
        raise ValueError(
            "The token grid is known while the transformer runs, and this attention runs outside of it. Let gradient "
            "checkpointing be done by transformer.enable_gradient_checkpointing(), which carries the grid along; or "
            "give the processor the grid of every input in tokens, MHLAProcessor(..., grid=(frames, height, width)), "
            "or (height, width) for images."
        )
    raise ValueError(
        "MHLAProcessor does not know the token grid: this model, or torch.compile, does not pass it to an attention. "
        "Call mhla_diffusers.set_attn_processor(pipe.transformer, processor) or mhla_diffusers.apply_mhla(pipe, ...), "
        "which read it from every input, or give it to the processor, grid=(frames, height, width) in tokens, or "
        "(height, width) for images."
    )
