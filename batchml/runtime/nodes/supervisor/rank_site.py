"""The `sitecustomize` of Python ranks: SIGUSR1 makes a rank write the stacks of all its threads.

The supervisor copies this file into a folder that comes first on the PYTHONPATH of the ranks
(`ranks.py`), so a program that hangs needs no change. Another `sitecustomize` runs as before.
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

        # The file stays open while the process lives; forks of it write to the same file.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
    except Exception:
        pass  # the program runs anyway, and cannot show its stacks


def _run_next() -> None:
    """Run the `sitecustomize` that this one hides, if there is one."""
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
    _run_next()
