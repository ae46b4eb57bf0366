"""The tiny pipelines, each described in one place: what its pictures show, its parts before training, how it is called.

Shapes: pictures are 64 pixels high and wide; a transformer sees 64 tokens of an image (dit, sana), 9x8x8 = 576 of a
clip (wan). All autoencoders make 4 channels of latents at a quarter of the resolution.
"""

import random
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import nn

from .digits import FRAMES, MOTIONS, NAMES, PICTURE_SIZE, Scene

LATENT_CHANNELS = 4
STRIDE = 4
"""Pixels per latent along height and width."""
LATENT_SIZE = PICTURE_SIZE // STRIDE
TEXT_CHANNELS = 64
MAX_TOKENS = 10
"""Length that prompts are padded to; the longest caption has eight tokens."""

_CALL = {"num_inference_steps": 20, "guidance_scale": 3.0, "height": PICTURE_SIZE, "width": PICTURE_SIZE}
_CALL |= {"max_sequence_length": MAX_TOKENS}


class TinyPipeline(ABC):
    """One tiny pipeline of real diffusers classes."""

    family: ClassVar[str]
    """Name of its model family."""
    digit_size: ClassVar[int] = 28
    """Height and width in pixels of a drawn digit."""
    most_digits: ClassVar[int] = 2
    motions: ClassVar[tuple[str | None, ...]] = (None,)
    """How digits move; None for pictures."""
    autoencoder_steps: ClassVar[int] = 400
    """Updates of its autoencoder."""
    call_settings: ClassVar[dict[str, Any]] = _CALL
    """Arguments of the pipeline's call that it was trained for."""
    blocks: ClassVar[tuple[int, ...]] = (4, 4)
    """Block counts that suit its token grid."""
    mixing_per_head: ClassVar[bool] = False
    """Whether its MHLA has a mixing matrix for every head."""
    batch_size: ClassVar[int] = 16
    """Samples per update when a patch is adapted."""

    @property
    def is_video(self) -> bool:
        """Whether its digits move."""
        return self.motions != (None,)

    def random_scene(self, chance: random.Random) -> Scene:
        """One digit, or one or two where there is room, in motion where they move."""
        count = chance.choice((1, 1, 2)) if self.most_digits == 2 else 1
        labels = tuple(chance.randrange(10) for _ in range(count))
        return Scene(labels, chance.choice(self.motions) if self.is_video else None)

    @abstractmethod
    def build_transformer(self) -> Any:
        """An untrained transformer."""

    @abstractmethod
    def build_autoencoder(self) -> Any:
        """An untrained autoencoder."""

    def build_scheduler(self) -> Any:
        """Flow matching with shift 3."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler(shift=3.0)

    def build_text_encoder(self, tokenizer: Any) -> Any | None:
        """An untrained text encoder for a tokenizer's vocabulary; None for a model without one."""
        return None

    text_marks: ClassVar[dict[str, str]] = {}
    """Special token that the tokenizer puts before ("bos_token") or after ("eos_token") a text; empty without text."""

    @abstractmethod
    def assemble(self, parts: dict[str, Any]) -> Any:
        """The pipeline of its parts, by the names of its components."""


class TinyDiT(TinyPipeline):
    """``DiTPipeline``: one digit, given by its class."""

    family = "dit"
    digit_size = 52
    most_digits = 1
    call_settings: ClassVar[dict[str, Any]] = {"num_inference_steps": 30, "guidance_scale": 4.0}

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
            sample_size=64,
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
        **_CALL,
        "use_resolution_binning": False,
        "complex_human_instruction": None,
    }
    text_marks: ClassVar[dict[str, str]] = {"bos_token": "<bos>"}

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
    autoencoder_steps = 250
    # WanPipeline rounds the number of frames to a multiple of the temporal stride and adds one
    call_settings: ClassVar[dict[str, Any]] = {**_CALL, "num_frames": FRAMES - 1}
    blocks = (3, 4, 4)
    mixing_per_head = True
    batch_size = 4
    text_marks: ClassVar[dict[str, str]] = {"eos_token": "</s>"}

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
        """``AutoencoderKLWan`` with temporal stride 1."""
        from diffusers import AutoencoderKLWan

        return AutoencoderKLWan(
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
