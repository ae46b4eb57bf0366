"""The learnable part of one patched attention, the submodule ``attn.mhla``, and what it is given."""

import math
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ..attention import (
    Call,
    ContentRule,
    MHLAState,
    clip_mixing_,
    extend_mixing,
    initial_mixing,
    mhla_attention,
    reference_weights,
    resize_mixing,
)
from ..attention.call import ExtraTokens, of_grid
from ..attention.layout import Extra
from ..attention.parallel.collectives import rows_around
from ..attention.parallel.place import Parallel
from ..attention.rope import Rotary, rotary_table, rotated
from ..attention.sparse import with_lists
from ..config import MHLAConfig
from ..families.adapters import AttentionAdapter

FLOAT32_PARAMETERS = ("mixing", "linear_log_weight", "pooled_bias")
"""Parameters of a layer that stay in float32 whatever the attention computes in."""

_UNIT_GATE = 1.2784645427610738
"""The number whose SiLU is 1, so that a fresh gate changes nothing."""
_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


class LayerInput(NamedTuple):
    """What a self-attention attends with: query, key and value of its N tokens, and how these lie on the grid.

    N is the product of the token grid and the extra tokens. Of tokens that are split over processes, all of it is of
    the own ones.
    """

    query: torch.Tensor
    """(B, N, H, D)."""
    key: torch.Tensor
    """(B, N, H, D); with a fresh state, keys of earlier tokens may stand in front."""
    value: torch.Tensor
    """Like ``key``."""
    hidden_states: torch.Tensor
    """(B, tokens, hidden size), input of the attention, which the gate projects: of all N tokens or of the grid's."""
    grid: tuple[int, ...]
    extra: Extra = (0, 0)
    """How many tokens stand before and after those of the grid."""
    rotary: Rotary | None = None
    """(cos, sin), each (1 or B, N, 1, D)."""
    key_mask: torch.Tensor | None = None
    """(B, N), see :func:`mhla_attention`."""

    def of_grid(self) -> "LayerInput":
        """The tokens of the grid alone."""
        query, key, value = (of_grid(x, self.extra) for x in (self.query, self.key, self.value))
        rotary = (
            None if self.rotary is None else (of_grid(self.rotary[0], self.extra), of_grid(self.rotary[1], self.extra))
        )
        mask = None if self.key_mask is None else of_grid(self.key_mask, self.extra)
        return LayerInput(query, key, value, self._hidden_states_of_grid(), self.grid, (0, 0), rotary, mask)

    def _hidden_states_of_grid(self) -> torch.Tensor:
        has_extra = any(self.extra) and self.hidden_states.shape[1] == self.query.shape[1]
        return of_grid(self.hidden_states, self.extra) if has_extra else self.hidden_states

    def extra_tokens(self) -> ExtraTokens | None:
        """The extra tokens; None if there are none."""
        if not any(self.extra):
            return None
        return ExtraTokens.of(self.query, self.key, self.value, self.rotary, self.key_mask, self.extra)

    def in_float32(self) -> "LayerInput":
        """With query, key and value in float32."""
        return self._replace(query=self.query.float(), key=self.key.float(), value=self.value.float())

    def rotated(self) -> "LayerInput":
        """With RoPE applied to query and key."""
        table = rotary_table(self.rotary) if self.rotary is not None else None
        return self._replace(query=rotated(self.query, table), key=rotated(self.key, table), rotary=None)


