"""The tiny pipelines, each described in one place.

The transformers of DiT and SANA see 64 tokens of an image, that of Wan 9x8x8 = 576 of a clip.
"""

from typing import Any, ClassVar

import torch
from torch import nn

from .base import LATENT_CHANNELS, LATENT_SIZE, STRIDE, TEXT_CHANNELS, Phase, TinyPipeline
from .digits import FRAMES, MOTIONS, NAMES, PICTURE_SIZE, Scene


class TinyDiT(TinyPipeline):
    """``DiTPipeline``: one digit, given by its class."""

    family = "dit"
    digit_size = 52
    most_digits = 1
    call_settings: ClassVar[dict[str, Any]] = {"num_inference_steps": 30, "guidance_scale": 4.0}
    phases = (Phase("whole", 6000, 32, 1.5e-3),)
    block_size = 2

    def prompt(self, scene: Scene) -> str:
        """The number of its class."""
        return str(scene.labels[0])

    def scene(self, prompt: str) -> Scene | None:
        """The digit of a class's number."""
        return Scene((int(prompt),)) if prompt.isdigit() else None

    def build_transformer(self) -> Any:
        """Four layers of 3 heads of 32."""
        from diffusers import DiTTransformer2DModel

        transformer = DiTTransformer2DModel(
            num_attention_heads=3,
            attention_head_dim=32,
            in_channels=LATENT_CHANNELS,
            out_channels=2 * LATENT_CHANNELS,
            num_layers=4,
            sample_size=LATENT_SIZE,
            patch_size=2,
            num_embeds_ada_norm=1000,
        )
        for block in transformer.transformer_blocks:
            # the usual 0.02 takes many thousand steps until the label is heard beside the timestep
            nn.init.normal_(block.norm1.emb.class_embedder.embedding_table.weight, std=0.5)
        return transformer

    def build_autoencoder(self) -> Any:
        """``AutoencoderKL``."""
        from diffusers import AutoencoderKL

        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(16, 32, 32),
            layers_per_block=1,
            latent_channels=LATENT_CHANNELS,
            norm_num_groups=8,
            sample_size=PICTURE_SIZE,
            mid_block_add_attention=False,
        )

    def build_scheduler(self) -> Any:
        """First-order DPM-Solver on DiT's linear schedule."""
        from diffusers import DPMSolverMultistepScheduler

        # the second order extrapolates predictions made of nearly pure noise, which a small model gets wrong
        return DPMSolverMultistepScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear", solver_order=1)

    def assemble(self, parts: dict[str, Any]) -> Any:
        """``DiTPipeline`` with the names of the digits as labels."""
        from diffusers import DiTPipeline

        pipe = DiTPipeline(**parts, id2label=dict(enumerate(NAMES)))
        # DiTPipeline reads the class names from its configuration, but does not write them
        pipe.register_to_config(id2label=dict(enumerate(NAMES)))
        return pipe


class TinySana(TinyPipeline):
    """``SanaPipeline``: one or two digits, given by a caption."""

    family = "sana"
    call_settings: ClassVar[dict[str, Any]] = {
        **TinyPipeline.call_settings,
        "use_resolution_binning": False,
        "complex_human_instruction": None,
    }
    text_marks: ClassVar[dict[str, str]] = {"bos_token": "<bos>"}
    phases = (Phase("whole", 2500, 32, 1e-3), Phase("longer", 3000, 32, 1e-3))

    def build_transformer(self) -> Any:
        """Four layers of 3 heads of 32."""
        from diffusers import SanaTransformer2DModel

        return SanaTransformer2DModel(
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_attention_heads=3,
            attention_head_dim=32,
            num_layers=4,
            num_cross_attention_heads=3,
            cross_attention_head_dim=32,
            cross_attention_dim=96,
            caption_channels=TEXT_CHANNELS,
            sample_size=LATENT_SIZE,
            patch_size=2,
        )

    def build_autoencoder(self) -> Any:
        """``AutoencoderDC``."""
        from diffusers import AutoencoderDC

        return AutoencoderDC(
            latent_channels=LATENT_CHANNELS,
            attention_head_dim=8,
            encoder_block_types=("ResBlock",) * 3,
            decoder_block_types=("ResBlock",) * 3,
            encoder_block_out_channels=(16, 32, 32),
            decoder_block_out_channels=(16, 32, 32),
            encoder_layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1),
            encoder_qkv_multiscales=((), (), ()),
            decoder_qkv_multiscales=((), (), ()),
        )

    def build_text_encoder(self, tokenizer: Any) -> Any:
        """``Gemma2Model``."""
        from transformers import Gemma2Config, Gemma2Model

        return Gemma2Model(
            Gemma2Config(
                vocab_size=len(tokenizer),
                hidden_size=TEXT_CHANNELS,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                query_pre_attn_scalar=16,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=None,
            )
        )

    def assemble(self, parts: dict[str, Any]) -> Any:
        """``SanaPipeline``."""
        from diffusers import SanaPipeline

        return SanaPipeline(**parts)


