"""Prepare and start a sweep, make the requests of its batches, and send it other code."""

from pathlib import Path

import msgspec
import pytest
from botocore.validate import ParamValidator
from msgspec.structs import replace

from batchml.aws.naming import Platform
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import ConfigError, NotFound, UsageError
from batchml.local.server.protocol import service_model
from batchml.model.job import JobSpec, Retry
from batchml.runtime.storage.folder import FolderStore
from batchml.sweeps.control.events import TrialBatch
from batchml.sweeps.jobs import (
    CODE,
    LONG_COMMAND_PLACEHOLDER,
    batch_record,
    check_code,
    describe_old_code,
    requests_of_batch,
    send_code,
    with_current_code,
)
from batchml.sweeps.run import gains_from_controller, needs_controller
from batchml.sweeps.samplers import optuna
from batchml.sweeps.start import (
    SweepOptions,
    check_sweep,
    find_sweep_file,
    limit_changes,
    make_contract,
    prepare_sweep,
    resolve_sweep,
)
from batchml.sweeps.started import StartedSweep, read_started, write_started
from tests.support.fakes import FakeClock

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
def context(tmp_path: Path) -> Context:
    job = tmp_path / "jobs" / "tiny"
    job.mkdir(parents=True)
    (job / "job.toml").write_text(JOB)
    (job / "train.py").write_text("print('acc=1')\n")
    (tmp_path / "sweep.toml").write_text(SWEEP)
    settings = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, "local")
    return Context(settings, FakeClock(), tmp_path)


def prepared_sweep(context: Context, *changes: str) -> StartedSweep:
    return prepare_sweep(context, SweepOptions(file="sweep.toml", changes=changes)).sweep


def in_aws(started: StartedSweep) -> StartedSweep:
    return replace(
        started,
        env="dev",
        store=f"s3://bucket/runs/{started.key}",
        runs="s3://bucket/runs",
        documents="s3://bucket/code",
        platform=Platform(job_role="arn:aws:iam::123456789012:role/r", log_group="/g"),
    )


WAVE = TrialBatch(2, 1.0, "3bbbbbbbbbbbbbbbb", ())


def environment(request: dict[str, object]) -> dict[str, str]:
    overrides = request["containerOverrides"]
    assert isinstance(overrides, dict)
    return {entry["name"]: entry["value"] for entry in overrides["environment"]}


def test_what_is_frozen_is_read_back_as_it_was(context: Context, tmp_path: Path) -> None:
    started, store = prepared_sweep(context), FolderStore(str(tmp_path / "store"))
    assert read_started(store) is None
    assert write_started(store, started)
    assert not write_started(store, replace(started, name="other"))
    assert read_started(store) == started
    assert started.text == SWEEP
    assert started.job_spec.command == ("python", "train.py", "--lr", "{lr}")
    assert started.store == str(context.home.root / "sweeps" / started.key)
    assert not context.home.root.exists()  # nothing is kept before it is started


def test_a_store_of_a_later_version_is_refused_in_words(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path))
    store.put("spec.json", b'{"key": 3}')
    with pytest.raises(ConfigError, match="cannot be read"):
        read_started(store)


def test_a_waves_request_is_one_that_aws_takes(context: Context) -> None:
    started = in_aws(prepared_sweep(context))
    made = requests_of_batch(started, WAVE, 300, 120, after="a-job", is_limited=True)
    request = made.submit
    model = service_model("batch").operation_model("SubmitJob").input_shape
    assert not ParamValidator().validate(request, model).has_errors()
    assert request["jobName"] == f"tiny-w2-{WAVE.key}"
    assert request["arrayProperties"] == {"size": 300}
    assert request["dependsOn"] == [{"jobId": "a-job"}]
    held = request["consumableResourcePropertiesOverride"]["consumableResourceList"]
    assert held == [{"consumableResource": f"batchml-{started.key}", "quantity": 1}]
    assert request["tags"]["batchml:sweep"] == started.key
    assert request["containerOverrides"]["command"] == ["python", "train.py", "--lr", "{lr}"]
    seen = environment(request)
    assert seen["BATCHML_SWEEP"] == started.store
    assert seen["BATCHML_STORE"] == f"s3://bucket/runs/{WAVE.key}"
    assert (seen["BATCHML_WAVE"], seen["BATCHML_WAVE_WIDTH"]) == ("2", "120")
    assert "BATCHML_RUNG" not in seen
    assert made.register["containerProperties"]["jobRoleArn"].endswith("role/r")


