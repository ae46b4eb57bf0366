"""Make a cache of latents from files, or from prompts."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...errors import check
from ...families import Clip, Sample
from ...files import fingerprint
from ...generation.noise import generator_for
from ...reporting import progress
from .batches import CAPTION
from .cache import CachedClip, CacheWriter, SourceFile
from .clips import Clips
from .media import read_files
from .model import DataModel

logger = logging.getLogger(__name__)


@torch.no_grad()
def encode_files(
    pipe: Any, data: DataModel, source: Path, files: Sequence[SourceFile], output: Path, clips: Clips
) -> list[SourceFile]:
    """Encode videos or images with captions into a cache, and return its files; goes on with an earlier call.

    ``pipe`` is the pipeline of ``data``, and ``files`` those of the folder ``source``, as :func:`~.media.find_media`.
    Unreadable files are left out, with the reason in the index. ValueError for a cache made with other settings,
    latents that are not finite, or no readable file; OSError if the folder cannot be written.
    """
    training, config, tokenizer = data.family.training, pipe.transformer.config, getattr(pipe, "tokenizer", None)
    if tokenizer is not None and (conditions := data.family.inputs.conditions_of(config)):
        limit = int(training.text_settings.get("max_sequence_length", conditions[0].sizes(config)[0]))
        long = [file.name for file in files for text in file.captions if len(tokenizer(text).input_ids) > limit]
        if long:
            words = "%d captions exceed the model's %d tokens and are truncated, such as that of %s."
            logger.warning(words, len(long), limit, long[0])
    empty = _on_cpu(training.encode_prompt(pipe, ""), data.name)
    writer = CacheWriter(output, data.header(clips.to_dict()), files, empty)

    def keep(file: SourceFile, pixels: torch.Tensor) -> CachedClip:
        given = (pixels.to(pipe.vae.device).float() / 127.5 - 1).to(pipe.vae.dtype)[None]
        of_picture = training.picture_settings(pipe, given)
        sample = {"latents": training.encode_pixels(pipe, given)[0], **training.encode_picture(pipe, given)}
        for number, caption in enumerate(file.captions):
            prompt = training.encode_prompt(pipe, caption, of_picture)
            sample |= {f"{CAPTION}{number}/{name}" if number else name: tensor for name, tensor in prompt.items()}
        return writer.write(_on_cpu(sample, file.name), tuple(pixels.shape[1:]))

    read = read_files(source, writer.left, clips, keep)
    for file in progress(read, total=len(files), initial=len(writer.files), desc="encode"):
        writer.add(file)
    if not any(file.clips for file in writer.files):
        reasons = "\n".join(f"{file.name}: {file.problem}" for file in writer.files[:5])
        raise ValueError(f"None of the {len(files)} files in {source} could be encoded, such as\n{reasons}")
    return writer.files


@torch.no_grad()
def synthesize(
    pipe: Any,
    data: DataModel,
    prompts: Sequence[SourceFile],
    output: Path,
    clips: Clips,
    *,
    steps: int,
    guidance: float,
    seed: int,
) -> None:
    """Make a cache of latents that the unpatched pipeline generates, of the first length and size of ``clips``.

    Each prompt, or class for DiT, gives a sample, named "number: prompt"; goes on with an earlier call. ValueError and
    OSError as :func:`encode_files`.
    """
    training, clip = data.family.training, Clip(frames=clips.frames[0], fps=clips.fps, sizes=clips.sizes[:1])
    made_with = {"clip": clip.to_dict(), "steps": steps, "guidance": guidance, "seed": seed}
    made_with = data.header({**made_with, "weights": fingerprint(Path(data.name))})
    writer = CacheWriter(output, made_with, prompts, _on_cpu(training.encode_prompt(pipe, ""), data.name))
    for file in progress(writer.left, total=len(prompts), initial=len(writer.files), desc="synthesize"):
        generator = generator_for(seed, "synthesize", int(file.name.partition(":")[0]))
        latents = training.generate_latents(pipe, file.caption, clip, steps, guidance, generator)
        sample = _on_cpu({"latents": latents, **training.encode_prompt(pipe, file.caption)}, file.name)
        writer.add(replace(file, clips=(writer.write(sample, (clip.frames, *clip.sizes[0])),)))


def _on_cpu(sample: Sample, name: str) -> Sample:
    """Move a sample, latents in float32, conditioning in bfloat16, the text encoders' type, to halve the cache."""
    check(
        all(bool(x.isfinite().all()) for x in sample.values()),
        f"{name!r} gives latents or an encoded prompt that are not finite; use another dtype, or leave it out.",
    )
    types = {key: torch.float32 if key == "latents" else torch.bfloat16 for key in sample}
    return {key: (x.to(types[key]) if x.is_floating_point() else x).cpu() for key, x in sample.items()}
