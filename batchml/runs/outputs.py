"""Copy the outputs or the checkpoints of a run to a folder; unchanged files are not copied again.

The program of the run chooses the names of the files, and is not trusted: no name leads out of the
folder, and links are neither followed nor created.
"""

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct

from batchml.context import Context, open_cache
from batchml.errors import NotFound, UsageError
from batchml.jobs.code import list_names
from batchml.jobs.ignore import IGNORE_FILE
from batchml.jobs.written import (
    is_outputs_rule,
    note_written,
    outputs_run,
    read_written,
    write_outputs_rule,
)
from batchml.model.names import short_id, to_name
from batchml.model.numbering import original_numbers
from batchml.runs.names import bare_id
from batchml.runtime.checkpoint.layout import REMOVING, SAVING
from batchml.runtime.entry.folders import size_text
from batchml.runtime.transfer.tree import Tree

if TYPE_CHECKING:
    from batchml.aws.s3 import BucketStore
    from batchml.model.run import Run
    from batchml.runs.search import FoundRun

PARTIAL_SUFFIX = ".batchml-part"  # the suffix of a file that is being copied
MAX_LEFT_OUT = 20  # names of files that were left out
MAX_NAMED = 5  # names of files in an error
MAX_PARALLEL = 8  # files that are copied at a time
ROUND = 64  # files; after an error the current round is completed
_OUR_FILE = ".batchml-"  # the beginning of names in checkpoint folders that no program writes
OUTPUT, CHECKPOINTS = "output", "checkpoints"  # folders of a run
MAX_PATH = 4095  # bytes; PATH_MAX of Linux, less the NUL at its end


class OutputEntry(NamedTuple):
    """One file of the outputs: its path below their folder, its size in bytes, and its time."""

    name: str
    size: int
    at: int  # the time of the last change, in ns since the epoch


class Unreadable(Exception):
    """A file cannot be read: the run may have deleted it. The text is the reason."""


class OutputSource(Protocol):
    """Outputs of a run, in a folder or a bucket.

    `left_out` has a line for each file that `entries` had to leave out, with the reason.
    """

    @property
    def left_out(self) -> Sequence[str]: ...

    def entries(self) -> Iterable[OutputEntry]:
        """All files."""

    def fetch(self, entry: OutputEntry, path: Path) -> None:
        """Write the content of a file to `path`, which does not exist. Raises Unreadable."""


class CopiedOutputs(Struct, frozen=True):
    """The result of a copy. `left_out` has a line "NAME: REASON" for each file."""

    files: int = 0
    size: int = 0  # bytes of all of them
    unchanged: int = 0
    left_out: tuple[str, ...] = ()


