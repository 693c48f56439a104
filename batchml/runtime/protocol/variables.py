"""What Batch and batchml tell a program through its environment, as one value."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Container, Dict, List, NamedTuple, Optional, Sequence, Union

DEFAULT_GRACE = 30  # seconds from TERM to KILL: ECS_CONTAINER_STOP_TIMEOUT's default


class RuntimeEnv(NamedTuple):
    """The attempt that this process belongs to. Paths are empty where nothing was set."""

    run: str  # the job's id, with `:INDEX` for the child of an array
    attempt: int  # from 1
    key: str  # of the submission; empty for jobs that other clients submitted
    code: str  # the archive: a path or an s3:// address
    order: str  # what to run, where it is too long for Batch: a path or an s3:// address
    store: str  # what outlives the run: a folder or an s3:// prefix
    array_index: Optional[int]
    array_size: int  # 0 unless the run is the child of an array
    output_dir: str
    checkpoint_dir: str
    workspace: str
    metrics: str  # the file that `report` appends to
    stop_file: str  # appears when the run should save and stop
    grace: float  # seconds from the stop signal to the kill
    max_seconds: float  # of all attempts together; 0: no limit
    is_run: bool  # False for a person who tries an image out
    sweep: str = ""  # the sweep's board, if this is a trial: a folder or an s3:// prefix
    wave: int = 0  # of the sweep, from 1
    wave_width: int = 0  # bytes of a line of the wave's manifest
    rung: int = 0  # from 0; above it the trial is found by rank, not by index
    moved: str = ""  # the job that it follows, which was cancelled in another queue

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> RuntimeEnv:
        """From `os.environ`, or any mapping like it."""
        index = environ.get("AWS_BATCH_JOB_ARRAY_INDEX", "")
        return cls(
            run=environ.get("AWS_BATCH_JOB_ID", environ.get("BATCHML_RUN", "")),
            attempt=_number(environ.get("AWS_BATCH_JOB_ATTEMPT"), 1),
            key=environ.get("BATCHML_KEY", ""),
            order=environ.get("BATCHML_ORDER", ""),
            store=environ.get("BATCHML_STORE", ""),
            array_index=_number(index, 0) if index else None,
            array_size=_number(
                environ.get("BATCHML_ARRAY_SIZE") or environ.get("AWS_BATCH_JOB_ARRAY_SIZE"), 0
            ),
            workspace=environ.get("BATCHML_WORKSPACE", ""),
            metrics=environ.get("BATCHML_METRICS", ""),
            stop_file=environ.get("BATCHML_STOP_FILE", ""),
            max_seconds=float(_number(environ.get("BATCHML_MAX_SECONDS"), 0)),
            code=environ.get("BATCHML_CODE", ""),
            output_dir=environ.get("BATCHML_OUTPUT_DIR", ""),
            checkpoint_dir=environ.get("BATCHML_CHECKPOINT_DIR", ""),
            grace=float(_number(environ.get("BATCHML_GRACE"), DEFAULT_GRACE)),
            is_run="AWS_BATCH_JOB_ID" in environ,
            sweep=environ.get("BATCHML_SWEEP", ""),
            wave=_number(environ.get("BATCHML_WAVE"), 0),
            wave_width=_number(environ.get("BATCHML_WAVE_WIDTH"), 0),
            rung=_number(environ.get("BATCHML_RUNG"), 0),
            moved=environ.get("BATCHML_MOVED", ""),
        )


def _number(text: Optional[str], default: int) -> int:
    """A whole number of few digits; anything else, which a user may have set, is the default."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else default


# --- parameters in a command ----------------------------------------------------------------------
# How parameters reach a program: words of its command, and variables.
#
# Said once, for the client, which checks and shows commands, and for a trial's container.


Scalar = Union[str, int, float, bool]

ALL = "params"  # `{params}`: all parameters, unless there is one of this name

_PLACEHOLDER = re.compile(r"\{(?:params:(key=value|json)|([A-Za-z_][A-Za-z0-9_.]*))\}")
_VARIABLE = re.compile(r"BATCHML_PARAM(?:S|_[A-Z0-9_]+)")
_FLAGS = "flags"
_NEGATIVE = re.compile(r"-[0-9]+|-[0-9]*\.[0-9]+")  # a number, as argparse knows it


