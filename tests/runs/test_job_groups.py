"""A gang: what its jobs are, and that all of them are submitted, or none."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from batchml.aws.batch.requests import SubmissionRequests
from batchml.errors import BatchmlError, ConfigError, ServiceError, UsageError
from batchml.history import History
from batchml.model.group import (
    GANG_HEAD,
    GANG_KEY,
    RENDEZVOUS,
    GroupJob,
    group_jobs,
    is_worker,
)
from batchml.model.job import Group, Health, JobSpec, Launch, Resources, Retry
from batchml.model.names import keyed_name, new_key
from batchml.model.run import JobStatus, Record, Run, RunName
from batchml.runs.commands.show import describe_groups as shown_groups
from batchml.runs.fit import Capacity, fit_groups
from batchml.runs.groups.members import GroupWorkers
from batchml.runs.groups.submit import (
    GROUP_OVER,
    INCOMPLETE,
    NO_HEAD,
    SubmitIntent,
    submit_group_run,
)
from batchml.runs.in_flight import InFlight, UnsentRequests
from batchml.runs.names import select_run
from batchml.runs.options import RunRequest
from batchml.runs.prepare import prepare
from batchml.runs.reconcile import reconcile, settle_abandoned
from batchml.runs.rerun.rules import check_runs_alone, groups_of, make_rerun
from batchml.runs.search import FoundRun, RunFilter, matches
from batchml.runs.send import AWS_LISTING_DELAY, Interrupted, Submitter
from batchml.runtime.nodes.ray.batch_api import attempts_of
from batchml.runtime.protocol.launch import (
    ENDED_BY_HEAD,
    HEAD,
    TOKEN,
    WORKER,
    LaunchPlan,
    WorkerGroup,
)
from tests.runs.test_submission import Aws, place_in, write
from tests.runs.test_submission import aws as aws
from tests.runs.test_submit import AMBIGUOUS, Killed, World
from tests.support.fakes import FakeClock
from tests.support.known_runs import KnownList
from tests.support.models import faults

SPEC = JobSpec(
    image="ray", command=("python", "vit.py"), name="vit", queue="gpu", timeout="1h",
    resources=Resources(vcpus=4, memory="15 GiB", gpus=1), metrics={"loss": "loss=(.*)"},
    launch=Launch(kind="ray", start_within="5m", hang_after="10m"), retry=Retry(attempts=2),
    groups=(
        Group("head"),
        Group("decoders", count=3, min=2, queue="cpu", resources=Resources(16, "30 GiB")),
        Group("one", queue="cpu"),
    ),
)  # fmt: skip
KEYS = ["2headaaaaaaaaaaaa", "3decodersaaaaaaaa", "4oneaaaaaaaaaaaaa"]


def split(spec: JobSpec = SPEC, **more: Any) -> list[GroupJob]:
    keys = KEYS[: len(spec.groups)]
    return group_jobs(spec, keys, "ab" * 16, queue=lambda name, gpus: f"q-{name}", **more)


# --- what its jobs are ------------------------------------------------------------------------


def test_the_head_runs_the_command_and_knows_its_workers() -> None:
    head = split()[0]
    assert (head.spec.name, head.queue, head.array, head.is_head) == ("vit", "q-gpu", None, True)
    assert (head.spec.resources, head.spec.groups) == (SPEC.resources, ())
    plan = LaunchPlan.read(head.env)
    assert plan is not None
    assert (plan.kind, plan.role, plan.start_within, plan.hang_after) == ("ray", HEAD, 300, 600)
    assert plan.groups == (
        WorkerGroup("decoders", 3, 2, f"vit-decoders-{KEYS[1]}", "q-cpu"),
        WorkerGroup("one", 1, 1, f"vit-one-{KEYS[2]}", "q-cpu"),
    )


def test_workers_are_an_array_with_what_their_group_has() -> None:
    _, decoders, one = split()
    assert (decoders.spec.name, decoders.array, one.array) == ("vit-decoders", 3, None)
    assert decoders.spec.resources == Resources(16, "30 GiB")
    assert one.spec.resources == SPEC.resources
    plan = LaunchPlan.read(decoders.env)
    assert plan is not None
    assert (plan.role, plan.groups) == (WORKER, ())
    assert decoders.spec.metrics == {}


def test_workers_have_time_for_every_attempt_of_the_head() -> None:
    head, decoders, _ = split()
    assert head.spec.timeout_seconds == 3600
    assert decoders.spec.timeout_seconds == 2 * (3600 + 300 + 600)
    assert split(msgspec.structs.replace(SPEC, timeout=None))[1].spec.timeout is None


def test_all_know_each_other_by_the_same_variables_and_tags() -> None:
    for member in split(rendezvous="s3://b/runs/2head"):
        assert member.env[TOKEN] == "ab" * 16
        assert member.env[GANG_KEY] == KEYS[0]
        assert member.env[RENDEZVOUS] == "s3://b/runs/2head"
        assert member.env[GANG_HEAD].endswith(f"-{KEYS[0]}")
        assert attempts_of(member.env) == SPEC.retry.attempts
        assert member.tags == {"batchml:gang": KEYS[0], "batchml:group": member.group}
        assert is_worker({**member.tags, "batchml:key": member.key}) is not member.is_head
    assert all(RENDEZVOUS not in member.env for member in split())


def test_workers_that_ended_with_their_head_have_not_failed() -> None:
    run = Run(
        "j", "w", "q", JobStatus.FAILED, status_reason=ENDED_BY_HEAD, is_terminated=True,
        children={"FAILED": 1, "SUCCEEDED": 1}, array_size=2,
    )  # fmt: skip
    assert shown_groups([GroupWorkers("w", 2, "j", FoundRun(run, None))]) == (
        "w ended with the run, 1 of 2 done (j)"
    )
    lost = msgspec.structs.replace(run, status_reason="", is_terminated=False)
    assert shown_groups([GroupWorkers("w", 2, "j", FoundRun(lost, None))]) == "w FAILED, 1 of 2 (j)"


GROUPS = st.lists(
    st.tuples(st.integers(1, 50), st.none() | st.integers(0, 60)), min_size=1, max_size=5
)


@given(groups=GROUPS)
def test_no_worker_is_lost_or_waited_for_in_vain(groups: list[tuple[int, int | None]]) -> None:
    named = [Group(f"g{n}", count=count, min=low) for n, (count, low) in enumerate(groups)]
    spec = msgspec.structs.replace(SPEC, groups=(Group("head"), *named))
    keys = [new_key(bytes([n]).__mul__) for n in range(len(spec.groups))]
    head, *workers = group_jobs(spec, keys, "t")
    assert [each.array or 1 for each in workers] == [group.count for group in named]
    assert len({each.key for each in (head, *workers)}) == len(spec.groups)
    for told, each in zip(head.plan.groups, workers, strict=True):
        assert 0 <= told.least <= told.size == (each.array or 1)
        assert told.job_name == keyed_name(each.spec.name, each.key)
    assert LaunchPlan.read(head.env) == head.plan


# --- on one machine ---------------------------------------------------------------------------


def test_groups_are_cut_until_all_of_them_run_here_at_once() -> None:
    fitted = fit_groups(SPEC, Capacity(vcpus=10, memory_mib=20_000, gpus=0))
    resources = [group.resources for group in fitted.spec.groups]
    assert resources == [
        Resources(2, "4000 MiB"), Resources(2, "4000 MiB"), Resources(2, "4000 MiB"),
    ]  # fmt: skip
    assert fitted.cuts[0] == "head with 2 vCPU, 4000 MiB instead of 4 vCPU, 15360 MiB, 1 GPU"
    assert fit_groups(SPEC, Capacity(100, 500_000, 4)).cuts == ()


def test_workers_that_are_not_waited_for_may_come_later() -> None:
    fitted = fit_groups(SPEC, Capacity(vcpus=4, memory_mib=8_000, gpus=0))
    assert all(each.resources and each.resources.vcpus == 1 for each in fitted.spec.groups)
    with pytest.raises(ConfigError, match=r"4 containers.*has 3 vCPUs.*--vcpus 4"):
        fit_groups(SPEC, Capacity(vcpus=3, memory_mib=8_000, gpus=0))


# --- submitted, all or none -------------------------------------------------------------------


class GangWorld(World):
    def describe(self, job_ids: Any) -> dict[str, Run]:
        names = {job_id: name for job_id, name, _ in self.jobs}
        return {
            each: Run(each, names[each], "default", self.status(each))
            for each in job_ids
            if each in names
        }


class User:
    """One user's state folder and account; each of its gangs is a head and two jobs of workers."""

    def __init__(self, folder: Path, *plan: str, lag: float = 0) -> None:
        self.clock = FakeClock()
        self.world = GangWorld(self.clock, list(plan), lag)
        self.history = History(folder / "history.jsonl")
        self.said: list[str] = []

    def intent(self, name: str, key: str, gang: str = "") -> SubmitIntent:
        at, named = int(self.clock.now() * 1000), keyed_name(name, key)
        record = Record(
            key=key, name=name, job_name=named, env="aws", queue="default", at=at, gang=gang
        )
        request = {"jobName": named, "jobDefinition": "d", "jobQueue": "default"}
        return SubmitIntent(SubmissionRequests({"jobDefinitionName": "d"}, request), record)

    def submit(self) -> str:
        head, *keys = KEYS
        workers = [self.intent(f"vit-{n}", key, gang=head) for n, key in enumerate(keys)]
        return submit_group_run(self.submitter, self.intent("vit", head), workers)

    @property
    def submitter(self) -> Submitter:
        return Submitter(self.world, self.history, self.clock, self.said.append)

    def reconcile(self, *plan: str) -> None:
        self.world.plan, self.world.listing = list(plan), []
        self.clock.time += 2 * AWS_LISTING_DELAY
        reconcile(self.submitter, "aws")

    @property
    def live(self) -> list[str]:
        """The names of the jobs that go on, without their keys."""
        return sorted(
            name.rpartition("-")[0] for i, name, _ in self.world.jobs if i in self.world.live
        )

    def is_settled(self) -> bool:
        """Nothing is open, and nothing of a request is left on the disk."""
        flights = InFlight.beside(self.history, "aws")
        unsent = UnsentRequests.beside(self.history, "aws")
        return not (
            self.history.unconfirmed("aws")
            or flights.abandoned(1e12)
            or any(unsent.find(KEYS[0], key) for key in KEYS)
        )


