"""The processors that a run may use, and the variables that tell its libraries to use no more.

AWS Batch gives a container a share of its host's processors, not processors of its own, so that a
library counts those of the whole host and starts a thread for each. On a busy host those threads
wait for each other. docs/decisions/041-processors.md has the rule.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Dict, List

from batchml.runtime.processes import read
from batchml.runtime.protocol.launch import VCPUS

# How many threads one process starts to compute. A value of OMP_NUM_THREADS that the job or its
# image sets holds for all of them, because most libraries read it if their own variable is unset.
# Besides OpenMP's own users (torch, MXNet, scikit-learn, XGBoost, R):
_OMP = "OMP_NUM_THREADS"
_THREADS = (
    _OMP,
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",  # tokenizers of Hugging Face
    "POLARS_MAX_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)
_NUMEXPR, _MOST_OF_NUMEXPR = "NUMEXPR_NUM_THREADS", 64  # for more, it raises ValueError

# How many processors there are, for programs that start a process or a thread for each.
_COUNTS = (
    "PYTHON_CPU_COUNT",  # os.cpu_count(): Python 3.13, and older ones by site/sitecustomize.py
    "NPROC",  # XLA's pool of threads, for JAX: GetCpuClient in xla/pjrt/cpu/cpu_client.cc
    "TORCHINDUCTOR_COMPILE_THREADS",
    "MC_CORES",  # R's package parallel
)
# Else Ray counts the host's processors: ray/_private/utils.py, get_num_cpus.
_RAY = "RAY_USE_MULTIPROCESSING_CPU_COUNT"

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")


def count_processors(environ: Mapping[str, str]) -> int:
    """The processors of this container, at least 1: the job's vCPUs, but no more than there are.

    AWS Batch lets a container use idle processors of its host beyond its vCPUs, until another
    container takes them. Threads that count on those would then wait for each other.
    """
    available = available_processors()
    try:
        return max(1, min(int(float(environ[VCPUS])), available))
    except (KeyError, ValueError, OverflowError):
        return available


def thread_variables(environ: Mapping[str, str], processors: int) -> Dict[str, str]:
    """The variables of threads that a process with this number of processors lacks."""
    given = environ.get(_OMP, "").partition(",")[0].strip()  # 4,2: of nested parallel regions
    is_given = given.isascii() and given.isdigit() and int(given) > 0
    threads = int(given) if is_given else processors
    found = {
        **dict.fromkeys(_THREADS, str(threads)),
        _NUMEXPR: str(min(threads, _MOST_OF_NUMEXPR)),
    }
    return {name: value for name, value in found.items() if name not in environ}


def with_processors(environ: Mapping[str, str], processors: int) -> Dict[str, str]:
    """The environment of a program that has this number of processors. Its own variables win."""
    return with_counts({**thread_variables(environ, processors), **environ}, processors)


def with_counts(environ: Mapping[str, str], processors: int) -> Dict[str, str]:
    """The environment of a program that divides this number of processors itself, as Ray does.

    Ray sets OMP_NUM_THREADS for each task, unless it is set: set_omp_num_threads_if_unset in
    ray/_private/utils.py.
    """
    path = environ.get("PYTHONPATH", "")
    return {
        **dict.fromkeys(_COUNTS, str(processors)),
        _RAY: "1",
        **environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (SITE, path))),
    }


def divide(environ: Mapping[str, str], processes: int) -> Dict[str, str]:
    """The variables to change for each of several processes that share this container.

    A variable whose value is the number of processors is one that `with_processors` has set.
    """
    processors = count_processors(environ)
    own = with_processors({}, max(1, processors // max(1, processes)))
    whole = with_processors({}, processors)
    return {name: own[name] for name, value in whole.items() if environ.get(name) == value}


def available_processors() -> int:
    """The processors that this process may use, by its affinity and its control group."""
    try:
        count = float(len(os.sched_getaffinity(0)))
    except AttributeError:  # not Linux
        count = float(os.cpu_count() or 1)
    quota = _quota()
    if len(quota) == 2 and quota[0] > 0 and quota[1] > 0:
        count = min(count, quota[0] / quota[1])
    return max(1, int(count))


@lru_cache(maxsize=None)
def _quota() -> List[float]:
    """The quota of this process's control group and its period, in microseconds."""
    root = "/sys/fs/cgroup"
    return _numbers(f"{root}/cpu.max") or (
        _numbers(f"{root}/cpu/cpu.cfs_quota_us") + _numbers(f"{root}/cpu/cpu.cfs_period_us")
    )


def _numbers(path: str) -> List[float]:
    try:
        return [float(word) for word in read(path).split() if word != "max"]
    except ValueError:
        return []
