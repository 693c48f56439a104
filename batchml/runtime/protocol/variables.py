"""The environment variables of a run as one value, and a run's parameters in its command."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Mapping
from typing import Container, Dict, List, NamedTuple, Optional, Sequence, Union

SLURM = "BATCHML_SLURM"  # "1": the program expects the variables and the srun of Slurm
KEEP = "BATCHML_KEEP"  # `keep` of job.toml as JSON: false, or patterns; unset: true
IDLE_AFTER = "BATCHML_IDLE_AFTER"  # seconds of idleness after which the run ends; unset: never
EFA = "BATCHML_EFA"  # EFA interfaces that each node was given; unset: none
DEFAULT_GRACE = 30  # seconds from TERM to KILL: ECS_CONTAINER_STOP_TIMEOUT's default


class RuntimeEnv(NamedTuple):
    """The attempt that this process belongs to. Texts are empty if their variable is not set."""

    run: str  # the job's id, with `:INDEX` for the child of an array
    attempt: int  # from 1
    key: str  # the submission's key; empty for jobs that other clients submitted
    code: str  # the code archive: a path or an s3:// address
    command_file: str  # has a command that is too long for AWS Batch: a path or an s3:// address
    store: str  # keeps outputs and records after the run: a folder or an s3:// prefix
    array_index: Optional[int]
    array_size: int  # 0 unless the run is the child of an array
    output_dir: str
    checkpoint_dir: str
    workspace: str
    metrics: str  # the file to which `report` appends
    stop_file: str  # appears when the run should save and stop
    grace: float  # seconds from the stop signal to the kill
    max_seconds: float  # the limit of all attempts together; 0: no limit
    is_run: bool  # False if a person starts the image by hand
    sweep: str = ""  # the sweep store, if this is a trial: a folder or an s3:// prefix
    wave: int = 0  # the number of the batch of trials, from 1
    wave_width: int = 0  # bytes of a line of the batch's manifest
    # The number of the rung, from 0. Above 0 a child of the array finds its trial in the ranking of
    # the rung below, not in the manifest.
    rung: int = 0
    moved: str = ""  # the id of the job that this job replaces: it was cancelled in another queue

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> RuntimeEnv:
        """Read the variables from `os.environ` or a similar mapping."""
        index = environ.get("AWS_BATCH_JOB_ARRAY_INDEX", "")
        return cls(
            run=environ.get("AWS_BATCH_JOB_ID", environ.get("BATCHML_RUN", "")),
            attempt=number_of(environ.get("AWS_BATCH_JOB_ATTEMPT"), 1),
            key=environ.get("BATCHML_KEY", ""),
            command_file=environ.get("BATCHML_ORDER", ""),
            store=environ.get("BATCHML_STORE", ""),
            array_index=number_of(index, 0) if index else None,
            array_size=number_of(
                environ.get("BATCHML_ARRAY_SIZE") or environ.get("AWS_BATCH_JOB_ARRAY_SIZE"), 0
            ),
            workspace=environ.get("BATCHML_WORKSPACE", ""),
            metrics=environ.get("BATCHML_METRICS", ""),
            stop_file=environ.get("BATCHML_STOP_FILE", ""),
            max_seconds=float(number_of(environ.get("BATCHML_MAX_SECONDS"), 0)),
            code=environ.get("BATCHML_CODE", ""),
            output_dir=environ.get("BATCHML_OUTPUT_DIR", ""),
            checkpoint_dir=environ.get("BATCHML_CHECKPOINT_DIR", ""),
            grace=float(number_of(environ.get("BATCHML_GRACE"), DEFAULT_GRACE)),
            is_run="AWS_BATCH_JOB_ID" in environ,
            sweep=environ.get("BATCHML_SWEEP", ""),
            wave=number_of(environ.get("BATCHML_WAVE"), 0),
            wave_width=number_of(environ.get("BATCHML_WAVE_WIDTH"), 0),
            rung=number_of(environ.get("BATCHML_RUNG"), 0),
            moved=environ.get("BATCHML_MOVED", ""),
        )


def number_of(text: Optional[str], default: int) -> int:
    """A whole number of at most nine digits; `default` for any other text, which users may set."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else default


def seconds_of(text: Optional[str], least: float, default: float) -> float:
    """A number of seconds from `least` to 1e6; `default` for any other text that users may set."""
    try:
        seconds = float(text or "")
    except ValueError:
        return default
    return seconds if least <= seconds < 1e6 else default


def is_main_node(environ: Mapping[str, str]) -> bool:
    """Whether this is the main node of a multi-node run, or a run of one node."""
    main = environ.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0")
    return environ.get("AWS_BATCH_JOB_NODE_INDEX", main) == main


# --- Parameters -----------------------------------------------------------------------------------
# Parameters reach a program as words of its command and as variables. Two programs need these
# functions: the client, which checks and prints commands, and the container of a trial.


