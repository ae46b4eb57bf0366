"""Where commands, presets and families that left the package went; an error quotes the line."""

MOVED: dict[str, str] = {
    "bench parallel": "Several GPUs are diffusers' own context parallelism (docs/combine.md); torch.profiler times them.",
}
"""Name of a command (as typed, without ``mhla``), preset or family → where it is now, as a sentence."""


def where_it_went(name: object) -> str:
    """Return the sentence about a removed name with a space before it, or nothing for any other name."""
    return f" {MOVED[str(name)]}" if str(name) in MOVED else ""
