"""Components that several of the tiny pipelines share: tokenizers, text encoders and the autoencoder of images."""

from typing import Any

import torch
from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from ...models import seeded
from ...pipelines import word_tokenizer

TEXT_TOKENS = 6
"""Of the inputs of transformers."""
TEXT_TEMPLATE = "the {} on"
"""In place of a prompt for language models, one token before the text and one behind it."""
_CHAT_TEMPLATE = "the {% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %} on"
"""The same as a chat."""


def text_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose longest text has ``TEXT_TOKENS`` tokens, which pipelines with CLIP ask it for."""
    tokenizer = word_tokenizer()
    tokenizer.model_max_length = TEXT_TOKENS
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def keep_some(batch: int, tokens: int = TEXT_TOKENS) -> torch.Tensor:
    """Mask (B, tokens), int64, of texts of other lengths: all tokens, two fewer, and three."""
    return (torch.arange(tokens) < torch.tensor([[tokens], [tokens - 2], [3]])[:batch]).long()


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


def language_model(layers: int) -> dict[str, Any]:
    """Settings that configurations of Llama and Qwen share: 16 channels, and a vocabulary of 16 tokens."""
    return {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }


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
