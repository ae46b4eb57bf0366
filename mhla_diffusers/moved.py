"""Where commands, presets and families that left the package went; an error quotes the line."""

MOVED: dict[str, str] = {
    "bench ceilings": "`mhla info --model NAME` counts the most that a patch can bring, at every size of a model.",
    "bench plot": "The CSV files of `mhla bench` open in pandas and any spreadsheet.",
    "bench parallel": "Several GPUs are diffusers' context parallelism now, see docs/combine.md.",
}
"""Name of a command (as typed, without ``mhla``), preset or family → where it is now, as a sentence."""


def where_it_went(name: object) -> str:
    """Return the sentence about a removed name with a space before it, or nothing for any other name."""
    return f" {MOVED[str(name)]}" if str(name) in MOVED else ""
