"""When a run has failed although it went on: numbers that are no longer finite."""

import math

from .folders import RunFolder, RunState


class TrainingDivergedError(RuntimeError):
    """Loss, gradient or weights are not finite, and nothing that a run could do by itself would mend them."""


def check_in_between(state: RunState, folder: RunFolder, max_skipped: int) -> None:
    """Raise if too many updates in a row were skipped.

    Raises:
        TrainingDivergedError: more than ``max_skipped``.
    """
    if state.skipped_in_row > max_skipped:
        raise _diverged(
            f"{state.skipped_in_row} updates in a row, up to step {state.step}, were skipped", state, folder
        )


def check_end(state: RunState, folder: RunFolder, weights_are_finite: bool, validation_loss: float | None) -> None:
    """Raise unless a run has ended with a model of which nothing bad is known.

    One skipped update is enough if it is the last one, since no later update shows that the weights still work.

    Args:
        state: after the last update.
        folder: of the run.
        weights_are_finite: all those that would be the result.
        validation_loss: after the last update; None without validation.

    Raises:
        TrainingDivergedError: naming what is not finite and the last good checkpoint.
    """
    if state.skipped_in_row:
        raise _diverged(f"all updates after step {state.step - state.skipped_in_row} were skipped", state, folder)
    if not weights_are_finite:
        raise _diverged(f"weights after step {state.step} are not finite", state, folder)
    if validation_loss is not None and not math.isfinite(validation_loss):
        raise _diverged(f"the validation loss after step {state.step} is {validation_loss}", state, folder)


def _diverged(what: str, state: RunState, folder: RunFolder) -> TrainingDivergedError:
    # that an update was not skipped shows that the weights before it worked, but says nothing of those after it
    good = folder.last_before(state.step - state.skipped_in_row)
    from_there = (
        f"{good} is the last good checkpoint: if a sample of the data is at fault, mend it and resume from there with "
        f"--resume {good}."
        if good is not None
        else f"{folder.path} holds no good checkpoint."
    )
    return TrainingDivergedError(
        f"Training has diverged: {what}. Updates are skipped where loss or gradient is not finite. Lower the learning "
        f"rate or lengthen the warm-up, and start again in another output folder. {from_there}"
    )
