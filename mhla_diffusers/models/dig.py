"""DiG, the diffusion transformer with gated linear attention (Zhu et al., CVPR 2025, arXiv 2405.18428).

DiT's frame, patches with sine positions, a class and a time that modulate every block (adaLN-Zero), around blocks of
gated linear attention, a SwiGLU feed-forward and a depth-wise convolution. Gated linear attention reads tokens in one
direction, so blocks take turns: rows, rows backwards, columns, columns backwards.

The authors' code reorders the stream of tokens between blocks. Here the stream stays in raster order, and a block
reorders its input and restores the order afterwards. The result is the same with the same weights, and MHLA, which
needs no direction, sees raster order. Settings are those of the authors' code (hustvl/DiG, ``models_dig.py``), read
there.
"""

import math
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.attention import AttentionMixin, AttentionModuleMixin, FeedForward
from diffusers.models.embeddings import LabelEmbedding, PatchEmbed, TimestepEmbedding, Timesteps
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from ..attention.gated_linear import GATE_RANK, gated_linear, log_decay

_EPS = 1e-6


def turned(tokens: torch.Tensor, direction: int) -> torch.Tensor:
    """Return tokens (B, N, C) of a square grid as a direction reads them; called again, in raster order.

    Directions are 0 along rows, 2 along columns; 1 and 3 the same backwards.
    """
    if direction & 2:
        side = math.isqrt(tokens.shape[1])
        tokens = tokens.unflatten(1, (side, side)).transpose(1, 2).flatten(1, 2)
    return tokens.flip(1) if direction & 1 else tokens


class GatedLinearAttnProcessor:
    """Gated linear attention of a :class:`DiGAttention`."""

    def __call__(self, attn: "DiGAttention", hidden_states: torch.Tensor) -> torch.Tensor:
        """Attend in the direction of the attention: (B, N, hidden size) in raster order to the same."""
        read = turned(hidden_states, attn.direction)
        query, key, value = (x.unflatten(-1, (attn.heads, -1)) for x in attn.project(read))
        decay = log_decay(attn.to_decay(read)).unflatten(-1, (attn.heads, -1))
        output = gated_linear(query, key, value, decay).flatten(2)
        return attn.project_output(turned(output, attn.direction).unflatten(-1, (attn.heads, -1)), hidden_states)


