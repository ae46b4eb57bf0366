"""What forwards of families take that the package makes no inputs for, and their tiny models."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mhla_diffusers.families import Condition, Inputs, Kwargs, Model, Sample
from mhla_diffusers.families.grids import keep_with
from mhla_diffusers.families.inputs import FluxInputs, LTXInputs, WanInputs, masked_text, pack
from mhla_diffusers.families.models import tiny_image, tiny_video


class _Allegro(Inputs):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add RoPE as the pipeline makes it."""
        from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

        (frames, *size), config = self.family.token_grid(transformer, latents), transformer.config
        scale = config.interpolation_scale_t, config.interpolation_scale_h, config.interpolation_scale_w
        made = get_3d_rotary_pos_embed_allegro(
            config.attention_head_dim, ((0, 0), size), size, frames, scale, device=latents.device
        )
        places = torch.cartesian_prod(*(axis.long() for axis in made[3:])).T[:, None]
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        return {**arguments, "image_rotary_emb": (made[:3], tuple(places))}


class _AnyFlow(Inputs):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Put frames before channels; the velocity is the output for steps of no length, which end where they begin."""
        times = timestep if timestep.ndim == 2 else timestep[:, None].expand(-1, latents.shape[2])
        arguments = super().arguments(transformer, latents.transpose(1, 2), timestep, conditioning)
        return {**arguments, "timestep": times, "r_timestep": times}


class _Chroma(FluxInputs):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Cut texts where the longest ends, and mask text and image where one is shorter."""
        text, mask = conditioning["encoder_hidden_states"], conditioning["attention_mask"].bool()
        longest = text.shape[1] if mask.is_meta else int(mask.sum(dim=1).max())
        text, mask = text[:, :longest], mask[:, :longest]
        arguments = super().arguments(transformer, latents, timestep, {"encoder_hidden_states": text})
        if mask.is_meta or bool(mask.all()):  # without values there are no lengths
            return arguments
        of_image = mask.new_ones(arguments["hidden_states"].shape[:2])
        return {**arguments, "attention_mask": torch.cat([mask, of_image], dim=1)}


class _CogView4(Inputs):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add the size of the picture, which is not cropped."""
        size = latents.new_tensor([[8 * side for side in latents.shape[2:]]]).expand(len(latents), -1)
        sizes = {"original_size": size, "target_size": size, "crop_coords": torch.zeros_like(size)}
        return {**super().arguments(transformer, latents, timestep, conditioning), **sizes}


class _Flux2(Inputs):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add picture, row, column and place in the text of tokens and of text, (B, N, 4)."""
        grid, text_tokens = self.family.token_grid(transformer, latents), conditioning["encoder_hidden_states"].shape[1]
        places = (torch.cartesian_prod(*map(torch.arange, one)) for one in ((1, *grid, 1), (1, 1, 1, text_tokens)))
        ids, text_ids = (one.to(latents.device).expand(len(latents), -1, -1) for one in places)
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        return {"img_ids": ids, "txt_ids": text_ids, **arguments}


class _Flux3(Inputs):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add ids, rows and columns halved as in training, and for a flow map a step to the end."""
        grid, tokens = self.family.token_grid(transformer, latents), conditioning["encoder_hidden_states"].shape[1]
        scale = torch.tensor([1, 0.5, 0.5, 1])
        ids, text_ids = (
            (torch.cartesian_prod(*map(torch.arange, sizes)) * scale).to(latents.device)
            for sizes in ((1, *grid, 1), (1, 1, 1, tokens))
        )
        keep_with(ids, grid)  # known here, and the ids may be on the meta device
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        end = {"target_timestep": torch.zeros_like(timestep)} if transformer.config.flow_map else {}
        return {"img_ids": ids, "txt_ids": text_ids, **arguments, **end}


_FRAMEPACK_HISTORY = {"latents_clean": 2, "latents_history_2x": 2, "latents_history_4x": 16}
"""Latent frames of each scale, as the pipeline gives them."""


class _Framepack(Inputs):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add a picture and a history without content, which begins where the window ends."""
        size, first = latents.shape[3:], latents.shape[2]
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        image = latents.new_zeros(len(latents), 729, transformer.config.image_proj_dim)
        arguments |= {"image_embeds": image, "indices_latents": torch.arange(first)}
        for name, frames in _FRAMEPACK_HISTORY.items():
            arguments[name] = latents.new_zeros(*latents.shape[:2], frames, *size)
            arguments[f"indices_{name}"] = torch.arange(first, first := first + frames)
        return arguments


