"""Replacements of removed commands, presets and families, quoted in errors."""

_LANGUAGE = "Language models are a study: studies/language/mhla_llama.py patches a Llama."
_BY_GRID = (
    "Sparse attention runs in it without a family: apply_mhla(model, grid=(16, 16), extra=(1, 0)), with a class token."
)
MOVED: dict[str, str] = {
    "analyze": "Run studies/analysis/analyze.py.",
    "bench ceilings": "`mhla info --model NAME` counts the most that a patch can bring, at every size of a model.",
    "bench parallel": "Several GPUs are diffusers' context parallelism now, see docs/combine.md.",
    "bench plot": "The CSV files of `mhla bench` open in pandas and any spreadsheet.",
    "demo": "`mhla bench pipeline --model tiny-wan` times the profiles; studies/quality judges adapted patches.",
    "dinov2": "Use apply_mhla(model, grid=…, extra=(1, 0)); studies/real_weights/dinov2.py shows it, and MHLA.",
    "eval clip": "It is `mhla eval compare FOLDER --clip-model openai/clip-vit-large-patch14`.",
    "eval samples prompts": "`mhla generate FAMILY --prompt-file FILE` makes such a set; accelerate launch shares it.",
    "pooled-vit": "studies/classify/pooled_vit.py registers it.",
    "tiny-wan-4-steps": "Distillation to four steps is a study, studies/few_steps/, and ships no patch.",
    **dict.fromkeys(("deit", "siglip", "vit", "DeiTForImageClassification"), _BY_GRID),
    **dict.fromkeys(("ViTForImageClassification", "ViTModel"), _BY_GRID),
    **dict.fromkeys(("dig", "DiGTransformer2DModel"), "DiG is in the repository's history alone; no table needs it."),
    **dict.fromkeys(("llama", "LlamaForCausalLM", "LlamaModel"), _LANGUAGE),
}
"""Name of a command (as typed, without ``mhla``), preset or family → where it is now, as a sentence."""


def where_it_went(name: object) -> str:
    """Return the sentence about a removed name with a space before it, or nothing for any other name."""
    return f" {MOVED[str(name)]}" if str(name) in MOVED else ""
