"""Z-Image: ``ZImageTransformer2DModel``.

One stream, the image before the text; each is filled up to a multiple of 32 tokens with learned ones, which take part
as text does. Two layers refine the image before that and two the text; these keep softmax, as some layers of a hybrid
do. Images and texts are lists, since texts of a batch have their own lengths. RoPE is handed over as complex numbers.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..config import MHLAConfig
from .adapters import JointAdapter
from .base import Family
from .encoding import padded_text
from .processes import DiffusionProcess, ReversedFlowMatching
from .sizes import GRIDS_OF_LARGE_SQUARES, LARGE_SQUARES, Model
from .structure import Sample

_TEXT_TOKENS = 512
"""Default of the pipeline's call, which cuts text there."""
_PATCH = 2
"""Latents per token along height and width, by default of the transformer's forward."""


_Z_IMAGE = Model(
    "z-image",
    "ZImageTransformer2DModel",
    {},
    30,
    128,
    30,
    (4, 4),
    stride=8,
    patch=2,
    sizes=LARGE_SQUARES,
    layers_argument="n_layers",
    more_layers={"n_refiner_layers": 2},
    grids=GRIDS_OF_LARGE_SQUARES,
)
_TINY = Model(
    "tiny-z_image",
    "ZImageTransformer2DModel",
    {"dim": 32, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 32, "axes_dims": [4, 6, 6]},
    2,
    16,
    3,
    blocks=(2, 2),
    stride=8,
    patch=2,
    sizes=((64, 64),),
    layers_argument="n_layers",
    more_layers={"n_refiner_layers": 1},
)


class ZImageFamily(Family):
    """Text-to-image transformers with a (height, width) token grid."""

    name = "z_image"
    transformers = ("ZImageTransformer2DModel",)
    axes = 2
    block_lists = ("layers",)
    attentions = ("attention",)
    adapter = JointAdapter(rotary_argument="freqs_cis")
    extra_tokens = _TEXT_TOKENS
    feed_forwards = ("feed_forward",)
    # at 1024 px 16 tokens a side of a block
    default_config = MHLAConfig(blocks=(4, 4), mixing_per_head=True, sparse="content")
    lacks_processor_methods = True
    dispatches_attention = True
    forward_names = ("x", "t", "cap_feats")
    timestep_name = "t"
    models = (_Z_IMAGE, _TINY)

    def self_attention_processor(self) -> Any:
        """``ZSingleStreamAttnProcessor``."""
        from diffusers.models.transformers.transformer_z_image import ZSingleStreamAttnProcessor

        return ZSingleStreamAttnProcessor()

    def rotary_axes(self, head_dim: int) -> tuple[int, ...] | None:
        """Of Z-Image: 32 channels that the text's length turns, counted to the height, then 48 for each axis."""
        return (80, 48) if head_dim == 128 else None

    def spatial_patch(self, transformer: Any) -> int:
        """2, unless the transformer's forward is told another."""
        return _PATCH

    def token_grid(self, transformer: Any, latents: torch.Tensor) -> tuple[int, ...]:
        """(height, width) of latents cut into patches of 2x2."""
        return latents.shape[2] // _PATCH, latents.shape[3] // _PATCH

    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Of a list of images (C, F, H, W).

        Raises:
            ValueError: several images for one sample, images of several sizes, or frames of a video.
        """
        images, patch = arguments["x"], arguments.get("patch_size", _PATCH)
        if isinstance(images[0], list):
            raise ValueError(
                f"x holds {len(images[0])} pictures for a sample: MHLA takes one, not one with others as its context, "
                "as in Z-Image-Omni. Run these without the patch: remove_mhla(pipe)."
            )
        sizes = {tuple(image.shape[1:]) for image in images}
        (frames, height, width), *others = sizes
        if others or frames != 1:
            raise ValueError(
                f"x holds images of the sizes {sorted(sizes)}, (frames, height, width) of latents: MHLA takes one size "
                "for a batch, of one frame. Run images of other sizes one after another."
            )
        return height // patch, width // patch

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """Lists of images with one frame and of texts without what they were filled up with."""
        texts, own = conditioning["cap_feats"], conditioning["cap_feats_mask"]
        if texts.is_meta:  # nothing tells the lengths
            return {"x": list(latents[:, :, None]), "t": timestep, "cap_feats": list(texts)}
        cut = [text[mask.bool()] for text, mask in zip(texts, own, strict=True)]
        return {"x": list(latents[:, :, None]), "t": timestep, "cap_feats": cut}

    def prediction(self, transformer: Any, output: Any, latents: torch.Tensor) -> torch.Tensor:
        """The velocity towards the noise; the model's is towards the data."""
        return -torch.stack(list(output))[:, :, 0]

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Flow matching; the transformer takes 1 - σ."""
        return ReversedFlowMatching(flow_shift)

    def scheduler_timestep(self, transformer: Any, timestep: torch.Tensor) -> torch.Tensor:
        """A thousand times σ."""
        return 1000 * (1 - timestep)

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """``cap_feats`` (512, channels) of Qwen3, and ``cap_feats_mask`` (512,), by which the text is cut again."""
        chosen = {"max_sequence_length": _TEXT_TOKENS, **(settings or {})}
        texts, _ = self.encode_text(pipe, prompt, chosen)
        filled, own = padded_text(texts[0], chosen["max_sequence_length"])
        return {"cap_feats": filled, "cap_feats_mask": own}

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """``cap_feats`` (512, channels) and ``cap_feats_mask`` (512,)."""
        return {
            "cap_feats": torch.empty(_TEXT_TOKENS, transformer.cap_feat_dim, device="meta"),
            "cap_feats_mask": torch.empty(_TEXT_TOKENS, dtype=torch.int64, device="meta"),
        }
