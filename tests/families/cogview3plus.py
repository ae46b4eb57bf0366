"""CogView3-Plus as a model family: all that the package has to be told of it."""

import torch

from mhla_diffusers.families import Condition, ImageFamily, JointAdapter, Model
from mhla_diffusers.families.processes import VelocityDDPM

_TEXT_TOKENS = 224
"""Length that the pipeline pads text to."""


class CogView3PlusFamily(ImageFamily):
    """Text-to-image transformers with a (height, width) token grid; joint attention with the text, without RoPE."""

    name = "cogview3plus"
    transformers = ("CogView3PlusTransformer2DModel",)
    adapter = JointAdapter(context_first=True)
    processor = "diffusers.models.attention_processor.CogVideoXAttnProcessor2_0"
    extra_tokens = _TEXT_TOKENS
    conditions = (Condition("encoder_hidden_states", (_TEXT_TOKENS, "text_embed_dim")),)
    models = (
        Model(
            name="cogview3-plus",
            transformer="CogView3PlusTransformer2DModel",
            heads=64,
            head_dim=40,
            layers=30,
            blocks=(4, 4),
            sizes=((1024, 1024), (2048, 2048)),
        ),
        Model(
            name="tiny-cogview3plus",
            transformer="CogView3PlusTransformer2DModel",
            settings={"in_channels": 4, "out_channels": 4, "text_embed_dim": 32, "time_embed_dim": 8},
            heads=2,
            head_dim=12,
            layers=4,
            blocks=(2, 2),
            sizes=((64, 64),),
        ),
    )

    def process(self, transformer, flow_shift):
        return VelocityDDPM(snr_shift=4.0)

    def forward_arguments(self, transformer, latents, timestep, conditioning):
        size = torch.tensor([8 * side for side in latents.shape[2:]]).to(latents).expand(len(latents), -1)
        sizes = {"original_size": size, "target_size": size, "crop_coords": torch.zeros_like(size)}
        return {**super().forward_arguments(transformer, latents, timestep, conditioning), **sizes}
