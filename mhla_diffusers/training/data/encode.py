"""Make a cache of latents: from files, or from prompts alone."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from ...errors import check
from ...families import Family, Sample, trained_family
from ...files import fingerprint, folder_for_results, weights_of
from ...generation.noise import generator_for
from ...generation.pipelines import component_identity, usual_clip
from ...patching import is_patched
from ...reporting import progress
from ...settings import Number, PositiveInteger, check_value
from .cache import BEGINS_WITH_PICTURE, CachedSource, CacheIndex, CacheWriter
from .clips import Clips
from .media import Media, contents_of, read_ahead
from .sources import read_sources

logger = logging.getLogger(__name__)


@torch.no_grad()
def encode_folder(
    pipe: Any, model: str, source: str | Path, output: str | Path, clips: Clips | None = None, workers: int = 1
) -> CacheIndex:
    """Encode videos or images with captions into a cache; resumes an earlier call.

    Unreadable files are skipped; the index lists them with reasons. A file that has changed since the earlier call, or
    whose caption has, is encoded again, and samples of files that are not there any more are removed. Shares and
    repeats of sources may change.

    Args:
        pipe: the pipeline whose autoencoder and text encoder are used.
        model: Hub id or folder that the pipeline came from.
        source: see :func:`~.media.find_media`, or a YAML file of :class:`~.sources.Sources`.
        output: folder of the cache.
        clips: what to cut out of every file; None for what the YAML file says, or the model's own clip.
        workers: threads that read files.

    Raises:
        FileNotFoundError: nothing to encode.
        ValueError: missing captions, or ones that are not a class of the DiT; sizes that the model cannot take; a cache
            made with other settings; latents that are not finite; or no readable file.
        OSError: the folder cannot be written, or another run has it.
    """
    family = trained_family(pipe.transformer)
    sources = read_sources(source)
    clips = _fitted(clips or sources.clip, model, family, pipe)
    media = sources.media()
    sources.check_captions(media)
    _check_captions(family, pipe, media)
    settings = clips.settings()
    # one transformer may be that of text-to-video too, whose samples differ
    if family.calling.begins_with_picture(pipe, pipe.transformer.config):
        settings[BEGINS_WITH_PICTURE] = True
    contents = contents_of(media)
    with folder_for_results(Path(output)):
        writer, left = _writer(pipe, model, family, output, settings, contents)
        index, kept = writer.index, len(writer.index.samples)
        index.sources = {
            one.path: CachedSource(str(Path(one.path).absolute()), one.share, one.repeats) for one in sources.sources
        }
        media_left = [item for item in media if item.name in left]
        slow, small = set[str](), set[str]()
        shown = {"total": len(media), "initial": len(media) - len(media_left), "desc": "encode"}
        with writer:
            for item, found in progress(read_ahead(media_left, clips, workers), **shown):
                name, there = item.name, set()
                if name == index.unfinished:
                    there = {(one.start, one.bucket[0]) for one in index.samples if one.source == name}
                index.unfinished = name
                for clip in found:
                    if isinstance(clip, str):
                        writer.skip(name, clip, contents[name])
                        continue
                    slow |= {name} if clip.bucket[0] > 1 and 0 < clip.fps < 0.9 * clips.fps else set()
                    small |= {name} if clip.scale > 1 else set()
                    if (clip.start, clip.bucket[0]) not in there:
                        sample = _encoded(pipe, family, clip.pixels, item.caption)
                        _check_finite(sample["latents"], model, name, "use another precision, or leave the file out")
                        place: dict[str, Any] = {"bucket": clip.bucket, "start": clip.start, "origin": item.origin}
                        writer.add(name, item.caption, sample, contents[name], **place)
                index.unfinished = None
    for names, what in (
        (slow, "fewer frames per second than fps, so that some are repeated; ask for fewer, or leave these files out"),
        (small, "fewer pixels than their size, and are enlarged; ask for a smaller size, or leave out upscale"),
    ):
        if names:
            logger.warning("%d of %d files have %s.", len(names), len(media_left), what)
    if not index.samples:
        reasons = "\n".join(f"{name}: {reason}" for name, reason in list(index.skipped.items())[:5])
        raise ValueError(f"None of the {len(media)} files in {source} could be encoded, such as\n{reasons}")
    before = f"; {kept} were there" if kept else ""
    logger.info("%d samples encoded, %d files skipped%s.", len(index.samples) - kept, len(index.skipped), before)
    return index


def _encoded(pipe: Any, family: Family, pixels: torch.Tensor, caption: str) -> dict[str, torch.Tensor]:
    """Encode a clip, uint8 (3, F, H, W), and its caption."""
    given = (pixels.to(pipe.vae.device).float() / 127.5 - 1).to(pipe.vae.dtype)[None]
    latents = family.training.encode_pixels(pipe, given)[0]
    of_picture = family.training.picture_settings(pipe, given)
    prompt = family.training.encode_prompt(pipe, caption, of_picture)
    return _on_cpu({"latents": latents, **family.training.encode_picture(pipe, given), **prompt})


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
) -> CacheIndex:
    """Make a cache of latents that the unpatched pipeline generates; resumes an earlier call.

    Args:
        pipe: unpatched pipeline.
        model: Hub id or folder that it came from.
        prompts: one sample each; classes for DiT.
        output: folder of the cache.
        clips: one number of frames, and one size; None for the model's own.
        steps: of the sampler.
        guidance: scale of classifier-free guidance.
        seed: with the sample's number, determines the noise.

    Raises:
        ValueError: no, empty or unknown prompts, a patched pipeline, sizes that the model cannot take, guidance or
            latents that are not finite, or a cache made with other settings.
        OSError: the folder cannot be written, or another run has it.
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
    family = trained_family(pipe.transformer)
    names = [f"{number}: {prompt}" for number, prompt in enumerate(prompts)]
    _check_captions(family, pipe, [Media(Path(), name, prompt) for name, prompt in zip(names, prompts, strict=True)])
    clips = _fitted(clips, model, family, pipe)
    check(
        len(clips.sizes) == 1 and len(clips.lengths) == 1,
        f"frames={clips.frames} and sizes={clips.sizes}: synthesized samples of one folder have one length and size; "
        "synthesize others into other folders.",
    )
    clip = clips.longest(usual_clip(model, family))
    settings = {"frames": list(clips.lengths), "sizes": [list(clip.sizes[0])], "steps": steps}
    settings |= {"guidance": guidance, "seed": seed}
    with folder_for_results(Path(output)):
        writer, missing = _writer(pipe, model, family, output, settings, dict.fromkeys(names, ""))
        left = [(number, name) for number, name in enumerate(names) if name in missing]
        pipe.set_progress_bar_config(disable=True)
        with writer:
            shown = {"total": len(names), "initial": len(names) - len(left), "desc": "synthesize"}
            for number, name in progress(left, **shown):
                prompt, generator = prompts[number], generator_for(seed, "synthesize", number)
                latents = family.training.generate_latents(pipe, prompt, clip, steps, guidance, generator)
                remedy = "use another precision, fewer or more steps, or another guidance"
                _check_finite(latents, model, prompt, remedy)
                sample = {"latents": latents, **family.training.encode_prompt(pipe, prompt)}
                writer.add(name, prompt, _on_cpu(sample), bucket=(clip.frames, *clip.sizes[0]))
    return writer.index


