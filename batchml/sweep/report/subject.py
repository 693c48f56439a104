"""Subject: what a report says of a sweep beside its trials."""

import shlex
from collections.abc import Mapping
from typing import Protocol

from batchml.model.job import JobSpec
from batchml.model.shell import one_line
from batchml.model.sweep import Params, SweepSpec, Trial
from batchml.runtime.protocol.variables import fill

SEED = "BATCHML_SEED"


class Subject(Protocol):
    """A sweep as it was started: the client's Frozen."""

    @property
    def key(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def env(self) -> str: ...
    @property
    def spec(self) -> SweepSpec: ...
    @property
    def job_spec(self) -> JobSpec: ...
    @property
    def queue(self) -> str: ...
    @property
    def image(self) -> str: ...
    @property
    def commit(self) -> str: ...
    @property
    def user(self) -> str: ...
    @property
    def created_at(self) -> float: ...
    @property
    def hourly(self) -> float | None: ...


def all_params(job: JobSpec, params: Params) -> Params:
    """What a trial's program is given: the job's parameters, but for those that the sweep sets."""
    return {**job.params, **params}


def words(job: JobSpec, params: Mapping[str, str | int | float | bool]) -> list[str]:
    """The command that a trial of these parameters runs."""
    return fill(job.command, all_params(job, dict(params)))


def command_line(job: JobSpec, trial: Trial) -> str:
    """What runs a trial again, as a shell takes it, in one line. Its seed comes along: a program
    that reads it comes to the same value."""
    return one_line(f"{SEED}={trial.seed} {shlex.join(words(job, trial.params))}")
