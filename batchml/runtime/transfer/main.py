"""Archive a folder and restore it: `python -m batchml.runtime.transfer.main VERB PLACE FOLDER`.

    archive PLACE FOLDER  send what is new or changed, read it back; --delete frees the folder
    restore PLACE FOLDER  bring back what is missing or changed; --partial: though not complete
    check PLACE FOLDER    as archive, but another has sent the files: they are only read back
    verify PLACE          read all of an archive back
    list FOLDER           what lies in a folder; --deep all below it

PLACE is a folder, or s3://BUCKET/PREFIX. The last line is `batchml-carry: ` and a JSON document,
the exit code 0 when all is there, 1 when something is missing. `--below PATH` is a part of FOLDER
(`list`, `restore`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Dict, List, Optional

from batchml.runtime.transfer.archive import archive, archive_and_free
from batchml.runtime.transfer.backends import open_vault
from batchml.runtime.transfer.parallel import Account, Progress
from batchml.runtime.transfer.receive import Result
from batchml.runtime.transfer.restore import restore, verify
from batchml.runtime.transfer.tree import FOLDER, CarryError, Entry, LeftOut, Tree, joined, to_line

MARK = "batchml-carry: "  # before the result, on a line of its own
EVERY = 10.0  # seconds between two lines of progress


def listing(tree: Tree, below: str = "", deep: bool = False) -> List[Entry]:
    """What lies in a folder, or a file itself, with paths from the top; nothing left unsaid.

    Raises FileNotFoundError for what is not there.
    """
    found = tree.look(below)
    if found is None:
        raise FileNotFoundError(below)
    if found.kind != FOLDER:
        return [found]
    left_out: List[LeftOut] = []
    entries = tree.walk(below, left_out) if deep else tree.inside(below, left_out)
    return sorted(
        (entry._replace(path=joined(below, entry.path)) for entry in entries),
        key=lambda entry: entry.path.split("/"),
    )


def told(result: Result) -> Dict[str, Any]:
    """A result as JSON has it."""
    return {
        "files": result.files, "bytes": result.size, "unchanged": result.unchanged,
        "removed": result.removed, "leftOut": list(map(str, result.left_out)),
        "missing": list(map(str, result.missing)),
    }  # fmt: skip


def in_words(now: Progress) -> str:
    return f"{now.doing}: {now.files} of {now.of_files} files, {now.size} of {now.of_size} bytes"


class Teller:
    """A line of progress now and then."""

    def __init__(self, say: Callable[[str], object], clock: Callable[[], float]) -> None:
        self._say, self._clock, self._last = say, clock, clock()

    def __call__(self, now: Progress) -> None:
        if self._clock() - self._last >= EVERY:
            self._last = self._clock()
            self._say(in_words(now))


def main(arguments: Sequence[str], environ: Mapping[str, str], say: Callable[[str], Any]) -> int:
    """Do what the arguments say; the exit code."""
    asked = _parser().parse_args(arguments)
    try:
        document = _done(asked, environ, Account(Teller(say, time.monotonic)))
    except (CarryError, OSError) as error:
        say(f"batchml: {error}")
        say(MARK + json.dumps({"error": str(error)}))
        return 1
    say(MARK + json.dumps(document))
    return 1 if document.get("missing") else 0


def _done(asked: Any, environ: Mapping[str, str], account: Account) -> Dict[str, Any]:
    if asked.verb == "list":
        found = listing(Tree(asked.folder), asked.below, asked.deep)
        return {"entries": [json.loads(to_line(entry)) for entry in found]}
    vault = open_vault(asked.place, environ)
    if asked.verb == "verify":
        return told(verify(vault, account))
    tree = Tree(asked.folder)
    if asked.verb == "restore":
        return told(restore(vault, tree, account, asked.partial, asked.checksum, asked.below,
                            asked.overwrite))  # fmt: skip
    os.makedirs(tree.root, exist_ok=True)
    if asked.delete:
        return told(archive_and_free(tree, vault, account, asked.checksum, asked.overwrite))
    sends = asked.verb == "archive"
    return told(archive(tree, vault, account, asked.checksum, sends, asked.overwrite))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m batchml.runtime.transfer.main")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("archive", "restore", "check", "verify", "list"):
        made = verbs.add_parser(verb)
        if verb != "list":
            made.add_argument("place")
        if verb != "verify":
            made.add_argument("folder")
        made.add_argument("--delete", action="store_true")
        made.add_argument("--partial", action="store_true")
        made.add_argument("--checksum", action="store_true")
        made.add_argument("--overwrite", action="store_true")
        made.add_argument("--below", default="")
        made.add_argument("--deep", action="store_true")
    return parser


def _say(text: str) -> None:
    print(text, flush=True)


def run(arguments: Optional[Sequence[str]] = None) -> int:
    return main(sys.argv[1:] if arguments is None else arguments, os.environ, _say)


if __name__ == "__main__":
    sys.exit(run())
