"""Components that several of the tiny pipelines share: tokenizers, CLIP, T5 and the autoencoder of images."""

from typing import Any

from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from ...models import seeded
from ...pipelines import word_tokenizer

TEXT_TOKENS = 6
"""Of the inputs of transformers, and what the tokenizers of CLIP pad to."""


def clip_tokenizer() -> PreTrainedTokenizerFast:
    """Pads to ``TEXT_TOKENS``; pipelines read that length from it."""
    tokenizer = word_tokenizer()
    tokenizer.model_max_length = TEXT_TOKENS
    return tokenizer


def clip_text(cls: type = CLIPTextModel, seed: int = 0) -> Any:
    """CLIP of 12 channels, whose pooled text is read at the first padding token."""
    config = CLIPTextConfig(
        vocab_size=16,
        hidden_size=12,
        intermediate_size=16,
        projection_dim=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=80,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=0,
    )
    return seeded(cls, seed=seed, config=config)


def t5_text(channels: int) -> T5EncoderModel:
    """T5 with one layer."""
    return seeded(
        T5EncoderModel, config=T5Config(vocab_size=16, d_model=channels, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )


def image_autoencoder(latent_channels: int, **config: Any) -> AutoencoderKL:
    """Latents of half the height and width."""
    return seeded(
        AutoencoderKL,
        noise=0.05,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=latent_channels,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        **config,
    )
