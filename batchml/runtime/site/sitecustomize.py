"""The `sitecustomize` of a run's Python programs: the first folder of their PYTHONPATH has it.

os.cpu_count() is the number in PYTHON_CPU_COUNT, as in Python 3.13, also in older versions. In a
rank, SIGUSR1 writes the stacks of all threads, so a program that hangs needs no change. Another
`sitecustomize` runs as before. In a run with spares, `batchml_torch` prepares the next start.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


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


def _torch_module() -> "Any":
    """Our module, which is found only now, while its folder is in `sys.path`."""
    __import__("batchml_torch")
    return sys.modules.pop("batchml_torch")


def _start_with_spare(stacks: str) -> None:
    """Start a rank of a run with spares, for which a spare may be made."""
    try:
        torch = _torch_module()
    except Exception:
        torch = None  # the program runs anyway, and has no spare
    _listen()
    _run_next()
    if torch:
        torch.watch(stacks)


def _start_spare(stacks: str) -> None:
    try:
        torch = _torch_module()
        _run_next()
        channel = torch.wait(stacks)
    except BaseException:
        os._exit(1)
    torch.begin(channel)
    _listen()  # not before: until now the rank that runs has this file


def _is_spare() -> bool:
    """Whether the supervisor started this very program as a spare: by a file of that name, which
    the kernel forgets when the process starts another program.
    """
    try:
        with open("/proc/self/comm", encoding="utf-8") as file:
            return file.read() == "batchml-spare\n"  # also in runtime/processes.py
    except OSError:
        return False


if __name__ == "sitecustomize":
    _count_processors()
    stacks = os.environ.get("BATCHML_STACKS", "")
    if not stacks or os.environ.get("BATCHML_SPARES") != "1" or os.getsid(0) != os.getpid():
        _listen()
        _run_next()
    elif _is_spare():
        _start_spare(stacks)
    else:
        _start_with_spare(stacks)
