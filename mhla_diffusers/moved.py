"""Replacements of removed commands, options, settings, presets and families, quoted in errors."""

_LANGUAGE = "Language models are a study: studies/language/mhla_llama.py patches a Llama."
_BY_GRID = (
    "Sparse attention runs in it without a family: apply_mhla(model, grid=(16, 16), extra=(1, 0)), with a class token."
)
_OF_PATCH = "Settings of the patch are --change density=0.05, repeatable."
_OF_CALL = "Arguments of the pipeline's call are --set num_inference_steps=20, repeatable."
MOVED: dict[str, str] = {
    "--cache": "`pipelines/measure_together.py --cache` measures a patch together with a cache.",
    "--weights": "Give a run's `result` folder as --patch.",
    "analyze": "Run studies/analysis/analyze.py.",
    "bench ceilings": "`mhla info --model NAME` counts the most that a patch can bring, at every size of a model.",
    "bench parallel": "Several GPUs are diffusers' context parallelism now, see docs/combine.md.",
    "bench plot": "The CSV files of `mhla bench` open in pandas and any spreadsheet.",
    "demo": "`mhla bench pipeline --model tiny-wan` times the profiles; studies/quality judges adapted patches.",
    "dinov2": "Use apply_mhla(model, grid=…, extra=(1, 0)); studies/real_weights/dinov2.py shows it, and MHLA.",
    **dict.fromkeys(("export_every", "--export-every"), "`mhla export` makes a patch of any checkpoint."),
    "eval clip": "It is `mhla eval compare FOLDER --clip-model openai/clip-vit-large-patch14`.",
    "eval samples prompts": "`mhla generate FAMILY --prompt-file FILE` makes such a set; accelerate launch shares it.",
    "pooled-vit": "studies/classify/pooled_vit.py registers it.",
    "tiny-wan-4-steps": "Distillation to four steps is a study, studies/few_steps/, and ships no patch.",
    **dict.fromkeys(("time_limit", "--time-limit"), "Run `timeout 8h mhla finetune …`; the same command resumes."),
    **dict.fromkeys(("--density", "--block-size", "--layers", "--dense-first", "--dense-last"), _OF_PATCH),
    **dict.fromkeys(("--dense-every", "--dense-layers", "--order", "--far", "--correct"), _OF_PATCH),
    **dict.fromkeys(("--steps", "--size", "--height", "--width", "--frames", "--guidance"), _OF_CALL),
    **dict.fromkeys(("deit", "siglip", "vit", "DeiTForImageClassification"), _BY_GRID),
    **dict.fromkeys(("ViTForImageClassification", "ViTModel"), _BY_GRID),
    **dict.fromkeys(("dig", "DiGTransformer2DModel"), "DiG is in the repository's history alone; no table needs it."),
    **dict.fromkeys(("llama", "LlamaForCausalLM", "LlamaModel"), _LANGUAGE),
}
"""Name of a command (without ``mhla``), option, setting, preset or family → where it is now, a sentence."""


def where_it_went(name: object) -> str:
    """Return the sentence about a removed name with a space before it, or nothing for any other name."""
    return f" {MOVED[str(name)]}" if str(name) in MOVED else ""
