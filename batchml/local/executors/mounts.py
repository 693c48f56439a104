"""Folders of this machine that a container mounts: find them through descriptors, make missing
folders, and give the container's user access.

A program in a container can rename entries of a folder that it may write, and create links in it,
at any moment. So a path below such a folder is only a proposal: it is walked from the folder down,
name by name, without following links. The result is a descriptor, through which the folder is made,
opened and mounted. The Docker engine accepts only names. It gets the name of a folder that no
container can rename: the allowed folder itself, or a bind mount of the descriptor in `PINS` during
the start of the container (docs/decisions/011).
"""

import contextlib
import ctypes
import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

PINS = "/run/batchml"  # only root may write to /run, and only root may mount

_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000  # mount(2)
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8  # umount2(2)


class AttemptNotStarted(Exception):
    """The program never ran; the text is the reason, in AWS's words."""


class ProposedPath(NamedTuple):
    """The apparent target of a path: names below a folder that no container can rename."""

    root: str
    names: tuple[str, ...]


def propose(path: str, roots: Iterable[str], fixed: bool = False) -> ProposedPath:
    """Split a path at the uppermost of the `roots` that contain it, because containers may write to
    each root.

    `fixed`: containers may write to none of the roots, so the path is not split. Raises
    AttemptNotStarted if no root contains it.
    """
    real = os.path.realpath(path)
    containing = [root for root in map(os.path.realpath, roots) if is_below(real, root)]
    if not containing:
        raise AttemptNotStarted(
            f"CannotCreateContainerError: {path} may not be mounted. Start the server with "
            f"--allow-path {path} to let jobs have it"
        )
    root = real if fixed else min(containing, key=len)
    return ProposedPath(root, tuple(filter(None, real[len(root) :].split("/"))))


def is_below(path: str, root: str) -> bool:
    """Whether a path is `root` or lies in it, by its text."""
    return path == root or path.startswith(root.rstrip("/") + "/")


def walk(root: int, names: Iterable[str], make: bool = False) -> int:
    """A descriptor of the target of names below an open folder. Links are not followed.

    `make`: make missing folders. Raises OSError.
    """
    at = os.dup(root)
    try:
        for name in names:
            above, at = at, _step(at, name, make)
            os.close(above)
    except BaseException:
        os.close(at)
        raise
    return at


def _step(at: int, name: str, make: bool) -> int:
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=at)
            inner = os.open(name, _STEP | os.O_DIRECTORY, dir_fd=at)
            os.chmod(_path_of(inner), 0o755)
            return inner
    inner = os.open(name, _STEP, dir_fd=at)
    if stat.S_ISLNK(os.fstat(inner).st_mode):
        os.close(inner)
        raise NotADirectoryError(
            errno.ENOTDIR, "a link was put here while the container was made", name
        )
    return inner


def give_access(descriptor: int) -> None:
    """Give any user of a container access. On this machine the state folder above it stays
    private.
    """
    mode_now = os.fstat(descriptor).st_mode
    mode = 0o777 if stat.S_ISDIR(mode_now) else 0o644
    if stat.S_IMODE(mode_now) != mode:
        os.chmod(_path_of(descriptor), mode)


def _path_of(descriptor: int) -> str:
    """A path to an open file itself, whatever its name is by now."""
    return f"/proc/self/fd/{descriptor}"


def make_readable(folder: str) -> None:
    """Let any user read all files of a folder that no container may write to."""
    for path, _, names in os.walk(folder):
        os.chmod(path, 0o755)
        for name in names:
            os.chmod(os.path.join(path, name), 0o644)


# --- During a start -------------------------------------------------------------------------------


class MountSource(NamedTuple):
    """A source that was found. The engine mounts it by `name`."""

    name: str
    file: tuple[int, int]  # its device and inode
    path: str


class ContainerMounts:
    """The mount sources of one container, from before it is created until it has started."""

    def __init__(self, sources: Iterable[Mapping[str, Any]], label: str, task_id: str) -> None:
        self._sources = list(sources)
        self._pins = pins_of(label, task_id)
        self._found: list[MountSource] = []

    def open(self) -> list[dict[str, Any]]:
        """The mounts in the engine's JSON. Raises AttemptNotStarted.

        The names are always the same: a runner that takes over opens them again.
        """
        if not self._found:
            unpin(self._pins)
            for number, source in enumerate(self._sources):
                self._found.append(_find_source(source, f"{self._pins}/{number}"))
        return [
            {"Type": "bind", "Source": found.name, "Target": source["target"],
             "ReadOnly": source["read_only"]}
            for found, source in zip(self._found, self._sources, strict=True)
        ]  # fmt: skip

    def close(self) -> None:
        self._found = []
        unpin(self._pins)

    def check(self, pid: int, container: str) -> None:
        """Raise AttemptNotStarted if a started container has other files mounted."""
        files = mounted_files(pid, container)
        for source in self._found:
            if files and source.file not in files:
                raise AttemptNotStarted(
                    f"CannotStartContainerError: the Docker engine did not mount {source.path}. "
                    f"The engine must run on this machine, in the server's mount namespace"
                )


