"""Tiny pipelines with random weights, and files to encode."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from .models import tiny_dit, tiny_sana


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", "<bos>", "a", "red", "blue", "ball", "moves"]
    fast = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="</s>", bos_token="<bos>", unk_token="<unk>"
    )


def wan_pipeline(latent_channels: int = 4) -> Any:
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=latent_channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1] * latent_channels,
        latents_std=[0.5] * latent_channels,
    )
    text_encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0)
    )
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=latent_channels,
        out_channels=latent_channels,
        text_dim=8,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    return WanPipeline(
        tokenizer(), text_encoder.eval(), vae.eval(), FlowMatchEulerDiscreteScheduler(shift=3.0), transformer
    )


def sana_pipeline() -> Any:
    from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, SanaPipeline
    from transformers import Gemma2Config, Gemma2Model

    torch.manual_seed(0)
    vae = AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "ResBlock"),
        decoder_block_types=("ResBlock", "ResBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), ()),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    text_encoder = Gemma2Model(
        Gemma2Config(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
        )
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return SanaPipeline(tokenizer(), text_encoder.eval(), vae.eval(), tiny_sana(), scheduler)


def dit_pipeline() -> Any:
    from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=0.18215,
    )
    scheduler = DDIMScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear", clip_sample=False)
    return DiTPipeline(tiny_dit(), vae.eval(), scheduler, id2label={3: "cat, house cat", 5: "dog"})


def write_video(path: Path, frames: int = 12, fps: int = 8, size: tuple[int, int] = (40, 48)) -> None:
    """A video whose frame i is of grey level 10 i."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        stream.bit_rate = 2_000_000
        for index in range(frames):
            pixels = np.full((*size, 3), 10 * index, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def write_image(path: Path, size: tuple[int, int] = (40, 40), level: int = 100) -> None:
    from PIL import Image

    Image.fromarray(np.full((*size, 3), level, dtype=np.uint8)).save(path)
