"""The learnable part of one patched attention: the submodule ``attn.mhla``."""

import math
from typing import Any

import torch
from torch import nn

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
from ..attention.call import of_grid
from ..attention.layout import Extra
from ..attention.parallel.collectives import rows_around
from ..attention.parallel.place import Parallel
from ..attention.rope import Rotary, rotary_table
from ..attention.sparse import with_lists
from ..config import MHLAConfig
from ..families.adapters import AttentionAdapter
from .attended import Attended
from .gate_and_convolution import Convolution, Gate

FLOAT32_PARAMETERS = ("mixing", "linear_log_weight", "pooled_bias")
"""Parameters of a layer that stay in float32 whatever the attention computes in."""

_LINEAR_LOG_WEIGHT = {True: -3.0, False: 0.0}
"""Log of λ at first, with and without pooled keys, which leave the linear branch little to add."""


def _beside_extra_tokens(head_dim: int) -> float:
    """Log of a λ with which a token of the grid weighs about as much as an extra token, attended to with softmax.

    Where channels are normed, φ(q) · φ(k) is of the order of D times a number near 1/6, and exp(q · k / √D) near 1.6.
    """
    return -0.5 * math.log(head_dim)


class MHLALayer(nn.Module):
    """Mixing matrix and, where configured, λ and β, output norm, gate and convolution of one attention.

    Each is initialised so that a fresh layer computes plain Eq. 4 with the initial mixing matrix: the norm's weight is
    1 (:func:`mhla_diffusers.calibrate_output_norm` fits it), the gate is 1, the convolution is 0. Beside the sparse
    branch λ is e⁻³, or 1 without pooled keys, and β, where it is a parameter, 0; :func:`calibrate_sparse` fits both.
    Beside extra tokens alone λ is 1 / √D; :func:`calibrate_mixing` fits it.

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
        self.adapter = adapter if adapter is not None else AttentionAdapter()
        self.heads = heads
        self.head_dim = head_dim
        self.original_processor: Any = None
        """The processor that this layer replaces; None if diffusers' own ``set_attn_processor`` dropped it."""
        self.rotary_axes: tuple[int, ...] | None = None
        """Channels that RoPE turns with each axis of the grid, if it is known to; see :func:`mhla_attention`."""
        inner_size = heads * head_dim
        mixing = initial_mixing(config.blocks, config.mixing_init)
        if config.mixing_per_head:
            mixing = mixing.repeat(heads, 1, 1)
        self.mixing = nn.Parameter(mixing, requires_grad=config.mixing_learnable)
        self.linear_log_weight: nn.Parameter | None = None
        """Log of λ, (H,); of layers that attend to anything with softmax, by the sparse branch or to extra tokens."""
        if config.sparse != "none" or self.adapter.has_extra:
            begin = self._first_log_weight if config.sparse != "none" else _beside_extra_tokens(head_dim)
            self.linear_log_weight = nn.Parameter(torch.full((heads,), begin))
        self.pooled_bias = nn.Parameter(torch.zeros(heads)) if config.learns_pooled_bias else None
        """β, (H,); None where it is fitted at every call."""
        self.output_norm = nn.Parameter(torch.ones(head_dim)) if config.output_norm else None
        self.gate = Gate(hidden_size, inner_size) if config.output_gate else None
        self.convolution: Convolution | None = None
        if config.convolution is not None:
            self.convolution = Convolution(inner_size, config.convolution, len(config.blocks))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        hidden_states: torch.Tensor,
        grid: tuple[int, ...],
        rotary: Rotary | None = None,
        key_mask: torch.Tensor | None = None,
        backend: str = "auto",
        extra: Extra = (0, 0),
        parallel: Parallel | None = None,
        state: MHLAState | None = None,
        keep: bool = True,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: (B, N, H, D).
            key: (B, N, H, D); with a fresh ``state``, those of tokens before may stand in front.
            value: like ``key``.
            hidden_states: (B, tokens, hidden size), input of the attention, for the gate: of all N tokens, or without
                the extra ones.
            grid: token grid; N is its product and the extra tokens.
            rotary: (cos, sin), each (1 or B, N, 1, D).
            key_mask: (B, N), see :func:`mhla_attention`.
            backend: see :func:`mhla_attention`.
            extra: how many tokens stand before and after those of the grid.
            parallel: the processes between which the tokens are split; all above is of the own ones then.
            state: of :meth:`new_state`, whose sequence these tokens go on; all above is of them alone then.
            keep: whether they belong to its past from now on.

        Returns:
            (B, N, H, D), before the output projection of the attention.

        Raises:
            ValueError: with ``causal="block"`` a grid that ends within a frame block, and whatever
                :func:`mhla_attention` and :meth:`MHLAState.step` refuse.
        """
        self.config.check_whole(grid)
        here = Attended(query, key, value, grid, extra, rotary).of_grid()
        gate = None
        if self.gate is not None:
            whole = any(extra) and hidden_states.shape[1] == query.shape[1]
            gate = self.gate(of_grid(hidden_states, extra) if whole else hidden_states)
            gate = gate.unflatten(-1, (self.heads, -1))
        if state is not None:
            return self._step(state, query, key, value, rotary, key_mask, gate, keep)
        output = mhla_attention(
            query,
            key,
            value,
            self._mixing_on(grid),
            self.config.grid_from(grid),
            self.config.blocks_on(grid),
            rotary=rotary,
            rotary_axes=self.rotary_axes,
            key_mask=key_mask,
            output_norm=self.output_norm,
            output_gate=gate,
            backend=backend,
            extra=extra,
            parallel=parallel,
            **self._settings(grid, any(extra)),
        )
        if self.convolution is not None:
            added = self._convolved(self.convolution, here.value.flatten(2), grid, parallel)
            added = added.unflatten(-1, (self.heads, -1))
            output = output + (torch.nn.functional.pad(added, (0, 0, 0, 0, *extra)) if any(extra) else added)
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
        trained = config.blocks[0] * config.block_length, *grid[1:]
        # weights come with every step, as here they may be offloaded, and may be trained between two steps
        return MHLAState(
            None,
            trained,
            config.blocks,
            causal=config.causal,
            beyond=config.beyond,
            backend=backend,
            **self._common_settings(),
        )

    def _step(
        self,
        state: MHLAState,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary | None,
        key_mask: torch.Tensor | None,
        gate: torch.Tensor | None,
        keep: bool,
    ) -> torch.Tensor:
        """The next step of a state, with the weights of now."""
        weights: dict[str, Any] = {
            "mixing": self.mixing,
            "output_norm": self.output_norm,
            "linear_weight": self._own_block_weight(),
        }
        earlier = key.shape[1] - query.shape[1]
        if earlier:
            past, key = key[:, :earlier], key[:, earlier:]
            # nobody reads what they get, so any query and gate will do
            any_gate = None if gate is None else torch.ones_like(past)
            state.step(past, past, value[:, :earlier], output_gate=any_gate, **weights)
            value = value[:, earlier:]
        return state.step(query, key, value, rotary=rotary, key_mask=key_mask, output_gate=gate, keep=keep, **weights)

    @staticmethod
    def _convolved(
        convolution: Convolution, values: torch.Tensor, grid: tuple[int, ...], parallel: Parallel | None
    ) -> torch.Tensor:
        """(B, tokens, H * D), before and after."""
        if parallel is None:
            return convolution.of_tokens(values, grid)
        around, own = rows_around(values, grid, convolution.reach, parallel)
        return convolution(around.movedim(-1, 1)).flatten(2).mT[:, own]

    @torch.no_grad()
    def weights(self, given: Attended) -> torch.Tensor:
        """What every query gives to every key: the effective attention matrix of :meth:`forward`, before norm and gate.

        Returns:
            float64 (B, H, N, N) of all tokens; rows are queries.
        """
        return reference_weights(self.call(given))

    def call(self, given: Attended) -> Call:
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
            extra=given.others(),
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
        config, log_weight = self.config, self.linear_log_weight
        settings = self._common_settings()
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

    def _common_settings(self) -> dict[str, Any]:
        """Those of every attention, which are no weights."""
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
    def _first_log_weight(self) -> float:
        return _LINEAR_LOG_WEIGHT[self.config.sparse == "content" and self.config.pooled]

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