class TinyWan(TinyPipeline):
    """``WanPipeline``: one or two digits in motion, given by a caption."""

    family = "wan"
    motions = MOTIONS
    # WanPipeline rounds the number of frames to a multiple of the temporal stride and adds one
    call_settings: ClassVar[dict[str, Any]] = {**TinyPipeline.call_settings, "num_frames": FRAMES - 1}
    text_marks: ClassVar[dict[str, str]] = {"eos_token": "</s>"}
    autoencoder_steps = 250
    training_scenes = 1500
    phases = (
        Phase("single", 2500, 48, 2e-3, frames=1),
        Phase("longer", 2000, 48, 2e-3, frames=1),
        Phase("whole", 700, 8, 1e-3),
        Phase("longest", 1500, 8, 1e-3),
        Phase("last", 2500, 8, 1e-3),
    )
    blocks = (3, 4, 4)
    block_size = 4
    mixing_per_head = True
    batch_size = 4

    def build_transformer(self) -> Any:
        """Four layers of 3 heads of 32."""
        from diffusers import WanTransformer3DModel

        return WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=3,
            attention_head_dim=32,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=TEXT_CHANNELS,
            ffn_dim=384,
            num_layers=4,
            rope_max_seq_len=64,
        )

    def build_autoencoder(self) -> Any:
        """``AutoencoderKLWan`` with temporal stride 1, whose convolutions do not look at earlier frames.

        It is trained on single frames, which give those weights no gradient, so it treats all frames of a clip alike.
        """
        from diffusers import AutoencoderKLWan

        autoencoder = AutoencoderKLWan(
            base_dim=16,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 1],
            num_res_blocks=1,
            temperal_downsample=[False],
            latents_mean=[0.0] * LATENT_CHANNELS,
            latents_std=[1.0] * LATENT_CHANNELS,
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_temporal=1,
            scale_factor_spatial=STRIDE,
        )
        with torch.no_grad():
            for module in autoencoder.modules():
                if isinstance(module, nn.Conv3d):
                    # of a causal kernel the last is the current frame
                    module.weight[:, :, :-1] = 0
        return autoencoder

    def decode(self, autoencoder: Any, latents: torch.Tensor) -> torch.Tensor:
        """Frames without the final clamp, behind which a dark pixel gets no gradient."""
        from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

        frames = autoencoder.decoder(autoencoder.post_quant_conv(latents), first_chunk=True)
        pictures: torch.Tensor = unpatchify(frames, autoencoder.config.patch_size)
        return pictures

    def record_scale(self, autoencoder: Any, latents: torch.Tensor, spread: float) -> None:
        """Mean and standard deviation of every channel."""
        channels = latents.movedim(1, 0).flatten(1)
        autoencoder.register_to_config(
            latents_mean=[round(x, 4) for x in channels.mean(dim=1).tolist()],
            latents_std=[round(x / spread, 4) for x in channels.std(dim=1).tolist()],
        )

    def build_text_encoder(self, tokenizer: Any) -> Any:
        """``UMT5EncoderModel``."""
        from transformers import UMT5Config, UMT5EncoderModel

        return UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(tokenizer),
                d_model=TEXT_CHANNELS,
                d_kv=16,
                d_ff=128,
                num_layers=2,
                num_heads=4,
                dropout_rate=0.0,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        )

    def assemble(self, parts: dict[str, Any]) -> Any:
        """``WanPipeline``."""
        from diffusers import WanPipeline

        return WanPipeline(**parts)


TINY: dict[str, TinyPipeline] = {tiny.family: tiny for tiny in (TinyDiT(), TinySana(), TinyWan())}
"""Family → its tiny pipeline."""


def tiny_pipeline(family: str) -> TinyPipeline:
    """The description of a family's tiny pipeline.

    Raises:
        ValueError: there is none; with the allowed names.
    """
    if family not in TINY:
        raise ValueError(f"family={family!r} has no tiny pipeline; allowed: {', '.join(TINY)}.")
    return TINY[family]
