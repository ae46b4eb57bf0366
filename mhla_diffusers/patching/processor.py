"""The attention processor: what a patched attention does instead of softmax attention."""

from typing import Any, NamedTuple

import torch

from ..attention import check_backend
from ..attention.blocks import check_blocks
from ..attention.rotary import Rotary
from ..config import MHLAConfig
from ..families import cross_attention_processor, rotary_axes
from .layer import FLOAT32_PARAMETERS, MHLALayer, layer_of, replaced_processor
from .token_grid import attends_as_before, grid_of_call

_FLOAT16_MAX = 65504.0
_BACKEND = "_attention_backend"
"""Attribute that diffusers' set_attention_backend writes into processors."""


class MHLAProcessor:
    """Runs self-attention as MHLA and leaves cross-attention as the model has it.

    A plain object without weights, as diffusers' processors are: the weights of every attention live in its own
    submodule ``attn.mhla``. One instance may therefore serve all attentions of a model::

        pipe.transformer.set_attn_processor(MHLAProcessor(blocks=(7, 3, 5)))

    diffusers does not tell a processor which model it is put on. Set in that way, it makes ``attn.mhla`` when the
    attention first runs, and the attention must be told the grid (Wan's is, by the tables of RoPE) or ``grid`` given.
    :func:`mhla_diffusers.set_attn_processor` and :func:`mhla_diffusers.apply_mhla` make the weights at once and read
    the grid of every input.

    Args:
        config: settings; or give the fields of :class:`MHLAConfig` as keywords.
        grid: token grid of every input; None to find it out. It is believed: of an input with as many tokens in
            another shape, such as portrait for landscape, the blocks would be wrong.
        backend: see :func:`mhla_diffusers.attention.mhla_attention`.
        **settings: fields of :class:`MHLAConfig`; unknown ones are an error.

    Raises:
        ValueError: settings that are not allowed, or both ``config`` and settings.
    """

    # read and written by diffusers' set_attention_backend; used for the cross-attention that is passed on
    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(
        self,
        config: MHLAConfig | None = None,
        *,
        grid: tuple[int, ...] | None = None,
        backend: str = "auto",
        **settings: Any,
    ) -> None:
        if config is not None and settings:
            raise ValueError(
                f"Give either config or single settings, not both (got config and {', '.join(settings)}); "
                "config.replace(...) changes a configuration."
            )
        check_backend(backend)
        self.config = config if config is not None else MHLAConfig.from_dict(settings)
        self.grid = None if grid is None else check_blocks(grid, "grid")
        self.backend = backend
        if self.grid is not None and len(self.grid) != len(self.config.blocks):
            raise ValueError(f"grid={self.grid} and blocks={self.config.blocks} must have the same number of axes.")
        _register_with_diffusers(type(self))

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """Run one attention of a diffusers model.

        Args:
            attn: a ``WanAttention`` or ``Attention``.
            hidden_states: (B, N, hidden size).
            encoder_hidden_states: given for cross-attention.
            attention_mask: for self-attention a key-padding mask, (B, N), (B, 1, N) or (B, 1, 1, N): bool, or the
                bias that softmax attention would add.
            rotary_emb: (cos, sin), each (1, N, 1, D).

        Returns:
            (B, N, hidden size).

        Raises:
            ValueError: the token grid is unknown or does not fit, or the mask is no key-padding mask.
        """
        if encoder_hidden_states is not None:
            processor = _cross_attention_processor(attn)
            processor._attention_backend = self._attention_backend
            return processor(attn, hidden_states, encoder_hidden_states, attention_mask)
        layer = layer_of(attn)
        self._check_layer(layer)
        if attends_as_before() and not _skips_scores(attn):
            rotary = {} if rotary_emb is None else {"rotary_emb": rotary_emb}
            before = with_backend_of(self, replaced_processor(attn))
            return before(attn, hidden_states, attention_mask=attention_mask, **rotary)
        grid = self._grid_of(attn, hidden_states.shape[1], rotary_emb)
        key_mask = key_padding_mask(attention_mask, *hidden_states.shape[:2]) if attention_mask is not None else None
        if layer is None:
            attn.mhla = make_layer(attn, self.config)
        query, key, value = project(attn, hidden_states)
        if _skips_scores(attn):
            output = value
        else:
            output = attn.mhla(query, key, value, hidden_states, grid, rotary_emb, key_mask, self.backend)
        return hand_on(attn, output, hidden_states)

    def _check_layer(self, layer: MHLALayer | None) -> None:
        if layer is None and self.config.layers != "all":
            raise ValueError(
                f"layers={self.config.layers!r} cannot be honoured when diffusers' own set_attn_processor puts the "
                "processor on every layer; use mhla_diffusers.set_attn_processor(transformer, processor) or "
                "apply_mhla()."
            )
        if layer is None and self.config.softmax_steps:
            raise ValueError(
                f"softmax_steps={self.config.softmax_steps!r} cannot be honoured when diffusers' own "
                "set_attn_processor drops the processors of before; use apply_mhla(pipe, ...), which keeps them."
            )
        # identity first: under torch.compile(dynamic=True) numbers inside an equality would become symbols
        if layer is not None and layer.config is not self.config and layer.config != self.config:
            raise ValueError(
                f"This attention was patched with {layer.config}, but its processor was made for {self.config}. "
                "Call remove_mhla() before patching with other settings."
            )

    def _grid_of(self, attn: Any, tokens: int, rotary: Rotary | None) -> tuple[int, ...]:
        grid = self.grid if self.grid is not None else grid_of_call(attn, rotary)
        if torch.Size(grid).numel() != tokens:
            raise ValueError(
                f"The token grid {grid} holds {torch.Size(grid).numel()} tokens, but the attention got {tokens}. "
                "Was the processor made for another resolution, or are the tokens split over devices? MHLA does not "
                "run under context parallelism."
            )
        return grid


