"""Call a function that came with the code of the run: `python -m batchml.runtime.function NAME`.

The function's result, or the exception that it raises, is written to the outputs of the run. The
exit code is 0 if the function returned, and 1 if it raised.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module
from types import TracebackType
from typing import Any, BinaryIO, Callable, Optional

from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR
from batchml.runtime.protocol.function import (
    ARGUMENTS,
    DESCRIPTION,
    ENDED,
    FOLDER,
    FUNCTION,
    RAISED,
    RESULT,
    RETURNED,
    FunctionCall,
    ResultHeader,
    python_version,
)
from batchml.runtime.protocol.variables import RuntimeEnv, is_main_node

_VALUE_MARK = b"cloudpickle.cloudpickle"  # in each pickle that has code


class CannotCall(Exception):
    """The function cannot be loaded here. The text says why, and what to change."""


def call(folder: str, environ: Mapping[str, str]) -> int:
    """Call the function in the code folder `folder`, write its result, and return the exit code."""
    env = RuntimeEnv.read(environ)
    writer = ResultWriter(env.output_dir if is_main_node(environ) else "", env.attempt)
    writer.clear()
    try:
        function, arguments = load(folder, env.array_index or 0)
    except CannotCall as error:
        writer.write_end(ENDED, str(error))
        print(f"batchml: {error}", file=sys.stderr)
        return CONFIGURATION_ERROR
    try:
        value = function(*arguments)
    except SystemExit as end:
        writer.write_end(ENDED, f"the function ended the program: sys.exit({end.code!r})")
        raise
    except BaseException as error:
        # Without this frame, which the user did not write.
        text = _format(error, error.__traceback__ and error.__traceback__.tb_next)
        print(text, end="", file=sys.stderr)
        writer.write_exception(error, text)
        return 1
    try:
        writer.write_value(RETURNED, "", value)
    except Exception as error:
        text = f"its result, a {type(value).__name__}, cannot be pickled: {error}"
        writer.write_end(ENDED, text)
        print(f"batchml: {text}", file=sys.stderr)
        return 1
    return 0


def _format(error: BaseException, where: Optional[TracebackType]) -> str:
    return "".join(traceback.format_exception(type(error), error, where))


# --- Loading --------------------------------------------------------------------------------------


def load(folder: str, index: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Load the function, and the arguments for child `index`. Raises CannotCall."""
    parts = os.path.join(folder, FOLDER)
    try:
        with open(os.path.join(parts, DESCRIPTION), "rb") as file:
            found = FunctionCall.read(file.read())
    except (OSError, ValueError, TypeError) as error:
        raise CannotCall(
            f"the code of this run has no function ({error}): submit it from Python again"
        ) from error
    if found.by_value and found.python != python_version():
        raise CannotCall(
            f"{found.name} was sent by Python {found.python}, and this image has Python "
            f"{python_version()}, which cannot load its code. Choose an image with Python "
            f"{found.python}, or move the function to a module of the folder."
        )
    if found.item(index) >= len(found.lengths):
        raise CannotCall(f"{found.name} has arguments for {len(found.lengths)} children only")
    sys.path[:0] = [os.path.join(folder, each) for each in found.search]
    _use_pickler(parts)
    try:
        with open(os.path.join(parts, FUNCTION), "rb") as file:
            function = _unpickle(file)
        with open(os.path.join(parts, ARGUMENTS), "rb") as file:
            file.seek(found.position(index))
            return function, _unpickle(file)
    except ImportError as error:
        raise CannotCall(
            f"{found.name} cannot be loaded: {error}. A module of the folder may be excluded by "
            "an ignore file; a package belongs in the image."
        ) from error
    except Exception as error:
        raise CannotCall(
            f"{found.name} cannot be loaded: {type(error).__name__}: {error}. The image may have "
            "other versions of its packages."
        ) from error


def _use_pickler(parts: str) -> None:
    """Import the cloudpickle that came with the function, whatever the image has."""
    sys.path.insert(0, parts)
    try:
        import_module("cloudpickle")
    finally:
        sys.path.remove(parts)


def _unpickle(file: BinaryIO) -> Any:
    import pickle

    return pickle.load(file)


# --- The result -----------------------------------------------------------------------------------


class ResultWriter:
    """Writes the result into the folder of the outputs; nothing without one."""

    def __init__(self, folder: str, attempt: int) -> None:
        self._path = os.path.join(folder, RESULT) if folder else ""
        self._attempt = attempt

    def clear(self) -> None:
        """Remove the result of an earlier attempt."""
        if self._path and os.path.lexists(self._path):
            os.unlink(self._path)

    def write_value(self, end: str, text: str, value: Any) -> None:
        """Write a value, or an exception. Raises what pickling it raises."""
        if not self._path:
            return
        data = import_module("cloudpickle").dumps(value)
        self._write(end, text, data, by_value=_VALUE_MARK in data)

    def write_exception(self, error: BaseException, text: str) -> None:
        """Write an exception: with its traceback as text only, if it cannot be pickled."""
        try:
            self.write_value(RAISED, text, error)
        except Exception:
            self.write_end(RAISED, text)

    def write_end(self, end: str, text: str) -> None:
        if self._path:
            self._write(end, text, b"")

    def _write(self, end: str, text: str, data: bytes, by_value: bool = False) -> None:
        part = f"{self._path}.part"
        with open(part, "wb") as file:
            header = ResultHeader(end, self._attempt, python_version(), text, by_value)
            file.write(header.to_line())
            file.write(data)
        os.replace(part, self._path)


if __name__ == "__main__":
    sys.exit(call(os.getcwd(), os.environ))
