"""Archive a folder and restore it: `python -m batchml.runtime.transfer.main VERB PLACE FOLDER`.

    archive PLACE FOLDER  send new and changed files, and read them back; --delete frees the folder
    restore PLACE FOLDER  bring back missing files; --partial: also from an incomplete archive
    check PLACE FOLDER    like archive, but only read back files that something else has sent
    verify PLACE          read the whole archive back
    list FOLDER           list a folder; --deep: with everything below it

PLACE is a folder or s3://BUCKET/PREFIX. The last line printed is `batchml-carry: ` and a JSON
document. The exit code is 0 if nothing is missing, else 1. `--below PATH` restricts `list` and
`restore` to a part of FOLDER.
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
from batchml.runtime.transfer.backends import open_archive
from batchml.runtime.transfer.parallel import ProgressState, TransferProgress
from batchml.runtime.transfer.receive import TransferResult
from batchml.runtime.transfer.restore import restore, verify
from batchml.runtime.transfer.tree import (
    FOLDER,
    LeftOut,
    TransferError,
    Tree,
    TreeEntry,
    join_path,
    to_line,
)

RESULT_MARK = "batchml-carry: "  # precedes the JSON document, on one line
EVERY = 10.0  # seconds between two lines of progress


def list_folder(tree: Tree, below: str = "", deep: bool = False) -> List[TreeEntry]:
    """List a folder, or a single file, with paths from the top of the tree.

    Unlike a transfer it also lists what would be left out. Raises FileNotFoundError.
    """
    found = tree.lookup(below)
    if found is None:
        raise FileNotFoundError(below)
    if found.kind != FOLDER:
        return [found]
    left_out: List[LeftOut] = []
    entries = tree.walk(below, left_out) if deep else tree.entries_in(below, left_out)
    return sorted(
        (entry._replace(path=join_path(below, entry.path)) for entry in entries),
        key=lambda entry: entry.path.split("/"),
    )


def to_json(result: TransferResult) -> Dict[str, Any]:
    """Return the result as the JSON document that clients read."""
    return {
        "files": result.files, "bytes": result.size, "unchanged": result.unchanged,
        "removed": result.removed, "leftOut": list(map(str, result.left_out)),
        "missing": list(map(str, result.missing)),
    }  # fmt: skip


def describe_progress(now: ProgressState) -> str:
    return f"{now.doing}: {now.files} of {now.of_files} files, {now.size} of {now.of_size} bytes"


class ProgressPrinter:
    """Prints a line of progress every ten seconds."""

    def __init__(self, say: Callable[[str], object], clock: Callable[[], float]) -> None:
        self._say, self._clock, self._last = say, clock, clock()

    def __call__(self, now: ProgressState) -> None:
        if self._clock() - self._last >= EVERY:
            self._last = self._clock()
            self._say(describe_progress(now))


def main(arguments: Sequence[str], environ: Mapping[str, str], say: Callable[[str], Any]) -> int:
    """Run one command line; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        progress = TransferProgress(ProgressPrinter(say, time.monotonic))
        document = _run_verb(options, environ, progress)
    except (TransferError, OSError) as error:
        say(f"batchml: {error}")
        say(RESULT_MARK + json.dumps({"error": str(error)}))
        return 1
    say(RESULT_MARK + json.dumps(document))
    return 1 if document.get("missing") else 0


def _run_verb(
    options: Any, environ: Mapping[str, str], progress: TransferProgress
) -> Dict[str, Any]:
    if options.verb == "list":
        found = list_folder(Tree(options.folder), options.below, options.deep)
        return {"entries": [json.loads(to_line(entry)) for entry in found]}
    store = open_archive(options.place, environ)
    if options.verb == "verify":
        return to_json(verify(store, progress))
    tree = Tree(options.folder)
    if options.verb == "restore":
        result = restore(
            store, tree, progress, options.partial, options.checksum, options.below,
            options.overwrite,
        )  # fmt: skip
        return to_json(result)
    os.makedirs(tree.root, exist_ok=True)
    if options.delete:
        return to_json(archive_and_free(tree, store, progress, options.checksum, options.overwrite))
    sends = options.verb == "archive"
    return to_json(archive(tree, store, progress, options.checksum, sends, options.overwrite))


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
