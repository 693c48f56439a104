"""What travels with a run is put where it will be fetched: a folder here, or a bucket in AWS.

Everything is named by its content, so what is there need not be sent again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from batchml.errors import ConfigError
from batchml.ops.code import CodeArchive, size_words

# What Linux takes as one argument, or one variable, of a program, and as all of them together.
# Source: execve(2), "Limits on size of arguments and environment".
MAX_WORD = 131_071
_TOLD = 3  # names in one line
MAX_WORDS = 1_900_000  # of 2 MiB, which the variables of the image and of Batch share


class Shelf(Protocol):
    """A place of things by name; `aws.objects.Bucket` is one."""

    def has(self, key: str) -> bool: ...

    def put(self, key: str, data: bytes) -> None: ...


class FolderShelf:
    """A folder of this machine, made when something is put there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, key: str) -> bool:
        return (self._folder / key).exists()

    def put(self, key: str, data: bytes) -> None:
        from batchml.runtime.storage.files import write_atomically

        path = self._folder / key
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(str(path), data)
        except OSError as error:
            error.filename = error.filename or str(path)  # a full disk does not say which
            raise


def deliver(shelf: Shelf, key: str, make: Callable[[], bytes]) -> bool:
    """Put what `make` makes on the shelf, unless it is there; whether it had to be sent.

    It costs one question and, for something new, one sending.
    """
    if shelf.has(key):
        return False
    shelf.put(key, make())
    return True


def told(archive: CodeArchive, sent: bool) -> str:
    """A line for people about the code of a run."""
    how = "" if sent else ", unchanged and not sent again"
    kept = archive.ignored
    more = f" and {len(kept) - _TOLD} more" if len(kept) > _TOLD else ""
    left = f" Ignored, and so left out: {', '.join(kept[:_TOLD])}{more}." if kept else ""
    return f"Code: {archive.describe()}{how}.{left}"


def check_words(where: str, command: list[str], env: dict[str, str]) -> None:
    """Raises ConfigError for a command or variables that Linux would not start a program with."""
    mistakes = []
    for place, word in enumerate(command):
        if len(word.encode()) > MAX_WORD:
            mistakes.append(f"command: word {place + 1} has {_size(word)}; {_LIMIT}")
    for name, value in env.items():
        if len(f"{name}={value}".encode()) > MAX_WORD:
            what = "params, together" if name == "BATCHML_PARAMS" else f"env.{name}"
            mistakes.append(f"{what}: {_size(value)}; {_LIMIT}")
    total = sum(len(word.encode()) + 9 for word in (*command, *env, *env.values()))
    if not mistakes and total > MAX_WORDS:
        mistakes.append(
            f"command and env: {size_words(total)}; Linux takes about 2 MiB together. Put long "
            f"lists into a file of the job's folder."
        )
    if mistakes:
        raise ConfigError(where, mistakes)


_LIMIT = "Linux takes 128 KiB at most. Put it into a file of the job's folder."


def _size(text: str) -> str:
    return size_words(len(text.encode()))
