"""Zero-shot tables of a language model that finetune/language.py has trained, by lm-eval (the extra "language").

python studies/language/zero_shot.py outputs/language-0.3b/result --tokenizer mistralai/Mistral-7B-v0.1 --tasks arc_easy
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mhla_diffusers import load_mhla
from mhla_diffusers.lazy import installing
from mhla_diffusers.patching import CONFIG_NAME


def main() -> None:
    """Read the arguments and print the scores as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="folder that language.py has saved")
    parser.add_argument("--tokenizer", required=True, help="model whose tokenizer cut the texts")
    parser.add_argument("--tasks", required=True, help="of lm-eval, with commas between")
    parser.add_argument("--limit", type=int, help="questions of a task; all unless it is said")
    arguments = parser.parse_args()
    judge = judge_of(arguments.result, arguments.tokenizer)
    from lm_eval import simple_evaluate

    found = simple_evaluate(judge, tasks=arguments.tasks.split(","), limit=arguments.limit)
    sys.stdout.write(json.dumps(found["results"], indent=2, default=str) + "\n")


def judge_of(result: Path, tokenizer: str) -> Any:
    """lm-eval's wrapper of the model in a folder.

    Raises:
        SystemExit: lm-eval is not installed.
    """
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise SystemExit(f"lm-eval is not installed; {installing('language')}.") from error
    if (result / CONFIG_NAME).is_file():
        model: Any = load_mhla(LlamaForCausalLM(LlamaConfig.from_pretrained(result)), result)
    else:
        model = LlamaForCausalLM.from_pretrained(result)
    cutter = AutoTokenizer.from_pretrained(tokenizer)
    # one text at a time: lm-eval pads prompts on the left to generate, which blocks do not take
    return HFLM(
        pretrained=model.eval(), tokenizer=cutter, batch_size=1, max_length=model.config.max_position_embeddings
    )


if __name__ == "__main__":
    main()
