"""Given to Python ranks as `sitecustomize`: SIGUSR1 makes one write where all its threads are.

A copy of this file is put into a folder of its own, first on their PYTHONPATH (`ranks.py`), so that
a program whose ranks hang needs no line of ours. Another `sitecustomize` is run as it would have
been.
"""

import os
import sys


def _listen() -> None:
    path = os.environ.get("BATCHML_STACKS")
    if not path:
        return
    try:
        import faulthandler
        import signal

        # Stays open for as long as the process lives. Of a fork of ours it is the same file.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
    except Exception:
        pass  # the program is worth more than its stacks


def _go_on() -> None:
    """Run the `sitecustomize` that this one stands before, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ImportError:
        if ours is not None:
            sys.modules["sitecustomize"] = ours


if __name__ == "sitecustomize":
    _listen()
    _go_on()