class FolderOutputs:
    """Outputs on this machine. Links and devices are left out: they may lead anywhere.

    Paths are opened one folder at a time, because the run may replace a folder by a link at any
    moment.
    """

    def __init__(self, root: Path) -> None:
        self._tree = Tree(str(root))
        self.left_out: list[str] = []

    def entries(self) -> Iterator[OutputEntry]:
        left = [""]
        with closing(_LastFolder(self._tree)) as last:
            while left:  # not os.walk, whose recursion fails for very deep folders
                folders = []
                for below, found in self._inside(last, left.pop()):
                    if stat.S_ISDIR(found.st_mode):
                        folders.append(below)
                    elif stat.S_ISREG(found.st_mode):
                        yield OutputEntry(below, found.st_size, found.st_mtime_ns)
                    else:
                        self.left_out.append(f"{below}: not a file")
                left += reversed(folders)

    def _inside(self, last: "_LastFolder", folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """The entries of a folder, sorted by name, with their paths below the root."""
        try:
            at = last.open(folder)
            for name in sorted(os.listdir(at)):
                # The run may have deleted the file.
                with suppress(FileNotFoundError):
                    about = os.stat(name, dir_fd=at, follow_symlinks=False)
                    yield os.path.join(folder, name), about
        except OSError as error:
            self.left_out.append(f"{folder or '.'}: {error.strerror}")

    def fetch(self, entry: OutputEntry, path: Path) -> None:
        try:
            source = self._tree.open(entry.name)
        except OSError as error:
            raise Unreadable(error.strerror) from error
        with os.fdopen(source, "rb") as reading:
            if not stat.S_ISREG(os.fstat(source).st_mode):
                raise Unreadable("not a file")
            with open(path, "wb") as writing:
                shutil.copyfileobj(reading, writing, 1024**2)


class _LastFolder:
    """Opens folders, and keeps the last one open: the next folder is often directly below it."""

    def __init__(self, tree: Tree) -> None:
        self._tree, self._path, self._at = tree, "", -1

    def open(self, folder: str) -> int:
        above, _, name = folder.rpartition("/")
        if self._at >= 0 and above == self._path:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            found = os.open(name, flags, dir_fd=self._at)
        else:
            with self._tree.folder(folder) as at:
                found = os.dup(at)
        self.close()
        self._path, self._at = folder, found
        return found

    def close(self) -> None:
        if self._at >= 0:
            os.close(self._at)
        self._at = -1


class ChildrenOutputs:
    """The outputs of several children or nodes, by folder name; "" for outputs without a folder."""

    def __init__(self, sources: Mapping[str, OutputSource]) -> None:
        self._sources = sources
        self._shadowed: list[str] = []

    @property
    def left_out(self) -> list[str]:
        return self._shadowed + [
            _joined(folder, text)
            for folder, source in self._sources.items()
            for text in source.left_out
        ]

    def entries(self) -> Iterator[OutputEntry]:
        for folder, source in self._sources.items():
            for entry in source.entries():
                if not folder and entry.name.partition("/")[0] in self._sources:
                    self._shadowed.append(
                        f"{entry.name}: the outputs of another node have this folder"
                    )
                else:
                    yield entry._replace(name=_joined(folder, entry.name))

    def fetch(self, entry: OutputEntry, path: Path) -> None:
        folder, _, name = entry.name.partition("/")
        if folder in self._sources:
            self._sources[folder].fetch(entry._replace(name=name), path)
        elif "" in self._sources:
            self._sources[""].fetch(entry, path)
        else:
            raise Unreadable("it does not exist")


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def copy_files(
    source: OutputSource, dest: Path, check: Callable[[Sequence[str]], None] = lambda _: None
) -> Iterator[OutputEntry | CopiedOutputs]:
    """Copy new and changed files; yield each copied file, and at the end the result.

    A file gets its name when it is complete: after an interruption the same call copies the rest.
    `check` gets the names of the files that will be replaced, before anything is copied. Raises
    OSError if the folder cannot be written, and what `check` raises.
    """
    from concurrent.futures import ThreadPoolExecutor  # late: `show` copies nothing

    files = size = unchanged = 0
    left_out: list[str] = []
    changed: list[OutputEntry] = []
    dest.mkdir(parents=True, exist_ok=True)
    for entry in source.entries():
        why = name_problem(entry.name) or _path_problem(dest, entry.name)
        if why:
            left_out.append(f"{entry.name}: {why}")
        elif _is_unchanged(dest / entry.name, entry):
            unchanged += 1
        else:
            changed.append(entry)
    check([each.name for each in changed if os.path.lexists(dest / each.name)])
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        # In rounds, so that an error ends the copy soon.
        for start in range(0, len(changed), ROUND):
            some = changed[start : start + ROUND]
            reasons = pool.map(lambda entry: _copy_file(source, dest, entry), some)
            for entry, why in zip(some, reasons, strict=True):
                if why:
                    left_out.append(f"{entry.name}: {why}")
                    continue
                files, size = files + 1, size + entry.size
                yield entry
    left_out += source.left_out
    yield CopiedOutputs(files, size, unchanged, tuple(left_out))


def _copy_file(source: OutputSource, dest: Path, entry: OutputEntry) -> str:
    """Copy one file; "", or the reason why it could not be copied."""
    path = dest / entry.name
    part = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        _make_folders(dest, entry.name)
        part.unlink(missing_ok=True)  # left by an interrupted call, or a link
        source.fetch(entry, part)
        os.utime(part, ns=(entry.at, entry.at))
        os.replace(part, path)
    except Unreadable as error:
        return str(error)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        return "one of the outputs has this name as a folder, another as a file"
    return ""


def _make_folders(dest: Path, name: str) -> None:
    """Create the folders above a file. The recursion of Path.mkdir fails for deep paths."""
    if (dest / name).parent.is_dir():
        return
    at = dest
    for part in name.split("/")[:-1]:
        at = at / part
        at.mkdir(exist_ok=True)


def name_problem(name: str) -> str:
    """Why a name cannot be copied as a file; "" for a valid name."""
    parts = name.split("/")
    if name.startswith("/") or "\0" in name or any(part in ("", ".", "..") for part in parts):
        return "not the name of a file below a folder"
    if name.endswith(PARTIAL_SUFFIX):
        return f"names that end with {PARTIAL_SUFFIX} are for incomplete copies"
    if any(
        len(part.encode("utf-8", "surrogateescape")) > 255 - len(PARTIAL_SUFFIX) for part in parts
    ):
        return "the name is too long"
    return ""


def _path_problem(dest: Path, name: str) -> str:
    """Why a file cannot be written to its path in `dest`; "" if it can."""
    if len(os.fsencode(dest / name)) + len(PARTIAL_SUFFIX) > MAX_PATH:
        return "the path is too long"
    *folders, last = name.split("/")
    at = dest
    for part in folders:
        at = at / part
        if at.is_symlink() or (at.exists() and not at.is_dir()):
            return f"{at} is in the way"
    return f"{at / last} is a folder" if (at / last).is_dir() else ""


def _is_unchanged(path: Path, entry: OutputEntry) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    same = (found.st_size, found.st_mtime_ns) == (entry.size, entry.at)
    return stat.S_ISREG(found.st_mode) and same


# --- Where outputs lie ----------------------------------------------------------------------------


_STORE = r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(.+)"


class BucketOutputs:
    """Outputs in a bucket, below a prefix that ends with a slash."""

    left_out: Sequence[str] = ()

    def __init__(self, bucket: "BucketStore", prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix

    def entries(self) -> Iterator[OutputEntry]:
        for item in self._bucket.list_objects(self._prefix):
            name = item.key.removeprefix(self._prefix)
            # The AWS console creates an object "NAME/" for a folder.
            if name and not name.endswith("/"):
                yield OutputEntry(name, item.size, round(item.modified * 1000) * 1_000_000)

    def fetch(self, entry: OutputEntry, path: Path) -> None:
        if not self._bucket.get_file(self._prefix + entry.name, str(path)):
            raise Unreadable("it was deleted meanwhile")


def copy_outputs(
    context: Context, found: "FoundRun", dest: Path, part: str = OUTPUT
) -> Iterable[OutputEntry | CopiedOutputs]:
    """Copy the outputs of a run to `dest`; yield each copied file, and then the result.

    `part` is the folder of the run to copy: OUTPUT or CHECKPOINTS.

    The outputs of a child of an array go to a folder that is named by its number. The copies are
    excluded from the code of later runs. Raises NotFound for a run without outputs, and UsageError
    if a file is where the folder would be, or if it has the outputs of another run or files of the
    user's own that would be replaced.
    """
    refuse_no_folder(dest)
    refuse_other_outputs(context, found, dest)
    source = open_outputs(context, found, part)
    run = "" if _is_partial(found) else found.job_id
    if not os.path.lexists(dest):
        return _copy_to_new_folder(source, dest, run)
    return _copy_into_folder(context, source, dest, run, dest / default_folder(found, part))


def refuse_no_folder(dest: Path) -> None:
    """Raise UsageError if a file is where the folder, or one above it, would be."""
    for path in (dest, *dest.parents):
        if os.path.lexists(path) and not path.is_dir():
            raise UsageError(f"{path} is not a folder. Give a folder, or none.")


def refuse_other_outputs(context: Context, found: "FoundRun", dest: Path) -> None:
    """Raise UsageError if `dest` has the outputs of another run: they would be mixed.

    The children of a partial rerun may join the outputs of their array.
    """
    if _is_partial(found):
        return
    made_for = outputs_run(dest / IGNORE_FILE)
    other = made_for or read_written(context.home.root).other_run(dest, found.job_id)
    if other not in ("", found.job_id):
        delete = ", or delete this one first" if made_for else ""
        own = dest.parent if made_for else dest
        raise UsageError(
            f"{dest} has the outputs of another run, {other}: nothing was copied. "
            f"Name another folder, such as {own / default_folder(found)}{delete}."
        )


def default_folder(found: "FoundRun", part: str = OUTPUT) -> str:
    """The name of the folder to which a run's outputs or checkpoints are copied by default."""
    name = f"{found.name}-{short_id(found.shown_id)}"
    return to_name(name if part == OUTPUT else f"{name}-checkpoints")


def _is_partial(found: "FoundRun") -> bool:
    return bool(original_numbers(found.run, found.record))


def _copy_into_folder(
    context: Context, source: OutputSource, dest: Path, job_id: str, free: Path
) -> Iterator[OutputEntry | CopiedOutputs]:
    """`free`: a folder for the message that this one has files of the user's own."""
    is_ours = is_outputs_rule(dest / IGNORE_FILE)
    written = read_written(context.home.root)

    def refuse_own_files(names: Sequence[str]) -> None:
        real = os.path.realpath(dest)
        own = [each for each in names if not written.has(f"{real}/{each}", is_folder=False)]
        if own and not is_ours:
            raise UsageError(
                f"{dest} has files of your own with the names of outputs: "
                f"{list_names(own, MAX_NAMED)}. Nothing was copied. Name another folder, such as "
                f"{free}."
            )

    copied = []
    try:
        for each in copy_files(source, dest, refuse_own_files):
            if isinstance(each, OutputEntry):
                copied.append(dest / each.name)
            yield each
    finally:
        if copied and not is_ours:
            note_written(context.home, copied, run=job_id, into=dest)


def _copy_to_new_folder(
    source: OutputSource, dest: Path, job_id: str
) -> Iterator[OutputEntry | CopiedOutputs]:
    dest.mkdir(parents=True)
    own = dest / IGNORE_FILE
    write_outputs_rule(own, job_id)
    for each in copy_files(source, dest):
        yield each
        if each == CopiedOutputs():  # no outputs: no folder, either
            own.unlink()
            dest.rmdir()


def open_outputs(context: Context, found: "FoundRun", part: str = OUTPUT) -> OutputSource:
    """The source of a run's outputs, or of its checkpoints. Raises NotFound."""
    source = (
        _folder_source(context, found.job_id, part, found.run)
        if context.settings.is_local
        else _bucket_outputs(context, found, part)
    )
    source = source if part == OUTPUT else CompleteCheckpoints(source)
    first = original_numbers(found.run, found.record)
    is_child = bare_id(found.job_id) != found.job_id
    if not first or is_child:
        return source
    return (
        ChildrenOutputs({str(first[0]): source})
        if len(first) == 1
        else RenumberedOutputs(source, first)
    )


class CompleteCheckpoints:
    """The files of a checkpoint folder, without those of checkpoints that are not complete."""

    def __init__(self, source: OutputSource) -> None:
        self.source = source

    @property
    def left_out(self) -> Sequence[str]:
        return self.source.left_out

    def entries(self) -> Iterator[OutputEntry]:
        for entry in self.source.entries():
            parts = entry.name.split("/")
            if not any(each.startswith((_OUR_FILE, SAVING, REMOVING)) for each in parts):
                yield entry

    def fetch(self, entry: OutputEntry, path: Path) -> None:
        self.source.fetch(entry, path)


class RenumberedOutputs:
    """The outputs of a partial rerun of an array, by the numbers of the first array."""

    def __init__(self, source: OutputSource, first: Sequence[int]) -> None:
        self._source = source
        self._to_first = {str(index): str(number) for index, number in enumerate(first)}
        self._to_own = {number: index for index, number in self._to_first.items()}

    @property
    def left_out(self) -> list[str]:
        return [_with_renamed_folder(text, self._to_first) for text in self._source.left_out]

    def entries(self) -> Iterator[OutputEntry]:
        for entry in self._source.entries():
            yield entry._replace(name=_with_renamed_folder(entry.name, self._to_first))

    def fetch(self, entry: OutputEntry, path: Path) -> None:
        self._source.fetch(
            entry._replace(name=_with_renamed_folder(entry.name, self._to_own)), path
        )


def _with_renamed_folder(path: str, folders: Mapping[str, str]) -> str:
    folder, slash, name = path.partition("/")
    return f"{folders.get(folder, folder)}{slash}{name}"


def _folder_source(context: Context, job_id: str, part: str, run: "Run | None") -> OutputSource:
    runs = context.home.runs
    whole, is_node, _ = job_id.partition("#")
    # All nodes on one machine write to the folder of the run.
    for name in (job_id, whole) if is_node else (job_id,):
        if (runs / name / part).is_dir():
            return FolderOutputs(runs / name / part)
    parts = {
        _part_folder(folder.name.removeprefix(job_id)): FolderOutputs(folder / part)
        for folder in runs.glob(f"{job_id}[:#]*")
        if (folder / part).is_dir()
    }
    if not parts:
        raise NotFound("Outputs of run", job_id, [], _no_outputs_reason(run))
    return ChildrenOutputs(
        {name: parts[name] for name in sorted(parts, key=lambda it: (len(it), it))}
    )


def describe_checkpoints(context: Context, job_id: str, shown: str = "") -> str:
    """The checkpoints of a run on this machine, and the command that copies them; "" without any.

    `2 files, 80 KiB, the newest is last.pt (batchml get 3f2a1b0c --checkpoints)`; a checkpoint that
    is a folder is named by it. `shown`: the id for users, if it is another.
    """
    if not context.settings.is_local:
        return ""
    try:
        source = _folder_source(context, job_id, CHECKPOINTS, None)
    except NotFound:
        return ""
    entries = list(CompleteCheckpoints(source).entries())
    if not entries:
        return ""
    newest = max(entries, key=lambda each: each.at).name
    count = "1 file" if len(entries) == 1 else f"{len(entries):,} files"
    size = size_text(sum(each.size for each in entries))
    word = f"{short_id(shown or job_id)}{context.env_option}"
    newest = os.path.dirname(newest) or newest
    return f"{count}, {size}, the newest is {newest} (batchml get {word} --checkpoints)"


def _part_folder(part: str) -> str:
    """The folder for the outputs of a child `:3` or a node `#1`, below the folder of the run.

    The main node writes to the folder of the run: often no other node writes outputs.
    """
    kind, number = part[:1], part[1:]
    if kind == ":":
        return number
    return f"node-{number}" if number and number != "0" else ""


def _no_outputs_reason(run: "Run | None") -> str:
    if run is None or run.started_at or run.children:
        return "Its folder was deleted."
    return "It never began." if run.status.is_terminal else "It has not begun yet."


def _bucket_outputs(context: Context, found: "FoundRun", part: str) -> OutputSource:
    from batchml.aws.s3 import BucketStore

    store = found.run.environment.get("BATCHML_STORE", "") if found.run else ""
    if not store and found.record and found.record.key:
        bucket = open_cache(context).outputs().get("BucketName", "")
        store = f"s3://{bucket}/runs/{found.record.key}" if bucket else ""
    parts = re.fullmatch(_STORE, store)
    if parts is None:
        raise NotFound(
            "Outputs of run", found.job_id, [],
            "Its image was not built by batchml, or its environment has no bucket: the files in "
            "BATCHML_OUTPUT_DIR were not kept.",
        )  # fmt: skip
    below = _part_folder(found.job_id[len(bare_id(found.job_id)) :])
    prefix = "/".join(filter(None, (parts[2], part, below)))
    return BucketOutputs(BucketStore(context.connect(), parts[1]), f"{prefix}/")