def test_a_wave_of_one_is_a_plain_job_and_all_waves_share_one_definition(context: Context) -> None:
    started = prepared_sweep(context)
    one = requests_of_batch(started, WAVE, 1, 120)
    other = requests_of_batch(started, replace(WAVE, number=7, rung=2), 9, 120)
    assert "arrayProperties" not in one.submit
    assert "consumableResourcePropertiesOverride" not in one.submit
    assert one.register == other.register
    assert environment(other.submit)["BATCHML_RUNG"] == "2"
    record = batch_record(started, WAVE, 1, one)
    assert (record.key, record.array_size, record.name) == (WAVE.key, 0, "tiny-w2")


def test_a_long_template_stays_on_the_store(context: Context) -> None:
    started = prepared_sweep(context)
    job = JobSpec(image="python", command=("sh", "-c", "x" * 9000), name="tiny")
    made = requests_of_batch(replace(started, job=msgspec.to_builtins(job)), WAVE, 2, 1)
    assert made.submit["containerOverrides"]["command"] == [LONG_COMMAND_PLACEHOLDER]
    assert made.document is None


def test_a_trial_is_tried_again_after_a_lost_host_unless_the_job_says_otherwise(
    context: Context,
) -> None:
    assert prepared_sweep(context).job_spec.retry == Retry(3, ("host-lost", "image-error"))
    path = context.folder / "jobs" / "tiny" / "job.toml"
    path.write_text(JOB + "[retry]\nattempts = 1\n")
    assert prepared_sweep(context).job_spec.retry == Retry(1)
    # A store that cannot be reached may be reachable from another host.
    rules = requests_of_batch(prepared_sweep(context), WAVE, 2, 1).submit["retryStrategy"][
        "evaluateOnExit"
    ]
    assert {"onExitCode": "75", "action": "RETRY"} in rules


def test_the_width_is_fitted_to_this_machine_and_that_is_said(context: Context) -> None:
    ready = prepare_sweep(
        context, SweepOptions(file="sweep.toml", changes=limit_changes(5000, 5000))
    )
    assert ready.sweep.spec.limits.trials == 5000
    assert ready.sweep.spec.limits.parallel < 5000
    assert any("at once instead of 5000" in notice for notice in ready.notices)


def test_a_job_is_looked_for_beside_the_file_and_a_jobs_own_file_needs_no_name(
    context: Context,
) -> None:
    folder = context.folder / "jobs" / "tiny"
    (folder / "sweep.toml").write_text(SWEEP.replace('job = "tiny"\n', ""))
    assert find_sweep_file(context, "tiny") == folder / "sweep.toml"
    assert find_sweep_file(context, "jobs/tiny") == folder / "sweep.toml"
    assert resolve_sweep(context, SweepOptions(file="tiny")).job.folder == folder
    assert resolve_sweep(context, SweepOptions(file="tiny")).spec.name == "tiny"
    with pytest.raises(NotFound, match="Did you mean"):
        find_sweep_file(context, "swep.toml")


def test_the_mistakes_of_the_file_and_of_its_job_are_told_together(context: Context) -> None:
    (context.folder / "jobs" / "tiny" / "job.toml").write_text('imag = "python"\n')
    (context.folder / "sweep.toml").write_text(SWEEP.replace("trials", "trails"))
    with pytest.raises(ConfigError) as caught:
        prepare_sweep(context, SweepOptions(file="sweep.toml"))
    told = str(caught.value)
    assert "trails" in told and "imag" in told and "command: missing" in told


def test_a_job_in_the_program_stands_for_the_one_in_the_file(context: Context) -> None:
    job = JobSpec(image="python", command=("python", "-c", "print('acc={lr}')"), params={"lr": 1})
    table = {"goal": {"max": "acc"}, "method": "grid", "space": {"lr": [1, 2]}}
    read = resolve_sweep(context, SweepOptions(table=table, job=job))
    assert read.job.spec.command == job.command
    assert read.spec.name == read.job.spec.name


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
    context: Context, changes: tuple[str, ...], needed: bool, shape: str
) -> None:
    started = prepared_sweep(context, *changes)
    assert needs_controller(started) is needed
    contract = make_contract(started, is_local=True)
    assert contract.shape == shape
    assert contract.key == started.key
    assert contract.rungs == ((1, 3) if "early_stop.max=9" in changes else ())