class Gate(nn.Module):
    """Projection of a layer's input, whose SiLU multiplies the output; fresh, it is 1.

    No ``nn.Linear``, and :class:`Convolution` no ``nn.Conv3d``: by these diffusers' layerwise casting and quantisation
    know what to store in fewer bits, and MHLA's few weights stay in the type that they compute in.
    """

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inner_size, hidden_size))
        self.bias = nn.Parameter(torch.full((inner_size,), _UNIT_GATE))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, N, hidden size) to (B, N, H * D)."""
        return functional.linear(hidden_states, self.weight, self.bias)


class Convolution(nn.Module):
    """Depth-wise convolution of the values over the token grid; fresh, it is 0.

    Args:
        channels: H * D.
        size: odd kernel size.
        axes: of the token grid.
    """

    def __init__(self, channels: int, size: int, axes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, *(size,) * axes))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, values: torch.Tensor, grid: tuple[int, ...], parallel: Parallel | None = None) -> torch.Tensor:
        """(B, N, H * D) of the tokens of the grid, or of those of this process, before and after."""
        channels, _, size, *rest = self.weight.shape
        own = slice(None)
        if parallel is None:
            on_grid = values.unflatten(1, grid)
        else:
            on_grid, own = rows_around(values, grid, size // 2, parallel)
        convolve = _CONVOLUTIONS[1 + len(rest)]
        output = convolve(on_grid.movedim(-1, 1), self.weight, self.bias, padding=size // 2, groups=channels)
        return output.flatten(2).mT[:, own]


class MHLALayer(nn.Module):
    """Mixing matrix and, where configured, λ and β, output norm, gate and convolution of one attention.

    Each begins so that a fresh layer computes plain Eq. 4 with the initial mixing matrix: the norm's weight is 1
    (:func:`calibrate_output_norm` fits it), the gate is 1, the convolution 0. Beside the sparse branch λ is e⁻³, or 1
    without pooled keys, and β, where it is a parameter, 0; :func:`calibrate_sparse` fits both. Beside extra tokens
    alone λ is 1 / √D; :func:`calibrate_mixing` fits it.

    Args:
        config: settings.
        heads: H.
        head_dim: D.
        hidden_size: channels of the attention's input, which the gate projects.
        adapter: of the attention.
    """

    def __init__(
        self, config: MHLAConfig, heads: int, head_dim: int, hidden_size: int, adapter: AttentionAdapter | None = None
    ) -> None:
        super().__init__()
        self.config = config
        """Settings; others that :func:`share_parameters` may take their place."""
        self.adapter = adapter if adapter is not None else AttentionAdapter()
        self.heads = heads
        self.head_dim = head_dim
        self.original_processor: Any = None
        """The processor that this layer replaces; None if diffusers' own ``set_attn_processor`` dropped it."""
        self.rotary_axes: tuple[int, ...] | None = None
        """Channels that RoPE turns with each axis of the grid, if it is known to; see :func:`mhla_attention`."""
        mixing = initial_mixing(config.blocks, config.mixing_init)
        if config.mixing_per_head:
            mixing = mixing.repeat(heads, 1, 1)
        self.mixing = nn.Parameter(mixing, requires_grad=config.mixing_learnable)
        self.linear_log_weight: nn.Parameter | None = None
        """Log of λ, (H,); of layers that attend to anything with softmax, by the sparse branch or to extra tokens."""
        if config.sparse != "none" or self.adapter.has_extra:
            self.linear_log_weight = nn.Parameter(torch.full((heads,), self._first_log_weight))
        self.pooled_bias = nn.Parameter(torch.zeros(heads)) if config.learns_pooled_bias else None
        """β, (H,); None where it is fitted at every call."""
        self.output_norm = nn.Parameter(torch.ones(head_dim)) if config.output_norm else None
        self.gate = Gate(hidden_size, heads * head_dim) if config.output_gate else None
        self.convolution: Convolution | None = None
        if config.convolution is not None:
            self.convolution = Convolution(heads * head_dim, config.convolution, len(config.blocks))

    @property
    def _first_log_weight(self) -> float:
        """Log of λ of a fresh layer: where pooled keys take part, they leave the linear branch little to add.

        Beside extra tokens alone a token of the grid weighs about as much as one of those: where channels are normed,
        φ(q) · φ(k) is of the order of D times a number near 1/6, and exp(q · k / √D) near 1.6.
        """
        if self.config.sparse == "none":
            return -0.5 * math.log(self.head_dim)
        return -3.0 if self.config.sparse == "content" and self.config.pooled else 0.0

    def forward(
        self,
        given: LayerInput,
        *,
        backend: str = "auto",
        parallel: Parallel | None = None,
        state: MHLAState | None = None,
        keep: bool = True,
    ) -> torch.Tensor:
        """Attend.

        Args:
            given: what to attend with.
            backend: see :func:`mhla_attention`.
            parallel: the processes between which the tokens are split.
            state: of :meth:`new_state`, whose sequence these tokens go on.
            keep: whether they belong to its past from now on.

        Returns:
            (B, N, H, D), before the output projection of the attention.

        Raises:
            ValueError: with ``causal="block"`` a grid that ends within a frame block, and whatever
                :func:`mhla_attention` and :meth:`MHLAState.step` refuse.
        """
        grid, extra = given.grid, given.extra
        self.config.check_whole(grid)
        here, gate = given.of_grid(), None
        if self.gate is not None:
            gate = self.gate(here.hidden_states).unflatten(-1, (self.heads, -1))
        if state is not None:
            return self._step(state, given, gate, keep)
        output = mhla_attention(
            given.query,
            given.key,
            given.value,
            self._mixing_on(grid),
            self.config.grid_from(grid),
            self.config.blocks_on(grid),
            rotary=given.rotary,
            rotary_axes=self.rotary_axes,
            key_mask=given.key_mask,
            output_norm=self.output_norm,
            output_gate=gate,
            backend=backend,
            extra=extra,
            parallel=parallel,
            **self._settings(grid, any(extra)),
        )
        if self.convolution is not None:
            added = self.convolution(here.value.flatten(2), grid, parallel).unflatten(-1, (self.heads, -1))
            output = output + (functional.pad(added, (0, 0, 0, 0, *extra)) if any(extra) else added)
        return output

    def new_state(self, grid: tuple[int, ...], backend: str = "auto") -> MHLAState:
        """For a sequence that goes on, of which every step gives some tokens to :meth:`forward`.

        Args:
            grid: token grid of a step, or of anything with the same axes behind the first.
            backend: see :func:`mhla_attention`.

        Raises:
            ValueError: the patch is not causal.
        """
        config = self.config
        if config.causal is None or config.block_length is None:
            raise ValueError(
                "A sequence that goes on needs a patch whose queries see the past alone; patch with causal='token' or "
                "causal='block' and a block_length."
            )
        # weights come with every step, as here they may be offloaded, and may be trained between two steps
        return MHLAState(
            None,
            (config.blocks[0] * config.block_length, *grid[1:]),
            config.blocks,
            causal=config.causal,
            beyond=config.beyond,
            backend=backend,
            **self._formula(),
        )

    def _step(self, state: MHLAState, given: LayerInput, gate: torch.Tensor | None, keep: bool) -> torch.Tensor:
        """The next step of a state, with the weights of now."""
        weights: dict[str, Any] = {
            "mixing": self.mixing,
            "output_norm": self.output_norm,
            "linear_weight": self._own_block_weight(),
        }
        query, key, value = given.query, given.key, given.value
        earlier = key.shape[1] - query.shape[1]
        if earlier:
            past, key = key[:, :earlier], key[:, earlier:]
            # nobody reads what they get, so any query and gate will do
            any_gate = None if gate is None else torch.ones_like(past)
            state.step(past, past, value[:, :earlier], output_gate=any_gate, **weights)
            value = value[:, earlier:]
        return state.step(
            query, key, value, rotary=given.rotary, key_mask=given.key_mask, output_gate=gate, keep=keep, **weights
        )

    @torch.no_grad()
    def weights(self, given: LayerInput) -> torch.Tensor:
        """What every query gives to every key: the effective attention matrix of :meth:`forward`, before norm and gate.

        Returns:
            float64 (B, H, N, N) of all tokens; rows are queries.
        """
        return reference_weights(self.call(given))

    def call(self, given: LayerInput) -> Call:
        """The call of :meth:`forward` without norm and gate, for what looks at the attention itself."""
        here = given.of_grid()
        settings = self._settings(given.grid, any(given.extra))
        settings["rule"] = settings.pop("sparse", None)
        call = Call(
            here.query,
            here.key,
            here.value,
            self._mixing_on(given.grid),
            self.config.grid_from(given.grid),
            self.config.blocks_on(given.grid),
            rotary=rotary_table(here.rotary) if here.rotary is not None else None,
            key_mask=here.key_mask,
            extra=given.extra_tokens(),
            **settings,
        )
        return with_lists(call)

    def _mixing_on(self, grid: tuple[int, ...]) -> torch.Tensor:
        """The mixing matrix of the blocks that a grid is cut into."""
        blocks = self.config.blocks_on(grid)
        if self.config.causal is not None and blocks != self.config.blocks:
            return extend_mixing(self.mixing, self.config.blocks, blocks[0])
        return self.mixing if blocks == self.config.blocks else resize_mixing(self.mixing, self.config.blocks, blocks)

    def _settings(self, grid: tuple[int, ...], has_extra: bool) -> dict[str, Any]:
        """Arguments of the attention besides tensors that the input brings."""
        config, log_weight, settings = self.config, self.linear_log_weight, self._formula()
        if config.causal is not None:
            return settings | {"causal": config.causal, "linear_weight": self._own_block_weight()}
        if config.sparse == "content":
            if config.listed_on(grid) == 1:  # nothing is left for pooled keys and the linear branch to add
                return settings | {"sparse": ContentRule(config.block_size, 1.0)}
            settings["sparse"] = ContentRule(config.block_size, config.listed, config.fits_pooled_bias)
        if log_weight is not None and (config.sparse == "content" or has_extra):
            settings["linear_weight"] = log_weight.exp()
        # where β is fitted at every call there is none to hand over
        return settings | ({} if self.pooled_bias is None else {"pooled_bias": self.pooled_bias})

    def _formula(self) -> dict[str, Any]:
        """Which linear attention it is."""
        config = self.config
        return {
            "feature_map": config.feature_map,
            "rope": config.rope,
            "normalize": config.normalize,
            "eps": config.eps,
        }

    def _own_block_weight(self) -> torch.Tensor | None:
        """λ beside the own frame block, if that is attended to with softmax."""
        log_weight = self.linear_log_weight
        return log_weight.exp() if self.config.sparse == "own" and log_weight is not None else None

    @property
    def needs_calibration(self) -> bool:
        """Whether λ and β are still those of a fresh layer, which nothing fits within the call."""
        if self.config.sparse != "content" or self.config.listed == 1 or self.config.fits_pooled_bias:
            return False
        is_fresh = self.linear_log_weight is None or bool((self.linear_log_weight == self._first_log_weight).all())
        return is_fresh and (self.pooled_bias is None or not self.pooled_bias.any())

    @torch.no_grad()
    def clip_mixing_(self) -> None:
        """Clip the mixing matrix into (0, 1), unless the configuration turns clipping off."""
        if self.config.mixing_clip:
            clip_mixing_(self.mixing)

    def extra_repr(self) -> str:
        """Blocks and shape, for ``print(model)``."""
        blocks = "x".join(map(str, self.config.blocks))
        return f"blocks={blocks} ({math.prod(self.config.blocks)}), heads={self.heads}, head_dim={self.head_dim}"


