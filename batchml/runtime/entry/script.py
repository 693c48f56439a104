"""Run a submitted script: `python -m batchml.runtime.entry.script PATH ARG...`.

The process becomes the program that the script's first line names. A script that is not a file of
the code package is passed on the command line: `--packed TEXT NAME ARG...`. A script for Slurm
(BATCHML_SLURM is set) gets sbatch's variables and an `srun` (`nodes/slurm/srun.py`). In a run of
several nodes the script runs on the first node, and the other nodes run the steps of its `srun`.
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Dict, List, NoReturn

from batchml.runtime.protocol.launch import PACKED
from batchml.runtime.protocol.variables import SLURM, number_of

ARRAY = "BATCHML_SLURM_ARRAY"  # the ids of the array's tasks: "1-9:2,20"
_SHELLS = ("sh", "ash", "bash", "dash", "ksh", "zsh")


def pack(text: bytes) -> str:
    """A script as one word without braces, which could be read as a placeholder."""
    return base64.urlsafe_b64encode(zlib.compress(text, 9)).decode()


def unpack(word: str) -> bytes:
    """The script in a word that `pack` has made. Raises ValueError for any other word."""
    try:
        return zlib.decompress(base64.urlsafe_b64decode(word.encode()))
    except zlib.error as error:
        raise ValueError(f"the script is damaged: {error}") from None


def interpreter(first: bytes) -> List[str]:
    """The program that a script's first line names, and its argument, as Linux reads the line.

    Empty if the line does not begin with `#!`.
    """
    if not first.startswith(b"#!"):
        return []
    return [os.fsdecode(word) for word in first[2:].strip().split(None, 1)]


def without_login(words: Sequence[str]) -> List[str]:
    """The program and argument of a first line, without the flag of a login shell.

    A login shell reads a profile, which would reset PATH and hide the programs of the image.
    """
    if not words[1:] or os.path.basename(words[0]) not in _SHELLS:
        return list(words)
    first, *others = words[1].split(None, 1)  # -euo pipefail
    if first in ("-l", "--login"):
        first = ""
    elif first.startswith("-") and not first.startswith("--"):
        first = first.replace("l", "")
    flags = " ".join(filter(None, [first, *others]))
    return [words[0], flags] if flags else [words[0]]


def slurm_variables(
    environ: Mapping[str, str], folder: str, addresses: Sequence[str] = ("127.0.0.1",)
) -> Dict[str, str]:
    """sbatch's output variables: the job, the task of its array, and the nodes at these addresses.

    Source: sbatch(1), OUTPUT ENVIRONMENT VARIABLES.
    """
    job = environ.get("AWS_BATCH_JOB_ID", "")
    array_job = job.partition(":")[0].partition("#")[0]
    count = number_of(environ.get("AWS_BATCH_JOB_NUM_NODES", ""), 1)
    tasks = number_of(environ.get("SLURM_NTASKS_PER_NODE", ""), 1)
    times = "" if count == 1 else f"(x{count})"
    nodes, first = ",".join(addresses), addresses[0] if addresses else ""
    variables = {
        "SLURM_JOB_ID": job_number(job.partition("#")[0]),
        "SLURM_JOBID": job_number(job.partition("#")[0]),
        "SLURM_JOB_PARTITION": environ.get("AWS_BATCH_JQ_NAME", ""),
        "SLURM_CLUSTER_NAME": environ.get("AWS_BATCH_CE_NAME", ""),
        "SLURM_SUBMIT_DIR": folder,
        "SLURM_SUBMIT_HOST": first,
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": str(count),
        "SLURM_JOB_NUM_NODES": str(count),
        "SLURM_NTASKS": str(tasks * count),
        "SLURM_NPROCS": str(tasks * count),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_TASKS_PER_NODE": f"{tasks}{times}",
        "SLURM_JOB_CPUS_PER_NODE": f"{environ.get('SLURM_CPUS_ON_NODE', '1')}{times}",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NODELIST": nodes,
        "SLURMD_NODENAME": first,
        "SLURM_RESTART_COUNT": str(max(0, number_of(environ.get("BATCHML_ATTEMPT", ""), 1) - 1)),
        "SLURM_LAUNCH_NODE_IPADDR": first,
        **_array_variables(environ, job_number(array_job)),
    }
    return {name: value for name, value in variables.items() if value}


def job_number(job: str) -> str:
    """A number in place of a job's id: scripts calculate ports with it.

    The tasks of an array have different numbers.
    """
    return str(1 + zlib.crc32(job.encode()) % (2**31 - 1)) if job else ""


def _array_variables(environ: Mapping[str, str], array_job: str) -> Dict[str, str]:
    """The variables of an array's task; empty for other jobs.

    AWS Batch has no arrays of one job, so the job of an array of one task has no array index.
    """
    index, spans = environ.get("AWS_BATCH_JOB_ARRAY_INDEX", ""), environ.get(ARRAY, "")
    if not (index or spans):
        return {}
    number = number_of(index, 0)
    size = number_of(environ.get("BATCHML_ARRAY_SIZE", ""), 0)
    size = size or number_of(environ.get("AWS_BATCH_JOB_ARRAY_SIZE", ""), 1)
    ids = task_ids(spans)
    # If the submission named the array, not the script, the tasks have the numbers of AWS Batch.
    if len(ids) != size or number >= len(ids):
        ids = list(range(max(size, number + 1)))
    return {
        "SLURM_ARRAY_JOB_ID": array_job,
        "SLURM_ARRAY_TASK_ID": str(ids[number]),
        "SLURM_ARRAY_TASK_COUNT": str(len(ids)),
        "SLURM_ARRAY_TASK_MIN": str(min(ids)),
        "SLURM_ARRAY_TASK_MAX": str(max(ids)),
        "SLURM_ARRAY_TASK_STEP": str(ids[1] - ids[0] if len(ids) > 1 else 1),
    }


def task_ids(spans: str) -> List[int]:
    """The ids in the value of sbatch's `--array`: `1-9:2,20` means 1, 3, 5, 7, 9, 20."""
    found: List[int] = []
    for part in filter(None, spans.split(",")):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found


