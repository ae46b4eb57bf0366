"""Where commands, presets and families that left the package went; an error quotes the line."""

MOVED: dict[str, str] = {
    "tiny-wan-4-steps": "Distillation to four steps is a study, studies/few_steps/, and ships no patch.",
    "llama": "Language models are a study: studies/language/mhla_llama.py patches a Llama.",
}
"""Name of a command (as typed, without ``mhla``), preset or family → where it is now, as a sentence."""


def where_it_went(name: object) -> str:
    """Return the sentence about a removed name with a space before it, or nothing for any other name."""
    return f" {MOVED[str(name)]}" if str(name) in MOVED else ""
