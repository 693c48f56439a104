"""Single keys on a terminal, while nothing else is typed there."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Rest = Callable[[float], str]  # sleeps so many seconds, or until a key, which it returns


@contextmanager
def reading_keys(sleep: Callable[[float], None]) -> Iterator[Rest]:
    """How to sleep until a key; keys are neither shown nor waited for with Enter meanwhile.

    Ctrl-C does what it does everywhere. Where nothing can be typed, it is `sleep`.
    """

    def just_sleep(seconds: float) -> str:
        sleep(seconds)
        return ""

    if not (sys.stdin and sys.stdin.isatty()):
        yield just_sleep
        return
    import select
    import termios
    import tty

    descriptor = sys.stdin.fileno()

    def rest(seconds: float) -> str:
        # By the descriptor: what Python has read ahead of the stream, select does not see.
        if not select.select([descriptor], [], [], seconds)[0]:
            return ""
        pressed = os.read(descriptor, 1024).decode(errors="replace")
        if not pressed:  # the terminal has gone: nothing more will come, and at once
            sleep(seconds)
        return pressed[:1]

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield rest
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
