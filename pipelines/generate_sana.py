r"""Generate images with SANA, patched with MHLA or not.

Without a GPU, with the tiny pipeline that ships with the package:

    python pipelines/generate_sana.py "a three and an eight"

With the real model:

    python pipelines/generate_sana.py "a cat surfing" --model Efficient-Large-Model/Sana_600M_1024px_diffusers \
        --patch sana-0.6b --device cuda --dtype bfloat16 --set height=1024 width=1024

--patch applies a patch as it is before training; --weights loads a trained one. Every prompt becomes one PNG file per
seed; files that are there already are kept, so a run that was interrupted goes on where it stopped.
"""

from mhla_diffusers.generation.generate import run_command_line

if __name__ == "__main__":
    run_command_line("sana", __doc__)