class DiGAttention(nn.Module, AttentionModuleMixin):
    """Gated linear attention with a norm over each head and a gate of the output, read in a direction of ``turned``.

    Queries and keys are ``expand_k`` times as wide as the values.
    """

    is_cross_attention = False
    use_bias = False
    norm_q = norm_k = None
    to_qkv: nn.Linear
    """Once diffusers has fused the projections."""

    def __init__(self, width: int, heads: int, head_dim: int, expand_k: float, direction: int) -> None:
        super().__init__()
        self.heads, self.inner_dim, self.direction = heads, heads * head_dim, direction
        keys = int(self.inner_dim * expand_k)
        if keys < heads or keys % heads:
            raise ValueError(
                f"expand_k={expand_k} gives queries and keys {keys} channels, which {heads} heads do not divide; 0.5 "
                "and 1.0 are usual."
            )
        self.to_q = nn.Linear(width, keys, bias=False)
        self.to_k = nn.Linear(width, keys, bias=False)
        self.to_v = nn.Linear(width, self.inner_dim, bias=False)
        self.to_decay = nn.Sequential(nn.Linear(width, GATE_RANK, bias=False), nn.Linear(GATE_RANK, keys))
        self.to_gate = nn.Linear(width, self.inner_dim, bias=False)
        self.norm_out = nn.RMSNorm(head_dim, eps=_EPS)
        self.to_out = nn.ModuleList([nn.Linear(self.inner_dim, width, bias=False)])
        self.processor: Any = GatedLinearAttnProcessor()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run the processor: (B, N, hidden size) in raster order to the same."""
        output: torch.Tensor = self.processor(self, hidden_states)
        return output

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return query, key and value, each (B, N, channels)."""
        if self.fused_projections:
            keys = self.to_q.out_features
            fused: torch.Tensor = self.to_qkv(hidden_states)
            return fused.split((keys, keys, self.inner_dim), dim=-1)
        return self.to_q(hidden_states), self.to_k(hidden_states), self.to_v(hidden_states)

    def project_output(self, output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm, gate and output projection, which stay when MHLA takes the place of gated linear attention.

        Args:
            output: of the heads, (B, N, H, D).
            hidden_states: (B, N, hidden size), input of the attention.
        """
        gate = nn.functional.silu(self.to_gate(hidden_states))
        result: torch.Tensor = self.to_out[0](self.norm_out(output).flatten(2) * gate)
        return result


class DiGBlock(nn.Module):
    """Attention, feed-forward, and a depth-wise convolution of the turned picture that begins as the identity."""

    def __init__(self, width: int, heads: int, head_dim: int, expand_k: float, direction: int) -> None:
        super().__init__()
        self.direction = direction
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=_EPS)
        self.attn1 = DiGAttention(width, heads, head_dim, expand_k, direction)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=_EPS)
        # 2/3 of four times the width, up to a multiple of 256, as GLA's configuration has it
        inner = 256 * math.ceil(int(width * 4 * 2 / 3) / 256)
        self.ff = FeedForward(width, inner_dim=inner, activation_fn="swiglu", bias=False)
        self.modulation = nn.Linear(width, 6 * width)
        self.conv = nn.Conv2d(width, width, kernel_size=3, padding=1, groups=width)

    def forward(self, hidden_states: torch.Tensor, conditioning: torch.Tensor) -> torch.Tensor:
        """Run the block: (B, N, hidden size) in raster order to the same; conditioning is (B, hidden size)."""
        modulation = self.modulation(nn.functional.silu(conditioning))[:, None].chunk(6, dim=-1)
        shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation
        hidden_states = hidden_states + gate * self.attn1(self.norm1(hidden_states) * (1 + scale) + shift)
        hidden_states = hidden_states + ff_gate * self.ff(self.norm2(hidden_states) * (1 + ff_scale) + ff_shift)
        side = math.isqrt(hidden_states.shape[1])
        picture = turned(hidden_states, self.direction).transpose(1, 2).unflatten(2, (side, side))
        return turned(self.conv(picture).flatten(2).transpose(1, 2), self.direction)


class DiGTransformer2DModel(ModelMixin, ConfigMixin, AttentionMixin):
    """DiG as diffusers has DiT: ``DiTPipeline`` runs, saves and loads it.

    Import this module before loading a saved pipeline, because diffusers does not import modules named in a file::

        import mhla_diffusers.models.dig
        pipe = DiTPipeline.from_pretrained(folder)

    The defaults are DiG-S/2's: 12 layers, width 384, 32.98 million parameters.

    Args:
        num_attention_heads: H.
        attention_head_dim: D, of values; H · D is the width.
        in_channels: of the latents.
        out_channels: of the output; twice as many where the model learns the variance. None for ``in_channels``.
        num_layers: blocks.
        sample_size: latents along a side that it is trained at; positions are interpolated for others.
        patch_size: latents along a side of a token.
        num_embeds_ada_norm: classes; one more stands for none.
        expand_k: width of queries and keys, as a part of the width. DiG's is 0.5; MHLA in the place of gated linear
            attention needs 1.0.
    """

    _supports_gradient_checkpointing = True
    _skip_layerwise_casting_patterns = ["pos_embed", "norm"]
    _no_split_modules = ["DiGBlock"]
    _repeated_blocks = ["DiGBlock"]

    @register_to_config
    def __init__(
        self,
        num_attention_heads: int = 6,
        attention_head_dim: int = 64,
        in_channels: int = 4,
        out_channels: int | None = 8,
        num_layers: int = 12,
        sample_size: int = 32,
        patch_size: int = 2,
        num_embeds_ada_norm: int = 1000,
        expand_k: float = 0.5,
    ) -> None:
        super().__init__()
        width = num_attention_heads * attention_head_dim
        self.out_channels = in_channels if out_channels is None else out_channels
        self.gradient_checkpointing = False
        self.pos_embed = PatchEmbed(sample_size, sample_size, patch_size, in_channels, width)
        self.time_proj = Timesteps(256, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.timestep_embedder = TimestepEmbedding(256, width)
        self.class_embedder = LabelEmbedding(num_embeds_ada_norm, width, dropout_prob=0.1)
        self.transformer_blocks = nn.ModuleList(
            DiGBlock(width, num_attention_heads, attention_head_dim, expand_k, index % 4) for index in range(num_layers)
        )
        self.norm_out = nn.LayerNorm(width, elementwise_affine=False, eps=_EPS)
        self.proj_out_1 = nn.Linear(width, 2 * width)
        self.proj_out_2 = nn.Linear(width, patch_size**2 * self.out_channels)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Initialise as the authors' code does: a fresh model predicts 0, and its blocks change nothing."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                # the gain of the attention's projections is that of GLA's authors
                nn.init.xavier_uniform_(module.weight, gain=2**-2.5 if ".attn1." in name else 1.0)
            if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.pos_embed.proj.weight.flatten(1))
        nn.init.normal_(self.class_embedder.embedding_table.weight, std=0.02)
        nn.init.normal_(self.timestep_embedder.linear_1.weight, std=0.02)
        nn.init.normal_(self.timestep_embedder.linear_2.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, DiGBlock):
                nn.init.dirac_(module.conv.weight, groups=module.conv.groups)
                nn.init.zeros_(module.modulation.weight)
        nn.init.zeros_(self.proj_out_1.weight)
        nn.init.zeros_(self.proj_out_2.weight)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor | None = None,
        class_labels: torch.Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[torch.Tensor]:
        """Predict (B, output channels, side, side), with the arguments of diffusers' DiT.

        Args:
            hidden_states: (B, C, side, side), latents.
            timestep: (B,).
            class_labels: (B,), the number of classes for none.
            cross_attention_kwargs: none are known.
            return_dict: whether to return an object in place of a tuple.

        Raises:
            ValueError: latents that are not square, or arguments that are missing or not known.
        """
        *_, height, width = hidden_states.shape
        patch = self.config.patch_size
        if height != width or height % patch:
            raise ValueError(f"DiG takes square latents whose side {patch} divides; got {height}x{width}.")
        if timestep is None or class_labels is None:
            raise ValueError("DiG is conditioned on time and class; give timestep and class_labels, (batch,) each.")
        if cross_attention_kwargs:
            raise ValueError(f"DiG's attention takes no further arguments; got {', '.join(cross_attention_kwargs)}.")
        tokens = self.pos_embed(hidden_states)
        time = self.timestep_embedder(self.time_proj(timestep).to(tokens.dtype))
        conditioning = time + self.class_embedder(class_labels)
        for block in self.transformer_blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                tokens = self._gradient_checkpointing_func(block, tokens, conditioning)
            else:
                tokens = block(tokens, conditioning)
        shift, scale = self.proj_out_1(nn.functional.silu(conditioning))[:, None].chunk(2, dim=-1)
        tokens = self.proj_out_2(self.norm_out(tokens) * (1 + scale) + shift)
        side = height // patch
        patches = tokens.unflatten(2, (patch, patch, -1)).unflatten(1, (side, side))
        output = patches.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
        return Transformer2DModelOutput(sample=output) if return_dict else (output,)