Scalar = Union[str, int, float, bool]

ALL = "params"  # `{params}`: all parameters, unless one has this name

_SWITCH = r"--[A-Za-z0-9][A-Za-z0-9_.-]*"
_PLACEHOLDER = (
    r"\{(?:params:(key=value|json|kebab)|([A-Za-z_][A-Za-z0-9_.]*)"
    rf"|({_SWITCH})(?:/({_SWITCH}))?)\}}"
)
_VARIABLE = r"BATCHML_PARAM(?:S|_[A-Z0-9_]+)"
_FLAGS, KEBAB = "flags", "kebab"  # `{params:kebab}`: what `flags = "kebab"` makes of `{params}`
_NEGATIVE = r"-[0-9]+|-[0-9]*\.[0-9]+"  # what argparse reads as a negative number


def fill_command(command: Sequence[str], params: Mapping[str, Scalar]) -> List[str]:
    """Replace the placeholders in a command.

    `{lr}` becomes the parameter's value, also inside a word. The word `{params}` becomes
    `--lr 0.01 --optimizer sgd`, with `--lr=-1e-05` for a value that looks like an option, and
    `{params:key=value}` becomes `lr=0.01 optimizer=sgd`: both for all parameters that the command
    does not name one by one. `{params:kebab}` is `{params}` with `--batch-size` for `batch_size`.
    `{params:json}` becomes all parameters as JSON. `{--amp}` becomes the flag `--amp` if the
    parameter `amp` is true, and no word if it is false; with `{--amp/--no-amp}`, then `--no-amp`.
    In a word with spaces, which is a line for a shell, their values are quoted for the shell.
    Braces around anything else stay.
    """
    return [word for words in fill_words(command, params) for word in words]


def fill_words(command: Sequence[str], params: Mapping[str, Scalar]) -> List[List[str]]:
    """The words that replace each word of the command, as `fill_command` describes."""
    if not any("{" in word for word in command):
        return [[word] for word in command]  # a submission asks seven times
    named = {name for word in command for name in placeholders(word, params)}
    rest = {name: value for name, value in params.items() if name not in named}
    found: List[List[str]] = []
    for word in command:
        match = re.fullmatch(_PLACEHOLDER, word)
        form = _form(match, params) if match else None
        if match and match[3] and _parameter(match, params) in params:
            found.append(_switch(match, params))
        else:
            found.append(_values(form, params, rest) if form else [_fill_word(word, params, rest)])
    return found


def placeholders(word: str, params: Container[str]) -> List[str]:
    """The parameters that a word of a command names one by one, in order.

    `params` are the names of all parameters.
    """
    found = re.finditer(_PLACEHOLDER, word)
    return [_parameter(match, params) for match in found if _form(match, params) is None]


def switches(word: str, params: Container[str]) -> List[str]:
    """The parameters that decide whether a word of a command becomes a flag without a value."""
    return [_parameter(match, params) for match in re.finditer(_PLACEHOLDER, word) if match[3]]


def takes_all(command: Sequence[str], params: Container[str]) -> bool:
    """Whether a command uses all parameters: `{params}` in any form, or BATCHML_PARAMS."""
    found = (match for word in command for match in re.finditer(_PLACEHOLDER, word))
    is_placed = any(_form(match, params) is not None for match in found)
    return is_placed or "BATCHML_PARAMS" in re.findall(_VARIABLE, " ".join(command))


def takes(command: Sequence[str], name: str, params: Container[str]) -> bool:
    """Whether a command uses the parameter `name`."""
    return takes_all(command, params) or takes_by_name(command, name, params)


def takes_by_name(command: Sequence[str], name: str, params: Container[str]) -> bool:
    """Whether a command names the parameter `name` itself: `{lr}`, or $BATCHML_PARAM_LR."""
    return any(name in placeholders(word, params) for word in command) or parameter_variable(
        name
    ) in re.findall(_VARIABLE, " ".join(command))


# --- Folders and the number of a child in a command -----------------------------------------------
# No shell expands `$BATCHML_OUTPUT_DIR` in a command, and a client cannot know the paths in a
# container, nor the child. So the runtime fills in these placeholders, also in parameters, if FILL
# says that a client has seen them.


FILL = "BATCHML_FILL"  # "1": the command or a parameter has placeholders of FOLDERS
ARRAY_MAP = "BATCHML_ARRAY_MAP"  # the children of the first array that run again: "3 17-19 40"
INDEX, SEED = NUMBERS = ("index", "seed")
FOLDERS = {  # placeholder -> the variable with the same value
    "checkpoints": "BATCHML_CHECKPOINT_DIR",
    "outputs": "BATCHML_OUTPUT_DIR",
    "data": "BATCHML_DATA_DIR",
    "workspace": "BATCHML_WORKSPACE",
    "run": "BATCHML_RUN",
    INDEX: "AWS_BATCH_JOB_ARRAY_INDEX",
    SEED: "BATCHML_SEED",  # of a trial
}