def _find_source(source: Mapping[str, Any], pin: str) -> MountSource:
    try:
        return _open_source(source, pin)
    except OSError as error:
        raise AttemptNotStarted(
            f"CannotCreateContainerError: {source['path']}: {error.strerror}"
        ) from error


def _open_source(source: Mapping[str, Any], pin: str) -> MountSource:
    if source["before"]:
        _move_volume(source["before"], source["roots"][0])
    proposal = propose(source["path"], source["roots"], source["fixed"])
    if source["make"] and not os.path.exists(proposal.root):
        os.makedirs(proposal.root, exist_ok=True)
        os.chmod(proposal.root, 0o755)
    root = os.open(proposal.root, _STEP)
    try:
        descriptor = walk(root, proposal.names, source["make"])
    finally:
        os.close(root)
    try:
        if source["ours"]:
            give_access(descriptor)
        about = os.fstat(descriptor)
        name = _pin(descriptor, pin, proposal) if proposal.names else proposal.root
    finally:
        os.close(descriptor)
    return MountSource(name, (about.st_dev, about.st_ino), source["path"])


def _move_volume(before: Sequence[str], root: str) -> None:
    """Move a volume of an older version out of the workspace, to where no container can rename it.

    Raises OSError.
    """
    workspace, *names, name = before
    if os.path.lexists(root) or not os.path.isdir(workspace):
        return
    top = os.open(workspace, os.O_PATH | os.O_CLOEXEC)
    try:
        at = walk(top, names)
    except (FileNotFoundError, NotADirectoryError):
        return
    finally:
        os.close(top)
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
            os.makedirs(os.path.dirname(root), 0o700, exist_ok=True)
            os.rename(name, root, src_dir_fd=at)
    except FileNotFoundError:
        pass
    finally:
        os.close(at)


def mounted_files(pid: int, container: str) -> set[tuple[int, int]]:
    """The files that are mounted in a container: device and inode of each. Empty where they cannot
    be read, as with an engine on another machine, or once the container's process `pid` has ended.
    """
    found: set[tuple[int, int]] = set()
    if not _is_of(pid, container):
        return found
    try:
        with open(f"/proc/{pid}/mountinfo", "rb") as file:
            points = [_unescape(line.split()[4]) for line in file]
    except OSError:
        return set()
    for point in points:
        with contextlib.suppress(OSError):
            about = os.stat(f"/proc/{pid}/root{point}")
            found.add((about.st_dev, about.st_ino))
    # If the program has ended meanwhile, only a part of its mounts was read.
    return found if _is_of(pid, container) else set()


def _is_of(pid: int, container: str) -> bool:
    """Whether a process lives and belongs to a container."""
    try:
        os.stat(f"/proc/{pid}/root/")
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            return container in file.read()
    except OSError:
        return False


def _unescape(word: bytes) -> str:
    """Decode a path of /proc/PID/mountinfo."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), word))


# --- Bind mounts ----------------------------------------------------------------------------------


def pins_of(label: str, task_id: str = "") -> str:
    """The folder of the bind mounts of a state folder, or of one of its attempts."""
    return f"{PINS}/{label}/{task_id}".rstrip("/")


def pinned_tasks(label: str) -> list[str]:
    """The attempts that have bind mounts."""
    try:
        return os.listdir(pins_of(label))
    except OSError:
        return []


def _pin(descriptor: int, pin: str, proposal: ProposedPath) -> str:
    """Make a bind mount of a descriptor; its name. Raises AttemptNotStarted, OSError."""
    try:
        os.makedirs(os.path.dirname(pin), 0o700, exist_ok=True)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.mkdir(pin)
        else:
            os.close(os.open(pin, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        _mount(_path_of(descriptor), pin, _MS_BIND | _MS_REC)
        # Else unmounting this would also unmount the mounts inside the folder itself.
        _mount(None, pin, _MS_PRIVATE | _MS_REC)
    except PermissionError:
        raise AttemptNotStarted(_only_root(proposal)) from None
    return pin


def _only_root(proposal: ProposedPath) -> str:
    path = "/".join((proposal.root.rstrip("/"), *proposal.names))
    return (
        f"CannotCreateContainerError: containers may rename {path}, so only a server of root can "
        f"mount it. Mount {proposal.root}, or allow {path} alone: --allow-path"
    )


def unpin(folder: str) -> None:
    """Unmount the bind mounts of an attempt. Their content is never deleted."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        pin = f"{folder}/{name}"
        while _libc().umount2(os.fsencode(pin), _MNT_DETACH | _UMOUNT_NOFOLLOW) == 0:
            pass
        with contextlib.suppress(OSError):  # still mounted
            os.rmdir(pin) if os.path.isdir(pin) else os.unlink(pin)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _mount(source: str | None, target: str, flags: int) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target)]
    if _libc().mount(*words, None, ctypes.c_ulong(flags), None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
