"""What is seen of a training by transformers' ``Trainer`` from outside: how far it is, and what it took."""

import sys
import time
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


class Watch(TrainerCallback, ExportableState):
    """Tells steps and loss on stderr, and counts CPU seconds; checkpoints hold those up to them."""

    def __init__(self) -> None:
        self._before = 0.0
        self._begin = time.process_time()

    @property
    def seconds(self) -> float:
        """Of this process since it was made, and those of the checkpoint from which it goes on."""
        return self._before + time.process_time() - self._begin

    def state(self) -> dict[str, Any]:
        """For ``trainer_state.json``."""
        return {"args": {}, "attributes": {"seconds": self.seconds}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take over the seconds of the checkpoint, if it goes on from one."""
        if state.global_step:
            self._before = state.stateful_callbacks[type(self).__name__]["attributes"]["seconds"]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Tell how far it is; at the end Trainer logs no loss."""
        if state.is_world_process_zero and "loss" in logs:
            sys.stderr.write(f"{state.global_step} of {state.max_steps} steps, loss {float(logs['loss']):.4f}\n")
