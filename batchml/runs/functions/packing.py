"""Pack a Python function and its arguments for a run, or name the part that cannot be sent.

A function of a module is sent by its name: the module is in the code of the run, or in its image. A
function of a script, a notebook, or of another function is sent with its compiled code and the
values that it uses (`by value`), as cloudpickle does it. Nothing is sent here.
"""

import inspect
import io
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from msgspec import Struct

from batchml.errors import ConfigError, UsageError
from batchml.jobs.code import MAX_BYTES
from batchml.model.names import to_name
from batchml.model.run import MAX_ARRAY
from batchml.runtime.entry.folders import size_text
from batchml.runtime.protocol.function import (
    ARGUMENTS,
    DESCRIPTION,
    FOLDER,
    FUNCTION,
    FunctionCall,
    python_version,
)

_MAX_DEPTH = 6  # objects inside each other that are searched for the part that cannot be sent
_MAX_PARTS = 1_000  # members of one object that are searched
_MAX_MISTAKES = 5  # after which no more are looked for


class PackedFunction(Struct, frozen=True):
    """A function that is ready to be sent. `files` are added to the code of the run.

    `modules` are the files below the folder, relative to it, that the function needs.
    """

    call: FunctionCall
    files: dict[str, bytes]
    modules: tuple[str, ...] = ()

    @property
    def run_name(self) -> str:
        return to_name(self.call.name.rpartition(".")[2].strip("<>"))


def check_items(function: Callable[..., Any], count: int) -> None:
    """Raise UsageError for more items than an array has children."""
    if count > MAX_ARRAY:
        raise UsageError(
            f"map: {count:,} items, and an array has {MAX_ARRAY:,} children at most. Let "
            f"{function_name(function)} take several items, or call map for each part of the list."
        )


def pack_function(
    function: Callable[..., Any],
    items: Sequence[tuple[Any, ...]],
    folder: Path,
    limit: int = MAX_BYTES,
) -> PackedFunction:
    """Pack a function and one tuple of arguments for each item.

    `folder` is sent as the code of the run; the pickles may have `limit` bytes together. Raises
    ConfigError with every part that cannot be sent, and for arguments that are too large.
    """
    name = function_name(function)
    modules: set[str] = set()
    mistakes = _argument_mistakes(function, items[0])
    parts: list[bytes] = []
    by_value = False
    for number, value in enumerate((function, *items)):
        try:
            pickled = _pickle(value)
        except Exception as error:
            index = number - 1 if len(items) > 1 else None
            mistakes += _describe_failure(name, value, error, number > 0, index)
            if len(mistakes) >= _MAX_MISTAKES:
                break
            continue
        parts.append(pickled.data)
        modules |= pickled.modules
        by_value = by_value or pickled.by_value
    files, outside = _find_modules(modules, folder)
    mistakes += [_outside_text(name, module, path, folder) for module, path in outside]
    if not mistakes:
        mistakes += _size_mistakes(name, items, parts, limit)
    if mistakes:
        raise ConfigError(f"The function {name}", mistakes)
    call = FunctionCall(
        name=name,
        python=python_version(),
        by_value=by_value,
        search=_search_path(folder),
        lengths=[len(part) for part in parts[1:]],
    )
    packed = {
        f"{FOLDER}/{DESCRIPTION}": call.to_json(),
        f"{FOLDER}/{FUNCTION}": parts[0],
        f"{FOLDER}/{ARGUMENTS}": b"".join(parts[1:]),
        **_pickler_sources(),
    }
    return PackedFunction(call, packed, files)


