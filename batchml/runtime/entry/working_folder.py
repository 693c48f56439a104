"""Keep the files that a command writes to its working folder, which is deleted with the attempt.

Programs that know nothing of batchml save there: `model.pt`, `out/ckpt.pt`, `runs/...`. Their new
and changed files become outputs of the run, below KEPT: while the command runs, each file once it
is at rest, and the others at the end. A later attempt finds them in its working folder again.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import time
from collections.abc import Mapping
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from batchml.runtime.entry.folders import FileState, list_entries, real_path, size_text
from batchml.runtime.entry.outputs import KEPT, OutputSender, StorePoller, output_prefix
from batchml.runtime.protocol.log_marks import error_line
from batchml.runtime.protocol.variables import KEEP, RuntimeEnv, is_main_node, seconds_of, shown_run
from batchml.runtime.storage.backends import open_store

GIB = 1024**3
MAX_NAMED = 3  # files that a message names
MAX_SCANNED = 200_000  # files and folders; of a folder with more nothing is kept
MAX_FILES = 20_000  # kept files

# Not kept unless a pattern names them: they can be made again, or are no results.
CACHES = (
    "__pycache__", ".cache", ".ipynb_checkpoints", ".pytest_cache", ".mypy_cache", ".ruff_cache",
    ".git", ".venv", "venv", "node_modules", ".triton", ".nv",
)  # fmt: skip

# --- Which files ----------------------------------------------------------------------------------


class KeepRule(NamedTuple):
    """`keep` of a job: all new and changed files, those that patterns choose, or none."""

    is_on: bool = True
    patterns: Tuple[str, ...] = ()  # empty: all files except caches

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> KeepRule:
        try:
            found = json.loads(environ.get(KEEP) or "true")
        except ValueError:
            found = True  # a user's mistake costs no files
        if isinstance(found, list):
            return cls(True, tuple(map(str, found)))
        return cls(found is not False)

    def includes(self, name: str) -> bool:
        """Whether a file is kept. Of several patterns that match it, the last one decides."""
        if not self.patterns:
            return True
        for pattern in reversed(self.patterns):
            refuses = pattern.startswith("!")
            if _regex(pattern[refuses:]).fullmatch(name):
                return not refuses
        return False

    def skips_folder(self, name: str) -> bool:
        """Whether no file below a folder of this name is kept."""
        return name.startswith(".batchml") or (not self.patterns and name in CACHES)


_PARTS = re.compile(r"\*\*/|\*\*|\*|\?|\[!?[^]]+\]|.", re.DOTALL)
_compiled: Dict[str, "re.Pattern[str]"] = {}


def _regex(pattern: str) -> re.Pattern[str]:
    """A pattern as in `.gitignore`: without a slash it matches a name in any folder; `**` also
    matches slashes; the name of a folder matches all files below it."""
    if pattern not in _compiled:
        below = pattern.strip("/") if "/" in pattern.strip("/") else f"**/{pattern.strip('/')}"
        text = "".join(_translate(part) for part in _PARTS.findall(below))
        _compiled[pattern] = re.compile(rf"{text}(?:/.*)?", re.DOTALL)
    return _compiled[pattern]


def _translate(part: str) -> str:
    if part.startswith("[") and len(part) > 1:
        text = part.replace("[!", "[^", 1).replace("\\", "\\\\")
        try:
            re.compile(text)
        except re.error:
            text = re.escape(part)
        return text
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return known.get(part) or re.escape(part)


class ChosenFiles(NamedTuple):
    """The files to keep, and those that are too much."""

    kept: Dict[str, FileState]
    left_out: Dict[str, FileState]


def choose_files(files: Mapping[str, FileState], limit: Optional[float]) -> ChosenFiles:
    """Choose files of at most `limit` bytes together, those that changed last first; None: all."""
    kept: Dict[str, FileState] = {}
    left_out: Dict[str, FileState] = {}
    size = 0
    for name in sorted(files, key=lambda name: (-files[name][1], name)):
        has_room = limit is None or size + files[name][0] <= limit
        if has_room and len(kept) < MAX_FILES:
            kept[name] = files[name]
            size += files[name][0]
        else:
            left_out[name] = files[name]
    return ChosenFiles(kept, left_out)


class DiskRoom(NamedTuple):
    """The space of a disk, in bytes."""

    free: float = math.inf
    total: float = math.inf

    @classmethod
    def of(cls, folder: str) -> DiskRoom:
        """Of the disk of a folder, which need not exist yet; unlimited if that is unknown."""
        folder = os.path.abspath(folder)
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        try:
            found = os.statvfs(folder)
        except OSError:
            return cls()
        return cls(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)

    def lacks_for(self, files: Mapping[str, FileState], is_last: bool = False) -> List[str]:
        """The files of which a copy has no room, if they are copied in this order.

        While the command runs, the copy has to leave as much as it takes, because the command may
        save the file again, and a reserve for it and all others that write to this disk.
        """
        room = self.free - (0 if is_last else min(_RESERVE, self.total / 20))
        lacking = []
        for name, (size, _) in files.items():
            if size * (1 if is_last else 2) > room:
                lacking.append(name)
            else:
                room -= size
        return lacking


# --- New and changed files ------------------------------------------------------------------------


class WorkingFolder:
    """Compares the working folder after the command with its content before the command.

    `outliving` are folders that outlive the attempt. If the command works in one of them, nothing
    is lost, and no file counts as changed.
    """

    def __init__(
        self,
        folder: str,
        outliving: Sequence[str],
        before: Optional[Dict[str, FileState]] = None,
        rule: Optional[KeepRule] = None,
    ) -> None:
        """`before`: the content before the command, if another process has read it."""
        self.folder = real_path(folder)
        self._outliving = [real_path(path) for path in outliving if path]
        self._rule = rule or KeepRule()
        # In `/` only new folders count: the others belong to the image.
        self._foreign = set(os.listdir(os.sep)) if self.folder == os.sep else set()
        self.why_unread = ""  # why the last comparison was not possible
        self.before: Optional[Dict[str, FileState]] = None  # None: no file counts as changed
        if not _is_in(self.folder, self._outliving):
            self.before = self._scan() if before is None else before

    def rescan(self) -> None:
        """Compare with the present content."""
        self.before = self._scan()

    def changed(self) -> Optional[Dict[str, FileState]]:
        """The new and changed files, by their path below the folder; None if that cannot be known,
        for the reason in `why_unread`."""
        before, after = self.before, self._scan() if self.before is not None else None
        if before is None or after is None:
            return None
        return {name: state for name, state in after.items() if before.get(name) != state}

    def describe_leftovers(
        self, advice: str = "which is not kept: write {} to BATCHML_OUTPUT_DIR"
    ) -> str:
        """One line that names the files that will be lost, the largest first; empty without any.

        `advice` ends the sentence after "the working folder, "; its {} becomes "it" or "them".
        """
        files = self.changed() or {}
        was, them = ("was", "it") if len(files) == 1 else ("were", "them")
        end = f"{was} written to the working folder, {advice.format(them)}"
        return f"{list_files(files)} {end}" if files else ""

    def _scan(self) -> Optional[Dict[str, FileState]]:
        """Path below the folder -> state, of regular files and of links to those in the folder;
        None if there are too many, or the folder is gone."""
        found: Dict[str, FileState] = {}
        count, left = 0, [""]
        try:
            device = os.lstat(self.folder).st_dev
        except OSError as error:
            self.why_unread = f"the working folder cannot be read: {error_line(error)}"
            return None
        while left:
            below = left.pop()
            for entry in list_entries(os.path.join(self.folder, below)):
                count += 1
                if count > MAX_SCANNED:
                    self.why_unread = (
                        f"the working folder has more than {MAX_SCANNED:,} files: {_ADVICE}"
                    )
                    return None
                if self._rule.skips_folder(entry.name):
                    continue
                path = os.path.join(below, entry.name)
                try:
                    state = entry.stat(follow_symlinks=self._leads_inside(entry))
                except OSError:
                    continue  # removed meanwhile
                if state.st_dev != device:
                    continue  # another volume, which may outlive the attempt
                if stat.S_ISREG(state.st_mode):
                    if self._rule.includes(path):
                        found[path] = (state.st_size, state.st_mtime_ns)
                elif entry.is_dir(follow_symlinks=False) and not self._is_foreign(path):
                    left.append(path)
        return found

    def _is_foreign(self, name: str) -> bool:
        return name in self._foreign or os.path.join(self.folder, name) in self._outliving

    def _leads_inside(self, entry: "os.DirEntry[str]") -> bool:
        """Whether an entry is a link to another file of the folder, such as `latest.pt`."""
        if not entry.is_symlink():
            return False
        return os.path.realpath(entry.path).startswith(self.folder.rstrip(os.sep) + os.sep)


def _is_in(path: str, folders: Sequence[str]) -> bool:
    """Whether a path is one of the folders, or below one of them."""
    return any(
        path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
        for folder in folders
        if folder
    )


def list_files(files: Mapping[str, FileState]) -> str:
    """Name some files, the largest first: `a.pt (4.2 MiB), b (1 B) and 2 more`."""
    names = sorted(files, key=lambda name: (-files[name][0], name))
    words = [f"{name} ({size_text(files[name][0])})" for name in names[:MAX_NAMED]]
    if len(names) > MAX_NAMED:
        words.append(f"{len(names) - MAX_NAMED} more")
    return ", ".join(words[:-1]) + " and " + words[-1] if words[1:] else "".join(words)


def watch_working_folder(
    env: RuntimeEnv, environ: Mapping[str, str], temporary: str, in_aws: bool
) -> Optional[WorkingFolder]:
    """A comparison of the current folder, if the folder is lost with the attempt; else None.

    `temporary` is the attempt's temporary folder.
    """
    if not env.is_run:
        return None
    try:
        folder = os.getcwd()
        if in_aws and os.stat(folder).st_dev != os.stat(os.sep).st_dev:
            return None  # a volume, which may outlive the attempt
    except OSError:
        return None
    data = environ.get("BATCHML_DATA_DIR", "")
    outliving = [env.output_dir, env.checkpoint_dir, env.workspace, data, temporary]
    return WorkingFolder(folder, outliving, rule=KeepRule.read(environ))


# --- Where kept files are -------------------------------------------------------------------------


class KeptPlace(NamedTuple):
    """The place of an attempt's kept files."""

    url: str  # of a store: a folder, or an s3:// prefix
    prefix: str  # of their keys in the store
    limit: Optional[float]  # bytes of all files together; None: no limit
    every: float  # seconds between two polls while the command runs


