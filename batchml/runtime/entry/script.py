"""Run a submitted script: `python -m batchml.runtime.entry.script PATH ARG...`.

It becomes the program that the script's first line names. A script that lies in no file that
travels comes packed: `--packed TEXT NAME ARG...`. Where the script speaks Slurm (BATCHML_SLURM is
set) it finds the variables that sbatch would have given it, and an `srun`
(`nodes/slurm/srun.py`). On several nodes such a script runs on the first, and the others do the
steps of its `srun`.
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Dict, List, NoReturn

from batchml.runtime.nodes.slurm.steps import number_of

SLURM = "BATCHML_SLURM"
ARRAY = "BATCHML_SLURM_ARRAY"  # the ids of the array's tasks: "1-9:2,20"
PACKED = "--packed"


def pack(text: bytes) -> str:
    """A script as one word, without braces that a placeholder could be found in."""
    return base64.urlsafe_b64encode(zlib.compress(text, 9)).decode()


def unpack(word: str) -> bytes:
    """Raises ValueError for a word that `pack` did not make."""
    try:
        return zlib.decompress(base64.urlsafe_b64decode(word.encode()))
    except zlib.error as error:
        raise ValueError(f"the script is damaged: {error}") from None


def interpreter(first: bytes) -> List[str]:
    """The program of a first line, and its argument, as Linux reads it; none where it says none."""
    if not first.startswith(b"#!"):
        return []
    return [os.fsdecode(word) for word in first[2:].strip().split(None, 1)]


def without_login(words: Sequence[str]) -> List[str]:
    """The program of a first line without the flag that makes a shell read a profile, which would
    set PATH anew and hide the programs of the image."""
    if words[1:] and words[1].strip() in ("-l", "--login"):
        return list(words[:1])
    return list(words)


def slurm_variables(
    environ: Mapping[str, str], folder: str, addresses: Sequence[str] = ("127.0.0.1",)
) -> Dict[str, str]:
    """What a script of sbatch reads: of the job, the array's task and the nodes, which have these
    addresses.

    Source: sbatch(1), OUTPUT ENVIRONMENT VARIABLES.
    """
    job = environ.get("AWS_BATCH_JOB_ID", "")
    whole = job.partition(":")[0].partition("#")[0]
    count = number_of(environ.get("AWS_BATCH_JOB_NUM_NODES", ""), 1)
    tasks = number_of(environ.get("SLURM_NTASKS_PER_NODE", ""), 1)
    each = "" if count == 1 else f"(x{count})"
    nodes, first = ",".join(addresses), addresses[0] if addresses else ""
    found = {
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
        "SLURM_TASKS_PER_NODE": f"{tasks}{each}",
        "SLURM_JOB_CPUS_PER_NODE": f"{environ.get('SLURM_CPUS_ON_NODE', '1')}{each}",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NODELIST": nodes,
        "SLURMD_NODENAME": first,
        "SLURM_RESTART_COUNT": str(max(0, number_of(environ.get("BATCHML_ATTEMPT", ""), 1) - 1)),
        "SLURM_LAUNCH_NODE_IPADDR": first,
        **_array(environ, job_number(whole)),
    }
    return {name: value for name, value in found.items() if value}


def job_number(job: str) -> str:
    """A job's id as a number: scripts calculate ports with it. Of a task another one than of its
    array."""
    return str(1 + zlib.crc32(job.encode()) % (2**31 - 1)) if job else ""


def _array(environ: Mapping[str, str], whole: str) -> Dict[str, str]:
    """Of a task of an array; a single id is no array of AWS Batch, and is a task all the same."""
    index, spans = environ.get("AWS_BATCH_JOB_ARRAY_INDEX", ""), environ.get(ARRAY, "")
    if not (index or spans):
        return {}
    number = number_of(index, 0)
    size = number_of(environ.get("BATCHML_ARRAY_SIZE", ""), 0)
    size = size or number_of(environ.get("AWS_BATCH_JOB_ARRAY_SIZE", ""), 1)
    ids = task_ids(spans)
    # Another --array than the script's own: AWS Batch's numbers.
    if len(ids) != size or number >= len(ids):
        ids = list(range(max(size, number + 1)))
    return {
        "SLURM_ARRAY_JOB_ID": whole,
        "SLURM_ARRAY_TASK_ID": str(ids[number]),
        "SLURM_ARRAY_TASK_COUNT": str(len(ids)),
        "SLURM_ARRAY_TASK_MIN": str(min(ids)),
        "SLURM_ARRAY_TASK_MAX": str(max(ids)),
        "SLURM_ARRAY_TASK_STEP": str(ids[1] - ids[0] if len(ids) > 1 else 1),
    }


def task_ids(spans: str) -> List[int]:
    """`1-9:2,20` as 1, 3, 5, 7, 9, 20."""
    found: List[int] = []
    for part in filter(None, spans.split(",")):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found


def _placed(name: str, text: bytes) -> str:
    """A file with the script, in a folder that goes with the attempt."""
    path = os.path.join(own_folder(), os.path.basename(name) or "script")
    with open(path, "wb") as file:
        file.write(text)
    os.chmod(path, 0o700)
    return path


def own_folder() -> str:
    """Beside the file of metrics, which is the attempt's own; a new one where there is none."""
    metrics = os.environ.get("BATCHML_METRICS", "")
    if not metrics:
        return tempfile.mkdtemp(prefix="batchml-")
    folder = os.path.join(os.path.dirname(metrics), ".batchml-script")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder


