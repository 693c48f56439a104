"""What was submitted from here, one line a run: what `@last` means."""

import json
import os
from pathlib import Path

import msgspec
from msgspec import Struct


class Remembered(Struct, frozen=True):
    job_id: str
    name: str
    env: str
    queue: str
    at: int  # ms


class History:
    """An append-only file. A torn last line, of a client that was killed, is passed over."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, run: Remembered) -> None:
        line = json.dumps(msgspec.to_builtins(run)).encode() + b"\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def newest_first(self, env: str) -> list[Remembered]:
        """The runs submitted to an environment."""
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in reversed(lines):
            try:
                run = msgspec.json.decode(line, type=Remembered)
            except msgspec.DecodeError:
                continue
            if run.env == env:
                found.append(run)
        return found