_RESERVE = 1.0 * GIB  # of the disk of kept files; 5 % of a small one
_UNSETTLED = 2.0  # seconds before a SIGKILL in which a file may have been half written
EVERY = 5.0  # seconds between two polls on one machine
EVERY_IN_AWS = 60.0  # where files are sent

# In AWS a large file costs the time of its upload at the end of the run, and 0.023 USD a GiB and
# month. Of 10,000 children even small files are many.
MAX_OF_RUN = 5.0 * GIB
MAX_OF_CHILD = 1.0 * GIB


def open_keeper(
    working: WorkingFolder,
    env: RuntimeEnv,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    temporary: str,
    sends_outputs: bool,
    others: Sequence[Tuple[str, str]] = (),
) -> Optional[WorkingFolderKeeper]:
    """The keeper of a working folder, which first gets the files of an earlier attempt, or else
    those of another run: `others` are their stores and prefixes.

    None if the job says `keep = false`, or if nothing of the attempt is kept: its folder of outputs
    is in the folder `temporary`, and is not sent. Raises StoreError and OSError.
    """
    is_kept = sends_outputs or not _is_in(env.output_dir, [temporary])
    if working.before is None or not (KeepRule.read(environ).is_on and is_kept and env.output_dir):
        return None
    place = _place(env, environ, sends_outputs)
    if env.attempt > 1 and not is_main_node(environ):
        # Ranks of a program that knows no shared folder expect the file of rank 0 beside them.
        main = {**environ, "AWS_BATCH_JOB_NODE_INDEX": environ["AWS_BATCH_JOB_MAIN_NODE_INDEX"]}
        restore(_place(env, main, sends_outputs), environ, working.folder)
        working.rescan()
    restored = restore(place, environ, working.folder) if env.attempt > 1 else {}
    if restored:
        say(f"batchml notice: from the attempt before: {list_files(restored)}")
    for url, prefix in () if restored else others:
        copied = restore(place._replace(url=url, prefix=prefix), environ, working.folder)
        if copied:
            say(f"batchml notice: from the run before: {list_files(copied)}")
            break
    return WorkingFolderKeeper(working, place, environ, shown_run(env, environ), say, restored)


