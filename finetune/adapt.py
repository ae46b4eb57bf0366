"""Fast adaptation of a patched pipeline.

accelerate launch finetune/adapt.py --config finetune/configs/wan2.1-t2v-1.3b-hybrid.yaml
accelerate launch finetune/adapt.py --config … --resume latest
accelerate launch --config_file finetune/accelerate/fsdp2.yaml --num_processes 8 finetune/adapt.py --config …
python finetune/adapt.py --config … --dry-run
SIGTERM and Ctrl-C save and stop, Ctrl-C again stops at once. With one process accelerate launch does not pass SIGTERM
on, so send it to this script's process.
Settings are overridden by key=value, for example: stages.0.steps=200 batch_size=2
context_parallel=4 among them spreads every video over groups of four processes.
"""

import argparse
import logging
import sys


def main() -> int:
    """Run; exit with 143 after SIGTERM, 130 after Ctrl-C; torchrun and accelerate launch have codes of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file, see finetune/configs")
    parser.add_argument("--resume", help='"latest", or the path of a checkpoint')
    parser.add_argument("--dry-run", action="store_true", help="show parameters, memory and FLOPs, and stop")
    parser.add_argument("--processes", type=int, help="of a dry run: how many FSDP2 spreads the weights over")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()

    from mhla_diffusers.reporting import set_quiet
    from mhla_diffusers.training import TrainingConfig, TrainingDivergedError
    from mhla_diffusers.training.finetune import dry_run, finetune

    set_quiet(arguments.quiet)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        config = TrainingConfig.from_yaml(arguments.config, arguments.overrides)
        if arguments.dry_run:
            sys.stdout.write(f"{dry_run(config, arguments.processes)}\n")
            return 0
        result = finetune(config, resume=arguments.resume)
    except (ValueError, OSError, ImportError, TrainingDivergedError) as error:
        parser.exit(1, f"Error: {error}\n")
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