WHOLE = ["vit", "vit-0", "vit-1"]


def test_one_call_for_each_job_the_head_first(tmp_path: Path) -> None:
    user = User(tmp_path)
    assert user.submit() == "job-0"
    assert user.world.calls == ["SubmitJob"] * 3
    assert next(name for _, name, _ in user.world.jobs) == f"vit-{KEYS[0]}"
    assert (user.live, user.is_settled(), user.said) == (WHOLE, True, [])


def test_all_of_it_is_on_the_disk_before_the_first_call(tmp_path: Path) -> None:
    user = User(tmp_path, "kill")
    with pytest.raises(Killed):
        user.submit()
    assert {record.key for record in user.history.unconfirmed("aws")} == {*KEYS}
    kept = UnsentRequests.beside(user.history, "aws").find(KEYS[0], KEYS[1])
    assert kept is not None
    assert kept.submit["jobName"] == f"vit-0-{KEYS[1]}"
    (file,) = (tmp_path / "gangs" / "aws").iterdir()
    assert file.stat().st_mode & 0o77 == 0


@pytest.mark.parametrize("done", [1, 2])
@pytest.mark.parametrize("kind", ["kill", "+kill"])
def test_a_client_that_is_killed_between_leaves_a_gang_that_is_finished(
    tmp_path: Path, done: int, kind: str
) -> None:
    user = User(tmp_path, *["ok"] * done, kind)
    with pytest.raises(Killed):
        user.submit()
    user.reconcile()
    assert (user.live, user.is_settled()) == (WHOLE, True)
    user.reconcile()
    assert user.live == WHOLE