@pytest.mark.parametrize("method", ["gp", "cmaes", "nsga2"])
def test_a_method_whose_package_is_not_there_is_refused_with_the_command(
    context: Context, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `sweep check`, too: nothing was sent by then."""
    monkeypatch.setattr(optuna, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        prepared_sweep(context, f"method={method}", "job=tniy")
    first, second = sorted(refused.value.mistakes, key=lambda each: "pip" in each)
    assert "pip install 'batchml[optuna]'" in second and method in second
    assert "Did you mean 'tiny'" in first  # and what else is wrong


def test_on_this_machine_it_is_free_unless_it_has_a_price(context: Context) -> None:
    started = prepared_sweep(context)
    assert started.is_free
    shown = check_sweep(started)
    assert not any("not bounded" in line for line in shown.lines)
    assert any(line.startswith("Free: ") for line in shown.lines)
    assert shown.to_json()["forecast"]["cost"] == 0
    (context.folder / "batchml.toml").write_text("[env.local]\nusd_per_hour = 2.0\n")
    settings = load_settings({"BATCHML_HOME": str(context.home.root)}, context.folder, "local")
    priced = prepared_sweep(Context(settings, FakeClock(), context.folder))
    assert not priced.is_free and not in_aws(started).is_free
    assert any("not bounded" in line for line in check_sweep(priced).lines)


def test_an_array_whose_trials_wait_for_others_is_better_watched(context: Context) -> None:
    parallel = prepared_sweep(context).spec.limits.parallel
    assert gains_from_controller(prepared_sweep(context, f"limits.trials={parallel + 1}"))
    assert not gains_from_controller(prepared_sweep(context, f"limits.trials={parallel}"))


def test_a_cost_limit_needs_a_known_price(context: Context) -> None:
    (context.folder / "batchml.toml").write_text("[env.local]\nusd_per_hour = 2.0\n")
    settings = load_settings({"BATCHML_HOME": str(context.home.root)}, context.folder, "local")
    priced = Context(settings, FakeClock(), context.folder)
    started = prepared_sweep(priced, "limits.cost='5 USD'")
    assert started.hourly is not None and 0 < started.hourly <= 2.0
    assert started.spec.limits.cost == 5.0


def test_a_parameter_of_the_space_needs_no_default_of_the_job(context: Context) -> None:
    job = context.folder / "jobs" / "tiny" / "job.toml"
    job.write_text(JOB.partition("[params]")[0])
    assert resolve_sweep(context, SweepOptions(file="sweep.toml")).job.spec.params == {}
    job.write_text(JOB.partition("[params]")[0].replace("{lr}", "{rate}"))
    with pytest.raises(ConfigError, match=r"rate.* has no default"):
        resolve_sweep(context, SweepOptions(file="sweep.toml"))


def test_one_that_takes_no_part_in_some_trials_needs_a_default(context: Context) -> None:
    job = context.folder / "jobs" / "tiny" / "job.toml"
    job.write_text(JOB.partition("[params]")[0].replace('"{lr}"', '"{lr}", "{opt}", "{beta}"'))
    (context.folder / "sweep.toml").write_text(
        SWEEP.replace(
            "[limits]",
            'opt = ["sgd", "adam"]\nbeta = { float = [0, 1], when = { opt = "adam" } }\n[limits]',
        )
    )
    with pytest.raises(ConfigError, match=r"beta.* has no default"):
        resolve_sweep(context, SweepOptions(file="sweep.toml"))


def test_a_sweep_beside_its_job_is_called_as_the_folder_is(context: Context) -> None:
    folder = context.folder / "jobs" / "tiny"
    (folder / "sweep.toml").write_text(SWEEP.replace('job = "tiny"', 'job = "."'))
    assert resolve_sweep(context, SweepOptions(file="tiny")).spec.name == "tiny"


def test_a_table_takes_a_job_by_its_name(context: Context) -> None:
    table = {"goal": {"max": "acc"}, "space": {"lr": [1, 2]}, "limits": {"trials": 2}}
    assert resolve_sweep(context, SweepOptions(table=table, job="tiny")).job.spec.name == "tiny"
    with pytest.raises(ConfigError, match="nowhere"):
        resolve_sweep(context, SweepOptions(table=table, job="nowhere"))


def test_wide_sweeps_speak_less_often_and_know_their_attempts(context: Context) -> None:
    started = prepared_sweep(context, "limits.parallel=1")
    contract = make_contract(started, is_local=False)
    assert (contract.every, contract.look) == (60, 15)
    assert (contract.attempts, contract.retries) == (3, ("host-lost", "image-error"))
    limits = replace(started.spec.limits, parallel=10_000)
    wide = replace(started, spec=replace(started.spec, limits=limits))
    contract = make_contract(wide, is_local=False)
    assert (contract.every, contract.look) == (500, 100), "20 messages and 100 lists a second"


def test_what_is_checked_ends_with_what_it_comes_to(context: Context) -> None:
    lines = check_sweep(prepared_sweep(context)).lines
    assert lines[0].startswith("Sweep tiny of job tiny") and len(lines) <= 20
    assert lines[-1].startswith("How it runs: ")
    assert "terminal" in check_sweep(prepared_sweep(context, "method=tpe")).lines[-1]


def test_rungs_under_a_limit_of_the_cost_need_somebody_who_keeps_it(context: Context) -> None:
    halving = prepared_sweep(context, "early_stop.max=9", "early_stop.method=halving")
    assert not needs_controller(halving)
    limits = replace(halving.spec.limits, cost=1.0)
    dear = replace(halving, hourly=1.0, spec=replace(halving.spec, limits=limits))
    assert needs_controller(dear)


def test_the_worst_case_counts_each_attempt(context: Context) -> None:
    started = prepared_sweep(context)
    job = {**started.job, "timeout": "1h"}  # 4 trials, each up to 3 times
    for cost, shape in ((12.0, "array"), (11.9, "waves")):
        limits = replace(started.spec.limits, cost=cost)
        spec = replace(started.spec, limits=limits)
        assert replace(started, job=job, hourly=1.0, spec=spec).chosen_mode.mode == shape


# --- Other code for a started sweep ---------------------------------------------------------------


@pytest.fixture
def started(context: Context) -> StartedSweep:
    return prepare_sweep(context, SweepOptions(file="sweep.toml")).sweep


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(str(tmp_path / "store"))


def mend(started: StartedSweep) -> None:
    (Path(started.folder) / "train.py").write_text("print('acc=2')\n")


def test_unchanged_code_is_run_and_nothing_is_said(
    context: Context, started: StartedSweep, store: FolderStore
) -> None:
    assert with_current_code(started, store).code == started.code
    assert describe_old_code(context, started, store) == ""
    assert not send_code(context, started, store)


def test_other_code_is_run_once_it_was_sent(
    context: Context, started: StartedSweep, store: FolderStore
) -> None:
    mend(started)
    assert "has changed since: --code sends it." in describe_old_code(context, started, store)
    assert with_current_code(started, store).code == started.code, "not before somebody says so"
    assert send_code(context, started, store)
    code = with_current_code(started, store).code
    assert code != started.code and Path(code).is_file()
    assert describe_old_code(context, started, store) == ""


@pytest.mark.parametrize("data", [b"", b"{", b'{"name": "../../etc/passwd", "at": 1}'])
def test_what_is_no_word_of_ours_changes_nothing(
    started: StartedSweep, store: FolderStore, data: bytes
) -> None:
    store.put(CODE, data)
    assert with_current_code(started, store).code == started.code


def test_code_that_cannot_be_sent_is_refused(
    context: Context, started: StartedSweep, store: FolderStore
) -> None:
    with pytest.raises(UsageError, match="in the image"):
        send_code(context, replace(started, code=""), store)
    with pytest.raises(UsageError, match="does not exist"):
        send_code(context, replace(started, folder="/nowhere"), store)
    (Path(started.folder) / "id_rsa").write_text("secret")
    with pytest.raises(ConfigError):
        send_code(context, started, store)
    assert send_code(context, started, store, include_secrets=True)


def test_a_sweep_whose_code_is_gone_can_begin_no_trial(
    context: Context, started: StartedSweep, store: FolderStore
) -> None:
    assert not send_code(context, started, store)  # which puts it where it was, if it is gone
    check_code(context, started, store)
    Path(started.code).unlink()
    with pytest.raises(
        NotFound, match=f"run {started.code}, which is gone, so nothing was requested"
    ):
        check_code(context, started, store)
    check_code(context, replace(started, code=""), store)  # it is in the image
    mend(started)
    assert send_code(context, started, store)
    check_code(context, started, store)
