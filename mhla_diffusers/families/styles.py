"""Bases of families by style: images, videos, joint attention, packed latents, models of transformers."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.metadata import version
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..config import MHLAConfig
from .adapters import AttentionAdapter, JointAdapter
from .family import Family, Sample
from .models import Clip
from .processes import KNOWN_FRAMES, DiffusionProcess, FlowMatching

Found = TypeVar("Found")

_DEVICE_OF: Any = vars(torch._C.TensorBase)["device"].__get__
_KEPT = "_mhla_kept"
"""Attribute of a tensor."""
_TRANSFORMERS = (5, 23)
"""Oldest version of transformers whose attentions, masks and caches are these; the version that is tested."""


class ImageFamily(Family):
    """Text-to-image transformers with a (height, width) token grid."""

    axes = 2
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks",)
    process_class: ClassVar[type[DiffusionProcess] | None] = FlowMatching
    # at 1024 px blocks of 16x16 tokens
    default_config = MHLAConfig(blocks=(4, 4), mixing_per_head=True, sparse="content")


class VideoFamily(Family):
    """Text- and image-to-video transformers with a (frames, height, width) token grid."""

    axes = 3
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks",)
    process_class: ClassVar[type[DiffusionProcess] | None] = FlowMatching

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Channels of a picture, which the transformer takes and does not predict, stay clean."""
        process, config = super().process(transformer, flow_shift), transformer.config
        if config.in_channels != (config.get("out_channels") or config.in_channels):
            process.channels = int(config.out_channels)
        return process

    def times_of_tokens(self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """Times of frames (B, F) as times of tokens (B, N); one time for all frames is unchanged."""
        if timestep.ndim == 1:
            return timestep
        frames, height, width = self.token_grid(transformer, latents)
        return timestep[:, :: timestep.shape[1] // frames].repeat_interleave(height * width, dim=1)

    def encode_pixels(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """(B, C, F, H, W); where the first latent frame is a picture, it is encoded by itself."""
        latents = super().encode_pixels(pipe, pixels)
        if not self.keeps_first_frame(pipe, pipe.transformer.config):
            return latents
        return torch.cat([super().encode_pixels(pipe, pixels[:, :, :1]), latents[:, :, 1:]], dim=2)

    def encode_picture(self, pipe: Any, pixels: torch.Tensor) -> Sample:
        """The number of given frames, where the first latent frame is a picture."""
        return {KNOWN_FRAMES: torch.tensor(1)} if self.keeps_first_frame(pipe, pipe.transformer.config) else {}

    def picture_settings(self, pipe: Any, pixels: torch.Tensor) -> Mapping[str, Any]:
        """The first frame as ``image``, where prompts are encoded with a picture."""
        takes_picture = "image" in inspect.signature(pipe.encode_prompt).parameters
        return {"image": first_picture(pipe, pixels)} if takes_picture else {}

    def beside(self, pipe: Any, latents: torch.Tensor, *pictures: torch.Tensor) -> torch.Tensor:
        """Latents with further channels of a picture, each (B, C, F, H, W), or fewer frames, filled up with zeros.

        Raises:
            ValueError: the transformer takes another number of channels.
        """
        frames, wanted = latents.shape[2], self.channels(pipe.transformer.config)
        filled = [torch.nn.functional.pad(one, (0, 0, 0, 0, 0, frames - one.shape[2])) for one in pictures]
        found = torch.cat([latents, *filled], dim=1)
        if wanted != found.shape[1]:
            raise ValueError(
                f"{type(pipe.transformer).__name__} takes {wanted} channels, not the {latents.shape[1]} of latents or "
                f"the {found.shape[1]} with a first frame; give the samples as InMemoryData."
            )
        return found


class JointFamily(Family):
    """Text is in one sequence with the image or video, after it unless the adapter says otherwise."""

    attentions: ClassVar[tuple[str, ...]] = ("attn",)
    adapter = JointAdapter()
    feed_forwards: ClassVar[tuple[str, ...]] = ("ff", "ff_context")
    dispatches_attention = True


class PackedFamily(Family):
    """The transformer's input is tokens of packed latents, (B, N, C patch)."""

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """With packed latents."""
        arguments = super().forward_arguments(transformer, latents, timestep, conditioning)
        return {**arguments, "hidden_states": pack(latents, self.patch(transformer))}

    def prediction(self, transformer: Any, output: Any, latents: torch.Tensor) -> torch.Tensor:
        """Unpacked."""
        return unpack(output, self.token_grid(transformer, latents), self.patch(transformer))

    def generate_latents(
        self, pipe: Any, prompt: str, clip: Clip, steps: int, guidance: float, generator: torch.Generator
    ) -> torch.Tensor:
        """What the pipeline passes to its autoencoder once it has unpacked it: (C, ...)."""
        latents = super().generate_latents(pipe, prompt, clip, steps, guidance, generator)
        if latents.ndim > 2:
            return latents
        grid = self.grid_of_clip(pipe, pipe.transformer, clip)
        return unpack(latents[None], grid, self.patch(pipe.transformer))[0]


class PackedImageFamily(PackedFamily, JointFamily, ImageFamily):
    """Joint attention over images whose latents are packed 2x2 to a token, as in Flux."""

    takes_sigma = True
    # 16 channels that rotate with the index of the picture, counted as height, and 56 for each axis
    rotary_channels = {128: (72, 56)}

    def patch(self, transformer: Any) -> tuple[int, ...]:
        """2x2, by packing."""
        return 2, 2

    def channels(self, transformer: Any) -> int:
        """Those of a token, without packing."""
        return int(transformer.in_channels) // 4


class PaddedTextFamily(Family):
    """Texts of a batch have different lengths; files hold them padded with zeros, with a mask.

    :attr:`conditions` are the text and its mask.
    """

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """The text, padded to the pipeline's default maximum length, and the mask of its tokens."""
        text, mask = self.conditions
        tokens = {"max_sequence_length": text.shape[0], **(settings or {})}
        embeddings, own = self.encode_text(pipe, prompt, tokens)
        # encode_prompt gives a mask, or None, or texts of a negative prompt in its place
        found = embeddings[0][own[0].bool()] if isinstance(own, torch.Tensor) else embeddings[0]
        missing = tokens["max_sequence_length"] - len(found)
        is_own = torch.arange(tokens["max_sequence_length"], device=found.device) < len(found)
        return {text.name: torch.nn.functional.pad(found, (0, 0, 0, missing)), mask.name: is_own.to(mask.dtype)}


class TransformersAdapter(AttentionAdapter):
    """Attentions with ``q_proj``, ``k_proj``, ``v_proj``, and ``o_proj`` or ``out_proj``."""

    def query_projection(self, attn: Any) -> Any:
        """Of all these models."""
        return attn.q_proj

    def output_projection(self, attn: Any) -> Any:
        """``o_proj``, or SigLIP's ``out_proj``."""
        return attn.o_proj if hasattr(attn, "o_proj") else attn.out_proj

    def projections(self, attn: Any) -> list[nn.Module]:
        """All linear layers that the attention runs."""
        return [attn.q_proj, attn.k_proj, attn.v_proj, self.output_projection(attn)]


class TransformersFamily(Family):
    """Models of transformers: no denoising steps; their attentions get a processor while patched."""

    library = "transformers"

    def self_attention_processor(self, attn: Any = None) -> Any:
        """A placeholder for the attention implementation that the model's configuration names."""
        from .patched_classes import OwnAttention

        return OwnAttention()

    def why_not_patched(self, transformer: Any, config: MHLAConfig) -> str | None:
        """An old transformers version, the reason from :meth:`why_not_fitting`, or settings for denoising steps."""
        kind = type(transformer).__name__
        if (why := _why_too_old(kind) or self.why_not_fitting(kind, config)) is not None:
            return why
        if config.softmax_steps:
            return (
                f"softmax_steps={config.softmax_steps!r} counts denoising steps, which {kind} does not have; leave it "
                "at 0."
            )
        return None

    def why_not_fitting(self, kind: str, config: MHLAConfig) -> str | None:
        """Why models of this family cannot have these settings, and the way out; None, if they can."""
        return None

    def prepare(self, transformer: Any) -> None:
        """Give its attentions a processor attribute."""
        from .patched_classes import give_classes

        give_classes(self.self_attentions(transformer).values())

    def restore(self, transformer: Any) -> None:
        """Restore their classes."""
        from .patched_classes import take_classes

        take_classes(self.self_attentions(transformer).values())


class WithoutValues(TorchFunctionMode):
    """For a forward on the meta device that reads values: every condition holds and every mask keeps everything.

    So a mask that was inverted keeps nothing, and shapes are those of the longest text.

    Args:
        seems_on_cpu: of a meta tensor, whether it reports the CPU as its device, for code that asks for its autocast,
            which the meta device lacks.
    """

    def __init__(self, seems_on_cpu: Callable[[torch.Tensor], bool] = lambda tensor: False) -> None:
        super().__init__()
        self.seems_on_cpu = seems_on_cpu

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not args or not getattr(args[0], "is_meta", False):
            return func(*args, **(kwargs or {}))
        if func == _DEVICE_OF and self.seems_on_cpu(args[0]):
            return torch.device("cpu")
        if func is torch.Tensor.__bool__:
            return True
        if func is torch.nonzero:
            return torch.empty(args[0].numel(), args[0].ndim, dtype=torch.int64, device="meta")
        if func is torch.Tensor.tolist:
            return [args[0].kept_tokens] * len(args[0])
        if func is torch.Tensor.sum and args[0].ndim == 2:
            lengths: Any = func(*args, **(kwargs or {}))
            lengths.kept_tokens = args[0].shape[1]
            return lengths
        if func is torch.Tensor.__invert__:
            inverted: Any = func(*args)
            inverted.keeps_nothing = True
            return inverted
        if func is torch.Tensor.__getitem__ and getattr(args[1], "is_meta", False) and args[1].dtype == torch.bool:
            return args[0][:0] if hasattr(args[1], "keeps_nothing") else args[0]
        return func(*args, **(kwargs or {}))


def first_picture(pipe: Any, pixels: torch.Tensor) -> Any:
    """The first frame of a clip (1, 3, F, H, W) as a PIL image."""
    return pipe.video_processor.postprocess(pixels[:, :, 0].float(), output_type="pil")[0]


def takes_picture(pipe: Any) -> bool:
    """Whether a pipeline, or its class, begins every video with a picture; one that takes any conditions need not."""
    known = inspect.signature(pipe.__call__).parameters
    return "image" in known and "conditions" not in known


def thirds(head_dim: int) -> tuple[int, ...]:
    """A third of the channels for each axis; frames also take the remainder."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def pack(latents: torch.Tensor, patch: Sequence[int]) -> torch.Tensor:
    """Patches of latents (B, C, ...) in raster order, each a token: (B, N, C patch), channels slowest."""
    for axis, size in enumerate(patch):
        latents = latents.unflatten(2 + 2 * axis, (-1, size))
    axes = range(len(patch))
    order = [0, *(2 + 2 * axis for axis in axes), 1, *(3 + 2 * axis for axis in axes)]
    return latents.permute(order).flatten(1, len(patch)).flatten(2)


def unpack(tokens: torch.Tensor, grid: Sequence[int], patch: Sequence[int]) -> torch.Tensor:
    """The inverse of :func:`pack`: (B, C, ...)."""
    patches = tokens.unflatten(2, (-1, *patch)).unflatten(1, tuple(grid))
    order = [0, 1 + len(grid)]
    for axis in range(len(grid)):
        order += [1 + axis, 2 + len(grid) + axis]
    latents = patches.permute(order)
    for axis in range(len(grid)):
        latents = latents.flatten(2 + axis, 3 + axis)
    return latents


def keep_with(tensor: torch.Tensor, found: Found) -> None:
    """Store on a tensor what :func:`kept_with` would read from its values."""
    setattr(tensor, _KEPT, (None if tensor.is_inference() else tensor._version, found))


def kept_with(tensor: torch.Tensor, read: Callable[[Any], Found]) -> Found:
    """The result of ``read`` on a tensor's values, cached until they change: reading waits for the device.

    A tensor made in inference mode has no version counter, so it is read every time.
    """
    version, kept = None if tensor.is_inference() else tensor._version, getattr(tensor, _KEPT, None)
    if kept is not None and kept[0] == version and (version is not None or tensor.is_meta):
        found: Found = kept[1]
        return found
    found = read(tensor)
    keep_with(tensor, found)
    return found


def read_once(read: Callable[..., Found]) -> Callable[..., Found]:
    """Decorator of a function that reads values of tensors: cached on the first, and a constant of a compiled graph."""

    @wraps(read)
    def reading(tensor: Any, *others: Any) -> Found:
        return kept_with(tensor, lambda found: read(found, *others))

    # the mark that torch.compiler.assume_constant_result sets, which imports all of torch.compile for it
    vars(reading)["_dynamo_marked_constant"] = True
    return reading


def _why_too_old(kind: str) -> str | None:
    """Why the installed transformers is too old to patch a model, or None."""
    major, minor, *_ = version("transformers").split(".")
    if (int(major), int(minor)) >= _TRANSFORMERS:
        return None
    needed = ".".join(map(str, _TRANSFORMERS))
    return (
        f"A patch of {kind} needs the attentions, masks and caches of transformers {needed} or newer, and "
        f"{major}.{minor} is installed: pip install --upgrade transformers."
    )
