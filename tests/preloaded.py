"""What the processes of the tests have imported when they start."""

import gc

import accelerate  # noqa: F401
import peft  # noqa: F401
import torch
from diffusers import WanTransformer3DModel  # noqa: F401
from diffusers.optimization import get_cosine_schedule_with_warmup  # noqa: F401
from diffusers.training_utils import EMAModel  # noqa: F401

import mhla_diffusers.training  # noqa: F401

torch.set_num_threads(1)

# what is there before a process begins need not be searched for garbage in it
gc.collect()
gc.freeze()