def _write_script(name: str, text: bytes) -> str:
    """Write the script to a file that is removed with the attempt. Return its path."""
    path = os.path.join(attempt_folder(), os.path.basename(name) or "script")
    with open(path, "wb") as file:
        file.write(text)
    os.chmod(path, 0o700)
    return path


def attempt_folder() -> str:
    """A folder beside the attempt's metrics file; without metrics, a new temporary folder."""
    metrics = os.environ.get("BATCHML_METRICS", "")
    if not metrics:
        return tempfile.mkdtemp(prefix="batchml-")
    folder = os.path.join(os.path.dirname(metrics), ".batchml-script")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder


def main(words: Sequence[str]) -> NoReturn:
    """Become the script's program. Exit codes are a shell's: 126 and 127."""
    arguments = list(words)
    try:
        if arguments[:1] == [PACKED]:
            path = _write_script(arguments[2], unpack(arguments[1]))
            arguments = arguments[3:]
        else:
            path, arguments = arguments[0], arguments[1:]
        with open(path, "rb") as file:
            program = interpreter(file.readline(4096))
    except (OSError, ValueError, IndexError) as error:
        _exit(126, f"the script cannot be read: {error}")
    if not program:
        _exit(126, f"{path}: the first line does not begin with #! and a program that runs it")
    environ = dict(os.environ)
    if environ.get(SLURM):
        program = without_login(program)
        environ = slurm_environment(environ)
    try:
        os.execvpe(program[0], [*program, path, *arguments], environ)
    except OSError as error:
        _exit(127, f"{program[0]}, the program in the first line of {path}: {error.strerror}")


def slurm_environment(environ: Mapping[str, str], *, gathered: bool = True) -> Dict[str, str]:
    """The environment of a Slurm script: sbatch's variables, and `srun` and other tools on PATH.

    On all nodes but the first this does not return: they run steps. The first node waits for the
    others; if `gathered` is false, it does not wait, and their addresses are missing.
    """
    from batchml.runtime.nodes.slurm import server, steps
    from batchml.runtime.nodes.slurm.srun import put_tools

    folder, tools = os.getcwd(), put_tools(attempt_folder())
    scratch = os.path.join(tools, "tmp")  # removed with the attempt
    os.makedirs(scratch, mode=0o700, exist_ok=True)
    given = {**steps.network_variables(environ), **environ}
    steps.remember_start(tools, given, folder)
    path = os.pathsep.join((tools, environ.get("PATH", "")))
    found = {**given, steps.FOLDER: tools, steps.LOG: steps.file_id(1), "PATH": path}
    if number_of(environ.get("AWS_BATCH_JOB_NODE_INDEX", ""), 0):
        steps.follow(found, folder)
    server.start_server(found, tools)
    addresses = server.gather(environ, tools) if gathered else ()
    return {**found, **slurm_variables(environ, folder, addresses), "SLURM_TMPDIR": scratch}


def _exit(code: int, message: str) -> NoReturn:
    print(f"batchml: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
