"""The code that travels with a run: a folder as an archive named by its content."""

import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path

from msgspec import Struct

from batchml.errors import ConfigError
from batchml.ops.ignore import OWN_FILE, Rules, looks_secret, never, read_rules

MAX_BYTES = 256 * 1024**2  # of all files; data belongs into the workspace, not beside the code

_TOLD = 5  # names in one message


class CodeArchive(Struct, frozen=True):
    """A tar of regular files. The same files make the same bytes, and so the same name.

    `left_out` names, for people, what is not a file below the folder: links that lead out of it,
    pipes, devices. `ignored` names what lines of ignore files keep here, folders with a `/`.
    """

    digest: str  # of `plain`: another zlib packs the same content to other bytes
    plain: bytes
    files: int
    size: int  # bytes of all files
    left_out: tuple[str, ...]
    ignored: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.digest}.tar.gz"

    @property
    def data(self) -> bytes:
        """The bytes that travel. Packed anew each time: only who has to send them needs them."""
        return gzip.compress(self.plain, compresslevel=6, mtime=0)

    def describe(self) -> str:
        """`14 files, 48 KiB (6b0e3f2c)`, for people."""
        files = "1 file" if self.files == 1 else f"{self.files} files"
        return f"{files}, {size_words(self.size)} ({self.digest[:8]})"


class Found(Struct, frozen=True):
    """What there is below a folder, by path. `allowed` are files that a line takes in by name.

    `ignored` says of what an ignore file keeps here which one does; folders have a `/` at the end.
    Caches and environments, which never travel, are not among them.
    """

    files: tuple[str, ...]
    left_out: tuple[str, ...]
    allowed: frozenset[str]
    ignored: dict[str, str] = {}


def find(folder: Path, without: Path | None = None) -> Found:
    """The files that travel, in order; not caches, environments, `without`, and what is ignored.

    `.gitignore` counts as it does for git, that of the folders above included where they are one
    repository; `.batchmlignore` has the last word. Raises OSError.
    """
    search = _Search(folder.resolve(), without.resolve() if without else None)
    search.run()
    return Found(
        tuple(sorted(search.files)),
        tuple(shown(name) for name in sorted(search.left_out)),
        frozenset(search.allowed),
        dict(sorted(search.ignored.items())),
    )


def pack(folder: Path, without: Path | None = None, include_secrets: bool = False) -> CodeArchive:
    """Archive the files that `find` finds.

    A link to a file below the folder travels as that file. Raises ConfigError when the files are
    too large to send along with each run, cannot be read, or are named as secrets are.
    """
    try:
        found = find(folder, without)
        secrets = [] if include_secrets else _secrets(found)
        if secrets:
            raise ConfigError(str(folder), [_refused(secrets)])
        sizes = {name: _size(folder / name) for name in found.files}
        if sum(sizes.values()) > MAX_BYTES:
            raise ConfigError(str(folder), [_too_large(sizes)])
        plain, packed = _tar(folder, found.files)
    except OSError as error:
        raise ConfigError(
            str(folder),
            [
                f"code: {shown(str(error.filename or folder))} cannot be read ({error.strerror}), "
                f"and the whole folder travels with a run. Make it readable, name it in "
                f"{OWN_FILE}, or keep it elsewhere."
            ],
        ) from error
    digest = hashlib.sha256(plain).hexdigest()
    ignored = tuple(map(shown, found.ignored))
    return CodeArchive(digest, plain, len(packed), sum(packed), found.left_out, ignored)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # gone since it was found


def _tar(folder: Path, files: tuple[str, ...]) -> tuple[bytes, list[int]]:
    """The archive and the sizes in it, without files that have gone since they were found.

    Names, modes and bytes decide the archive; times and owners do not.
    """
    buffer, sizes = io.BytesIO(), list[int]()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in files:
            try:
                content = (folder / name).read_bytes()
            except FileNotFoundError:
                continue
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755 if os.access(folder / name, os.X_OK) else 0o644
            tar.addfile(member, io.BytesIO(content))
            sizes.append(len(content))
    return buffer.getvalue(), sizes


def size_words(size: int) -> str:
    """`48 KiB`: bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size} {unit}"
        size = -(-size // 1024)
    return f"{size} GiB"


def shown(name: str) -> str:
    """A file's name for people: those that would play tricks on a terminal are quoted."""
    return name if name.isprintable() else ascii(name)


