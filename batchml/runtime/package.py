"""The source files of batchml: how they are started, and which are copied into images."""

import os
import sys
from functools import lru_cache
from typing import Dict, List, Sequence

_PROGRAM = """#!/bin/sh
exec "{python}" -I -c 'import sys
sys.path.insert(0, "{root}")
from {module} import main
words = sys.argv[1:]
sys.exit(main({arguments}))' "$@"
"""


def package_root() -> str:
    """The folder that must be in `sys.path` for `import batchml`."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def module_command(
    python: str, module: str, flags: Sequence[str] = ("-I",), root: str = ""
) -> List[str]:
    """The words that run `main()` of one of our modules in a new Python; its arguments follow.

    `root`: the folder with the package, by default this one's. `-I`: the program uses neither the
    PYTHONPATH nor the other Python variables of its caller, nor modules of the working folder.
    """
    start = f"import sys; sys.path.insert(0, sys.argv.pop(1)); from {module} import main; main()"
    return [python, *flags, "-c", start, root or package_root()]


def drop_working_folder() -> None:
    """Remove the working folder from `sys.path`, where `python -m` puts it.

    The job may have modules in it that hide those of the standard library, such as a `queue.py`.
    """
    if sys.path[:1] in ([""], [os.getcwd()]):
        del sys.path[0]


def write_program(path: str, module: str, arguments: str) -> None:
    """Write an executable file that exits with `main(ARGUMENTS)` of one of our modules.

    `arguments`: Python source, in which `words` is the list of words on the command line; without
    single quotes. The program uses neither the PYTHONPATH nor the other Python variables of its
    caller.
    """
    program = _PROGRAM.format(
        python=sys.executable, root=package_root(), module=module, arguments=arguments
    )
    with open(path, "w", encoding="utf-8") as file:
        file.write(program)
    os.chmod(path, 0o755)


def sources(whole: bool = False) -> Dict[str, bytes]:
    """The source files of `batchml.runtime`: path below the image's module folder -> content.

    With `whole`, the files of all of batchml, for the image of sweep controllers.
    """
    return dict(_read_sources(whole))


@lru_cache(maxsize=None)
def _read_sources(whole: bool) -> Dict[str, bytes]:
    """Read once: of a thousand submissions of one process, this would take a third."""
    if whole:
        return _files_below("batchml")
    first = "batchml/__init__.py"
    return {first: _read(os.path.join(package_root(), first)), **_files_below("batchml/runtime")}


def _files_below(top: str) -> Dict[str, bytes]:
    root, files = package_root(), {}
    for folder, folders, names in os.walk(os.path.join(root, top)):
        # `share` has data that is installed with the package: images, jobs, templates.
        folders[:] = sorted(name for name in folders if name not in ("__pycache__", "share"))
        below = os.path.relpath(folder, root)
        for name in sorted(names):
            if name.endswith(".py"):
                files[os.path.join(below, name)] = _read(os.path.join(folder, name))
    return files


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
