"""A request to stop, made by SIGTERM."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether SIGTERM has arrived."""

    def __init__(self) -> None:
        self.made = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within the context SIGTERM makes the request instead of ending the process; in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signal_number: int, frame: FrameType | None) -> None:
            self.made = True

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
