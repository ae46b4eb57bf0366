"""Summarise data: clips used, by bucket, and why files are left out."""

from collections import Counter
from collections.abc import Sequence

from ...reporting import text_table, times
from .cache import SourceFile
from .model import DataModel

_MOST_REASONS = 20
"""Files that are named of those left out."""


def summarize(source: object, files: Sequence[SourceFile], model: DataModel | None = None) -> str:
    """Return a table of clips by bucket, and the files left out; a model adds columns for latents and tokens."""
    used = [file for file in files if file.clips]
    clips = [clip for file in used for clip in file.clips]
    lines = [f"{source}: {len(used)} of {len(files)} files are used; clips: {len(clips)}."]
    rows = []
    for bucket, count in sorted(Counter(clip.bucket for clip in clips).items()):
        rows.append([times(bucket[1:]), str(bucket[0]), str(count)])
        if model is not None:
            latents, tokens = model.latents_of(bucket)
            rows[-1] += [times(latents), str(tokens)]
    if rows:
        header = ["size", "frames", "clips", *["latents", "tokens"] * (model is not None)]
        lines.append(text_table(header, rows, right=True))
    if left_out := [f"  {file.name}: {file.problem}" for file in files if file.problem is not None]:
        more = [f"  and {len(left_out) - _MOST_REASONS} more"] * (len(left_out) > _MOST_REASONS)
        lines.append("\n".join(["Left out:", *left_out[:_MOST_REASONS], *more]))
    return "\n\n".join(lines)
