"""From a file to what is frozen, and from a wave to the request of its job."""

from pathlib import Path

import msgspec
import pytest
from botocore.validate import ParamValidator
from msgspec.structs import replace

from batchml.aws.naming import Platform
from batchml.client.place import Place
from batchml.client.sweeping.checking import check
from batchml.client.sweeping.courses import course_of
from batchml.client.sweeping.freezing import Frozen, read_frozen, write_frozen
from batchml.client.sweeping.reading import Wish, find_file, read_wish, widths
from batchml.client.sweeping.running import is_better_watched, needs_controller
from batchml.client.sweeping.starting import make_ready
from batchml.client.sweeping.waves import BY_TRIAL, wave_record, wave_requests
from batchml.errors import ConfigError, NotFound
from batchml.local.server.protocol import service_model
from batchml.model.job import JobSpec, Retry
from batchml.runtime.storage.store import FolderStore
from batchml.settings import load_settings
from batchml.sweep import optuna_door
from batchml.sweep.events import Wave
from tests.fakes import FakeClock

SWEEP = """
job = "tiny"
goal = { max = "acc" }
method = "random"
[space]
lr = { log = [1e-4, 1e-1] }
[limits]
trials = 4
"""
JOB = """
image = "docker.io/library/python:3.12"
command = ["python", "train.py", "--lr", "{lr}"]
[params]
lr = 0.1
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    job = tmp_path / "jobs" / "tiny"
    job.mkdir(parents=True)
    (job / "job.toml").write_text(JOB)
    (job / "train.py").write_text("print('acc=1')\n")
    (tmp_path / "sweep.toml").write_text(SWEEP)
    settings = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, "local")
    return Place(settings, FakeClock(), tmp_path)


def frozen_of(place: Place, *changes: str) -> Frozen:
    return make_ready(place, Wish(file="sweep.toml", changes=changes)).frozen


def in_aws(frozen: Frozen) -> Frozen:
    return replace(
        frozen,
        env="dev",
        board=f"s3://bucket/runs/{frozen.key}",
        runs="s3://bucket/runs",
        documents="s3://bucket/code",
        platform=Platform(job_role="arn:aws:iam::123456789012:role/r", log_group="/g"),
    )


WAVE = Wave(2, 1.0, "3bbbbbbbbbbbbbbbb", ())


def environment(request: dict[str, object]) -> dict[str, str]:
    overrides = request["containerOverrides"]
    assert isinstance(overrides, dict)
    return {entry["name"]: entry["value"] for entry in overrides["environment"]}


def test_what_is_frozen_is_read_back_as_it_was(place: Place, tmp_path: Path) -> None:
    frozen, board = frozen_of(place), FolderStore(str(tmp_path / "board"))
    assert read_frozen(board) is None
    assert write_frozen(board, frozen)
    assert not write_frozen(board, replace(frozen, name="other"))
    assert read_frozen(board) == frozen
    assert frozen.text == SWEEP
    assert frozen.job_spec.command == ("python", "train.py", "--lr", "{lr}")
    assert frozen.board == str(place.home.root / "sweeps" / frozen.key)
    assert not place.home.root.exists()  # nothing is kept before it is started


def test_a_board_of_a_later_version_is_refused_in_words(tmp_path: Path) -> None:
    board = FolderStore(str(tmp_path))
    board.put("spec.json", b'{"key": 3}')
    with pytest.raises(ConfigError, match="cannot be read"):
        read_frozen(board)


def test_a_waves_request_is_one_that_aws_takes(place: Place) -> None:
    frozen = in_aws(frozen_of(place))
    made = wave_requests(frozen, WAVE, 300, 120, after="a-job", is_held=True)
    request = made.submit
    model = service_model("batch").operation_model("SubmitJob").input_shape
    assert not ParamValidator().validate(request, model).has_errors()
    assert request["jobName"] == f"tiny-w2-{WAVE.key}"
    assert request["arrayProperties"] == {"size": 300}
    assert request["dependsOn"] == [{"jobId": "a-job"}]
    held = request["consumableResourcePropertiesOverride"]["consumableResourceList"]
    assert held == [{"consumableResource": f"batchml-{frozen.key}", "quantity": 1}]
    assert request["tags"]["batchml:sweep"] == frozen.key
    assert request["containerOverrides"]["command"] == ["python", "train.py", "--lr", "{lr}"]
    seen = environment(request)
    assert seen["BATCHML_SWEEP"] == frozen.board
    assert seen["BATCHML_STORE"] == f"s3://bucket/runs/{WAVE.key}"
    assert (seen["BATCHML_WAVE"], seen["BATCHML_WAVE_WIDTH"]) == ("2", "120")
    assert "BATCHML_RUNG" not in seen
    assert made.register["containerProperties"]["jobRoleArn"].endswith("role/r")


def test_a_wave_of_one_is_a_plain_job_and_all_waves_share_one_definition(place: Place) -> None:
    frozen = frozen_of(place)
    one = wave_requests(frozen, WAVE, 1, 120)
    other = wave_requests(frozen, replace(WAVE, number=7, rung=2), 9, 120)
    assert "arrayProperties" not in one.submit
    assert "consumableResourcePropertiesOverride" not in one.submit
    assert one.register == other.register
    assert environment(other.submit)["BATCHML_RUNG"] == "2"
    record = wave_record(frozen, WAVE, 1, one)
    assert (record.key, record.array_size, record.name) == (WAVE.key, 0, "tiny-w2")


def test_a_long_template_stays_on_the_board(place: Place) -> None:
    frozen = frozen_of(place)
    job = JobSpec(image="python", command=("sh", "-c", "x" * 9000), name="tiny")
    made = wave_requests(replace(frozen, job=msgspec.to_builtins(job)), WAVE, 2, 1)
    assert made.submit["containerOverrides"]["command"] == [BY_TRIAL]
    assert made.document is None


def test_a_trial_is_tried_again_after_a_lost_host_unless_the_job_says_otherwise(
    place: Place,
) -> None:
    assert frozen_of(place).job_spec.retry == Retry(3, ("host-lost", "image-error"))
    path = place.here / "jobs" / "tiny" / "job.toml"
    path.write_text(JOB + "[retry]\nattempts = 1\n")
    assert frozen_of(place).job_spec.retry == Retry(1)
    # A board that cannot be reached may be reachable from another host.
    rules = wave_requests(frozen_of(place), WAVE, 2, 1).submit["retryStrategy"]["evaluateOnExit"]
    assert {"onExitCode": "75", "action": "RETRY"} in rules


def test_the_width_is_fitted_to_this_machine_and_that_is_said(place: Place) -> None:
    ready = make_ready(place, Wish(file="sweep.toml", changes=widths(5000, 5000)))
    assert ready.frozen.spec.limits.trials == 5000
    assert ready.frozen.spec.limits.parallel < 5000
    assert any("at once instead of 5000" in notice for notice in ready.notices)


def test_a_job_is_looked_for_beside_the_file_and_a_jobs_own_file_needs_no_name(
    place: Place,
) -> None:
    folder = place.here / "jobs" / "tiny"
    (folder / "sweep.toml").write_text(SWEEP.replace('job = "tiny"\n', ""))
    assert find_file(place, "tiny") == folder / "sweep.toml"
    assert find_file(place, "jobs/tiny") == folder / "sweep.toml"
    assert read_wish(place, Wish(file="tiny")).ordered.folder == folder
    assert read_wish(place, Wish(file="tiny")).spec.name == "tiny"
    with pytest.raises(NotFound, match="Did you mean"):
        find_file(place, "swep.toml")


def test_the_mistakes_of_the_file_and_of_its_job_are_told_together(place: Place) -> None:
    (place.here / "jobs" / "tiny" / "job.toml").write_text('imag = "python"\n')
    (place.here / "sweep.toml").write_text(SWEEP.replace("trials", "trails"))
    with pytest.raises(ConfigError) as caught:
        make_ready(place, Wish(file="sweep.toml"))
    told = str(caught.value)
    assert "trails" in told and "imag" in told and "command: missing" in told


def test_a_job_in_the_program_stands_for_the_one_in_the_file(place: Place) -> None:
    job = JobSpec(image="python", command=("python", "-c", "print('acc={lr}')"), params={"lr": 1})
    table = {"goal": {"max": "acc"}, "method": "grid", "space": {"lr": [1, 2]}}
    read = read_wish(place, Wish(table=table, job=job))
    assert read.ordered.spec.command == job.command
    assert read.spec.name == read.ordered.spec.name


@pytest.mark.parametrize(
    ("changes", "needed", "shape"),
    [
        ((), False, "array"),
        (("method=tpe",), True, "waves"),
        (("early_stop.max=9", "early_stop.method=asha"), True, "array"),
        (("early_stop.max=9", "early_stop.method=halving"), False, "rungs"),
        (("limits.target=0.9",), True, "array"),
        (("limits.hours=2",), False, "array"),
        (("confirm.top=2",), True, "array"),
    ],
)
def test_who_needs_a_controller(
    place: Place, changes: tuple[str, ...], needed: bool, shape: str
) -> None:
    frozen = frozen_of(place, *changes)
    assert needs_controller(frozen) is needed
    course = course_of(frozen, is_local=True)
    assert course.shape == shape
    assert course.key == frozen.key
    assert course.rungs == ((1, 3) if "early_stop.max=9" in changes else ())


@pytest.mark.parametrize("method", ["gp", "cmaes", "nsga2"])
def test_a_method_whose_package_is_not_there_is_refused_with_the_command(
    place: Place, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `sweep check`, too: nothing was sent by then."""
    monkeypatch.setattr(optuna_door, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        frozen_of(place, f"method={method}", "job=tniy")
    first, second = sorted(refused.value.mistakes, key=lambda each: "pip" in each)
    assert "pip install 'batchml[optuna]'" in second and method in second
    assert "Did you mean 'tiny'" in first  # and what else is wrong


def test_on_this_machine_it_is_free_unless_it_has_a_price(place: Place) -> None:
    frozen = frozen_of(place)
    assert frozen.is_free
    shown = check(frozen)
    assert not any("not bounded" in line for line in shown.lines)
    assert any(line.startswith("Free: ") for line in shown.lines)
    assert shown.as_json()["forecast"]["cost"] == 0
    (place.here / "batchml.toml").write_text("[env.local]\nusd_per_hour = 2.0\n")
    settings = load_settings({"BATCHML_HOME": str(place.home.root)}, place.here, "local")
    priced = frozen_of(Place(settings, FakeClock(), place.here))
    assert not priced.is_free and not in_aws(frozen).is_free
    assert any("not bounded" in line for line in check(priced).lines)


def test_an_array_whose_trials_wait_for_others_is_better_watched(place: Place) -> None:
    parallel = frozen_of(place).spec.limits.parallel
    assert is_better_watched(frozen_of(place, f"limits.trials={parallel + 1}"))
    assert not is_better_watched(frozen_of(place, f"limits.trials={parallel}"))


def test_a_cost_limit_needs_a_known_price(place: Place) -> None:
    (place.here / "batchml.toml").write_text("[env.local]\nusd_per_hour = 2.0\n")
    settings = load_settings({"BATCHML_HOME": str(place.home.root)}, place.here, "local")
    priced = Place(settings, FakeClock(), place.here)
    frozen = frozen_of(priced, "limits.cost='5 USD'")
    assert frozen.hourly is not None and 0 < frozen.hourly <= 2.0
    assert frozen.spec.limits.cost == 5.0


def test_a_parameter_of_the_space_needs_no_default_of_the_job(place: Place) -> None:
    job = place.here / "jobs" / "tiny" / "job.toml"
    job.write_text(JOB.partition("[params]")[0])
    assert read_wish(place, Wish(file="sweep.toml")).ordered.spec.params == {}
    job.write_text(JOB.partition("[params]")[0].replace("{lr}", "{rate}"))
    with pytest.raises(ConfigError, match=r"rate.* has no default"):
        read_wish(place, Wish(file="sweep.toml"))


def test_one_that_takes_no_part_in_some_trials_needs_a_default(place: Place) -> None:
    job = place.here / "jobs" / "tiny" / "job.toml"
    job.write_text(JOB.partition("[params]")[0].replace('"{lr}"', '"{lr}", "{opt}", "{beta}"'))
    (place.here / "sweep.toml").write_text(
        SWEEP.replace(
            "[limits]",
            'opt = ["sgd", "adam"]\nbeta = { float = [0, 1], when = { opt = "adam" } }\n[limits]',
        )
    )
    with pytest.raises(ConfigError, match=r"beta.* has no default"):
        read_wish(place, Wish(file="sweep.toml"))


def test_a_sweep_beside_its_job_is_called_as_the_folder_is(place: Place) -> None:
    folder = place.here / "jobs" / "tiny"
    (folder / "sweep.toml").write_text(SWEEP.replace('job = "tiny"', 'job = "."'))
    assert read_wish(place, Wish(file="tiny")).spec.name == "tiny"


def test_a_table_takes_a_job_by_its_name(place: Place) -> None:
    table = {"goal": {"max": "acc"}, "space": {"lr": [1, 2]}, "limits": {"trials": 2}}
    assert read_wish(place, Wish(table=table, job="tiny")).ordered.spec.name == "tiny"
    with pytest.raises(ConfigError, match="nowhere"):
        read_wish(place, Wish(table=table, job="nowhere"))


def test_wide_sweeps_speak_less_often_and_know_their_attempts(place: Place) -> None:
    frozen = frozen_of(place, "limits.parallel=1")
    course = course_of(frozen, is_local=False)
    assert (course.every, course.look) == (60, 15)
    assert (course.attempts, course.retries) == (3, ("host-lost", "image-error"))
    limits = replace(frozen.spec.limits, parallel=10_000)
    wide = replace(frozen, spec=replace(frozen.spec, limits=limits))
    course = course_of(wide, is_local=False)
    assert (course.every, course.look) == (500, 100), "20 messages and 100 lists a second"


def test_what_is_checked_ends_with_what_it_comes_to(place: Place) -> None:
    lines = check(frozen_of(place)).lines
    assert lines[0] == "RegisterJobDefinition:"
    assert lines[-1].startswith("How it runs: ")
    assert "terminal" in check(frozen_of(place, "method=tpe")).lines[-1]


def test_rungs_under_a_limit_of_the_cost_need_somebody_who_keeps_it(place: Place) -> None:
    halving = frozen_of(place, "early_stop.max=9", "early_stop.method=halving")
    assert not needs_controller(halving)
    limits = replace(halving.spec.limits, cost=1.0)
    dear = replace(halving, hourly=1.0, spec=replace(halving.spec, limits=limits))
    assert needs_controller(dear)


def test_the_worst_case_counts_each_attempt(place: Place) -> None:
    frozen = frozen_of(place)
    job = {**frozen.job, "timeout": "1h"}  # 4 trials, each up to 3 times
    for cost, shape in ((12.0, "array"), (11.9, "waves")):
        limits = replace(frozen.spec.limits, cost=cost)
        spec = replace(frozen.spec, limits=limits)
        assert replace(frozen, job=job, hourly=1.0, spec=spec).shaped.shape == shape