_SETTINGS_OF_PARAMETERS = (
    "blocks",
    "causal",
    "block_length",
    "mixing_per_head",
    "mixing_learnable",
    "sparse",
    "learns_pooled_bias",
    "output_norm",
    "output_gate",
    "convolution",
)


def share_parameters(before: MHLAConfig, after: MHLAConfig) -> bool:
    """Whether layers of these settings have the same parameters, so that one keeps its own when settings change."""
    return all(getattr(before, name) == getattr(after, name) for name in _SETTINGS_OF_PARAMETERS)


def attentions_of(transformer: nn.Module) -> dict[str, Any]:
    """Name and module of every attention, cross-attention included."""
    return {name: module for name, module in transformer.named_modules() if hasattr(module, "set_processor")}


def layer_of(attn: Any) -> MHLALayer | None:
    """The MHLA layer that an attention uses, or None.

    PEFT's ``modules_to_save=["mhla"]`` puts a wrapper in its place, with the layer and a copy of it for every adapter.
    """
    module: Any = getattr(attn, "mhla", None)
    if module is None or isinstance(module, MHLALayer):
        return module
    copies = module.modules_to_save
    active = (
        None if module.disable_adapters else next((name for name in module.active_adapters if name in copies), None)
    )
    layer: MHLALayer = module.original_module if active is None else copies[active]
    return layer


def replaced_processor(attn: Any) -> Any:
    """The processor that an attention had before its patch; None if no record was kept."""
    module: Any = getattr(attn, "mhla", None)
    layer = getattr(module, "original_module", module)
    return None if layer is None else layer.original_processor
