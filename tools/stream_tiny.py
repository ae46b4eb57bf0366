"""Clips four times as long as those that were trained on, judged by frame: assets/demo/stream.json and stream.gif.

python tools/stream_tiny.py --scenes 16 --seed 0 --output outputs/stream
"""

import argparse
import random
import sys
import time
from pathlib import Path

from mhla_diffusers.demo.page import draw_clips
from mhla_diffusers.demo.streaming import HEADER, judge_streams
from mhla_diffusers.devices import free_threads, threads
from mhla_diffusers.files import write_json
from mhla_diffusers.reporting import text_table
from mhla_diffusers.tiny import TINY


def main() -> None:
    """Generate, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/stream"))
    parser.add_argument("--scenes", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tiny, chance = TINY["wan"], random.Random(arguments.seed)
    scenes = [tiny.random_scene(chance) for _ in range(arguments.scenes)]
    with threads(free_threads()):
        judged = judge_streams(tiny, scenes, arguments.seed)
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = {
        "command": f"python tools/stream_tiny.py --scenes {arguments.scenes} --seed {arguments.seed}",
        "date": time.strftime("%Y-%m-%d"),
        "digits right, by frame": {one.name: one.right for one in judged},
    }
    write_json(results, arguments.output / "stream.json")
    draw_clips(judged[-1].name, judged[-1].pictures, scenes, arguments.output / "stream.gif")
    sys.stdout.write(f"{text_table(HEADER, (one.cells for one in judged), right=True)}\n")


if __name__ == "__main__":
    main()
