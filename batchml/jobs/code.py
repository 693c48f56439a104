"""The code package of a run: the files of a folder in an archive that is named by its content.

Files that ignore files exclude are left out, and files that look like secrets are refused. A
package that is in the store already is not sent again.
"""

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from batchml.clock import Clock
from batchml.config.project import repository_root
from batchml.errors import AccessError, ConfigError
from batchml.jobs.ignore import IGNORE_FILE, IgnoreRules, default_rules, looks_secret, read_rules
from batchml.jobs.written import WRITTEN, is_outputs_rule, read_written
from batchml.runtime.entry.folders import size_text

if TYPE_CHECKING:
    from batchml.runtime.storage.store import Store

MAX_BYTES = 256 * 1024**2  # of all files; data belongs in the workspace

_MAX_NAMED = 5  # files in one message
DEFAULT = "a default of batchml"  # why caches and environments are not sent


class CodeArchive(Struct, frozen=True):
    """A tar archive of regular files. The same files give the same bytes, and so the same name."""

    digest: str  # SHA-256 of `plain`: compressed bytes depend on the version of zlib
    plain: bytes  # not compressed
    files: int  # their number
    size: int  # bytes of all files
    left_out: tuple[str, ...]  # links that lead out of the folder, pipes, devices
    # Files and folders (`name/`) that ignore files exclude, without those that batchml wrote.
    ignored: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.digest}.tar.gz"

    @property
    def data(self) -> bytes:
        """The compressed bytes, made at each access: most packages are in the store already."""
        return gzip.compress(self.plain, compresslevel=6, mtime=0)

    def describe(self) -> str:
        """`14 files, 48 KiB (6b0e3f2c)`"""
        files = "1 file" if self.files == 1 else f"{self.files} files"
        return f"{files}, {size_text(self.size)} ({self.digest[:8]})"


class CodeFiles(Struct, frozen=True):
    """The files of a folder, as paths below it."""

    files: tuple[str, ...]  # that belong to the package
    left_out: tuple[str, ...]  # links that lead out of the folder, pipes, devices
    allowed: frozenset[str]  # files that a line with `!` of `.batchmlignore` includes
    # Path (`name/` for a folder) -> name of the ignore file that excludes it, or WRITTEN. Caches
    # and environments, which are ignored by default, are not listed.
    ignored: dict[str, str] = {}


def find_files(folder: Path, without: Path | None = None) -> CodeFiles:
    """Find the files of the package: all but caches, environments, ignored files and `without`.

    `without` is the state folder. Files that batchml has written are left out, too.

    `.gitignore` files, also those of the folders above in the same repository, have git's meaning.
    Rules of `.batchmlignore` come after them. Raises OSError.
    """
    search = _Search(folder.resolve(), without.resolve() if without else None)
    search.run()
    return CodeFiles(
        tuple(sorted(search.files)),
        tuple(printable_name(name) for name in sorted(search.left_out)),
        frozenset(search.allowed),
        dict(sorted(search.ignored.items())),
    )


def find_exclusions(folder: Path, name: str, without: Path | None = None) -> dict[str, str]:
    """The rules that keep one file of a folder out of the package: path -> ignore file, or WRITTEN.

    `name`: the path of an existing file below `folder`. A line `!PATH` in the folder's
    `.batchmlignore` for each of the paths, which are the file or folders above it (`name/`), sends
    the file, unless a `.batchmlignore` of a folder below excludes it. Raises OSError.
    """
    return _Search(folder.resolve(), without.resolve() if without else None).exclusions(name)


