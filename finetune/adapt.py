"""mhla finetune for accelerate launch and torchrun, which start a script on several devices.

accelerate launch finetune/adapt.py finetune/configs/wan2.1-t2v-1.3b-hybrid.yaml --resume latest
accelerate launch --config_file finetune/accelerate/ddp.yaml --num_processes 8 finetune/adapt.py CONFIG.yaml
With one process accelerate launch does not pass SIGTERM on, so send it to this script's process.
"""

import sys

from mhla_diffusers.cli import run

if __name__ == "__main__":
    sys.argv.insert(1, "finetune")
    run()
