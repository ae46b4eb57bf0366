"""``python -m mhla_diffusers.demo``: the demo without the ``mhla`` command."""

import argparse
from pathlib import Path

from ..tiny.building import FAMILIES
from .run import DemoConfig, run_demo

parser = argparse.ArgumentParser(description="Compare softmax, plain linear attention and MHLA on a tiny pipeline.")
parser.add_argument("--output", type=Path, default=DemoConfig.output)
parser.add_argument("--family", choices=FAMILIES, default=DemoConfig.family)
parser.add_argument("--device", default=DemoConfig.device)
parser.add_argument("--seed", type=int, default=DemoConfig.seed)
parser.add_argument("--steps", type=int, default=DemoConfig.steps)
parser.add_argument("--scenes", type=int, default=DemoConfig.scenes)
arguments = parser.parse_args()
run_demo(DemoConfig(**vars(arguments)))
