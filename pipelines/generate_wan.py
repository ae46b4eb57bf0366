r"""Generate videos with Wan, patched with MHLA or not.

Without a GPU, with the tiny pipeline that ships with the package:

    python pipelines/generate_wan.py "a seven moving left"

With the real model:

    python pipelines/generate_wan.py "a cat surfing" --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers \
        --patch wan2.1-t2v-1.3b-hybrid --device cuda --dtype bfloat16 --set height=480 width=832 num_frames=81

--patch applies a patch as it is before training; --weights loads a trained one. Every prompt becomes one MP4 file per
seed; files that are there already are kept, so a run that was interrupted goes on where it stopped.
"""

from mhla_diffusers.generation.generate import run_command_line

if __name__ == "__main__":
    run_command_line("wan", __doc__)
