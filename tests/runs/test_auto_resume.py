"""`--auto-resume`: attempts after lost hosts, from what was saved, on checked hosts."""

from pathlib import Path

import pytest

from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import ConfigError
from batchml.model.job import Health, JobSpec, Retry
from batchml.runs.options import SubmitOptions, to_request
from batchml.runs.prepare import PreparedRun, prepare
from tests.support.fakes import FakeClock

JOB = 'image = "python"\ncommand = ["python", "train.py"]\ncode = false\n'


@pytest.fixture
def context(tmp_path: Path) -> Context:
    environ = {"BATCHML_HOME": str(tmp_path / "home")}
    (tmp_path / "job.toml").write_text(JOB)
    return Context(load_settings(environ, tmp_path, None), FakeClock(), tmp_path)


def made(context: Context, options: SubmitOptions, job: str | JobSpec = ".") -> PreparedRun:
    return prepare(context, to_request(job, options), dry_run=True)


def script(context: Context, *lines: str) -> str:
    (context.folder / "train.sh").write_text("\n".join(["#!/bin/bash", *lines, ""]))
    return "train.sh"


def test_it_means_five_attempts_from_what_was_saved_on_checked_hosts(context: Context) -> None:
    ready = made(context, {"auto_resume": True})
    assert ready.requests.submit["retryStrategy"]["attempts"] == 5
    assert ready.spec.retry == Retry(5)
    assert ready.notices == (
        "--auto-resume: up to 5 attempts, after: host-lost; each goes on from what the run has "
        "saved, on hosts that pass the quick checks.",
    )
    again = JobSpec(**{**ready.record.spec, "retry": Retry(**ready.record.spec["retry"])})
    assert again.retry.attempts == 5, "a rerun has them too"


@pytest.mark.parametrize(
    ("spec", "options", "retry", "checks"),
    [
        (JobSpec(), {"attempts": 8}, Retry(8), "quick"),
        (JobSpec(retry=Retry(3)), {}, Retry(3), "quick"),
        (JobSpec(retry=Retry(1, ("app-error",))), {}, Retry(5, ("host-lost", "app-error")),
         "quick"),
        (JobSpec(), {"retry_on": ["out-of-memory"]}, Retry(5, ("host-lost", "out-of-memory")),
         "quick"),
        (JobSpec(health=Health(checks="off")), {}, Retry(5), "quick"),
        (JobSpec(health=Health(checks="deep")), {}, Retry(5), "deep"),
    ],
)  # fmt: skip
def test_what_the_job_or_other_flags_say_stays(
    context: Context, spec: JobSpec, options: SubmitOptions, retry: Retry, checks: str
) -> None:
    spec = JobSpec(
        image="python", command=("true",), code=False, retry=spec.retry, health=spec.health
    )
    ready = made(context, {**options, "auto_resume": True}, spec)
    assert (ready.spec.retry, ready.spec.health.checks) == (retry, checks)
    assert f"pass the {checks} checks" in ready.notices[0]


def test_one_attempt_cannot_be_resumed(context: Context) -> None:
    with pytest.raises(ConfigError, match="--attempts 1 nothing is resumed"):
        made(context, {"auto_resume": True, "attempts": 1})


def test_an_image_without_the_runtime_is_only_tried_again(context: Context) -> None:
    (context.folder / "batchml.toml").write_text(
        '[env.dev]\nregion = "us-east-1"\n[env.dev.compute.c]\ninstance_types = ["c7i"]\n'
        'max_vcpus = 8\n[env.dev.queues.default]\ncompute = ["c"]\n'
    )
    environ = {"BATCHML_HOME": str(context.folder / "home")}
    settings = load_settings(environ, context.folder, "dev")
    there = Context(settings, FakeClock(), context.folder, why_offline="a test")
    options: SubmitOptions = {"auto_resume": True, "image": "docker.io/library/python:3.12"}
    assert made(there, options).notices == (
        "--auto-resume: up to 5 attempts, after: host-lost; each begins anew, on hosts not "
        "checked: batchml did not build docker.io/library/python:3.12.",
    )


@pytest.mark.parametrize(
    "lines",
    [
        ("#SBATCH --auto-resume=1", "python train.py"),
        ("#BATCHML --auto-resume", "python train.py"),
        ("#SBATCH --no-requeue", "srun --auto-resume=1 torchrun train.py"),
        ("srun -l \\", "    --auto-resume=1 \\", "    torchrun train.py"),
        ("#SBATCH --requeue", "    srun -N 2 --auto-resume 1 train.py"),
        # AWS's examples for HyperPod
        ('if [ -d "/opt/sagemaker_cluster" ]; then', '    AUTO_RESUME="--auto-resume=1"', "fi",
         "srun ${AUTO_RESUME} -l torchrun train.py"),
    ],
)  # fmt: skip
def test_scripts_for_hyperpod_ask_for_it(context: Context, lines: tuple[str, ...]) -> None:
    ready = made(context, {}, script(context, *lines))
    assert ready.spec.retry.attempts == 5
    assert sum("--auto-resume: up to 5 attempts" in each for each in ready.notices) == 1


@pytest.mark.parametrize(
    "lines",
    [
        ("srun --auto-resume=0 train.py",),
        ("# srun --auto-resume=1 train.py", "srun train.py"),
        ("#SBATCH --auto-resume=0", "srun train.py"),
        ("echo enabling --auto-resume=1", "srun train.py  # --auto-resume=1"),
        ("srun train.py", "python other.py --auto-resume=1"),
    ],
)
def test_other_scripts_do_not(context: Context, lines: tuple[str, ...]) -> None:
    ready = made(context, {}, script(context, *lines))
    assert ready.spec.retry.attempts == 1


def test_a_script_with_it_takes_the_attempts_of_the_command_line(context: Context) -> None:
    name = script(context, "srun --auto-resume=1 train.py")
    assert made(context, {"attempts": 9}, name).spec.retry.attempts == 9
    with pytest.raises(ConfigError, match="Give at least 2 attempts"):
        made(context, {"attempts": 1}, name)
