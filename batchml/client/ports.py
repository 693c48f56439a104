"""Who listens on a port of this machine, as far as /proc tells this user."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LISTENING = "0A"  # TCP_LISTEN of include/net/tcp_states.h


def holder_of(port: int, proc: Path = Path("/proc")) -> str:
    """`process 4711 (jupyter-lab)`; empty where it is not known, or another user's."""
    inodes = {f"socket:[{inode}]" for inode in _inodes(port, proc)}
    if not inodes:
        return ""
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            for file in (entry / "fd").iterdir():
                with suppress(OSError):
                    if os.readlink(file) in inodes:
                        return f"process {entry.name} ({(entry / 'comm').read_text().strip()})"
    return ""


def is_quiet(port: int, proc: Path = Path("/proc")) -> bool:
    """Whether it is known that nobody listens on it; nobody is connected to for that."""
    return (proc / "net" / "tcp").exists() and not any(_inodes(port, proc))


def _inodes(port: int, proc: Path) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                yield words[9]
