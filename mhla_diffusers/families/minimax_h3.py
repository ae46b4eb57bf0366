"""MiniMax-H3: ``MiniMaxH3Transformer3DModel``.

One sequence holds text, conditioning pictures or videos, sound, and last the video that is generated; every token
attends to all. All but the generated video are extra tokens. RoPE pairs the halves of the channels that it rotates. All
samples of a batch share one layout and one time, which runs from the noise to the data. Default blocks cut 37x24x42
tokens, 124 frames at 768p, into three latent frames by eight by eight tokens.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .adapters import JointAdapter
from .family import Attention, Condition, Family, Forward, Kwargs, Sample
from .models import Clip, Model, tiny_video
from .packed_videos import grid_of_places, lies_on
from .packing import pack
from .values import compiled_for, keep_with, read_once

_CLASS = "MiniMaxH3Transformer3DModel"
_TEXT_TOKENS, _SOUND_TOKENS = 256, 414
"""Tokens of a long prompt, whose length is not limited, and of two channels of sound for 124 frames."""
_TINY = {"hidden_size": 24, "ffn_dim": 32, "num_refiner_layers": 1, "rope_freq_dim": 2}
_TINY |= {"text_dim": 16, "freq_dim": 8, "time_embed_hidden_dim": 16, "time_embed_dim": 8}
_LAYOUT = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")


class MiniMaxH3Adapter(JointAdapter):
    """RoPE pairs halves and is the second argument."""

    places = ("hidden_states", "rotary_emb", "attention_mask")
    pairs_halves = True


class _Forward(Forward):
    def latent_frames(self, config: Any, frames: int, stride: int) -> int:
        """Count five for every 17 frames, and two for the last five; the pipeline rounds up to that."""
        return 5 * math.ceil((frames - 5) / 17) + 2

    def grid_of_clip(self, pipe: Any, transformer: Any, clip: Clip) -> tuple[int, ...]:
        """Take the stride from the modular pipeline, which may lack the autoencoder."""
        sides = (side // pipe.vae_spatial_compression_ratio for side in clip.sizes[0])
        latents = torch.empty(1, 1, self.latent_frames(None, clip.frames, 1), *sides, device="meta")
        return self.token_grid(transformer, latents)

    def time_of(self, arguments: Mapping[str, Any]) -> Any:
        """Return the time of the last row, which is of the video."""
        return arguments["timestep"][arguments["timestep_indices"][-1]]

    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read the grid from the rows' places, once per tensor; ValueError unless the last are a video in order."""
        places, *others = (arguments[name] for name in ("position_ids", "video_indices", "timestep_indices"))
        grid = _grid_of_rows(places, *others)
        return compiled_for(grid, lambda: lies_on(grid, places.T))

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add the layout without pictures; sound has the video's time. ValueError for samples at other times."""
        if not timestep.is_meta and bool((timestep != timestep[0]).any()):
            raise ValueError("MiniMax-H3 takes one time for a batch; run samples at other times one after another.")
        from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

        arguments = super().arguments(transformer, latents, timestep[:1], conditioning)
        text, sound = (arguments[condition.name].shape[1] for condition in self.conditions)
        sizes = *latents.shape[2:], sound // 2, self.patch(transformer)
        # the last three: channels of sound, and tags of the rows of sound and video
        made = MiniMaxH3PrepareLayoutStep.build_packed_sequence(torch.ones(text), *sizes, 2, 2, 0)
        layout = {name: rows.to(latents.device) for name, rows in zip(_LAYOUT, made, strict=False)}
        keep_with(layout["position_ids"], self.token_grid(transformer, latents))  # known, also on the meta device
        arguments |= {"hidden_states": pack(latents, self.patch(transformer)), **layout}
        return {**arguments, "timestep_indices": torch.zeros_like(layout["token_tags"])}


MINIMAX_H3 = Family(
    name="minimax_h3",
    transformers=(_CLASS,),
    attention=Attention(
        adapter=MiniMaxH3Adapter(context_first=True, rotary_argument="rotary_emb"),
        dispatches=True,
        extra=(None, 0),
        extra_tokens=_TEXT_TOKENS + _SOUND_TOKENS,
    ),
    forward=_Forward(
        axes=3,
        conditions=(
            Condition("encoder_hidden_states", (_TEXT_TOKENS, "text_dim")),
            Condition("audio_hidden_states", (_SOUND_TOKENS, "audio_in_channels")),
        ),
    ),
    trained=(
        "MiniMax-H3 learns video and sound together, which mhla encode does not read, and the mhla command does not "
        "call its modular pipeline. apply_mhla(pipe, calibration=...) fits a patch without training."
    ),
    mhla_blocks=(12, 3, 5),
    default_clip=Clip(frames=124, fps=24.0, sizes=((768, 1344),)),
    models=(
        Model("minimax-h3", _CLASS, 56, 128, 50, (12, 3, 5), ((768, 1344),), stride=16, frames=124),
        tiny_video("minimax_h3", _CLASS, _TINY, head_dim=16, sizes=((128, 192),), stride=16, frames=21),
    ),
)


@read_once
def _grid_of_rows(places: Tensor, video: Tensor, times: Tensor) -> tuple[int, ...]:
    """Read the grid of the generated rows: last, without a gap, of one time; rows of given videos have another."""
    rows = torch.arange(len(places) - len(video), len(places), device=video.device)
    others = ((video != rows) | (times[video] != times[-1])).nonzero()
    generated = places[int(others[-1]) + 1 - len(video) if len(others) else -len(video) :]
    grid = grid_of_places(generated.T)
    if grid is None or len(generated[:, 0].unique()) < grid[0]:
        raise ValueError(
            "The sequence does not end in one token grid in raster order, as MiniMax-H3's pipeline makes it. Several "
            "videos in one sequence cannot be patched: run one after another, or remove_mhla(transformer)."
        )
    return grid