def pack(
    folder: Path,
    without: Path | None = None,
    include_secrets: bool = False,
    more: Mapping[str, bytes] = {},
    memory: "PackMemory | None" = None,
) -> CodeArchive:
    """Archive the files of `find_files`, and those of `more`: path -> content.

    A link to a file below the folder becomes that file. A folder that is unchanged since `memory`
    has its archive is not read again. Raises ConfigError if the files are too large, cannot be
    read, or are named like secrets.
    """
    try:
        found = find_files(folder, without)
        files = [name for name in found.files if name not in more]
        key, began = (str(folder), include_secrets), memory.clock.now() if memory else 0.0
        content = _FolderContent(found, {name: _state(f"{folder}/{name}") for name in files})
        known = memory.find(key, content) if memory is not None and not more else None
        if known is not None:
            return known
        secrets = [] if include_secrets else _secrets(found)
        if secrets:
            raise ConfigError(str(folder), [_secrets_text(secrets)])
        sizes = {name: state.size for name, state in content.states.items()}
        sizes |= {name: len(data) for name, data in more.items()}
        if sum(sizes.values()) > MAX_BYTES:
            raise ConfigError(str(folder), [_too_large(sizes)])
        plain, packed = _tar(folder, files, more)
    except OSError as error:
        raise ConfigError(
            str(folder),
            [
                f"code: {printable_name(str(error.filename or folder))} cannot be read "
                f"({error.strerror}), and a run gets the whole folder. Make it readable, exclude "
                f"it in {IGNORE_FILE}, or move it elsewhere."
            ],
        ) from error
    digest = hashlib.sha256(plain).hexdigest()
    ignored = tuple(printable_name(name) for name, why in found.ignored.items() if why != WRITTEN)
    archive = CodeArchive(digest, plain, len(packed), sum(packed), found.left_out, ignored)
    if memory is not None and not more:
        memory.keep(key, content, archive, began)
    return archive


class _FileState(NamedTuple):
    """What tells a changed file from an unchanged one. Times in ns since the epoch."""

    size: int = 0
    modified: int = 0
    changed: int = 0  # also of its mode, and not to be set by programs
    device: int = 0
    inode: int = 0


def _state(path: str) -> _FileState:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return _FileState()  # deleted after it was found
    return _FileState(
        found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_dev, found.st_ino
    )


class _FolderContent(NamedTuple):
    found: CodeFiles
    states: dict[str, _FileState]  # by path below the folder


_SETTLED = 2.0  # seconds; the times of some file systems have no smaller steps
_KEPT = 4  # archives
_MOST_KEPT = 16 * 1024**2  # bytes of each


class PackMemory:
    """The last archives of a program that submits the same folders again and again.

    A folder is unchanged if it has the same files in the same states. A file that was changed less
    than `_SETTLED` ago could be changed again without another time, so its folder's archive is not
    kept. Source: Git, "Use of index and Racy Git problem".
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._kept: dict[tuple[str, bool], tuple[_FolderContent, CodeArchive]] = {}

    def find(self, key: tuple[str, bool], content: _FolderContent) -> CodeArchive | None:
        """The archive of a folder with this content; None if it is not known."""
        before, archive = self._kept.get(key, (None, None))
        return archive if before == content else None

    def keep(
        self, key: tuple[str, bool], content: _FolderContent, archive: CodeArchive, read_at: float
    ) -> None:
        """Remember an archive. The states of its files were read at `read_at` (seconds since the
        epoch), and then the files.
        """
        self._kept.pop(key, None)
        newest = max((max(each[1:3]) for each in content.states.values()), default=0)
        if len(archive.plain) > _MOST_KEPT or newest / 1e9 > read_at - _SETTLED:
            return
        others = list(self._kept.items())  # other threads may change it
        self._kept = dict([*others[1 - _KEPT :], (key, (content, archive))])


def _tar(
    folder: Path, files: Sequence[str], more: Mapping[str, bytes] = {}
) -> tuple[bytes, list[int]]:
    """Return the archive and the sizes of its files. Files that were deleted meanwhile are missing.

    The archive depends on names, executable bits and contents, and not on times and owners.
    """
    buffer, sizes = io.BytesIO(), list[int]()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in (*files, *sorted(more)):
            try:
                content = more[name] if name in more else (folder / name).read_bytes()
            except FileNotFoundError:
                continue
            member = tarfile.TarInfo(name)
            member.size = len(content)
            is_program = name not in more and os.access(folder / name, os.X_OK)
            member.mode = 0o755 if is_program else 0o644
            tar.addfile(member, io.BytesIO(content))
            sizes.append(len(content))
    return buffer.getvalue(), sizes


def printable_name(name: str) -> str:
    """Escape a file's name if it has control characters."""
    return name if name.isprintable() else ascii(name)


def _secrets(found: CodeFiles) -> list[str]:
    return [name for name in found.files if name not in found.allowed and looks_secret(name)]


