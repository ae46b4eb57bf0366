"""Tiny models of the families for which the package has none."""

from typing import Any

from mhla_diffusers.families import Model
from mhla_diffusers.families.models import tiny_image, tiny_video

_STREAMS: dict[str, Any] = {"layers": 2, "more_layers": {"num_single_layers": 1}}
_FLUX_RELATIVE = {**_STREAMS, "head_dim": 16}
_OF_WAN = {"ffn_dim": 32, "text_dim": 32, "freq_dim": 16}
_FACE: dict[str, Any] = {**_OF_WAN, "image_dim": 8, "added_kv_proj_dim": 24, "motion_style_dim": 8, "motion_dim": 4}
_FACE |= {"motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8}, "motion_encoder_size": 16, "motion_encoder_dim": 8}
_FACE |= {"face_encoder_hidden_dim": 8, "face_encoder_num_heads": 2}
_CHROMA = {"axes_dims_rope": (4, 6, 6), "joint_attention_dim": 32, "in_channels": 16, "approximator_num_channels": 16}
_CHROMA |= {"approximator_hidden_dim": 16, "approximator_layers": 1}
_FLUX2 = {"axes_dims_rope": (4, 4, 4, 4), "joint_attention_dim": 48, "in_channels": 16, "timestep_guidance_channels": 8}
_FLUX3 = {"axes_dims_rope": (4, 4, 4, 4), "joint_attention_dim": 16, "in_channels": 16, "cond_in_channels": 16}
_HUNYUAN: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "num_refiner_layers": 1, "text_embed_dim": 16}
_FRAMEPACK = {**_HUNYUAN, "has_image_proj": True, "has_clean_x_embedder": True, "image_proj_dim": 8}
_FRAMEPACK |= {"pooled_projection_dim": 12, "rope_axes_dim": (4, 4, 4)}
_HUNYUAN_DIT = {"in_channels": 4, "patch_size": 2, "hidden_size": 24, "cross_attention_dim": 16}
_HUNYUAN_DIT |= {"cross_attention_dim_t5": 32, "pooled_projection_dim": 16}
_HUNYUAN_IMAGE = {**_HUNYUAN, "text_embed_2_dim": 32, "rope_axes_dim": (8, 4), "patch_size": (1, 1)}
_HUNYUAN15 = {**_HUNYUAN, "in_channels": 9, "text_embed_2_dim": 32, "image_embed_dim": 8, "task_type": "t2v"}
_HUNYUAN15 |= {"rope_axes_dim": (4, 4, 4)}
_IDEOGRAM: dict[str, Any] = {"in_channels": 16, "intermediate_size": 32, "adaln_dim": 8, "llm_features_dim": 13 * 16}
_IDEOGRAM |= {"mrope_section": (2, 2, 2)}
_KANDINSKY: dict[str, Any] = {"in_text_dim": 16, "in_text_dim2": 12, "time_dim": 16, "model_dim": 24, "ff_dim": 32}
_KANDINSKY |= {"axes_dims": (4, 4, 4)}
_KANDINSKY6 = {**_KANDINSKY, "in_visual_dim": 4, "out_visual_dim": 4}
_KANDINSKY6 |= dict.fromkeys(("ca_rope", "cross_gates", "fix_modulation"), True)
_VISUAL: dict[str, Any] = {"layers_argument": "num_visual_blocks", "more_layers": {"num_text_blocks": 1}}
_KREA: dict[str, Any] = {"in_channels": 16, "num_key_value_heads": 1, "intermediate_size": 32, "text_hidden_dim": 16}
_KREA |= {"timestep_embed_dim": 8, "num_text_layers": 2, "text_num_attention_heads": 2, "axes_dims_rope": (4, 6, 6)}
_KREA |= {"text_num_key_value_heads": 2, "text_intermediate_size": 16}
_LATTE = {"in_channels": 4, "out_channels": 8, "patch_size": 2, "attention_bias": True, "norm_type": "ada_norm_single"}
_LATTE |= {"norm_elementwise_affine": False, "norm_eps": 1e-6, "num_embeds_ada_norm": 1000}
_LATTE |= {"activation_fn": "gelu-approximate", "cross_attention_dim": 24, "caption_channels": 32}
_LONGCAT = {"axes_dims_rope": (4, 6, 6), "joint_attention_dim": 16, "pooled_projection_dim": 16}
_LTX2: dict[str, Any] = {
    **dict.fromkeys(("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod"), True),
    **{"perturbed_attn": True, "use_prompt_embeddings": False, "rope_type": "split"},
    **dict.fromkeys(("in_channels", "out_channels", "audio_in_channels", "audio_out_channels"), 8),
    **dict.fromkeys(("cross_attention_dim", "audio_cross_attention_dim", "caption_channels"), 32),
    **{"audio_num_attention_heads": 2, "audio_attention_head_dim": 16},
}
_LTX2_STRIDES: dict[str, Any] = {"sizes": ((128, 192),), "stride": 32, "patch": 1, "temporal_stride": 8}
_LUMINA: dict[str, Any] = {"in_channels": 4, "hidden_size": 48, "num_kv_heads": 2, "multiple_of": 8, "cap_feat_dim": 8}
_LUMINA["axes_dim_rope"] = (4, 4, 4)
_MINIMAX_STRIDES: dict[str, Any] = {"sizes": ((128, 192),), "stride": 16, "frames": 21}
_MINIMAX = {"hidden_size": 24, "ffn_dim": 32, "num_refiner_layers": 1, "rope_freq_dim": 2}
_MINIMAX |= {"text_dim": 16, "freq_dim": 8, "time_embed_hidden_dim": 16, "time_embed_dim": 8}
_EASY = {"in_channels": 4, "out_channels": 4, "patch_size": 2, "text_embed_dim": 16, "time_embed_dim": 16}
_COGVIEW4 = {"in_channels": 4, "out_channels": 4, "text_embed_dim": 16, "time_embed_dim": 8, "condition_dim": 8}
_AURA = {"caption_projection_dim": 24, "joint_attention_dim": 32, "pos_embed_max_size": 8 * 8}
_AURA_LAYERS: dict[str, Any] = {"layers_argument": "num_mmdit_layers", "more_layers": {"num_single_dit_layers": 1}}
_ZIMAGE = {"dim": 32, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 32, "axes_dims": [4, 6, 6]}
_ZIMAGE_LAYERS: dict[str, Any] = {"layers_argument": "n_layers", "more_layers": {"n_refiner_layers": 1}}
_MOCHI = {"pooled_projection_dim": 16, "text_embed_dim": 32, "time_embed_dim": 8}
_CHRONO = {**_OF_WAN, "in_channels": 36, "image_dim": 8, "added_kv_proj_dim": 24}
_MODELS: tuple[Model, ...] = (
    tiny_video("allegro", "AllegroTransformer3DModel", {"cross_attention_dim": 24, "caption_channels": 32}),
    tiny_video("anyflow", "AnyFlowTransformer3DModel", _OF_WAN),
    tiny_image("auraflow", "AuraFlowTransformer2DModel", _AURA, layers=2, **_AURA_LAYERS),
    tiny_image("chroma", "ChromaTransformer2DModel", _CHROMA, **_FLUX_RELATIVE),
    tiny_video("chronoedit", "ChronoEditTransformer3DModel", _CHRONO, frames=5),
    tiny_image("cogview4", "CogView4Transformer2DModel", _COGVIEW4),
    tiny_video("easyanimate", "EasyAnimateTransformer3DModel", _EASY, head_dim=16, more_layers={"mmdit_layers": 2}),
    tiny_image("flux2", "Flux2Transformer2DModel", _FLUX2, **_FLUX_RELATIVE),
    tiny_image("flux3", "Flux3Transformer2DModel", _FLUX3, **_FLUX_RELATIVE),
    tiny_video("framepack", "HunyuanVideoFramepackTransformer3DModel", _FRAMEPACK, **_STREAMS),
    tiny_video("helios", "HeliosTransformer3DModel", {**_OF_WAN, "rope_dim": (4, 4, 4)}),
    tiny_image("hunyuan_dit", "HunyuanDiT2DModel", _HUNYUAN_DIT, layers=4),
    tiny_image("hunyuan_image", "HunyuanImageTransformer2DModel", _HUNYUAN_IMAGE, **_STREAMS, stride=8, patch=1),
    tiny_video("hunyuan_video15", "HunyuanVideo15Transformer3DModel", _HUNYUAN15, stride=16, patch=1),
    tiny_image("ideogram4", "Ideogram4Transformer2DModel", _IDEOGRAM),
    tiny_video("kandinsky5", "Kandinsky5Transformer3DModel", _KANDINSKY, **_VISUAL),
    tiny_video("kandinsky6", "Kandinsky6Transformer3DModel", _KANDINSKY6, **_VISUAL),
    tiny_image("krea2", "Krea2Transformer2DModel", _KREA, head_dim=16),
    tiny_image("latte", "LatteTransformer3DModel", _LATTE, frames=3),
    tiny_image("longcat_image", "LongCatImageTransformer2DModel", _LONGCAT, **_FLUX_RELATIVE),
    tiny_video("ltx2", "LTX2VideoTransformer3DModel", _LTX2, head_dim=16, **_LTX2_STRIDES),
    tiny_image("lumina2", "Lumina2Transformer2DModel", _LUMINA, heads=4, more_layers={"num_refiner_layers": 1}),
    tiny_video("minimax_h3", "MiniMaxH3Transformer3DModel", _MINIMAX, head_dim=16, **_MINIMAX_STRIDES),
    tiny_video("mochi", "MochiTransformer3DModel", _MOCHI, frames=13, temporal_stride=6),
    tiny_video("wan_animate", "WanAnimateTransformer3DModel", _FACE, more_layers={"inject_face_latents_blocks": 1}),
    tiny_image("z_image", "ZImageTransformer2DModel", _ZIMAGE, head_dim=16, **_ZIMAGE_LAYERS),
)
MODELS = {model.name.removeprefix("tiny-"): model for model in _MODELS}
"""Tiny models by the family's name."""
