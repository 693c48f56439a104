"""ECS Exec without our program inside: a shell on our terminal, or a command between two marks."""

import os
import re
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING

from batchml.client.talk import write_out
from batchml.client.terminal import lent

if TYPE_CHECKING:
    from batchml.client.plugin_line import PluginLine


def run_shell(words: list[str], variables: Mapping[str, str]) -> int:
    """The plugin itself has the terminal; its exit code says nothing of the shell's."""
    process = subprocess.Popen(words, env={**os.environ, **variables})
    with lent(lambda _: process.terminate()):
        return process.wait()


def run_command(line: "PluginLine", mark: str) -> int | None:
    """Pass on what comes between the marks, as lines end here; the code that follows, or None."""
    marks = Marks(mark)
    for data in line.raw():
        write_out(1, marks.feed(data))
        if marks.code is not None:
            return marks.code
    return None


class Marks:
    """Output of a terminal in, what lies between the marks out. `code` is that of the last mark."""

    def __init__(self, mark: str) -> None:
        self._begin = f"{mark} begin\n".encode()
        self._end = re.compile(rf"\n?{mark} end (\d+)".encode() + rb"\n")
        self._held = len(mark) + 16  # the end may just be coming
        self._rest = b""
        self._began = False
        self.code: int | None = None

    def feed(self, data: bytes) -> bytes:
        if self.code is not None:
            return b""
        self._rest = (self._rest + data).replace(b"\r\n", b"\n")
        if not self._began:
            _, begin, after = self._rest.partition(self._begin)
            if not begin:
                return b""
            self._began, self._rest = True, after
        end = self._end.search(self._rest)
        if end is not None:
            self.code = int(end[1])
            out, self._rest = self._rest[: end.start()], b""
            return out
        keep = max(0, len(self._rest) - self._held)
        out, self._rest = self._rest[:keep], self._rest[keep:]
        return out
