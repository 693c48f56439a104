"""The jobs that ship with batchml, on the first digits only: their own programs, in less time."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PROGRAM = '''\
"""The job's own program; it is given the first digits."""

import sys

import train
from batchml.runtime import mnist

load = mnist.load


def first(split, count):
    return mnist.Split(split.images[: count * mnist.SIDE**2], split.labels[:count])


def load_few():
    every = load()
    return every._replace(
        train=first(every.train, {train}), validation=first(every.validation, {validation})
    )


mnist.load = load_few
sys.exit(train.main())
'''
# One thread and one vCPU: two such trials at once are faster than two with both in turn.
_CHANGES = (
    ('"train.py"', '"few.py"'),
    ("vcpus = 2", "vcpus = 1"),
)


def few_digits(folder: Path, name: str, *, train: int, validation: int) -> Path:
    """A copy of a job below `folder`/jobs, with its sweep file, that trains on so many images."""
    job = folder / "jobs" / name
    shutil.copytree(ROOT / "jobs" / name, job)
    (job / "few.py").write_text(_PROGRAM.format(train=train, validation=validation))
    text = (job / "job.toml").read_text("utf-8")
    for old, new in _CHANGES:
        assert old in text, f"{old} in {job / 'job.toml'}"
        text = text.replace(old, new)
    (job / "job.toml").write_text(text, "utf-8")
    return job
