"""Clips four times as long as those that were trained on, judged by frame: assets/demo/stream.json and stream.gif.

python tools/stream_tiny.py --scenes 16 --seed 0 --output outputs/stream
"""

import argparse
import sys
import time
from pathlib import Path

from mhla_diffusers.demo.judging import Yardstick
from mhla_diffusers.demo.page import draw_samples
from mhla_diffusers.demo.run import STREAM_HEADER, by_frame, stream_cells, stream_longer
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
    tiny = TINY["wan"]
    scenes = tiny.random_scenes(arguments.scenes, arguments.seed)
    yardstick = Yardstick(tiny, scenes, arguments.seed)
    with threads(free_threads()):
        streams = stream_longer(tiny, scenes, arguments.seed)
    right = {name: by_frame(clips, yardstick) for name, clips in streams.items()}
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = {
        "command": f"python tools/stream_tiny.py --scenes {arguments.scenes} --seed {arguments.seed}",
        "date": time.strftime("%Y-%m-%d"),
        "digits right, by frame": right,
    }
    write_json(results, arguments.output / "stream.json")
    draw_samples(dict(list(streams.items())[-1:]), scenes, arguments.output / "stream")
    rows = [stream_cells(*item) for item in right.items()]
    sys.stdout.write(f"{text_table(STREAM_HEADER, rows, right=True)}\n")


if __name__ == "__main__":
    main()