DATA = "BATCHML_DATA"  # `[data]` of job.toml as JSON: name -> address
DATA_CACHE = "BATCHML_DATA_CACHE"  # the folder of data sets that a host has copied
STAGED = "BATCHML_DATA_SECONDS"  # the time that the program waited for them before its start
_DATA_SET = "data."  # begins the placeholder of a data set: `{data.train}`

# Not `${data}` of a shell.
_FOLDER = rf"(?<!\$)\{{({'|'.join(FOLDERS)}|data\.[a-z][a-z0-9_]*)\}}"


def data_variable(name: str) -> str:
    """The variable with the path of a data set: `BATCHML_DATA_TRAIN` of `train`."""
    return f"BATCHML_DATA_{name.upper()}"


def folder_variable(placeholder: str) -> str:
    """The variable with the same value as a placeholder in FOLDERS, or of a data set."""
    name = placeholder[len(_DATA_SET) :]
    return FOLDERS[placeholder] if placeholder in FOLDERS else data_variable(name)


def read_data(environ: Mapping[str, str]) -> Dict[str, str]:
    """The data sets of a run: name -> address. Raises ValueError for another text."""
    found = json.loads(environ.get(DATA) or "{}")
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise ValueError(f"{DATA} is not JSON with names and addresses")
    return found


def unknown_data(placeholders: Sequence[str], names: Container[str]) -> List[str]:
    """The placeholders of data sets that `[data]` does not have, such as `data.train`."""
    sets = (each for each in placeholders if each.startswith(_DATA_SET))
    return [each for each in dict.fromkeys(sets) if each[len(_DATA_SET) :] not in names]


def folder_placeholders(command: Sequence[str]) -> List[str]:
    """The names in FOLDERS that a command uses; its parameters are filled in already.

    The code in `python -c CODE` is left alone: `{data}` may be part of an f-string.
    """
    return [match[1] for word in _without_code(command) for match in re.finditer(_FOLDER, word)]


def folder_values(environ: Mapping[str, str]) -> Dict[str, str]:
    """The value of each name in FOLDERS, and of each data set that was staged.

    Data sets are in the workspace if no folder is set. The seed is 0 if no sweep has set one.
    """
    values = {name: environ.get(variable, "") for name, variable in FOLDERS.items()}
    try:
        names = list(read_data(environ))
    except ValueError:
        names = []
    return {
        **values,
        **{f"{_DATA_SET}{name}": environ.get(data_variable(name), "") for name in names},
        "data": values["data"] or values["workspace"],
        INDEX: str(child_number(values[INDEX], environ.get(ARRAY_MAP, ""))),
        SEED: values[SEED] or "0",
    }


def child_number(index: str, mapped: str = "") -> int:
    """The number of a child in its array, or in the first array if `mapped` is a rerun's ARRAY_MAP.

    0 in a run that is no array.
    """
    number = number_of(index, 0)
    try:
        return nth_number(mapped, number) if mapped else number
    except ValueError:  # a variable of another program
        return number


def shown_run(env: RuntimeEnv, environ: Mapping[str, str]) -> str:
    """The id by which users call the run: of a child with its number in the first array."""
    whole, colon, index = env.run.partition("#")[0].partition(":")
    return f"{whole}:{child_number(index, environ.get(ARRAY_MAP, ''))}" if colon else whole


def nth_number(numbers: str, index: int) -> int:
    """The number at `index` in a text such as "3 17-19". Raises ValueError."""
    left = index
    for word in numbers.split():
        first, _, last = word.partition("-")
        size = int(last or first) - int(first) + 1
        if left < size:
            return int(first) + left
        left -= size
    raise ValueError(f"{numbers[:80]!r} has no number at index {index}")


def fill_folders(command: Sequence[str], values: Mapping[str, str]) -> List[str]:
    """Replace the placeholders of FOLDERS, such as `{outputs}`, in a command.

    `values` has the value of each name. In a word with spaces, which is a line for a shell, values
    are quoted for the shell.
    """
    filled = [_fill_folder(word, values) for word in _without_code(command)]
    return [new or word for word, new in zip(command, filled)]  # noqa: B905 (Python 3.8)


def _without_code(command: Sequence[str]) -> List[str]:
    """The words of a command, with empty texts in place of code for Python."""
    words = list(command)
    if words and os.path.basename(words[0]).startswith("python") and "-c" in words:
        words[words.index("-c") + 1 : words.index("-c") + 2] = [""]
    return words


