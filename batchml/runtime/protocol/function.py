"""The files by which a function of a Python program is sent to a run, and its result comes back.

The client adds a folder to the code of the run: the pickled function, the pickled arguments, and a
description of both. The run writes one file to its outputs: a line of JSON, then the pickled result
or exception.
"""

from __future__ import annotations

import json
import sys
from typing import BinaryIO, List, NamedTuple

FOLDER = ".batchml-function"  # in the code of the run
DESCRIPTION = "call.json"
FUNCTION = "function.pickle"
ARGUMENTS = "arguments.pickle"  # one pickle after the other; each is a tuple
RESULT = ".batchml-result"  # in the outputs of the run, of each child for an array
MODULE = "batchml.runtime.function"  # the program that calls the function

RETURNED, RAISED, ENDED = "returned", "raised", "ended"  # values of `ResultHeader.end`
_MAX_HEADER = 4 * 1024**2  # bytes


def python_version() -> str:
    """The version whose compiled code this Python can load, such as `3.11`."""
    return "%d.%d" % sys.version_info[:2]


class FunctionCall(NamedTuple):
    """A function that is sent, without the pickles.

    `lengths` are the bytes of each item of the arguments: child N of an array takes item N, and
    with one item all children take it. `search` are folders of the code for `sys.path`. `by_value`:
    the pickles have compiled code, which only the client's version of Python can load.
    """

    name: str
    python: str
    by_value: bool
    search: List[str]
    lengths: List[int]

    def to_json(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @classmethod
    def read(cls, data: bytes) -> FunctionCall:
        return cls(**json.loads(data))

    def position(self, index: int) -> int:
        """The place of the item for child `index` in the arguments, in bytes."""
        return sum(self.lengths[: self.item(index)])

    def item(self, index: int) -> int:
        return index if len(self.lengths) > 1 else 0


class ResultHeader(NamedTuple):
    """The first line of a result.

    `text` is the traceback, or why there is no value. `by_value` is that of FunctionCall: the
    result has compiled code of `python`.
    """

    end: str
    attempt: int
    python: str
    text: str = ""
    by_value: bool = False

    def to_line(self) -> bytes:
        return json.dumps(self._asdict()).encode() + b"\n"

    @classmethod
    def read(cls, stream: BinaryIO) -> ResultHeader:
        """Read the line; the pickle follows. Raises ValueError for any other file."""
        try:
            found = cls(**json.loads(stream.readline(_MAX_HEADER)))
            if found.end in (RETURNED, RAISED, ENDED) and isinstance(found.text, str):
                return found
        except (ValueError, TypeError) as error:
            raise ValueError("not a result") from error
        raise ValueError("not a result")
