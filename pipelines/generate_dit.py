r"""Generate images with DiT, patched with MHLA or not.

Without a GPU, with the tiny pipeline that ships with the package:

    python pipelines/generate_dit.py "seven"

With the real model:

    python pipelines/generate_dit.py "golden retriever" --model facebook/DiT-XL-2-256 \
        --patch dit-xl-2-256 --device cuda --dtype bfloat16 --set num_inference_steps=50

--patch applies a patch as it is before training; --weights loads a trained one. Every prompt becomes one PNG file per
seed; files that are there already are kept, so a run that was interrupted goes on where it stopped.
"""

from mhla_diffusers.generation.generate import run_command_line

if __name__ == "__main__":
    run_command_line("dit", __doc__)
