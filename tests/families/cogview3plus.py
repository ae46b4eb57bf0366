"""CogView3-Plus as a model family: all that the package has to be told of it."""

from functools import partial

import torch

from mhla_diffusers.families import Condition, Family, Inputs, Model, Training
from mhla_diffusers.families.processes import VelocityDDPM

_CLASS = "CogView3PlusTransformer2DModel"
_TEXT_TOKENS = 224
"""Length that the pipeline pads text to."""
_TINY = {"in_channels": 4, "out_channels": 4, "text_embed_dim": 32, "time_embed_dim": 8}


class CogView3PlusInputs(Inputs):
    """The sizes of the picture are conditions that no prompt holds."""

    def arguments(self, transformer, latents, timestep, conditioning):
        size = torch.tensor([8 * side for side in latents.shape[2:]]).to(latents).expand(len(latents), -1)
        sizes = {"original_size": size, "target_size": size, "crop_coords": torch.zeros_like(size)}
        return {**super().arguments(transformer, latents, timestep, conditioning), **sizes}


COGVIEW3PLUS = Family(
    name="cogview3plus",
    transformers=(_CLASS,),
    extra=(None, 0),  # text before the image
    extra_tokens=_TEXT_TOKENS,
    inputs=CogView3PlusInputs(conditions=(Condition("encoder_hidden_states", (_TEXT_TOKENS, "text_embed_dim")),)),
    trained=Training(ddpm=partial(VelocityDDPM, snr_shift=4.0)),  # a diffusion whose velocity the model predicts
    models=(
        Model("cogview3-plus", _CLASS, heads=64, head_dim=40, layers=30, blocks=(4, 4), sizes=((1024, 1024),)),
        Model(
            "tiny-cogview3plus",
            _CLASS,
            heads=2,
            head_dim=12,
            layers=4,
            blocks=(2, 2),
            sizes=((64, 64),),
            settings=_TINY,
        ),
    ),
)