def model_header(model: str, family: Family) -> dict[str, Any]:
    """Make the header of a cache for a model, without settings; loads none of its weights."""
    names = ("vae", "text_encoder")
    parts = {name: component_identity(model, name) for name in names}
    parts_weights = {f"{name}_weights": weights_of(Path(model, name)) for name in names}
    return {"family": family.name, **parts, **parts_weights, "weights": fingerprint(Path(model)), "settings": {}}


def _writer(
    pipe: Any, model: str, family: Family, output: str | Path, settings: dict[str, Any], contents: dict[str, str]
) -> tuple[CacheWriter, set[str]]:
    """Open a cache, without samples of other sources than these, and return it with the sources that it lacks."""
    writer = CacheWriter(output, {**model_header(model, family), "settings": settings})
    writer.set_empty(_on_cpu(family.training.encode_prompt(pipe, "")))
    known = writer.index.contents
    changed = sorted(name for name in contents.keys() & known.keys() if contents[name] != known[name])
    cached = {sample.source for sample in writer.index.samples}
    gone = sorted(cached - contents.keys())
    check(
        not gone or len(gone) < len(cached),
        f"{output} holds latents of other files or prompts, such as {gone[:1]}; choose another folder.",
    )
    for names, what in ((changed, "have changed and are encoded again"), (gone, "are gone, and so are their samples")):
        if names:
            logger.warning("%d files or captions %s, such as %s.", len(names), what, names[0])
    missing = {name for name in contents if name not in known or name == writer.index.unfinished} | set(changed)
    writer.drop({*changed, *gone, *(known.keys() - contents.keys())})
    return writer, missing


def _fitted(clips: Clips | None, model: str, family: Family, pipe: Any) -> Clips:
    """Return clips, or the model's own, with sizes for its pipeline; ValueError for frames or sizes it cannot take."""
    usual = usual_clip(model, family)
    begins_with_picture = family.calling.begins_with_picture(pipe, pipe.transformer.config)
    return (clips or Clips.of(usual)).fitted(family, pipe.transformer, pipe.vae.config, begins_with_picture, usual)


def _check_captions(family: Family, pipe: Any, media: Sequence[Media]) -> None:
    """Raise ValueError for captions that the model does not take, and warn of those that it cuts."""
    usable = [item for item in media if item.problem is None]
    for item in usable:
        try:
            family.calling.check_prompt(pipe, item.caption)
        except ValueError as error:
            raise ValueError(f"The caption of {item.name} cannot be used: {error}") from error
    conditions, tokenizer = family.inputs.conditions_of(pipe.transformer.config), getattr(pipe, "tokenizer", None)
    if tokenizer is not None and conditions:
        usual = conditions[0].sizes(pipe.transformer.config)[0]
        limit = int(family.training.text_settings.get("max_sequence_length", usual))
        long = [item.name for item in usable if len(tokenizer(item.caption).input_ids) > limit]
        if long:
            logger.warning(
                "%d captions have more than the %d tokens that the model takes and are cut, such as that of %s.",
                *(len(long), limit, long[0]),
            )


def _check_finite(latents: torch.Tensor, model: str, of: str, remedy: str) -> None:
    check(bool(latents.isfinite().all()), f"{model} makes latents that are not finite for {of!r}; {remedy}.")


def _on_cpu(sample: Sample) -> dict[str, torch.Tensor]:
    """Move a sample, latents in float32, conditioning in bfloat16, the text encoders' type, to halve the cache."""
    types = {name: torch.float32 if name == "latents" else torch.bfloat16 for name in sample}
    return {name: (x.to(types[name]) if x.is_floating_point() else x).cpu() for name, x in sample.items()}