_HELIOS_HISTORY = {"long": 16, "mid": 2, "short": 1}
"""Latent frames of each scale, as the pipeline gives them; with the last goes the first frame of the video."""


class _Helios(Inputs):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add a history without content, which ends where the window begins."""
        arguments, place = super().arguments(transformer, latents, timestep, conditioning), 1
        for name, frames in _HELIOS_HISTORY.items():
            places = torch.arange(place, place := place + frames)
            places = torch.cat([torch.zeros(1, dtype=torch.int64), places]) if name == "short" else places
            arguments[f"indices_latents_history_{name}"] = places[None]
            shape = *latents.shape[:2], len(places), *latents.shape[3:]
            arguments[f"latents_history_{name}"] = latents.new_zeros(shape)
        return {**arguments, "indices_hidden_states": torch.arange(place, place + latents.shape[2])[None]}


class _HunyuanDiT(Inputs):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add RoPE's tables, the picture's size and the only style; the timestep is a float."""
        from diffusers.models.embeddings import get_2d_rotary_pos_embed
        from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid

        config, grid, count = transformer.config, self.family.token_grid(transformer, latents), len(latents)
        height, width = (8 * side for side in latents.shape[2:])
        region = get_resize_crop_region_for_grid(grid, 512 // 8 // config.patch_size)
        return {
            **super().arguments(transformer, latents, timestep.to(latents.dtype), conditioning),
            "image_meta_size": latents.new_tensor([[1024, 1024, height, width, 0, 0]]).repeat(count, 1),
            "style": torch.zeros(count, dtype=torch.int64, device=latents.device),
            "image_rotary_emb": get_2d_rotary_pos_embed(config.attention_head_dim, region, grid, device=latents.device),
        }


class _HunyuanImage(Inputs):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Give time in the latents' type; the velocity is a mean-flow model's output for steps of no length."""
        timestep = timestep.to(latents.dtype)  # whose type is the type that the transformer computes in
        end = {"timestep_r": timestep} if transformer.config.use_meanflow else {}
        return {**super().arguments(transformer, latents, timestep, conditioning), **end}


class _HunyuanVideo15(Inputs):
    def channels(self, config: Any) -> int:
        """Leave out those of given frames."""
        return int(config.out_channels)

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add empty given frames and no image."""
        config, batch = transformer.config, len(latents)
        nothing = latents.new_zeros(batch, config.in_channels - latents.shape[1], *latents.shape[2:])
        return {
            "hidden_states": torch.cat([latents, nothing], dim=1),
            "timestep": timestep.to(latents.dtype),  # whose type is the type that the transformer computes in
            "image_embeds": latents.new_zeros(batch, 729, config.image_embed_dim),
            **conditioning,
        }


class _Ideogram4(Inputs):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Make one sequence of text and image, without padding, and say what every token is and where."""
        grid, text = self.family.token_grid(transformer, latents), conditioning["encoder_hidden_states"]
        # a token's channels are slowest by its patch
        image = pack(latents, self.family.patch_of(transformer)).unflatten(2, (latents.shape[1], -1)).mT.flatten(2)
        (batch, first, _), tokens = text.shape, image.shape[1]
        on_grid = torch.cartesian_prod(*(torch.arange(size) for size in (1, *grid))) + 65536
        places = torch.cat([torch.arange(first)[:, None].expand(-1, 3), on_grid]).to(latents.device)
        places = places.expand(batch, -1, -1).clone()
        keep_with(places, grid)  # known here, and the places may be on the meta device
        indicator = torch.full_like(places[..., 0], 3)
        indicator[:, first:] = 2
        return {
            "hidden_states": functional.pad(image, (0, 0, first, 0)),
            "timestep": timestep,
            "encoder_hidden_states": functional.pad(text, (0, 0, 0, tokens)),
            **{"position_ids": places, "indicator": indicator, "segment_ids": torch.ones_like(indicator)},
        }


class _Kandinsky5(Inputs):
    def channels(self, config: Any) -> int:
        """Leave out those of a picture and a mask."""
        return int(config.in_visual_dim)

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Move channels last, add an empty picture and mask where the model takes them, and places for RoPE."""
        grid, tokens = self.family.token_grid(transformer, latents), conditioning["encoder_hidden_states"].shape[1]
        others = latents.shape[1] + 1 if transformer.config.visual_cond else 0
        taken = torch.cat([latents, torch.zeros_like(latents[:, :1]).expand(-1, others, -1, -1, -1)], dim=1)
        *places, text = (torch.arange(size, device=latents.device) for size in (*grid, tokens))
        arguments = super().arguments(transformer, taken.movedim(1, -1), timestep, conditioning)
        return {**arguments, "visual_rope_pos": places, "text_rope_pos": text}


class _Kandinsky6(_Kandinsky5):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add silence, as long as the video."""
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        tokens = math.ceil(latents.shape[2] * 4 / 24 * 44_100 / 1024)
        silence = latents.new_zeros(len(latents), tokens, transformer.config.in_audio_dim)
        return {name: x for name, x in arguments.items() if name != "text_rope_pos"} | {"audio_hidden_states": silence}


class _Krea2(Inputs):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add picture, row and column of text, all 0, and of the grid's tokens."""
        grid, tokens = self.family.token_grid(transformer, latents), conditioning["encoder_hidden_states"].shape[1]
        places = torch.cartesian_prod(*(torch.arange(size).float() for size in (1, *grid)))
        ids = torch.cat([torch.zeros(tokens, 3), places]).to(latents.device)
        keep_with(ids, grid)  # known here, and the ids may be on the meta device
        return {"position_ids": ids, **super().arguments(transformer, latents, timestep, conditioning)}


class _LongCat(Inputs):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add kind, row and column of the grid's tokens, (N, 3), behind the longest text, and of the text's."""
        grid = self.family.token_grid(transformer, latents)
        text = torch.arange(conditioning["encoder_hidden_states"].shape[1]).float()
        places = torch.cartesian_prod(torch.zeros(1), *(torch.arange(size).float() for size in grid))
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        ids, text_ids = places + torch.tensor([1.0, 512, 512]), torch.stack([torch.zeros_like(text), text, text], 1)
        return {"img_ids": ids.to(latents.device), "txt_ids": text_ids.to(latents.device), **arguments}


class _LTX2(LTXInputs):
    def conditions_of(self, config: Any) -> tuple[Condition, ...]:
        """Return text and mask that the connectors make for the video."""
        width = "caption_channels" if config.use_prompt_embeddings else "cross_attention_dim"
        mask = Condition("encoder_attention_mask", (1024,), output=1, dtype=torch.int64)
        return Condition("encoder_hidden_states", (1024, width)), mask

    def conditioning_shapes(self, config: Any) -> Sample:
        """Add sound and its text, which files lack."""
        width = config.caption_channels if config.use_prompt_embeddings else config.audio_cross_attention_dim
        sound = torch.empty(126, config.audio_in_channels, device="meta")
        text = torch.empty(1024, width, device="meta")
        shapes = super().conditioning_shapes(config)
        return {**shapes, "audio_hidden_states": sound, "audio_encoder_hidden_states": text}

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add sound, at the usual frame rate; without any the video attends to none."""
        shapes = self.conditioning_shapes(transformer.config)
        missing = [name for name in shapes if name.startswith("audio") and name not in conditioning]
        sound = {name: latents.new_zeros(len(latents), 1, shapes[name].shape[1]) for name in missing}
        own = super().arguments(transformer, latents, timestep, {**sound, **conditioning})
        del own["rope_interpolation_scale"]
        tokens, sigma = own["audio_hidden_states"].shape[1], timestep.reshape(len(latents), -1).amax(dim=1)
        times = {"sigma": sigma, "audio_timestep": sigma}
        return {**own, **times, "audio_num_frames": tokens, "isolate_modalities": bool(missing)}


class _MiniMaxH3(Inputs):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add the layout without pictures; sound has the video's time. ValueError for samples at other times."""
        if not timestep.is_meta and bool((timestep != timestep[0]).any()):
            raise ValueError("MiniMax-H3 takes one time for a batch; run samples at other times one after another.")
        from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

        arguments = super().arguments(transformer, latents, timestep[:1], conditioning)
        text, sound = (arguments[condition.name].shape[1] for condition in self.conditions)
        sizes = *latents.shape[2:], sound // 2, self.family.patch_of(transformer)
        # the last three: channels of sound, and tags of the rows of sound and video
        made = MiniMaxH3PrepareLayoutStep.build_packed_sequence(torch.ones(text), *sizes, 2, 2, 0)
        names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
        layout = {name: rows.to(latents.device) for name, rows in zip(names, made, strict=False)}
        keep_with(
            layout["position_ids"], self.family.token_grid(transformer, latents)
        )  # known, also on the meta device
        arguments |= {"hidden_states": pack(latents, self.family.patch_of(transformer)), **layout}
        return {**arguments, "timestep_indices": torch.zeros_like(layout["token_tags"])}


class _WanAnimate(WanInputs):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add a pose of zeros and no face where they are missing, as in the pipeline's guidance."""
        (batch, _, frames, height, width), config = latents.shape, transformer.config
        still = latents.new_zeros(batch, config.latent_channels, frames - 1, height, width)
        side = config.motion_encoder_size
        faceless = latents.new_full((batch, 3, 4 * (frames - 2) + 1, side, side), -1.0)
        moved = {"pose_hidden_states": still, "face_pixel_values": faceless, **conditioning}
        return super().arguments(transformer, latents, timestep, moved)


class _ZImage(Inputs):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Pass lists of images with one frame and of texts without their padding."""
        texts = list(conditioning["cap_feats"])
        if not conditioning["cap_feats"].is_meta:  # which has no lengths to read
            masks = conditioning["cap_feats_mask"].bool()
            texts = [text[mask] for text, mask in zip(texts, masks, strict=True)]
        return {"x": list(latents[:, :, None]), "t": timestep, "cap_feats": texts}


def _text(tokens: int | str, *channels: str) -> Condition:
    return Condition("encoder_hidden_states", (tokens, *channels))


def _mask(
    tokens: int | str, output: int, name: str = "encoder_attention_mask", dtype: torch.dtype = torch.int64
) -> Condition:
    return Condition(name, (tokens,), output, dtype)


def _pooled(width: str = "pooled_projection_dim") -> Condition:
    return Condition("pooled_projections", (width,), output=1)


_GLYPHS = (
    _text(1000, "text_embed_dim"),
    _mask(1000, 1),
    Condition("encoder_hidden_states_2", (256, "text_embed_2_dim"), output=2),
    _mask(256, 3, "encoder_attention_mask_2"),
)
_PACKED: dict[str, Any] = {"packs_latents": True, "takes_sigma": True}
_JOINT = (_text(512, "joint_attention_dim"),)

INPUTS: dict[str, Inputs] = {
    "allegro": _Allegro(conditions=masked_text(512, "caption_channels", torch.int64)),
    "anyflow": _AnyFlow(conditions=(_text(512, "text_dim"),)),
    "auraflow": Inputs(takes_sigma=True, conditions=(_text(256, "joint_attention_dim"),)),
    "chroma": _Chroma(**_PACKED, conditions=(*_JOINT, _mask(512, 2, "attention_mask", torch.bool))),
    "chronoedit": WanInputs(conditions=(_text(512, "text_dim"),)),
    "cogview4": _CogView4(conditions=(_text(224, "text_embed_dim"),)),
    "easyanimate": Inputs(conditions=(_text(256, "text_embed_dim"),)),
    "flux2": _Flux2(**_PACKED, guidance=4.0, conditions=_JOINT),
    "flux3": _Flux3(**_PACKED, conditions=_JOINT),
    "framepack": _Framepack(guidance=6000.0, conditions=(_text(256, "text_embed_dim"), _mask(256, 2), _pooled())),
    "helios": _Helios(conditions=(_text(512, "text_dim"),)),
    "hunyuan_dit": _HunyuanDiT(
        conditions=(
            _text("text_len", "cross_attention_dim"),
            _mask("text_len", 2, "text_embedding_mask"),
            Condition("encoder_hidden_states_t5", ("text_len_t5", "cross_attention_dim_t5")),
            _mask("text_len_t5", 2, "text_embedding_mask_t5"),
        )
    ),
    "hunyuan_image": _HunyuanImage(guidance=3250.0, conditions=_GLYPHS),
    "hunyuan_video15": _HunyuanVideo15(conditions=_GLYPHS),
    "ideogram4": _Ideogram4(**_PACKED, conditions=(_text(2048, "llm_features_dim"),)),
    "kandinsky5": _Kandinsky5(conditions=(_text(512, "in_text_dim"), _pooled("in_text_dim2"))),
    "kandinsky6": _Kandinsky6(conditions=(_text(1024, "in_text_dim"), _pooled("in_text_dim2"))),
    "krea2": _Krea2(
        **_PACKED,
        conditions=(_text(512, "num_text_layers", "text_hidden_dim"), _mask(512, 1, dtype=torch.bool)),
    ),
    "latte": Inputs(conditions=(_text(120, "caption_channels"),)),
    "longcat_image": _LongCat(**_PACKED, conditions=_JOINT),
    "ltx2": _LTX2(packs_latents=True),
    "lumina2": Inputs(takes_sigma=True, conditions=masked_text(256, "cap_feat_dim", torch.int64)),
    "minimax_h3": _MiniMaxH3(
        conditions=(_text(256, "text_dim"), Condition("audio_hidden_states", (414, "audio_in_channels")))
    ),
    "mochi": Inputs(takes_sigma=True, conditions=masked_text(256, "text_embed_dim", torch.bool)),
    "wan_animate": _WanAnimate(conditions=(_text(512, "text_dim"),)),
    "z_image": _ZImage(
        takes_sigma=True,
        conditions=(Condition("cap_feats", (512, "cap_feat_dim")), _mask(512, 0, "cap_feats_mask")),
    ),
}
"""By the family's name."""

_FLUX_RELATIVE: dict[str, Any] = {"head_dim": 16, "layers": 2, "more_layers": {"num_single_layers": 1}}
_OF_WAN = {"ffn_dim": 32, "text_dim": 32, "freq_dim": 16}
_FACE: dict[str, Any] = {"image_dim": 8, "added_kv_proj_dim": 24, "motion_style_dim": 8, "motion_dim": 4}
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
    tiny_video(
        "framepack",
        "HunyuanVideoFramepackTransformer3DModel",
        _FRAMEPACK,
        layers=2,
        more_layers={"num_single_layers": 1},
    ),
    tiny_video("helios", "HeliosTransformer3DModel", {**_OF_WAN, "rope_dim": (4, 4, 4)}),
    tiny_image("hunyuan_dit", "HunyuanDiT2DModel", _HUNYUAN_DIT, layers=4),
    tiny_image(
        "hunyuan_image",
        "HunyuanImageTransformer2DModel",
        _HUNYUAN_IMAGE,
        layers=2,
        more_layers={"num_single_layers": 1},
        stride=8,
        patch=1,
    ),
    tiny_video("hunyuan_video15", "HunyuanVideo15Transformer3DModel", _HUNYUAN15, stride=16, patch=1),
    tiny_image("ideogram4", "Ideogram4Transformer2DModel", _IDEOGRAM),
    tiny_video("kandinsky5", "Kandinsky5Transformer3DModel", _KANDINSKY, **_VISUAL),
    tiny_video("kandinsky6", "Kandinsky6Transformer3DModel", _KANDINSKY6, **_VISUAL),
    tiny_image("krea2", "Krea2Transformer2DModel", _KREA, head_dim=16),
    tiny_image("latte", "LatteTransformer3DModel", _LATTE, frames=3),
    tiny_image("longcat_image", "LongCatImageTransformer2DModel", _LONGCAT, **_FLUX_RELATIVE),
    tiny_video("ltx2", "LTX2VideoTransformer3DModel", _LTX2, head_dim=16, **_LTX2_STRIDES),
    tiny_image("lumina2", "Lumina2Transformer2DModel", _LUMINA, heads=4, more_layers={"num_refiner_layers": 1}),
    tiny_video(
        "minimax_h3",
        "MiniMaxH3Transformer3DModel",
        _MINIMAX,
        head_dim=16,
        sizes=((128, 192),),
        stride=16,
        frames=21,
    ),
    tiny_video("mochi", "MochiTransformer3DModel", _MOCHI, frames=13, temporal_stride=6),
    tiny_video(
        "wan_animate",
        "WanAnimateTransformer3DModel",
        {**_OF_WAN, **_FACE},
        more_layers={"inject_face_latents_blocks": 1},
    ),
    tiny_image("z_image", "ZImageTransformer2DModel", _ZIMAGE, head_dim=16, **_ZIMAGE_LAYERS),
)
MODELS = {model.name.removeprefix("tiny-"): model for model in _MODELS}
"""Tiny models by the family's name."""
