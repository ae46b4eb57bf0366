"""Make a cache of latents: from files, or from prompts alone."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from ...errors import check
from ...families import Family, Sample
from ...files import fingerprint, folder_for_results
from ...generation.noise import generator_for
from ...patching import is_patched
from ...reporting import progress
from ...settings import Number, PositiveInteger, check_value
from .batches import CAPTION
from .cache import CachedClip, CachedFile, CacheWriter, LatentCache
from .clips import Clips
from .media import ClipRead, Media, contents_of, read_files
from .model import DataModel
from .sources import read_sources

logger = logging.getLogger(__name__)


@torch.no_grad()
def encode_folder(
    pipe: Any, model: str, source: str | Path, output: str | Path, clips: Clips | None = None
) -> list[CachedFile]:
    """Encode videos or images with captions into a cache, and return its files; goes on with an earlier call.

    Unreadable files are left out, with the reason in the index. Changed files and captions are encoded again, and
    clips of files that are gone are removed. ``pipe`` is the pipeline of ``model``, ``source`` what
    :func:`~.sources.read_sources` takes; ``clips`` None means what the source says, or the model's own clip.

    Raises:
        FileNotFoundError, OSError: nothing to encode; the folder cannot be written, or another run has it.
        ValueError: captions or sizes that the model cannot take, a cache made with other settings, latents that are
            not finite, or no readable file.
    """
    data, sources = DataModel(model), read_sources(source)
    clips, media = data.fitted(clips or sources.clip), sources.media()
    usable = [item for item in media if item.problem is None]
    data.check_captions(caption for item in usable for caption in item.captions)
    _warn_of_cut_captions(data.family, pipe, usable)
    made_with = data.header({**clips.to_dict(), "frames": list(clips.lengths)})
    contents = contents_of(media)
    with folder_for_results(Path(output)):
        empty = _on_cpu(data.family.training.encode_prompt(pipe, ""))
        writer = CacheWriter(output, made_with, contents, empty, sources.shares)
        kept = {file.name for file in writer.files}
        left = [item for item in media if item.name not in kept]
        slow = set[str]()

        def keep(item: Media, clip: ClipRead) -> CachedClip:
            sample = _encoded(pipe, data.family, clip.pixels, item.captions)
            _check_finite(sample["latents"], model, item.name, "use another precision, or leave the file out")
            if clip.bucket[0] > 1 and 0 < clip.fps < 0.9 * clips.fps:
                slow.add(item.name)
            return writer.write(sample, clip.bucket, clip.start)

        for file in progress(read_files(left, clips, keep), total=len(media), initial=len(kept), desc="encode"):
            writer.add(replace(file, content=contents[file.name]))
    if slow:
        logger.warning(
            "%d of %d files have fewer frames per second than fps, so that some are repeated; ask for fewer, or leave "
            "these files out.",
            *(len(slow), len(left)),
        )
    if not any(file.clips for file in writer.files):
        reasons = "\n".join(f"{file.name}: {file.problem}" for file in writer.files[:5])
        raise ValueError(f"None of the {len(media)} files in {source} could be encoded, such as\n{reasons}")
    return writer.files


def _encoded(pipe: Any, family: Family, pixels: torch.Tensor, captions: Sequence[str]) -> Sample:
    """Encode a clip, uint8 (3, F, H, W), and its captions."""
    given = (pixels.to(pipe.vae.device).float() / 127.5 - 1).to(pipe.vae.dtype)[None]
    latents = family.training.encode_pixels(pipe, given)[0]
    of_picture = family.training.picture_settings(pipe, given)
    sample = {"latents": latents, **family.training.encode_picture(pipe, given)}
    for number, caption in enumerate(captions):
        prompt = family.training.encode_prompt(pipe, caption, of_picture)
        sample |= {f"{CAPTION}{number}/{name}" if number else name: tensor for name, tensor in prompt.items()}
    return _on_cpu(sample)


@torch.no_grad()
def synthesize(
    pipe: Any,
    model: str,
    prompts: Sequence[str],
    output: str | Path,
    clips: Clips | None = None,
    *,
    steps: int = 50,
    guidance: float = 5.0,
    seed: int = 0,
) -> LatentCache:
    """Make a cache of latents that the unpatched pipeline generates, and return it; goes on with an earlier call.

    ``prompts`` give a sample each and are classes for DiT; ``clips`` has one length and one size, None for the model's
    own. ValueError for what the model cannot take or make, or a cache made with other settings; OSError if the folder
    cannot be written, or another run has it.
    """
    check(
        not is_patched(pipe),
        "The pipeline is patched, but the latents must be the original model's; call remove_mhla() first.",
    )
    check_value("guidance", guidance, Annotated[Number, Field(ge=0)])
    check_value("steps", steps, PositiveInteger)
    empty = [str(number) for number, prompt in enumerate(prompts) if not prompt.strip()]
    check(
        bool(prompts) and not empty,
        f"Prompts must not be missing or empty; empty: number {', '.join(empty) or 'none given'}.",
    )
    data = DataModel(model)
    data.check_captions(prompts)
    clips, training = data.fitted(clips), data.family.training
    check(
        len(clips.sizes) == 1 and len(clips.lengths) == 1,
        f"frames={clips.frames} and sizes={clips.sizes}: synthesized samples of one folder have one length and size; "
        "synthesize others into other folders.",
    )
    clip = clips.longest(data.usual)
    settings = {"frames": list(clips.lengths), "sizes": [list(clip.sizes[0])], "steps": steps, "guidance": guidance}
    made_with = data.header({**settings, "seed": seed, "weights": fingerprint(Path(model))})
    names = {f"{number}: {prompt}": "" for number, prompt in enumerate(prompts)}
    with folder_for_results(Path(output)):
        writer = CacheWriter(output, made_with, names, _on_cpu(training.encode_prompt(pipe, "")), {})
        pipe.set_progress_bar_config(disable=True)
        kept = {file.name for file in writer.files}
        left = [(number, name) for number, name in enumerate(names) if name not in kept]
        for number, name in progress(left, total=len(names), initial=len(kept), desc="synthesize"):
            prompt, generator = prompts[number], generator_for(seed, "synthesize", number)
            latents = training.generate_latents(pipe, prompt, clip, steps, guidance, generator)
            remedy = "use another precision, fewer or more steps, or another guidance"
            _check_finite(latents, model, prompt, remedy)
            sample = _on_cpu({"latents": latents, **training.encode_prompt(pipe, prompt)})
            encoded = writer.write(sample, (clip.frames, *clip.sizes[0]))
            writer.add(CachedFile(name, prompt, clips=(encoded,)))
    return LatentCache(output)


def _warn_of_cut_captions(family: Family, pipe: Any, media: Sequence[Media]) -> None:
    conditions, tokenizer = family.inputs.conditions_of(pipe.transformer.config), getattr(pipe, "tokenizer", None)
    if tokenizer is None or not conditions:
        return
    usual = conditions[0].sizes(pipe.transformer.config)[0]
    limit = int(family.training.text_settings.get("max_sequence_length", usual))
    long = [item.name for item in media for text in item.captions if len(tokenizer(text).input_ids) > limit]
    if long:
        logger.warning(
            "%d captions have more than the %d tokens that the model takes and are cut, such as that of %s.",
            *(len(long), limit, long[0]),
        )


def _check_finite(latents: torch.Tensor, model: str, of: str, remedy: str) -> None:
    check(bool(latents.isfinite().all()), f"{model} makes latents that are not finite for {of!r}; {remedy}.")


def _on_cpu(sample: Sample) -> Sample:
    """Move a sample, latents in float32, conditioning in bfloat16, the text encoders' type, to halve the cache."""
    types = {name: torch.float32 if name == "latents" else torch.bfloat16 for name in sample}
    return {name: (x.to(types[name]) if x.is_floating_point() else x).cpu() for name, x in sample.items()}
