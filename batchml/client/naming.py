"""What a run of a bare command is called: after its script, where a program only reads one."""

import re
from collections.abc import Sequence
from pathlib import PurePath

from batchml.model.names import to_name

# Programs that say nothing of what is run; the script is the first word that looks like one.
_RUNNERS = re.compile(
    r"python[0-9.]*|pypy[0-9.]*|(ba|da|z|k)?sh|fish|perl|ruby|node|deno|Rscript|julia|lua|php"
    r"|torchrun|accelerate|deepspeed|uv|poetry|env|time|nice|nohup|exec"
)
_SUFFIXES = re.compile(r"\.(py|sh|bash|zsh|pl|rb|js|mjs|ts|R|r|jl|lua|php)$")


def name_of(command: Sequence[str]) -> str:
    """`train` for `python -u data/train.py --lr 1`; `python` for `python -c ...`."""
    first = PurePath(command[0]).name
    script = _script(command) if _RUNNERS.fullmatch(first) else ""
    return to_name(_SUFFIXES.sub("", PurePath(script or first).name))


def _script(command: Sequence[str]) -> str:
    """The script or module that a runner is given; empty where there is none to be seen."""
    words = iter(command[1:])
    for word in words:
        if word == "-m":
            return next(words, "").rpartition(".")[2]
        if word in ("-c", "-e", "-lc", "-ec", "-"):
            return ""
        if _SUFFIXES.search(word):
            return word
    return ""