def list_names(names: Sequence[str], limit: int) -> str:
    """Return `a, b and 3 more`: at most `limit` names."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(printable_name, names[:limit])) + more


def _secrets_text(names: list[str]) -> str:
    return (
        f"code: {list_names(names, _MAX_NAMED)}: named like secrets, and everybody who can read "
        f"the environment's code could read them. A line in {IGNORE_FILE} excludes a file. The "
        f"line `!{printable_name(names[0])}` there includes a file that is no secret; "
        "--include-secrets includes all. Secrets belong in [secrets] of job.toml."
    )


def _too_large(sizes: dict[str, int]) -> str:
    largest = max(sizes, key=sizes.__getitem__)
    return (
        f"code: {sum(sizes.values()) // 1024**2} MiB in {len(sizes)} files; at most "
        f"{MAX_BYTES // 1024**2} MiB are sent with a run. The largest is "
        f"{printable_name(largest)}. Keep data elsewhere (BATCHML_DATA_DIR), exclude it in "
        f"{IGNORE_FILE}, or run from a smaller folder (in a job.toml: code)."
    )


class _Search:
    """Walks a folder, and sorts its files into the fields of `CodeFiles`."""

    def __init__(self, root: Path, without: Path | None) -> None:
        self._root = root
        self._without = without
        self._written = read_written(without)
        self._defaults = default_rules()
        top = repository_root(str(root))
        above = Path(top) if top else None
        # Rules match paths below the top of the repository, whose folders have rules, too.
        self._prefix = "" if above is None else _posix(root.relative_to(above))
        self.git = IgnoreRules()
        self.own = IgnoreRules()
        self._folders: list[tuple[str, IgnoreRules, IgnoreRules, bool, bool]] = []
        if above is not None:
            self.git = read_rules(above / ".git" / "info" / "exclude", self.git)
            for folder in reversed(root.parents):
                if folder == above or above in folder.parents:
                    base = _posix(folder.relative_to(above))
                    self.git = read_rules(folder / ".gitignore", self.git, base)
        self.files: list[str] = []
        self.left_out: list[str] = []
        self.allowed: list[str] = []
        self.ignored: dict[str, str] = {}

    def run(self) -> None:
        # Without recursion: folders may be deeper than Python's stack.
        self._folders = [("", self.git, self.own, False, False)]
        while self._folders:
            folder = self._folders.pop()
            try:
                self._scan(*folder)
            except FileNotFoundError:
                if folder[0] == "":
                    raise
                # else the folder was deleted after it was found

    def _scan(
        self, below: str, git: IgnoreRules, own: IgnoreRules, is_allowed: bool, is_fetched: bool
    ) -> None:
        """Sort a folder's entries. `is_allowed`: a line with `!` includes the folder.

        `is_fetched`: the folder has outputs of a run, which only such a line includes.
        """
        with os.scandir(self._root / below) as found:
            entries = {entry.name: entry for entry in found}
        git, own, is_fetched = self._read_rules(below, entries, git, own, is_fetched)
        for entry in entries.values():
            name = f"{below}/{entry.name}" if below else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            why, included = self._judge(name, is_folder, git, own, is_allowed, is_fetched)
            if why:
                if why != DEFAULT:
                    self.ignored[name + "/" * is_folder] = why
            elif is_folder:
                if Path(entry.path) != self._without:
                    self._folders.append((name, git, own, included, is_fetched))
            elif self._is_file_inside(entry):
                self.files.append(name)
                if included:
                    self.allowed.append(name)
            else:
                self.left_out.append(name)

    def exclusions(self, name: str) -> dict[str, str]:
        """What keeps one file out, from the top down, as if a line `!` included each of these."""
        found: dict[str, str] = {}
        git, own, is_allowed, is_fetched = self.git, self.own, False, False
        parts = name.split("/")
        for depth in range(len(parts)):
            below, path = "/".join(parts[:depth]), "/".join(parts[: depth + 1])
            names = os.listdir(self._root / below)
            git, own, is_fetched = self._read_rules(below, names, git, own, is_fetched)
            is_folder = (self._root / path).is_dir()
            why, included = self._judge(path, is_folder, git, own, is_allowed, is_fetched)
            if why:
                found[path + "/" * is_folder] = why
            is_allowed = included or bool(why)
        return found

    def _read_rules(
        self,
        below: str,
        names: Container[str],
        git: IgnoreRules,
        own: IgnoreRules,
        is_fetched: bool,
    ) -> tuple[IgnoreRules, IgnoreRules, bool]:
        """Add the rules of a folder, which has files of these names."""
        folder, base = self._root / below, self._path(below)
        if ".gitignore" in names:
            git = read_rules(folder / ".gitignore", git, base)
        if IGNORE_FILE in names:
            # The rule that `get` wrote yields to lines of the user in the folders above.
            if is_outputs_rule(folder / IGNORE_FILE):
                is_fetched = True
            else:
                own = read_rules(folder / IGNORE_FILE, own, base)
        return git, own, is_fetched

    def _judge(
        self,
        name: str,
        is_folder: bool,
        git: IgnoreRules,
        own: IgnoreRules,
        is_allowed: bool,
        is_fetched: bool,
    ) -> tuple[str, bool]:
        """Why a file or folder is left out, or ""; and whether a line with `!` includes it."""
        path, last = self._path(name), name.rpartition("/")[2]
        own_match = own.match(path, is_folder)
        by_default = bool(self._defaults.match(last, is_folder))
        if own_match or (own_match is None and (by_default or git.match(path, is_folder))):
            return DEFAULT if by_default else IGNORE_FILE if own_match else ".gitignore", False
        included = own_match is False or (is_allowed and own_match is None)
        real = os.path.join(self._root, name)
        if not included and (is_fetched or self._written.has(real, is_folder=is_folder)):
            return WRITTEN, False
        return "", included

    def _path(self, name: str) -> str:
        return "/".join(filter(None, (self._prefix, name)))

    def _is_file_inside(self, entry: os.DirEntry[str]) -> bool:
        if not entry.is_symlink():
            return entry.is_file()
        try:
            return entry.is_file() and Path(entry.path).resolve().is_relative_to(self._root)
        except OSError:  # a link to itself, or into a folder that cannot be read
            return False


def _posix(path: Path) -> str:
    text = path.as_posix()
    return "" if text == "." else text


def put_once(store: "Store", key: str, make: Callable[[], bytes]) -> bool:
    """Put the bytes that `make` returns into the store, unless it has the key.

    Return whether they were sent. An existing key needs one call of the store, a new key two. Who
    may only write sends them again: the same key has the same bytes.
    """
    with suppress(AccessError):
        if store.has(key):
            return False
    store.put(key, make())
    return True


def describe_sent(archive: CodeArchive, sent: bool) -> str:
    """Make the message about the code package of a run."""
    how = "" if sent else ", unchanged and not sent again"
    ignored = f" Ignored: {list_names(archive.ignored, 3)}." if archive.ignored else ""
    return f"Code: {archive.describe()}{how}.{ignored}"


# --- The size of a command ------------------------------------------------------------------------


# Linux's limits in bytes for one argument or variable of a program, and for all of them together.
# Source: execve(2), "Limits on size of arguments and environment".
MAX_WORD = 131_071
MAX_WORDS = 1_900_000  # of 2 MiB; the image and AWS Batch add variables


def check_command_size(where: str, command: list[str], env: dict[str, str]) -> None:
    """Raise ConfigError if a command and variables exceed Linux's limits for a program."""
    mistakes = []
    for number, word in enumerate(command, 1):
        if len(word.encode()) > MAX_WORD:
            mistakes.append(f"command: word {number} has {_size_of_text(word)}; {_LIMIT}")
    for name, value in env.items():
        if len(f"{name}={value}".encode()) > MAX_WORD:
            key = "params, together" if name == "BATCHML_PARAMS" else f"env.{name}"
            mistakes.append(f"{key}: {_size_of_text(value)}; {_LIMIT}")
    total = sum(len(word.encode()) + 9 for word in (*command, *env, *env.values()))
    if not mistakes and total > MAX_WORDS:
        mistakes.append(
            f"command and env: {size_text(total)}; Linux allows about 2 MiB together. Put long "
            f"lists into a file of the job's folder."
        )
    if mistakes:
        raise ConfigError(where, mistakes)


_LIMIT = "Linux allows 128 KiB at most. Put it into a file of the job's folder."


def _size_of_text(text: str) -> str:
    return size_text(len(text.encode()))