def test_the_next_submission_finishes_it_too(tmp_path: Path) -> None:
    user = User(tmp_path, "ok", "kill")
    with pytest.raises(Killed):
        user.submit()
    user.clock.time += 2 * AWS_LISTING_DELAY
    settle_abandoned(user.submitter, "aws")
    assert (user.live, user.is_settled()) == (WHOLE, True)


def test_without_a_head_there_are_no_workers(tmp_path: Path) -> None:
    user = User(tmp_path, "refused")
    with pytest.raises(ServiceError):
        user.submit()
    assert (user.live, user.is_settled()) == ([], True)
    reasons = {each.key: each.refused for each in user.history.newest_first("aws")}
    assert [reasons[key] for key in KEYS[1:]] == [NO_HEAD] * 2
    user.reconcile()
    assert user.live == []


def test_workers_that_are_refused_end_the_head(tmp_path: Path) -> None:
    user = User(tmp_path, "ok", "ok", "refused")
    with pytest.raises(ServiceError):
        user.submit()
    assert (user.live, user.is_settled()) == ([], True)
    assert set(user.world.ended.values()) == {INCOMPLETE}


def test_a_gang_that_was_cancelled_meanwhile_is_not_finished(tmp_path: Path) -> None:
    user = User(tmp_path, "ok", "kill")
    with pytest.raises(Killed):
        user.submit()
    user.world.ended["job-0"] = "cancelled"
    user.reconcile()
    assert (user.live, user.is_settled()) == ([], True)
    assert {each.refused for each in user.history.newest_first("aws")} == {"", GROUP_OVER}