def _fill_folder(word: str, values: Mapping[str, str]) -> str:
    is_line = any(character.isspace() for character in word)

    def value(found: re.Match[str]) -> str:
        text = values.get(found[1], found[0])
        return shlex.quote(text) if is_line else text

    return re.sub(_FOLDER, value, word)


def params_placeholders(params: Mapping[str, object]) -> List[str]:
    """The names in FOLDERS that the values of parameters use."""
    texts = [value for value in params.values() if isinstance(value, str)]
    return [match[1] for text in texts for match in re.finditer(_FOLDER, text)]


def fill_params(params: Mapping[str, Scalar], values: Mapping[str, str]) -> Dict[str, Scalar]:
    """Replace placeholders of FOLDERS in parameters; a value that becomes a number is a number."""
    return {name: _fill_param(value, values) for name, value in params.items()}


def _fill_param(value: Scalar, values: Mapping[str, str]) -> Scalar:
    if not isinstance(value, str):
        return value
    filled = re.sub(_FOLDER, lambda found: values.get(found[1], found[0]), value)
    return value if filled == value else parse_number(filled)


_NUMBER = r"-?(0|[1-9][0-9]{0,17})(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?"  # as in JSON


def parse_number(text: str) -> Union[str, int, float]:
    """The number of a text that is one in JSON; else the text."""
    match = re.fullmatch(_NUMBER, text)
    if match is None:
        return text
    number = float(text) if match[2] or match[3] else int(text)
    return number if math.isfinite(number) else text


def format_value(value: Scalar) -> str:
    """A value as text; `true` and `false` in lower case."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_params(environ: Mapping[str, str]) -> Dict[str, Scalar]:
    """The parameters that batchml sent; {} for the jobs of other clients."""
    try:
        found = json.loads(environ.get("BATCHML_PARAMS", ""))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def parameter_variables(params: Mapping[str, Scalar]) -> Dict[str, str]:
    """`BATCHML_PARAMS`, all as JSON, and `BATCHML_PARAM_LR` for each of them."""
    single = {parameter_variable(name): format_value(value) for name, value in params.items()}
    return {"BATCHML_PARAMS": json.dumps(params, sort_keys=True), **single}


def parameter_variable(name: str) -> str:
    """The variable of one parameter: `weight-decay` is in `BATCHML_PARAM_WEIGHT_DECAY`."""
    return "BATCHML_PARAM_" + re.sub("[^A-Z0-9_]", "_", name.upper())


def _form(found: re.Match[str], params: Container[str]) -> Optional[str]:
    """The form in which a placeholder takes all parameters; None if it takes one parameter."""
    if found[1]:
        return found[1]
    return _FLAGS if found[2] == ALL and ALL not in params else None


def _parameter(found: re.Match[str], params: Container[str]) -> str:
    """The parameter that a placeholder names: `no_cuda` of `{--no-cuda}`, unless it has the `-`."""
    if not found[3]:
        return found[2]
    name = found[3][2:]
    return name if name in params else name.replace("-", "_")


def _switch(found: re.Match[str], params: Mapping[str, Scalar]) -> List[str]:
    is_on = format_value(params[_parameter(found, params)]) == "true"
    return list(filter(None, [found[3] if is_on else found[4]]))


def _values(form: str, params: Mapping[str, Scalar], rest: Mapping[str, Scalar]) -> List[str]:
    if form == "json":
        return [json.dumps(params, sort_keys=True)]
    if form == "key=value":
        return [f"{name}={format_value(value)}" for name, value in rest.items()]
    if form == KEBAB:
        rest = {name.replace("_", "-"): value for name, value in rest.items()}
    return [word for name, value in rest.items() for word in _flag(name, format_value(value))]


def with_kebab_flags(command: Sequence[str], params: Container[str]) -> List[str]:
    """The command with `{params:kebab}` in place of `{params}`."""
    if ALL in params:  # then `{params}` is the value of that parameter
        return list(command)
    return [word.replace(f"{{{ALL}}}", f"{{{ALL}:{KEBAB}}}") for word in command]


def _flag(name: str, value: str) -> List[str]:
    """Two words, or one if the second would look like an option.

    For argparse -0.5 is a number, but -5e-05 and any other text that begins with `-` is an option.
    """
    if value.startswith("-") and not re.fullmatch(_NEGATIVE, value):
        return [f"--{name}={value}"]
    return [f"--{name}", value]


def _fill_word(word: str, params: Mapping[str, Scalar], rest: Mapping[str, Scalar]) -> str:
    is_line = any(character.isspace() for character in word)

    def value(found: re.Match[str]) -> str:
        form = _form(found, params)
        if form is None:
            name = _parameter(found, params)
            if name not in params:
                return found[0]
            return "".join(_switch(found, params)) if found[3] else format_value(params[name])
        values = _values(form, params, rest)
        return " ".join(map(shlex.quote, values) if is_line else values)

    return re.sub(_PLACEHOLDER, value, word)