def fill(command: Sequence[str], params: Mapping[str, Scalar]) -> List[str]:
    """The command with its placeholders filled in.

    `{lr}` becomes the parameter's value, inside a word too. A word that is `{params}` becomes
    `--lr 0.01 --optimizer sgd`, with `--lr=-1e-05` for a value that would be taken for an option,
    and `{params:key=value}` becomes `lr=0.01 optimizer=sgd`: of all parameters that the command
    does not name one by one. `{params:json}` is all of them as JSON.
    In a longer word with spaces, a line for a shell, their values are quoted as a shell wants it.
    Braces around anything else stay as they are.
    """
    return [word for words in filled(command, params) for word in words]


def filled(command: Sequence[str], params: Mapping[str, Scalar]) -> List[List[str]]:
    """What each word of the command becomes, as `fill` says it: one word, or any number."""
    named = {name for word in command for name in placeholders(word, params)}
    rest = {name: value for name, value in params.items() if name not in named}
    found: List[List[str]] = []
    for word in command:
        match = _PLACEHOLDER.fullmatch(word)
        form = _form(match, params) if match else None
        found.append(_values(form, params, rest) if form else [_within(word, params, rest)])
    return found


def placeholders(word: str, known: Container[str]) -> List[str]:
    """The parameters that a word of a command names one by one, in their order."""
    found = _PLACEHOLDER.finditer(word)
    return [match[2] for match in found if _form(match, known) is None]


def takes_all(command: Sequence[str], known: Container[str]) -> bool:
    """Whether a command takes all parameters at once, `{params}` in any form or by a variable."""
    return any(
        _form(match, known) is not None for word in command for match in _PLACEHOLDER.finditer(word)
    ) or "BATCHML_PARAMS" in _VARIABLE.findall(" ".join(command))


def takes(command: Sequence[str], name: str, known: Container[str]) -> bool:
    """Whether a command has a place for this parameter."""
    return (
        takes_all(command, known)
        or any(name in placeholders(word, known) for word in command)
        or variable(name) in _VARIABLE.findall(" ".join(command))
    )


def text(value: Scalar) -> str:
    """A value as a program reads it: true and false in small letters."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def variables(params: Mapping[str, Scalar]) -> Dict[str, str]:
    """`BATCHML_PARAMS`, all as JSON, and `BATCHML_PARAM_LR` for each of them."""
    each = {variable(name): text(value) for name, value in params.items()}
    return {"BATCHML_PARAMS": json.dumps(params, sort_keys=True), **each}


def variable(name: str) -> str:
    """The variable of one parameter: `weight-decay` is in `BATCHML_PARAM_WEIGHT_DECAY`."""
    return "BATCHML_PARAM_" + re.sub("[^A-Z0-9_]", "_", name.upper())


def _form(found: re.Match[str], known: Container[str]) -> Optional[str]:
    """How a placeholder wants all parameters; None for the placeholder of one."""
    if found[1]:
        return found[1]
    return _FLAGS if found[2] == ALL and ALL not in known else None


def _values(form: str, params: Mapping[str, Scalar], rest: Mapping[str, Scalar]) -> List[str]:
    if form == "json":
        return [json.dumps(params, sort_keys=True)]
    if form == "key=value":
        return [f"{name}={text(value)}" for name, value in rest.items()]
    return [word for name, value in rest.items() for word in _flag(name, text(value))]


def _flag(name: str, value: str) -> List[str]:
    """Two words, or one where the second would be taken for an option: argparse takes -0.5 for a
    number, but neither -5e-05 nor any other text that begins so."""
    if value.startswith("-") and not _NEGATIVE.fullmatch(value):
        return [f"--{name}={value}"]
    return [f"--{name}", value]


def _within(word: str, params: Mapping[str, Scalar], rest: Mapping[str, Scalar]) -> str:
    is_line = any(character.isspace() for character in word)

    def value(found: re.Match[str]) -> str:
        form = _form(found, params)
        if form is None:
            return text(params[found[2]]) if found[2] in params else found[0]
        values = _values(form, params, rest)
        return " ".join(map(shlex.quote, values) if is_line else values)

    return _PLACEHOLDER.sub(value, word)
