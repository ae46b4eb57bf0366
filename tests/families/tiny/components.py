"""Random components that more than one tiny pipeline has."""

from typing import Any

from diffusers import AutoencoderKL, UniPCMultistepScheduler
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, T5Config, T5EncoderModel

from ...models import seeded
from ...pipelines import wan_pipeline


def t5(channels: int) -> T5EncoderModel:
    """One layer; its tokens are those of ``word_tokenizer``."""
    config = T5Config(vocab_size=16, d_model=channels, d_kv=8, d_ff=16, num_layers=1, num_heads=4)
    return seeded(T5EncoderModel, config=config)


def kl_autoencoder() -> AutoencoderKL:
    """Of images: 8 pixels per latent along height and width, 4 channels."""
    return seeded(
        AutoencoderKL,
        noise=0.05,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=4,
        mid_block_add_attention=False,
    )


def clip_vision(channels: int) -> CLIPVisionModel:
    """Two layers; five tokens for a picture of 8x8, four patches and the class."""
    config = CLIPVisionConfig(
        hidden_size=channels,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    return seeded(CLIPVisionModel, config=config)


def wan_components(flow_shift: float) -> dict[str, Any]:
    """UMT5 with 32 channels, Wan's autoencoder with 16, UniPC on flow matching."""
    parts = wan_pipeline().components
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift)
    return {name: parts[name] for name in ("tokenizer", "text_encoder", "vae")} | {"scheduler": scheduler}


def wan_image_components(flow_shift: float, channels: int) -> dict[str, Any]:
    """The same with a vision encoder.

    Args:
        flow_shift: of the scheduler.
        channels: of the vision encoder.
    """
    side = {"height": 8, "width": 8}
    return wan_components(flow_shift) | {
        "image_encoder": clip_vision(channels),
        "image_processor": CLIPImageProcessor(size=side, crop_size=side),
    }
