"""Archive a folder and restore it: `python -m batchml.runtime.transfer.main VERB PLACE FOLDER`.

    archive PLACE FOLDER  send and read back new and changed files; --delete: free archived files;
                          --checksum: also compare and read back files that look unchanged
    restore PLACE FOLDER  bring back missing files; --partial: also from an incomplete archive;
                          --overwrite: replace files that differ
    check PLACE FOLDER    like archive, but only read back files that another program has sent
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
from functools import partial
from typing import Any, Callable, Dict, List

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

RESULT_MARK = "batchml-carry: "  # before the JSON document, on the same line
EVERY = 10.0  # seconds between two lines of progress


def list_folder(tree: Tree, below: str = "", deep: bool = False) -> List[TreeEntry]:
    """List a folder, or a single file, with paths from the top of the tree.

    `deep`: with everything below the folder. Raises FileNotFoundError.
    """
    top = tree.lookup(below)
    if top is None:
        raise FileNotFoundError(below)
    if top.kind != FOLDER:
        return [top]
    left_out: List[LeftOut] = []
    entries = tree.walk(below, left_out) if deep else tree.list_folder(below, "", left_out)
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
        entries = list_folder(Tree(options.folder), options.below, options.deep)
        return {"entries": [json.loads(to_line(entry)) for entry in entries]}
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
        command = verbs.add_parser(verb)
        if verb != "list":
            command.add_argument("place")
        if verb != "verify":
            command.add_argument("folder")
        for flag in ("--delete", "--partial", "--checksum", "--overwrite", "--deep"):
            command.add_argument(flag, action="store_true")
        command.add_argument("--below", default="")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ, partial(print, flush=True)))