def main(words: Sequence[str]) -> NoReturn:
    """Become the script's program. What is not there is told of, with the code that a shell has."""
    arguments = list(words)
    try:
        if arguments[:1] == [PACKED]:
            path = _placed(arguments[2], unpack(arguments[1]))
            arguments = arguments[3:]
        else:
            path, arguments = arguments[0], arguments[1:]
        with open(path, "rb") as file:
            program = interpreter(file.readline(4096))
    except (OSError, ValueError, IndexError) as error:
        _refuse(126, f"the script cannot be read: {error}")
    if not program:
        _refuse(126, f"{path}: its first line does not begin with #!, so nothing says what runs it")
    environ = dict(os.environ)
    if environ.get(SLURM):
        program = without_login(program)
        environ = on_a_cluster(environ)
    try:
        os.execvpe(program[0], [*program, path, *arguments], environ)
    except OSError as error:
        _refuse(127, f"{program[0]}, which {path} names in its first line: {error.strerror}")


def on_a_cluster(environ: Mapping[str, str], *, gathered: bool = True) -> Dict[str, str]:
    """The environment of a program that speaks Slurm: its variables, and the tools on its PATH.

    A node that is not the first does not return: it does steps. The first has waited for the
    others, unless `gathered` is false: then their addresses are not in it.
    """
    from batchml.runtime.nodes.slurm import steps
    from batchml.runtime.nodes.slurm.srun import put_tools

    folder, tools = os.getcwd(), put_tools(own_folder())
    scratch = os.path.join(tools, "tmp")  # the attempt's own, and gone with it
    os.makedirs(scratch, mode=0o700, exist_ok=True)
    given = {**steps.network(environ), **environ}
    steps.remember(tools, given, folder)
    path = os.pathsep.join((tools, environ.get("PATH", "")))
    found = {**given, steps.FOLDER: tools, steps.LOG: steps.log_of(1), "PATH": path}
    if number_of(environ.get("AWS_BATCH_JOB_NODE_INDEX", ""), 0):
        steps.follow(found, folder)
    addresses = steps.gather(environ) if gathered else ()
    return {**found, **slurm_variables(environ, folder, addresses), "SLURM_TMPDIR": scratch}


def _refuse(code: int, words: str) -> NoReturn:
    print(f"batchml: {words}", file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
