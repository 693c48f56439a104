"""In a rank, for `sitecustomize`: note how the program imports torch, or wait as a spare.

A spare is the process of a rank's next start, begun early: it has the command and the variables of
that start, and imports torch before it runs its program (runtime/nodes/supervisor/spares.py). The
program must not see a difference. So a spare ends itself, and the rank is started plainly, unless
torch finds in it what it found in the rank that runs: variables, processors, libraries for threads
and linear algebra, and itself. Python imports here only what torch imports anyway.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Dict, NoReturn, Optional, Set

    State = Dict[str, Any]

NAME = "batchml-spare"  # of a process that waits, in /proc/PID/comm; also in runtime/processes.py
_COMPARED = ("torch", "changed", "affinity", "flags", "libraries")
_LIBRARIES = ("omp", "mkl", "blas", "blis", "lapack", "tbb", "cuda", "cudnn", "nccl", "amdhip")
_OPENED = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty",
           "/dev/pts/", "/dev/shm/")  # fmt: skip


def watch(stacks: str) -> None:
    """Note the state in which this process imports torch, if it does, for its spares."""
    sys.meta_path.insert(0, _Watch(lambda state: _write(stacks, state)))


def wait(order: str, stacks: str) -> None:
    """Import torch, and return once the supervisor starts this rank. Raises or ends the process if
    its program must not run.

    `order`: the descriptor of the connection to the supervisor, and the file of the rank's state.
    """
    descriptor, _, path = order.partition(" ")
    channel = int(descriptor)
    os.set_inheritable(channel, False)
    kill_first = _replace("/proc/self/oom_score_adj", "1000")
    _replace("/proc/self/oom_score_adj", kill_first)  # raises if it could not be undone later
    _replace("/proc/self/oom_score_adj", "1000")
    state = _import_torch(path)
    name = _replace("/proc/self/comm", NAME)
    os.write(channel, b"ready")
    if os.read(channel, 16) != b"go":
        _end()
    os.close(channel)
    _replace("/proc/self/comm", name)
    _replace("/proc/self/oom_score_adj", kill_first)
    _write(stacks, state)


class _Watch:
    """A finder that calls `see` with the state just before torch is imported."""

    def __init__(self, see: Callable[[State], None]) -> None:
        self._see, self._pid, self._before = see, os.getpid(), dict(os.environ)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        # Other callers, such as importlib.util.find_spec, only ask whether torch is installed.
        if name != "torch" or sys._getframe(2).f_code.co_name != "_find_and_load_unlocked":
            return None
        sys.meta_path.remove(self)
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                self._tell(spec)
                return spec
        return None

    def _tell(self, spec: Any) -> None:
        try:
            if os.getpid() == self._pid:  # not in a fork
                self._see(_state(spec.origin, self._before))
        except Exception:
            pass  # the program runs anyway, and has no spare


def _state(origin: Optional[str], before: Dict[str, str]) -> State:
    """What torch may find when it is imported. `before`: the variables at the start."""
    now = dict(os.environ)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        paths = {line.split(None, 5)[-1].strip() for line in file if "/lib" in line}
    return {
        "torch": origin,
        "numpy": "numpy" in sys.modules,
        "changed": sorted(k for k in {**before, **now} if before.get(k) != now.get(k)),
        "affinity": sorted(os.sched_getaffinity(0)),
        "flags": sys.getdlopenflags(),
        "libraries": sorted(filter(_is_counted, paths)),
        "path": list(sys.path),
    }


def _is_counted(library: str) -> bool:
    name = os.path.basename(library)
    return name.startswith("lib") and any(word in name for word in _LIBRARIES)


def _import_torch(path: str) -> State:
    """Import torch as the rank did that wrote the file; end the process where that is impossible.

    Returns the state of that rank.
    """
    import ast

    with open(path, encoding="utf-8") as file:
        expected: State = ast.literal_eval(file.read())

    def compare(state: State) -> None:
        if any(state[name] != expected[name] for name in _COMPARED):
            _end()

    before = set(sys.modules)
    if expected["numpy"]:
        __import__("numpy")
    sys.meta_path.insert(0, _Watch(compare))
    __import__("torch")
    imported = {name.partition(".")[0] for name in set(sys.modules) - before}
    own = [folder for folder in expected["path"] if folder not in sys.path]
    if _has_opened_device() or any(_hides(folder or ".", imported) for folder in own):
        _end()
    return expected


def _has_opened_device() -> bool:
    """Whether torch, or a plugin that it loads, has opened a device, which the ranks still use."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # of the list itself
            continue
        if target.startswith("/dev/") and not target.startswith(_OPENED):
            return True
    return False


def _hides(folder: str, imported: Set[str]) -> bool:
    """Whether a folder that only the program has in `sys.path` has one of the imported modules: the
    program would have used its own.
    """
    for name in os.listdir(folder) if os.path.lexists(folder) else []:
        module, dot, _ = name.partition(".")
        is_module = dot or os.path.exists(os.path.join(folder, name, "__init__.py"))
        if is_module and module in imported:
            return True
    return False


def _write(stacks: str, state: State) -> None:
    path = os.path.join(os.path.dirname(stacks), f"torch-{os.getpid()}")
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.write(repr(state))
    os.replace(path + ".tmp", path)


def _replace(path: str, text: str) -> str:
    """Write into a file of the kernel; return what it had."""
    with open(path, encoding="utf-8") as file:
        before = file.read().strip()
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return before


def _end() -> NoReturn:
    os._exit(0)
