"""Looking again and again, from a thread, so that a run's output never waits for the store."""

from __future__ import annotations

import threading
from typing import Callable, Optional


class Looks:
    """Calls `look` every so often until it is ended. What it raises goes to `failed`."""

    def __init__(
        self, look: Callable[[], object], failed: Callable[[Exception], None] = lambda _: None
    ) -> None:
        self._look, self._failed = look, failed
        self._over = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def start(self, every: float) -> None:
        """`every`: seconds between two looks."""
        thread = threading.Thread(target=self._go_round, args=(every,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had: then all goes at the end
            return
        self._thread = thread

    def end(self) -> None:
        """No look is under way when this returns, and none follows."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _go_round(self, every: float) -> None:
        while not self._over.wait(every):
            try:
                self._look()
            except Exception as error:
                self._failed(error)