def _place(env: RuntimeEnv, environ: Mapping[str, str], sends_outputs: bool) -> KeptPlace:
    def every(default: float) -> float:
        return seconds_of(environ.get("BATCHML_KEEP_EVERY"), least=0.1, default=default)

    if not sends_outputs:  # all nodes have one folder
        node = "" if is_main_node(environ) else f"node-{environ['AWS_BATCH_JOB_NODE_INDEX']}/"
        return KeptPlace(env.output_dir, f"{node}{KEPT}/", None, every(EVERY))
    is_one_of_many = env.array_index is not None or bool(env.sweep)
    limit: Optional[float] = MAX_OF_CHILD if is_one_of_many else MAX_OF_RUN
    if KeepRule.read(environ).patterns:
        limit = None
    prefix = f"{output_prefix(environ)}{KEPT}/"
    return KeptPlace(env.store, prefix, limit, every(EVERY_IN_AWS))


def restore(place: KeptPlace, environ: Mapping[str, str], folder: str) -> Dict[str, FileState]:
    """Copy the kept files of the attempt before into the working folder; their states there.

    Raises StoreError and OSError: to begin again without them would be worse than to wait.
    """
    store = open_store(place.url, environ)
    found: Dict[str, FileState] = {}
    names = [key[len(place.prefix) :] for key in store.keys(place.prefix)]
    for name in sorted(names, key=_natural):  # programs look for their newest file by its time
        path = os.path.join(folder, *name.split("/"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if store.get_file(place.prefix + name, path):
            state = os.stat(path)
            found[name] = (state.st_size, state.st_mtime_ns)
    return found


def _natural(name: str) -> List[Union[str, int]]:
    """A key to sort by numbers: `epoch_9.pt` comes before `epoch_10.pt`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]


class WorkingFolderKeeper:
    """An attempt plug-in that keeps the new and changed files of the working folder."""

    def __init__(
        self,
        working: WorkingFolder,
        place: KeptPlace,
        environ: Mapping[str, str],
        run: str,
        say: Callable[[str], None],
        restored: Mapping[str, FileState],
        room: Callable[[str], DiskRoom] = DiskRoom.of,
    ) -> None:
        """`restored`: files that an earlier attempt has kept, which are in the place already.

        `room`: the space of the disk of a folder.
        """
        self._working, self._place, self._environ = working, place, environ
        self._run, self._say, self._restored, self._room = run, say, restored, room
        self._sender: Optional[OutputSender] = None  # made for the first file
        self._poller = StorePoller(self._mirror)  # `end` reports what could not be kept
        self._why_not = ""  # why some files are not kept
        self._has_warned = self._has_started = False

    def tick(self, now: float) -> None:
        if not self._has_started:  # a short command needs no thread
            self._has_started = True
            is_large = len(self._working.before or ()) > MAX_FILES
            every = self._place.every
            self._poller.start(max(EVERY_IN_AWS, every) if is_large else every)
        if self._why_not and not self._has_warned:
            self._has_warned = True
            self._say(f"batchml notice: {self._why_not}")

    def finish(self) -> None:
        """Required by the plug-in interface. Does nothing: `end` keeps the remaining files."""

    def end(self, was_killed: bool) -> None:
        """Keep the remaining files, and print which are kept.

        `was_killed`: SIGKILL ended the command. What it wrote last may be half a file, so an
        earlier whole copy of it stays.
        """
        self._poller.end()
        try:
            errors = self._mirror(True, time.time() - _UNSETTLED if was_killed else math.inf)
        except OSError as error:
            errors = {"the store": error_line(error)}
        kept = self._sender.sent if self._sender is not None else {}
        if kept:
            are, names = "is" if len(kept) == 1 else "are", list_files(kept)
            self._say(
                f"batchml notice: {names} of the working folder {are} kept: batchml get {self._run}"
            )
        if self._why_not:
            self._say(f"batchml notice: {self._why_not}")
        if errors:
            count = "1 file" if len(errors) == 1 else f"{len(errors)} files"
            first = "{}: {}".format(*next(iter(errors.items())))
            self._say(f"batchml: {count} of the working folder could not be kept: {first}")

    def _mirror(self, is_last: bool = False, until: float = math.inf) -> Mapping[str, str]:
        """Keep the files; return errors by name. Raises StoreError.

        A file that was changed after `until`, in seconds since the epoch, does not replace its
        kept copy.
        """
        changed = self._working.changed()
        if changed is None:
            self._why_not = self._working.why_unread
            return {}
        chosen = choose_files(changed, self._place.limit)
        self._why_not = self._describe(chosen.left_out) if chosen.left_out else ""
        if self._sender is None:
            if not (chosen.kept or self._restored):
                return {}
            store = open_store(self._place.url, self._environ)
            self._sender = OutputSender(
                self._working.folder, store, self._place.prefix, self._restored
            )
        sent, kept = self._sender.sent, chosen.kept
        late = {name for name in kept if name in sent and kept[name][1] > until * 1e9}
        late |= self._without_room(
            {name: state for name, state in kept.items() if sent.get(name) != state}, is_last
        )
        files = {name: sent.get(name) if name in late else state for name, state in kept.items()}
        return self._sender.mirror({n: state for n, state in files.items() if state}, is_last)

    def _without_room(self, new: Mapping[str, FileState], is_last: bool) -> Set[str]:
        """Those of the files to copy for which the disk is too full now."""
        url = self._place.url
        if "://" in url or (is_last and _are_on_one_disk(self._working.folder, url)):
            return set()  # they are sent, or at the end linked, which takes no space
        room = self._room(url)
        lacking = {name: new[name] for name in room.lacks_for(new, is_last)}
        if lacking:
            are, when = "is" if len(lacking) == 1 else "are", "" if is_last else " before the end"
            self._why_not = (
                f"{list_files(lacking)} {are} not kept{when}: the disk of {url} has only "
                f"{size_text(int(room.free))} left"
            )
        return set(lacking)

    def _describe(self, left_out: Mapping[str, FileState]) -> str:
        are, limit = "is" if len(left_out) == 1 else "are", self._place.limit
        most = f"{MAX_FILES:,} files" + (f" and {size_text(int(limit))}" if limit else "")
        return f"{list_files(left_out)} {are} not kept; at most {most} are: {_ADVICE}"


def _are_on_one_disk(folder: str, other: str) -> bool:
    """Whether a file of one folder can be linked into the other."""
    try:
        return os.stat(folder).st_dev == os.stat(other).st_dev
    except OSError:
        return False


_ADVICE = 'write to BATCHML_OUTPUT_DIR, or choose files in job.toml: keep = ["*.pt"]'