def test_a_gang_whose_requests_are_gone_is_ended_rather_than_left_half(tmp_path: Path) -> None:
    user = User(tmp_path, "ok", "kill")
    with pytest.raises(Killed):
        user.submit()
    UnsentRequests.beside(user.history, "aws").drop(KEYS[0])
    user.reconcile()
    assert (user.live, user.world.ended) == ([], {"job-0": INCOMPLETE})


def test_ctrl_c_between_tells_the_head(tmp_path: Path) -> None:
    user = User(tmp_path, "ok", "ctrl-c")
    with pytest.raises(Interrupted) as stop:
        user.submit()
    assert (stop.value.job_id, stop.value.key) == ("job-0", KEYS[0])
    assert "batchml reconcile" in user.said[-1]
    user.reconcile()
    assert (user.live, user.is_settled()) == (WHOLE, True)


FATES = st.sampled_from(
    ["ok", "kill", "+kill", "refused", "throttled", "dns", "ctrl-c"]
    + [f"{carried}{kind}" for kind in AMBIGUOUS for carried in ("", "+")]
)  # fmt: skip


@examples(max_examples=150, deadline=None)
@given(
    plan=st.lists(FATES, max_size=8),
    listing=st.lists(st.sampled_from(["ok", "closed"])),
    later=st.lists(FATES, max_size=5),
)
def test_whatever_happens_there_is_a_whole_gang_or_none(
    plan: list[str],
    listing: list[str],
    later: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    user = User(tmp_path_factory.mktemp("gang"), *plan)
    user.world.listing = listing
    try:
        user.submit()
    except (BatchmlError, Killed, KeyboardInterrupt):
        pass
    for fates in (later, later[2:], [], []):
        try:
            user.reconcile(*fates)
        except (BatchmlError, Killed, KeyboardInterrupt):
            pass
    assert user.live in (WHOLE, [])
    assert user.is_settled()


# --- which run is meant, and which are shown ---------------------------------------------------


def test_the_last_run_is_the_head(tmp_path: Path) -> None:
    user = User(tmp_path)
    user.submit()
    names = user.history.names("aws")
    assert select_run("@last", names, list) == "job-0"
    assert select_run("vit-1", names, list) == "job-2"
    plain = [RunName(key="k", job_id="job-9", name="older")]
    assert select_run("@last~1", KnownList([*names, *plain]), list) == "job-9"


def test_workers_are_listed_only_where_they_are_asked_for() -> None:
    tags = {"batchml:key": KEYS[1], "batchml:gang": KEYS[0], "batchml:group": "decoders"}
    worker = FoundRun(Run("j", "vit-decoders", "q", JobStatus.RUNNING, tags=tags), None)
    assert worker.is_worker
    assert RunFilter().leaves_out_workers
    asked = [
        RunFilter(include_workers=True), RunFilter(name="vit-decoders"),
        RunFilter(tags={"batchml:gang": KEYS[0]}), RunFilter(tags={"batchml:group": "decoders"}),
    ]  # fmt: skip
    for wanted in asked:
        assert not wanted.leaves_out_workers
        assert matches(worker, wanted)


# --- again ------------------------------------------------------------------------------------


def seen(member: GroupJob) -> Run:
    """A job of a gang as AWS describes it."""
    resources = member.spec.resources
    return Run(
        f"id-{member.group}", member.spec.name, member.queue, JobStatus.SUCCEEDED, image="r/i@s",
        command=("python", "vit.py"), vcpus=resources.vcpus, memory_mib=resources.memory_mib,
        gpus=resources.gpu_count, array_size=member.array or 0, key=member.key,
        tags={**member.tags, "batchml:key": member.key},
        environment={**member.env, "BATCHML_CODE": "s3://b/c", "BATCHML_KEY": member.key,
                     "BATCHML_HEALTH": json.dumps({"checks": "deep", "bandwidth": 0, "tries": 2})},
    )  # fmt: skip


def test_a_gang_from_elsewhere_comes_again_whole() -> None:
    head, *workers = split()
    groups = groups_of(seen(head), {each.group: seen(each) for each in workers})
    spec = make_rerun(seen(head), None, groups=groups).spec
    assert [(each.name, each.count, each.min, each.queue) for each in spec.groups] == [
        ("head", 1, None, "q-gpu"), ("decoders", 3, 2, "q-cpu"), ("one", 1, 1, "q-cpu"),
    ]  # fmt: skip
    assert spec.groups[1].resources == Resources(16, "30720 MiB")
    assert (spec.launch.kind, spec.launch.start_within) == ("ray", "300s")
    assert spec.health == Health(checks="deep", tries=2)
    assert not any(name.startswith("BATCHML_") for name in spec.env)
    with pytest.raises(UsageError, match="forgotten its workers decoders"):
        groups_of(seen(head), {})


def test_neither_workers_nor_a_node_come_again_alone() -> None:
    worker = seen(split()[1])
    with pytest.raises(UsageError, match=f"batchml rerun {KEYS[0]}"):
        make_rerun(worker, None)
    with pytest.raises(UsageError, match=r"To run all nodes again: batchml rerun id$"):
        check_runs_alone(Run("id#1", "n", "q", JobStatus.FAILED, node_index=1), {}, "id#1")


# --- in AWS -----------------------------------------------------------------------------------

GANG = """
image = "pytorch"
command = ["python", "vit.py"]
code = false
[launch]
kind = "ray"
[[groups]]
name = "head"
queue = "gpu"
resources = { gpus = 1 }
[[groups]]
name = "workers"
count = 4
queue = "gpu"
resources = { vcpus = 16 }
"""


def test_in_aws_each_group_has_its_image_and_all_meet_in_the_bucket(
    tmp_path: Path, aws: Aws
) -> None:
    place, session = place_in(tmp_path, aws.answer)
    write(tmp_path, GANG)
    order = RunRequest(job="hello", tags={"team": "v"})
    made = prepare(place, order, dry_run=True)
    jobs = [made.requests, *(each.requests for each in made.workers)]
    asked = [params["imageIds"][0]["imageTag"] for params in session.asked("DescribeImages")]
    assert len(set(asked)) == 2  # with GPUs it is another flavor
    told = [variables(each) for each in jobs]
    key = made.record.key
    assert {each["BATCHML_GANG"] for each in told} == {f"s3://bucket/runs/{key}"}
    assert len({each["BATCHML_STORE"] for each in told}) == 2
    assert {each.submit["tags"]["batchml:gang"] for each in jobs} == {key}
    assert {each.submit["tags"]["team"] for each in jobs} == {"v"}
    for each in jobs:
        assert faults("batch", "RegisterJobDefinition", each.register) == []
        assert faults("batch", "SubmitJob", each.submit) == []
    assert made.record.groups == {"workers": made.workers[0].record.key}
    assert made.workers[0].record.gang == key
    assert (made.workers[0].record.vcpus, made.workers[0].record.array_size) == (16, 4)

    before = {"workers": "registry/pytorch@sha256:1"}
    again = prepare(place, order, dry_run=True, images=before).workers[0].requests
    assert again.register["containerProperties"]["image"] == before["workers"]


def test_a_gang_that_could_not_meet_is_refused(tmp_path: Path, aws: Aws) -> None:
    aws.stacks = {}
    place, session = place_in(tmp_path, aws.answer)
    write(tmp_path, GANG)
    with pytest.raises(ConfigError, match="bucket or the workspace of dev"):
        prepare(place, RunRequest(job="hello"), dry_run=True)
    assert session.asked("SubmitJob") == []


def variables(requests: SubmissionRequests) -> dict[str, str]:
    entries = requests.submit["containerOverrides"]["environment"]
    return {each["name"]: each["value"] for each in entries}
