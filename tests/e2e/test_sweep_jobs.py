"""The jobs of a sweep on the embedded AWS Batch: sent once, held to a width, looked at, ended."""

import shutil
from pathlib import Path

import msgspec
import pytest

from batchml.clock import SystemClock
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.local.home import Home, ServerEndpoint
from batchml.model.job import JobSpec
from batchml.model.run import JobStatus
from batchml.model.sweep import Goal, SweepLimits, SweepSpec
from batchml.runtime.storage.folder import FolderStore
from batchml.sweeps.control.events import TrialBatch
from batchml.sweeps.control.watch import JobObservation
from batchml.sweeps.jobs import LIMIT_MARK, BatchJobs
from batchml.sweeps.started import StartedSweep
from tests.support.local_server import wait_for

KEY = "2aaaaaaaaaaaaaaaa"


class World:
    def __init__(self, home: Home, folder: Path) -> None:
        settings = load_settings({"BATCHML_HOME": str(home.root)}, folder, "local")
        self.place = Context(settings, SystemClock(), folder)
        self.store = FolderStore(str(folder / "store"))
        self.told: list[str] = []

    def jobs(self, *command: str) -> BatchJobs:
        spec = JobSpec(image="docker.io/library/python:3.12", command=command, name="echo")
        sweep = SweepSpec("s", "echo", (Goal("loss", "min"),), {}, limits=SweepLimits(trials=4))
        started = StartedSweep(
            key=KEY, name="s", env="local", spec=sweep, job=msgspec.to_builtins(spec),
            queue="default", image=spec.image, tags={"batchml:sweep": KEY},
        )  # fmt: skip
        return BatchJobs(self.place, started, self.store, self.told.append)

    def wave(self, number: int = 1, age: float = 0.0) -> TrialBatch:
        return TrialBatch(number, self.place.clock.now() - age, f"3{'abcdefgh'[number] * 16}", ())


@pytest.fixture
def world(home: Home, server: ServerEndpoint, tmp_path: Path) -> World:
    return World(home, tmp_path)


def ended(jobs: BatchJobs, job_id: str) -> JobObservation:
    def look() -> JobObservation | None:
        found = jobs.observe([job_id])[job_id]
        return found if found.status.is_terminal else None

    found: JobObservation = wait_for(look, "the end")
    return found


def test_a_wave_is_an_array_one_trial_a_plain_job_and_a_rung_waits_for_its_rung(
    world: World,
) -> None:
    jobs = world.jobs("true")
    first = jobs.submit(world.wave(1), 3, 100)
    second = jobs.submit(world.wave(2), 1, 100, after=first)
    assert ended(jobs, first).children["SUCCEEDED"] == 3
    assert ended(jobs, second).exit_code == 0
    run = world.place.describe([second])[second]
    assert run.name == "s-w2"
    assert run.depends_on == (first,)
    assert run.tags["batchml:sweep"] == KEY
    assert {"BATCHML_SWEEP", "BATCHML_WAVE"} <= run.environment.keys()
    assert run.environment["BATCHML_WAVE_WIDTH"] == "100"


def test_a_wave_that_may_have_been_sent_is_found_and_not_sent_again(world: World) -> None:
    wave = world.wave()
    sent = world.jobs("sleep", "60").submit(wave, 2, 100)
    shutil.rmtree(world.place.home.root / "flights", ignore_errors=True)
    another = world.jobs("sleep", "60")  # another controller, which was told of no job id
    assert another.submit(wave, 2, 100) == sent
    assert len(list(world.place.batch.list_recent("default"))) == 1
    another.terminate([sent], "over")
    assert ended(another, sent).status is JobStatus.FAILED


def test_a_wave_whose_sender_died_before_the_call_is_sent(world: World) -> None:
    wave = world.wave(age=3600.0)
    world.store.create(f"waves/{wave.number:06}.sent", b"somebody")
    jobs = world.jobs("true")
    assert ended(jobs, jobs.submit(wave, 1, 100)).status is JobStatus.SUCCEEDED


def test_a_consumable_resource_holds_the_width_and_is_gone_at_the_end(world: World) -> None:
    jobs = world.jobs("sleep", "60")
    jobs.limit_running(1)
    array = jobs.submit(world.wave(), 3, 100)
    wait_for(lambda: jobs.observe([array])[array].children.get("RUNNING"), "one runs")
    found = jobs.observe([array])[array].children
    assert (found.get("RUNNING"), found.get("RUNNABLE")) == (1, 2)
    assert world.store.get(LIMIT_MARK) == b"1"
    jobs.terminate([array], "enough")
    ended(jobs, array)
    world.jobs("true").remove_limit()  # another controller's end
    assert world.store.get(LIMIT_MARK) is None
    assert world.told == []
    jobs.remove_limit()


def test_the_children_that_failed_are_told_with_their_codes(world: World) -> None:
    jobs = world.jobs("sh", "-c", "exit $AWS_BATCH_JOB_ARRAY_INDEX")
    array = jobs.submit(world.wave(), 3, 100)
    assert ended(jobs, array).children == {"SUCCEEDED": 1, "FAILED": 2}
    found = jobs.failed_children(array)
    assert [(each.index, each.exit_code) for each in found] == [(1, 1), (2, 2)]
    assert all(each.stopped_at and each.started_at for each in found)
    assert [each.job_id for each in found] == [f"{array}:1", f"{array}:2"]
