"""The `sitecustomize` of a run's Python programs: the first folder of their PYTHONPATH has it.

os.cpu_count() is the number in PYTHON_CPU_COUNT, as in Python 3.13, also in older versions. In a
rank, SIGUSR1 writes the stacks of all threads, so a program that hangs needs no change. Another
`sitecustomize` runs as before.
"""

import os
import sys


def _count_processors() -> None:
    text = os.environ.get("PYTHON_CPU_COUNT", "")
    if sys.version_info >= (3, 13) or not text.isdigit() or int(text) < 1:
        return
    count = int(text)
    os.cpu_count = lambda: count


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
    _count_processors()
    _listen()
    _run_next()
