"""Random text encoders that more than one tiny pipeline has."""

from transformers import T5Config, T5EncoderModel

from ...models import seeded


def t5(channels: int) -> T5EncoderModel:
    """One layer; its tokens are those of ``word_tokenizer``."""
    config = T5Config(vocab_size=16, d_model=channels, d_kv=8, d_ff=16, num_layers=1, num_heads=4)
    return seeded(T5EncoderModel, config=config)
