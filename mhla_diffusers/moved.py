"""Replacements of removed commands, options, presets and families, quoted in errors."""

_LANGUAGE = "Language models are a study: studies/language/mhla_llama.py patches a Llama."
_BY_GRID = (
    "Sparse attention runs in it without a family: apply_mhla(model, grid=(16, 16), extra=(1, 0)), with a class token."
)
_OF_PATCH = ("density", "block-size", "layers", "dense-first", "dense-last", "dense-every", "dense-layers")
_OF_CALL = ("steps", "size", "height", "width", "frames", "guidance")
MOVED: dict[str, str] = {
    "analyze": "Run studies/analysis/analyze.py.",
    "bench ceilings": "`mhla info --model NAME` counts the most that a patch can bring, at every size of a model.",
    "bench parallel": "Several GPUs are diffusers' context parallelism now, see docs/combine.md.",
    "bench plot": "The CSV files of `mhla bench` open in pandas and any spreadsheet.",
    "demo": "`mhla bench pipeline --model tiny-wan` times the profiles; studies/quality judges adapted patches.",
    "dinov2": "Use apply_mhla(model, grid=…, extra=(1, 0)); studies/real_weights/dinov2.py shows it, and MHLA.",
    "eval clip": "It is `mhla eval compare FOLDER --clip-model openai/clip-vit-large-patch14`.",
    "eval samples prompts": "`mhla generate FAMILY --prompts FILE` makes such a set; accelerate launch shares it.",
    "generate --weights": "Give a run's `result` folder as --patch.",
    "pooled-vit": "studies/classify/pooled_vit.py registers it.",
    "tiny-wan-4-steps": "Distillation to four steps is a study, studies/few_steps/, and ships no patch.",
    "tune --cache": "`pipelines/measure_together.py --cache` measures a patch together with a cache.",
    **{
        f"{command} --{name}": "Settings of the patch are --change density=0.05, repeatable."
        for command in ("generate", "bench pipeline", "audit")
        for name in _OF_PATCH
    },
    **{
        f"{command} --{name}": "Arguments of the pipeline's call are --set num_inference_steps=20, repeatable."
        for command in ("generate", "bench pipeline", "audit", "tune")
        for name in _OF_CALL
    },
    **dict.fromkeys(("generate --prompt-file", "bench pipeline --prompt-file"), "It is --prompts FILE."),
    **dict.fromkeys(("encode --precision", "synthesize --precision"), "It is --dtype, float32 or bfloat16."),
    **dict.fromkeys(("deit", "siglip", "vit", "DeiTForImageClassification"), _BY_GRID),
    **dict.fromkeys(("ViTForImageClassification", "ViTModel"), _BY_GRID),
    **dict.fromkeys(("dig", "DiGTransformer2DModel"), "DiG is in the repository's history alone; no table needs it."),
    **dict.fromkeys(("llama", "LlamaForCausalLM", "LlamaModel"), _LANGUAGE),
}
"""Name of a command, of an option after its command, preset or family → where it is now, as a sentence."""


def where_it_went(name: object) -> str:
    """Return "it was removed." and what took the place of a removed name, or nothing for any other name."""
    return f"it was removed. {MOVED[str(name)]}" if str(name) in MOVED else ""