def _secrets(found: Found) -> list[str]:
    return [name for name in found.files if name not in found.allowed and looks_secret(name)]


def _refused(names: list[str]) -> str:
    more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    told = ", ".join(map(shown, names[:_TOLD]))
    return (
        f"code: {told}{more}: named as secrets are, and whoever may read the environment's code "
        f"could read them. A line in {OWN_FILE} keeps a file here; one that is no secret travels "
        f"with the line `!{shown(names[0])}` there, or all of them with --include-secrets. Secrets "
        f"belong into [secrets] of a job.toml."
    )


def _too_large(sizes: dict[str, int]) -> str:
    largest = max(sizes, key=sizes.__getitem__)
    return (
        f"code: {sum(sizes.values()) // 1024**2} MiB in {len(sizes)} files; at most "
        f"{MAX_BYTES // 1024**2} MiB travel with a run. The largest is {shown(largest)}. Keep "
        f"data elsewhere (BATCHML_DATA_DIR), name it in {OWN_FILE}, or run from a smaller folder "
        f"(in a job.toml: code)."
    )


class _Search:
    """The files below a folder that travel, and what else there is."""

    def __init__(self, root: Path, without: Path | None) -> None:
        self._root = root
        self._without = without
        self._never = never()
        above = _repository(root)
        # Rules see paths from the repository's top, because those of the folders above do.
        self._prefix = "" if above is None else _posix(root.relative_to(above))
        self.git = Rules()
        self.own = Rules()
        self._folders: list[tuple[str, Rules, Rules, bool]] = []
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
        # Not by recursion: folders may lie deeper than Python's stack.
        self._folders = [("", self.git, self.own, False)]
        while self._folders:
            folder = self._folders.pop()
            try:
                self._look(*folder)
            except FileNotFoundError:
                if folder[0] == "":
                    raise
                # else it has gone since it was found

    def _look(self, below: str, git: Rules, own: Rules, is_allowed: bool) -> None:
        folder, base = self._root / below, self._path(below)
        with os.scandir(folder) as found:
            entries = {entry.name: entry for entry in found}
        if ".gitignore" in entries:
            git = read_rules(folder / ".gitignore", git, base)
        if OWN_FILE in entries:
            own = read_rules(folder / OWN_FILE, own, base)
        for entry in entries.values():
            name = f"{below}/{entry.name}" if below else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            path = self._path(name)
            said = own.verdict(path, is_folder)
            if self._is_ignored(path, entry.name, is_folder, said, git):
                if not self._never.verdict(entry.name, is_folder):
                    self.ignored[name + "/" * is_folder] = OWN_FILE if said else ".gitignore"
                continue
            takes_in = said is False or (is_allowed and said is None)
            if is_folder:
                if Path(entry.path) != self._without:
                    self._folders.append((name, git, own, takes_in))
            elif self._is_file_inside(entry):
                self.files.append(name)
                if takes_in:
                    self.allowed.append(name)
            else:
                self.left_out.append(name)

    def _is_ignored(
        self, path: str, name: str, is_folder: bool, said: bool | None, git: Rules
    ) -> bool:
        if said is not None:
            return said
        return bool(git.verdict(path, is_folder) or self._never.verdict(name, is_folder))

    def _path(self, name: str) -> str:
        return "/".join(filter(None, (self._prefix, name)))

    def _is_file_inside(self, entry: os.DirEntry[str]) -> bool:
        if not entry.is_symlink():
            return entry.is_file()
        try:
            return entry.is_file() and Path(entry.path).resolve().is_relative_to(self._root)
        except OSError:  # a link to itself, or to where we may not look
            return False


def _repository(folder: Path) -> Path | None:
    """The top of the git repository that a folder is in."""
    for place in (folder, *folder.parents):
        if (place / ".git").exists():
            return place
    return None


def _posix(path: Path) -> str:
    text = path.as_posix()
    return "" if text == "." else text


def keep(archive: CodeArchive, folder: Path) -> Path:
    """Put the archive into a folder of archives, unless it is there; its path."""
    from batchml.ops.delivery import FolderShelf, deliver

    deliver(FolderShelf(folder), archive.name, lambda: archive.data)
    return folder / archive.name
