"""In a rank of a run with spares, for `sitecustomize`: note how it imports torch, or be a spare.

A spare is the process of a rank's next start, begun early: it has the command and the variables of
that start, and imports torch before it runs its program (runtime/nodes/supervisor/spares.py). So it
ends itself, and the rank is started plainly, unless torch finds in it what it found in the rank
that runs. It cannot know what the program will do before `import torch` the next time.
Python imports here only what torch imports anyway.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Set

    State = Dict[str, Any]

ORDER = "spare-order"  # a file beside that of the stacks; also in spares.py
WAITING = "batchml-spare-w"  # also in runtime/processes.py
_NOT_COMPARED = ("modules", "path")
_OPENED = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty",
           "/dev/pts/", "/dev/shm/")  # fmt: skip


def watch(stacks: str) -> None:
    """Note the state in which this process imports torch, if it does, for its spare."""
    if hasattr(sys, "stdlib_module_names"):  # Python 3.10
        sys.meta_path.insert(0, _Watch(stacks))


def wait(stacks: str) -> int:
    """Import torch, and return once the supervisor starts this rank, what `begin` takes.

    Raises or ends the process if its program must not run.
    """
    with open(os.path.join(os.path.dirname(stacks), ORDER), encoding="utf-8") as file:
        descriptor, supervisor, path = file.read().split(" ", 2)
    channel = int(descriptor)
    os.set_inheritable(channel, False)
    if os.getppid() != int(supervisor):
        os._exit(1)
    _import_torch(path)
    _rename(WAITING)
    os.write(channel, b"ready %d" % os.getpid())
    if os.read(channel, 16) != b"go":
        os._exit(1)
    return channel


def begin(channel: int) -> None:
    """Look like a rank that was started plainly."""
    try:
        os.close(channel)
        _rename(os.path.basename(sys.orig_argv[0]))
    except Exception:
        pass  # the program runs anyway


def _rename(name: str) -> None:
    """Let this process, and each of its threads, have the name in /proc/PID/comm."""
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm", "w", encoding="utf-8") as file:
            file.write(name)


class _Watch:
    """A finder that writes the state just before torch is imported."""

    def __init__(self, stacks: str) -> None:
        self._stacks, self._pid, self._before = stacks, os.getpid(), dict(os.environ)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        try:
            # Other callers, such as importlib.util.find_spec, only ask whether torch is installed.
            if sys._getframe(2).f_code.co_name != "_find_and_load_unlocked":
                return None
            place = sys.meta_path.index(self)
        except ValueError:
            return None
        del sys.meta_path[place]
        self._note()
        # The caller, which walks along the list, would leave out the next finder.
        for finder in sys.meta_path[place:]:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                return spec
        return None

    def _note(self) -> None:
        try:
            if os.getpid() != self._pid:  # a fork
                return
            path = os.path.join(os.path.dirname(self._stacks), f"torch-{self._pid}")
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            with open(os.open(path + ".tmp", flags, 0o600), "w", encoding="utf-8") as file:
                file.write(repr(_state(self._before)))
            os.replace(path + ".tmp", path)
        except Exception:
            pass  # the program runs anyway, and has no spare


class _NotFound:
    """The last finder: it notes the modules that no other has found."""

    def __init__(self) -> None:
        self.names: Set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        self.names.add(name)


def _state(before: Dict[str, str]) -> State:
    """What torch may find when it is imported. `before`: the variables at the start."""
    import warnings

    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        maps = [line.split(None, 5) for line in file]
    known = {*sys.stdlib_module_names, "numpy"}
    names = [name for name, module in list(sys.modules.items()) if module is not None]
    finders = [each if isinstance(each, type) else type(each) for each in sys.meta_path]
    return {
        "executable": sys.executable,
        "changed": sorted(set(before.items()) ^ set(os.environ.items())),
        "affinity": sorted(os.sched_getaffinity(0)),
        "flags": sys.getdlopenflags(),
        "libraries": sorted({m[5].strip() for m in maps if "x" in m[1] and m[5:]}),
        "others": sorted({_top(name) for name in names} - known - {"batchml"}),
        "stubs": sorted(name for name, module in list(sys.modules.items()) if module is None),
        "finders": [f"{each.__module__}.{each.__qualname__}" for each in finders],
        "filters": repr(warnings.filters),
        "modules": [name for name in names if _top(name) in known],
        "path": list(sys.path),
    }


def _import_torch(path: str) -> None:
    """Import torch as the rank did that wrote the file; raise or end the process where that is
    impossible.
    """
    import ast

    variables, before = dict(os.environ), set(sys.modules)
    with open(path, encoding="utf-8") as file:
        expected: State = ast.literal_eval(file.read())
    for name in expected["modules"]:
        __import__(name)
    state = _state(variables)
    if any(state[key] != expected[key] for key in state if key not in _NOT_COMPARED):
        os._exit(1)
    missing = _NotFound()
    sys.meta_path.append(missing)
    __import__("torch")
    sys.meta_path.remove(missing)
    own = len(expected["path"]) - len(sys.path)  # the program has put these folders in front
    if own < 0 or expected["path"][own:] != sys.path or _has_opened_device():
        os._exit(1)
    imported = {_top(name) for name in set(sys.modules) - before}
    for folder in expected["path"][:own]:
        if folder != sys.path[0] and _hides(folder or ".", imported, missing.names):
            os._exit(1)


def _top(name: str) -> str:
    return name.partition(".")[0]


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


def _hides(folder: str, imported: Set[str], missing: Set[str]) -> bool:
    """Whether a folder that only the program has in `sys.path` has a module that torch imports, or
    would import if it were there, or the description of a package, which may have plugins.
    """
    names: List[str] = os.listdir(folder) if os.path.lexists(folder) else []
    for name in names:
        module, dot, _ = name.partition(".")
        is_module = dot or os.path.exists(os.path.join(folder, name, "__init__.py"))
        if module in missing or (is_module and module in imported):
            return True
    return any(name.endswith((".egg-info", ".dist-info")) for name in names)