def _argument_mistakes(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[str]:
    """The mistake in arguments that the function does not take: what calling it would say."""
    try:
        # The signature of a decorator's own function: what it passes on is its own affair.
        taken = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return []  # as for many functions in C
    try:
        taken.bind(*arguments)
    except TypeError as error:
        return [f"{error}: its arguments are {taken}."]
    return []


def function_name(function: Any) -> str:
    """`train`, `Trainer.fit`, `<lambda>`; the name of the function inside a partial."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", "") or type(function).__qualname__
    return str(name).replace("<locals>.", "")


def read_packed(code: Path) -> dict[str, bytes]:
    """The files that `pack_function` added to the code of a run, which was unpacked at `code`."""
    return {
        path.relative_to(code).as_posix(): path.read_bytes()
        for path in (code / FOLDER).rglob("*")
        if path.is_file()
    }


# --- Pickling -------------------------------------------------------------------------------------


class _Pickled(Struct, frozen=True):
    """`modules` are the names of the modules that the pickle refers to."""

    data: bytes
    modules: frozenset[str]
    by_value: bool


@cache
def _pickler() -> Any:
    """cloudpickle's pickler, which also notes what it meets. Imported for functions only."""
    import cloudpickle

    class NotingPickler(cloudpickle.Pickler):  # type: ignore[misc]
        def __init__(self, stream: io.BytesIO) -> None:
            super().__init__(stream)
            self.modules: set[str] = set()
            self.by_value = False

        def reducer_override(self, obj: Any) -> Any:
            reduced = super().reducer_override(obj)
            if isinstance(obj, ModuleType):
                self.modules.add(obj.__name__)
            elif isinstance(obj, type | FunctionType):
                if reduced is NotImplemented:
                    self.modules.add(obj.__module__ or "")
                else:
                    self.by_value = True
            return reduced

    return NotingPickler


def _pickle(value: Any) -> _Pickled:
    stream = io.BytesIO()
    pickler = _pickler()(stream)
    pickler.dump(value)
    return _Pickled(stream.getvalue(), frozenset(pickler.modules), pickler.by_value)


@cache
def _pickler_sources() -> dict[str, bytes]:
    """The files of cloudpickle, which the run needs to load the function."""
    import cloudpickle

    folder = Path(cloudpickle.__file__).parent
    return {
        f"{FOLDER}/cloudpickle/{path.name}": path.read_bytes()
        for path in sorted(folder.glob("*.py"))
    }


# --- The part that cannot be sent -----------------------------------------------------------------


def _describe_failure(
    name: str, value: Any, error: Exception, is_argument: bool, index: int | None
) -> Iterator[str]:
    """Yield what cannot be pickled, with its place: at least one line."""
    if not is_argument:
        found = _find_unpicklable(value, _MAX_DEPTH)
        yield _cannot(" of ".join([*found, f"the function {name}"]), error)
        return
    for number, argument in enumerate(value, 1):
        try:
            _pickle(argument)
        except Exception as failure:
            inner = _find_unpicklable(argument, _MAX_DEPTH)
            kind = "" if inner else f" ({type(argument).__name__})"
            item = f"item {index}" if index is not None else f"argument {number}"
            yield _cannot(" of ".join([*inner, f"{item}{kind} of {name}"]), failure)


def _cannot(what: str, error: Exception) -> str:
    hint = "Make it inside the function, or pass what it is made from."
    return f"{what} cannot be sent: {error}. {hint}"


def _find_unpicklable(value: Any, depth: int) -> list[str]:
    """The way from the innermost part that cannot be pickled out to `value`, as words.

    Empty if no part of it fails by itself.
    """
    if depth == 0:
        return []
    for label, part in _parts(value):
        try:
            _pickle(part)
        except Exception:
            inner = _find_unpicklable(part, depth - 1)
            kind = "" if inner else f" ({type(part).__name__})"
            return [*inner, f"{label}{kind}"]
    return []


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value that are pickled with it, each with its name."""
    if isinstance(value, partial):
        yield from _named("the partial's argument", value.keywords)
        yield from (("the partial's function", value.func), ("a partial's argument", value.args))
    elif isinstance(value, Mapping):
        yield from list(_named("the key", value))[:_MAX_PARTS]
    elif isinstance(value, list | tuple | set | frozenset):
        for number, each in enumerate(list(value)[:_MAX_PARTS]):
            yield f"element {number}", each
    elif inspect.ismethod(value):
        yield "its object", value.__self__
    elif isinstance(value, FunctionType):
        yield from _function_parts(value)
    else:
        yield from _named("the attribute", getattr(value, "__dict__", {}))


def _function_parts(function: FunctionType) -> Iterator[tuple[str, Any]]:
    try:
        used = inspect.getclosurevars(function)
    except ValueError:  # a closure variable that has no value yet
        return
    yield from _named("the closure variable", used.nonlocals)
    yield from _named("the global variable", used.globals)
    yield from _named("the default of", function.__kwdefaults__ or {})
    yield "a default", function.__defaults__


def _named(kind: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        yield f"{kind} {str(name)!r}", value


# --- Sizes ----------------------------------------------------------------------------------------


def _size_mistakes(
    name: str, items: Sequence[tuple[Any, ...]], parts: Sequence[bytes], limit: int
) -> Iterator[str]:
    total = sum(map(len, parts))
    if total <= limit:
        return
    what = f"{name} with the values that it uses" if len(parts[0]) > limit else "the arguments"
    if len(parts[0]) <= limit and len(items) == 1:
        sizes = {number: len(_pickle(each).data) for number, each in enumerate(items[0], 1)}
        what = f"argument {max(sizes, key=sizes.__getitem__)}"
        total = max(sizes.values())
    yield (
        f"{what}: {size_text(total)}; at most {size_text(limit)} are sent with a run, code "
        "included. Pass the path of a file, such as one below BATCHML_DATA_DIR."
    )


# --- Modules --------------------------------------------------------------------------------------


def _find_modules(names: set[str], folder: Path) -> tuple[tuple[str, ...], list[tuple[str, Path]]]:
    """The files of modules below `folder`, relative to it; and modules that are nowhere in a run.

    Modules of the standard library and of installed packages are in neither.
    """
    root = folder.resolve()
    inside: list[str] = []
    outside: list[tuple[str, Path]] = []
    for name in sorted(names - {"__main__", ""}):
        if name.partition(".")[0] == "batchml":
            continue  # its runtime is in every image
        file = getattr(sys.modules.get(name), "__file__", None)
        if not file or _is_installed(Path(file)):
            continue
        path = Path(file).resolve()
        if path.is_relative_to(root):
            inside.append(path.relative_to(root).as_posix())
        else:
            outside.append((name, path))
    return tuple(inside), outside


def _is_installed(file: Path) -> bool:
    """Whether a module belongs to Python or to an installed package."""
    if {"site-packages", "dist-packages"} & set(file.parts):
        return True
    kinds = ("stdlib", "platstdlib")
    return any(file.is_relative_to(sysconfig.get_path(kind)) for kind in kinds)


def _outside_text(name: str, module: str, path: Path, folder: Path) -> str:
    return (
        f"{name} uses the module {module}, {path}, which is neither below {folder}, the folder "
        "that is sent, nor an installed package. Client(folder=...) sends another folder."
    )


def _search_path(folder: Path) -> list[str]:
    """The folders of `sys.path` that are sent, relative to `folder`."""
    root = folder.resolve()
    found = []
    for each in sys.path:
        path = Path(each or os.curdir).resolve()
        if path.is_relative_to(root) and not _is_installed(path):
            found.append(path.relative_to(root).as_posix())
    return list(dict.fromkeys(found))