def with_backend_of(processor: MHLAProcessor, original: Any) -> Any:
    """The processor of before with the backend that ``set_attention_backend`` has set on a patched one meanwhile."""
    meanwhile = vars(processor).get(_BACKEND, original)
    if meanwhile is not original and getattr(original, _BACKEND, meanwhile) != meanwhile:
        setattr(original, _BACKEND, meanwhile)
    return original


def make_layer(attn: Any, config: MHLAConfig) -> MHLALayer:
    """A fresh :class:`MHLALayer` that fits an attention, on its device; mixing matrix, λ and β are float32.

    Gate, norm and convolution take the type that the attention computes in.

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
    if hasattr(attn.to_out[0], "_hf_hook") and any(weight.is_meta for weight in attn.parameters()):
        raise ValueError("The weights of this model are offloaded; patch it before you enable offloading.")
    heads = int(attn.heads)
    weights = [tensor for tensor in (*attn.parameters(), *attn.buffers()) if tensor.is_floating_point()]
    # an attention that first runs under inference_mode must still get weights that can be trained
    with torch.inference_mode(False):
        layer = MHLALayer(config, heads, int(attn.inner_dim) // heads, int(attn.to_out[0].out_features))
        if weights:
            layer.to(device=weights[0].device)
            for name, parameter in layer.named_parameters():
                if name not in FLOAT32_PARAMETERS:
                    parameter.data = parameter.data.to(_compute_dtype(attn, weights[0]))
    layer.rotary_axes = rotary_axes(attn)
    return layer.train(attn.training)


def _skips_scores(attn: Any) -> bool:
    """Whether a hook of diffusers asks this attention to hand on its values, as perturbed-attention guidance does."""
    registry = getattr(attn, "_diffusers_hook", None)
    return registry is not None and any(
        getattr(hook, "skip_attention_scores", False) for hook in registry.hooks.values()
    )


def _skip(attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What diffusers' layer skipping runs in place of a patched attention: nothing."""
    return hidden_states


def _register_with_diffusers(kind: type) -> None:
    """Tell diffusers' hooks, which look a processor's class up, how it is skipped."""
    from diffusers.hooks._helpers import AttentionProcessorMetadata, AttentionProcessorRegistry

    AttentionProcessorRegistry.register(kind, AttentionProcessorMetadata(skip_processor_output_fn=_skip))


def _compute_dtype(attn: Any, weight: torch.Tensor) -> torch.dtype:
    """Type that an attention computes in: that of its weights, unless they are stored in 8 bits."""
    hooks = getattr(attn.to_out[0], "_diffusers_hook", None)
    casting = hooks.get_hook("layerwise_casting") if hooks is not None else None
    if casting is not None:
        return casting.compute_dtype
    return weight.dtype if weight.dtype.itemsize > 1 else torch.float32


