"""A shell inside a run says in its prompt where it is: `(alloc 47cc2814) `, `(run 47cc2814) `."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Dict

KIND = "BATCHML_SEAT"  # what the run is held for: "alloc", "notebook"

_ID = 8  # characters of a run's id that are shown, as in `batchml ls`
_PLAIN = ("sh", "dash", "ash")  # take PS1 from their environment


def prompted(environ: Mapping[str, str], shell: str) -> Dict[str, str]:
    """Variables that put the run before a shell's prompt, whatever its files make of that.

    Bash does PROMPT_COMMAND before each prompt, after its files were read; a file that sets that
    variable wins. Other shells than these are left as they are.
    """
    run, name = environ.get("AWS_BATCH_JOB_ID", ""), os.path.basename(shell)
    if not run:
        return {}
    kind = "alloc" if environ.get(KIND) == "alloc" else "run"
    parts = run.replace("#", ":").split(":")
    mark = f"({kind} {':'.join([parts[0][:_ID], *parts[1:]])}) "
    if name in _PLAIN:
        return {"PS1": f"{mark}$ "}
    if name != "bash":
        return {}
    ours = f'case "$PS1" in *"{mark}"*) ;; *) PS1="{mark}$PS1";; esac'
    theirs = environ.get("PROMPT_COMMAND", "").strip().strip(";")
    return {"PROMPT_COMMAND": f"{ours}; {theirs}" if theirs else ours}