def _cross_attention_processor(attn: Any) -> Any:
    """A processor that does what diffusers' own does for this cross-attention."""
    default = getattr(attn, "_default_processor_cls", None)
    return default() if default is not None else cross_attention_processor(attn)


class AttentionInput(NamedTuple):
    """What a self-attention is called with."""

    hidden_states: torch.Tensor
    """(B, N, hidden size)."""
    rotary: Rotary | None
    """(cos, sin), each (1, N, 1, D)."""
    key_mask: torch.Tensor | None
    """(B, N), see :func:`key_padding_mask`."""


def attention_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionInput:
    """Read the arguments of a self-attention's forward, as a hook of a ``WanAttention`` or ``Attention`` gets them."""
    given = dict(zip(("hidden_states", "encoder_hidden_states", "attention_mask", "rotary_emb"), args, strict=False))
    given |= kwargs
    hidden_states, mask = given["hidden_states"], given.get("attention_mask")
    key_mask = key_padding_mask(mask, *hidden_states.shape[:2]) if mask is not None else None
    return AttentionInput(hidden_states, given.get("rotary_emb"), key_mask)


def project(attn: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of a self-attention, normed where the model norms them: each (B, N, H, D).

    Under autocast a norm may give float32 where the projections give the lower type; all three then take the lower one,
    as those of ``scaled_dot_product_attention`` do.
    """
    if attn.fused_projections:
        query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
    else:
        query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
    query, key = _normed_heads(query, attn.norm_q, attn.heads), _normed_heads(key, attn.norm_k, attn.heads)
    value = value.unflatten(-1, (attn.heads, -1))
    device = hidden_states.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and value.dtype != torch.float64:
        lower = torch.get_autocast_dtype(device)
        return query.to(lower), key.to(lower), value.to(lower)
    return query, key, value


def hand_on(attn: Any, output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """What a self-attention returns, from the output of its heads (B, N, H, D) and its input: (B, N, hidden size)."""
    output = attn.to_out[1](attn.to_out[0](output.flatten(2)))
    if getattr(attn, "residual_connection", False):
        output = output + hidden_states
    factor = getattr(attn, "rescale_output_factor", 1.0)
    if factor != 1:
        output = output / factor
    if output.dtype == torch.float16:
        # an infinity here would spread over the whole image; diffusers' own linear attention clips too
        output = output.clip(-_FLOAT16_MAX, _FLOAT16_MAX)
    return output


def _normed_heads(x: torch.Tensor, norm: Any, heads: int) -> torch.Tensor:
    """(B, N, H * D) to (B, N, H, D); a norm across heads acts before the split, another one after it."""
    if norm is None:
        return x.unflatten(-1, (heads, -1))
    if _is_across_heads(norm, x.shape[-1]):
        return norm(x).unflatten(-1, (heads, -1))
    return norm(x.unflatten(-1, (heads, -1)))


def _is_across_heads(norm: Any, inner_dim: int) -> bool:
    """Whether a query or key norm has a weight for every channel of all heads."""
    weight = getattr(norm, "weight", None)
    return weight is not None and weight.numel() == inner_dim


def key_padding_mask(attention_mask: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """The (B, N) mask of ``mhla_attention`` from the mask that diffusers passes to an attention.

    A bias that softmax attention adds to the scores of a key multiplies the key's weight by its exponential, which
    linear attention can do as well; a mask that differs between queries it cannot.

    Raises:
        ValueError: if the mask is not the same for every query, or holds integers.
    """
    shape = tuple(attention_mask.shape)
    if shape not in ((batch, tokens), (batch, 1, tokens), (batch, 1, 1, tokens)):
        raise ValueError(
            f"MHLA honours key-padding masks of shape ({batch}, {tokens}), ({batch}, 1, {tokens}) or "
            f"({batch}, 1, 1, {tokens}); got {shape}. A mask that differs between queries has no linear form: "
            "keep softmax attention in this layer with layers=[...]."
        )
    if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
        raise ValueError(
            f"A mask of {attention_mask.dtype} is ambiguous; give bool (True takes part) or the floating point bias "
            "that softmax attention would add, for example mask.bool()."
        )
    mask = attention_mask.reshape(batch, tokens)
    if mask.dtype == torch.bool:
        return mask
    # as in softmax, only differences between the keys of a sample count
    return (mask.float() - mask.float().amax(dim=-1, keepdim=True)).exp()
