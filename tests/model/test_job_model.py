"""`batchml.model`: job.toml, its sizes and durations, and what an end means."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.errors import ConfigError
from batchml.model.job import JobSpec, change_job, read_job
from batchml.model.run import EXIT_CODES, JobStatus, OutcomeClass, Run, classify
from batchml.model.tables import parse_duration, parse_size

SMALLEST = {"image": "pytorch", "command": ["python", "train.py"]}


def gang(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"launch": {"kind": "ray"}, "groups": list(groups)}


RAY = gang({"name": "head"}, {"name": "workers", "count": 4, "min": 1, "queue": "cpu"})


def mistakes(**table: Any) -> list[str]:
    """The mistakes of the smallest job with `table` added."""
    with pytest.raises(ConfigError) as refused:
        read_job({**SMALLEST, **table}, "job.toml")
    assert refused.value.exit_code == 78
    return list(refused.value.mistakes)


def test_the_smallest_job_has_defaults_for_the_rest() -> None:
    spec = read_job(SMALLEST, "job.toml")
    assert spec == JobSpec(image="pytorch", command=("python", "train.py"))
    assert (spec.resources.vcpus, spec.resources.memory_mib, spec.resources.gpus) == (1, 2048, 0)
    assert (spec.retry.attempts, spec.retry.on) == (1, ("host-lost",))
    assert (spec.timeout_seconds, spec.checkpoint.grace_seconds) == (None, 30)


def test_all_mistakes_are_reported_at_once_and_each_says_where() -> None:
    wrong = {
        "imgae": "x",
        "command": "python train.py",
        "resources": {"vcpus": 0, "memroy": "1 GiB", "memory": "lots", "gpus": -1, "shm": "?"},
        "retry": {"attempts": 11, "on": ["spot"]},
        "timeout": "5s",
        "checkpoint": {"grace": "soon"},
        "env": {"1a": "x", "AWS_BATCH_X": "y"},
        "metrics": {"loss": "(", "acc": "no group"},
        "name": "-x",
        "nodes": 0,
        "launch": {"kind": "torchrun", "processes_per_node": 0, "hang_after": "soon"},
        "health": {"bandwidth": "fast", "tries": 0},
    }
    with pytest.raises(ConfigError) as refused:
        read_job(wrong, "job.toml")
    keys = sorted(mistake.partition(":")[0] for mistake in refused.value.mistakes)
    assert keys == sorted([
        "imgae", "image", "command", "resources.vcpus", "resources.memroy", "resources.memory",
        "resources.gpus", "resources.shm", "retry.attempts", "retry.on[0]", "timeout",
        "checkpoint.grace", "env.1a", "env.AWS_BATCH_X", "metrics.loss", "metrics.acc", "name",
        "nodes", "launch.processes_per_node", "launch.hang_after", "health.bandwidth",
        "health.tries",
    ])  # fmt: skip
    assert str(refused.value).startswith(f"job.toml: {len(keys)} mistakes, nothing was sent.")


def test_one_mistake_is_reported_once() -> None:
    assert mistakes(image=7) == ["image: found 7. Expected a text."]
    assert mistakes(command=[]) == ["command: is empty."]


@pytest.mark.parametrize(
    "table",
    [
        RAY,
        {"nodes": 1000, "launch": {"kind": "plain"}},
        {"nodes": 2, "launch": {"kind": "torchrun", "processes_per_node": 64, "logs": "main"},
         "health": {"bandwidth": "100 MiB", "checks": "deep"}},
        {"launch": {"kind": "torchrun", "hang_after": 600, "start_within": "1h"}},
    ],
)  # fmt: skip
def test_what_nodes_can_do_together_is_taken_also_after_a_change(table: dict[str, Any]) -> None:
    spec = read_job({**SMALLEST, **table}, "job.toml")
    assert change_job(spec, {"name": "x"}, "here").groups == spec.groups


@pytest.mark.parametrize(
    ("table", "meant"),
    [
        ({"comand": 1}, "'command'"),
        ({"resources": {"cpus": 2}}, "'vcpus'"),
        ({"retry": {"attempt": 2}}, "'attempts'"),
        ({"checkpoint": {"Grace": "1s"}}, "'grace'"),
        ({"groups": [{"resources": {"gpu": 1}}]}, "'gpus'"),
    ],
)
def test_an_unknown_key_is_met_with_the_one_that_was_meant(
    table: dict[str, Any], meant: str
) -> None:
    assert f"unknown key. Did you mean {meant}?" in mistakes(**table)[0]


def test_an_unknown_key_like_no_other_is_met_with_all_known() -> None:
    assert mistakes(retry={"zzz": 1}) == ["retry.zzz: unknown key. Known: attempts, on."]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"image": ""}, None),
        ({"command": ["a", ""]}, "command[1]: is an empty text"),
        ({"command": ["{lr}"]}, "{lr} has no default under [params]"),
        ({"keep": []}, "keep: is an empty list. Write false"),
        ({"keep": ["a", "../b"]}, "keep[1]: found '../b'. Write a pattern"),
        ({"keep": ["/etc/**"]}, "keep[0]: found '/etc/**'"),
        ({"keep": "*.pt"}, "keep: found '*.pt'"),
        ({"command": ["python -V"]}, "Did you mean: sh -c 'python -V'"),
        ({"command": ["a", "$BATCHML_OUTPUT_DIR/x"]}, "$BATCHML_OUTPUT_DIR. Write {outputs}."),
        ({"command": ["a", "${AWS_BATCH_JOB_ID}"]}, "$AWS_BATCH_JOB_ID. Write: sh -c"),
        ({"command": ["a", "{output}"]}, "{output} has no default under [params]"),
        ({"name": "a b"}, "name: found 'a b'"),
        ({"name": "x" * 129}, "1-128 letters"),
        ({"timeout": "59s"}, "60 seconds or more"),
        ({"timeout": True}, "timeout: found True"),
        ({"idle_after": "soon"}, "idle_after: found 'soon'. Write a duration"),
        ({"idle_after": "59s"}, "idle_after: found '59s'. Give a time from 1 minute"),
        ({"idle_after": "11d"}, "idle_after: found '11d'. Give a time from 1 minute to 10 days"),
        (
            {"idle_after": "1h", "launch": {"kind": "ray"}, "groups": [{"name": "head"}]},
            "idle_after: is not for [[groups]]",
        ),
        ({"resources": {"memory": "3 MiB"}}, "At least 4 MiB"),
        ({"resources": 5}, "resources: found 5. Expected a table"),
        ({"params": {"x": [1]}}, "params.x: found"),
        ({"nodes": 1001}, "nodes: found 1001"),
        ({"env": {"BATCHML_LAUNCH": "{}"}}, "env.BATCHML_LAUNCH: batchml sets it"),
        ({"launch": {"kind": "dask"}}, "launch.kind"),
        ({"launch": {"logs": "main"}}, 'launch.logs: needs kind = "torchrun"'),
        (
            {"launch": {"kind": "mpi", "logs": "main"}},
            'launch.logs: needs kind = "torchrun", found',
        ),
        ({"launch": {"processes_per_node": 2}}, 'needs kind = "torchrun" or "mpi", found'),
        ({"launch": {"start_within": "5m"}}, "launch.start_within: needs kind"),
        ({"launch": {"kind": "torchrun", "start_within": "0s"}}, "launch.start_within: found"),
        ({"health": {"bandwidth": "1 GiB"}}, "is measured between the nodes of launch.kind"),
        ({"launch": {"kind": "ray"}}, '"ray" needs [[groups]]'),
        ({"groups": [{"name": "a"}]}, "groups: need launch.kind = \"ray\", found 'plain'"),
        ({**RAY, "nodes": 2}, "nodes: found 2 with groups"),
        (gang({"name": "h", "count": 2}), "groups[0].count: found 2. The first group is the head"),
        (gang({"name": "h", "min": 1}), "groups[0].min: the first group is the head"),
        (gang({"name": "h"}, {"name": "h"}), "'h' is the name of another group"),
        (gang({"name": "h"}, {"count": 2}), "groups[1].name: missing"),
        (gang({"name": "h"}, {"name": "w", "min": 2}), "groups[1].min: found 2, more than"),
        (gang({"name": "h", "resources": {"memory": "8"}}), "groups[0].resources.memory: found"),
        ({"secrets": {"A": "sk-live-1"}}, "secrets.A: does not name a secret"),
    ],
)
def test_what_cannot_run_is_refused(table: dict[str, Any], says: str | None) -> None:
    if says is None:  # an empty image is caught where images are looked up
        assert read_job({**SMALLEST, **table}, "job.toml").image == ""
    else:
        assert any(says in mistake for mistake in mistakes(**table))


def test_placeholders_are_filled_in_and_other_braces_left() -> None:
    spec = read_job(
        {
            "image": "i",
            "command": ["run", "--lr={lr}", "{a}{b}", "{}", "{not a name}", "a b"],
            "params": {"lr": 0.1, "a": True, "b": "x y"},
        },
        "job.toml",
    )
    assert spec.argv() == ["run", "--lr=0.1", "truex y", "{}", "{not a name}", "a b"]


def test_all_parameters_that_the_command_does_not_name_become_words() -> None:
    table = {**SMALLEST, "command": ["run", "{n}", "{params}"], "params": {"n": 1, "on": True}}
    spec = read_job(table, "job.toml")
    assert spec.argv() == ["run", "1", "--on", "true"]
    assert read_job({**table, "params": {"n": 1}}, "job.toml").argv() == ["run", "1"]
    only = "command: is only {params}, and the job has no params. Write a program before it."
    assert mistakes(command=["{params}"]) == [only]


def test_words_that_a_parameter_leaves_empty_are_named() -> None:
    table = {**SMALLEST, "command": ["run", "{a}", "x{b}", "{params}"]}
    spec = read_job({**table, "params": {"a": "", "b": "", "c": ""}}, "job.toml")
    assert list(spec.empty_words()) == [(1, ["a"]), (3, ["c"])]
    spec = read_job({**table, "params": {"a": "1", "b": "", "c": "x"}}, "job.toml")
    assert list(spec.empty_words()) == []


def test_the_parameter_of_a_switch_is_true_or_false() -> None:
    table = {**SMALLEST, "command": ["run", "{--amp}"]}
    assert read_job({**table, "params": {"amp": True}}, "x").argv() == ["run", "--amp"]
    assert read_job({**table, "params": {"amp": False}}, "x").argv() == ["run"]
    for params, why in (
        ({"amp": "yes"}, r"params\.amp: decides on a flag.*Expected true or false"),
        ({}, r"\{amp\} has no default under \[params\]"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            read_job({**table, "params": params}, "x")


def test_a_mistake_below_an_empty_name_is_told_with_its_table() -> None:
    with pytest.raises(ConfigError, match=r"metrics: found \{'': \{'a': 1\}\}"):
        read_job({**SMALLEST, "metrics": {"": {"a": 1}}}, "job.toml")


def test_kebab_flags_are_written_with_hyphens() -> None:
    table = {**SMALLEST, "command": ["t", "{seed}", "{params}"], "flags": "kebab"}
    spec = read_job({**table, "params": {"batch_size": 8, "seed": 1}}, "job.toml")
    assert spec.argv() == ["t", "1", "--batch-size", "8"]
    assert spec.template == ("t", "{seed}", "{params:kebab}")
    line = read_job({**table, "command": ["sh", "-c", "t {params}"], "params": {"a_b": 1}}, "x")
    assert line.argv() == ["sh", "-c", "t --a-b 1"]
    single = read_job({**table, "params": {"params": "x", "seed": 1}}, "job.toml")
    assert single.argv() == ["t", "1", "x"]  # a parameter of this name is just one
    with pytest.raises(ConfigError, match=r"flags: found 'snake'.* one of as-is, kebab"):
        read_job({**table, "flags": "snake"}, "job.toml")


def test_a_changed_job_is_checked_like_a_file() -> None:
    spec = read_job(SMALLEST, "job.toml")
    assert change_job(spec, {"timeout": "2h"}, "--timeout").timeout_seconds == 7200
    with pytest.raises(ConfigError, match="60 seconds"):
        change_job(spec, {"timeout": "1s"}, "--timeout")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("15 GiB", 15 * 1024**3), ("512m", 512 * 1024**2), ("8GB", 8 * 1024**3), ("1k", 1024),
        ("2 TiB", 2 * 1024**4), ("1.5 GiB", 3 * 1024**3 // 2), (64, 64 * 1024**2),
        ("64", 64 * 1024**2), ("100 b", 100), (" 1 G ", 1024**3), ("", None), ("GiB", None),
        ("-1 GiB", None), ("1 XiB", None), ("1 GiB 2", None), ("1,5 GiB", None), (-5, None),
    ],
)  # fmt: skip
def test_sizes_are_powers_of_1024_and_bare_numbers_mib(
    text: str | int, expected: int | None
) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4h", 14_400), ("1h30m", 5_400), ("90s", 90), (90, 90), ("90", 90), ("1d", 86_400),
        ("0.5h", 1_800), ("1H 30M", 5_400), (" 2m ", 120), ("", None), ("h", None),
        ("1w", None), ("-1h", None), ("1h30", None), ("1:30", None), (-1, None),
    ],
)  # fmt: skip
def test_durations_add_up(text: str | int, expected: int | None) -> None:
    assert parse_duration(text) == expected


@given(st.integers(0, 30), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_any_mix_of_units_adds_up(days: int, hours: int, minutes: int, seconds: int) -> None:
    text = f"{days}d{hours}h{minutes}m{seconds}s"
    assert parse_duration(text) == ((days * 24 + hours) * 60 + minutes) * 60 + seconds


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab{}.-", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*JobSpec.__struct_fields__, "other"]), _JSON, max_size=5))
def test_whatever_a_file_says_it_is_read_or_refused_in_words(table: dict[str, Any]) -> None:
    try:
        spec = read_job(table, "job.toml")
    except ConfigError as error:
        assert error.mistakes
    else:
        assert spec.command


OUTCOMES: list[tuple[OutcomeClass, int, dict[str, Any]]] = [
    (OutcomeClass.SUCCEEDED, 0, {"status": "SUCCEEDED", "exit_code": 0}),
    (OutcomeClass.APP_ERROR, 3, {"exit_code": 3}),
    (OutcomeClass.APP_ERROR, 1, {"exit_code": 0}),
    (OutcomeClass.APP_ERROR, 137, {"exit_code": 137}),
    (
        OutcomeClass.OUT_OF_MEMORY, 137,
        {"exit_code": 137, "reason": "OutOfMemoryError: Container killed due to memory usage"},
    ),
    (
        OutcomeClass.TIMED_OUT, 124,
        {"exit_code": 143, "status_reason": "Job attempt duration exceeded timeout"},
    ),
    (OutcomeClass.CANCELLED, 143, {"is_cancelled": True, "status_reason": "why"}),
    (OutcomeClass.CANCELLED, 143, {"is_terminated": True, "exit_code": 143}),
    (
        OutcomeClass.HOST_LOST, 75,
        {"status_reason": "Host EC2 (instance i-0123) terminated."},
    ),
    (
        OutcomeClass.IMAGE_ERROR, 125,
        {"status_reason": "Task failed to start", "reason": "CannotPullContainerError: no"},
    ),
    (OutcomeClass.IMAGE_ERROR, 125, {"reason": "ResourceInitializationError: x"}),
    (OutcomeClass.DEPENDENCY_FAILED, 76, {"status_reason": "Dependent Job failed"}),
    (
        OutcomeClass.UNSCHEDULABLE, 69,
        {
            "is_cancelled": True,
            "status_reason": "Canceled by JobStateTimeLimit action due to reason: CAPACITY",
        },
    ),
    (OutcomeClass.UNKNOWN, 74, {}),
    (OutcomeClass.UNKNOWN, 74, {"status": "RUNNING"}),
]  # fmt: skip


@pytest.mark.parametrize(("outcome", "code", "end"), OUTCOMES)
def test_every_end_has_a_class_and_an_exit_code(
    outcome: OutcomeClass, code: int, end: dict[str, Any]
) -> None:
    status = JobStatus(end.get("status", "FAILED"))
    fields = {key: value for key, value in end.items() if key != "status"}
    run = Run(job_id="j", name="n", queue="q", status=status, **fields)
    assert classify(run) == (outcome, code)


def test_every_class_is_reached_and_has_its_own_exit_code() -> None:
    assert {outcome for outcome, _, _ in OUTCOMES} == set(OutcomeClass)
    assert set(EXIT_CODES) == set(OutcomeClass) - {OutcomeClass.APP_ERROR}
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)


@given(
    st.sampled_from(JobStatus), st.text(max_size=30), st.text(max_size=30),
    st.none() | st.integers(0, 255), st.booleans(), st.booleans(),
)  # fmt: skip
def test_only_success_exits_with_0(
    status: JobStatus, because: str, reason: str, code: int | None, cancelled: bool, ended: bool
) -> None:
    run = Run(
        "j", "n", "q", status, status_reason=because, reason=reason, exit_code=code,
        is_cancelled=cancelled, is_terminated=ended,
    )  # fmt: skip
    assert (classify(run).exit_code == 0) is (status is JobStatus.SUCCEEDED)


def test_a_word_that_is_none_of_a_few_is_answered_with_them() -> None:
    with pytest.raises(ConfigError) as caught:
        read_job({"image": "i", "command": ["c"], "retry": {"on": ["spot"]}}, "job.toml")
    assert caught.value.mistakes == (
        "retry.on[0]: found 'spot'. Expected one of "
        "host-lost, image-error, app-error, out-of-memory.",
    )


def test_a_metric_may_have_a_pattern_a_direction_or_both() -> None:
    table = {"loss": "loss=(.)", "acc": {"pattern": "a=(.)", "best": "max"}, "f1": {"best": "max"}}
    spec = read_job({**SMALLEST, "metrics": table}, "job.toml")
    assert spec.patterns == {"loss": "loss=(.)", "acc": "a=(.)"}
    assert spec.directions == {"acc": "max", "f1": "max"}


@pytest.mark.parametrize("text", ["9" * 400 + "g", "²", "1e9", "-1", "", "٣"])
def test_what_is_no_size_or_duration_is_none_not_a_crash(text: str) -> None:
    assert parse_size(text) is None
    assert parse_duration(text) is None


@pytest.mark.parametrize(
    ("table", "mistake"),
    [
        ({"memory": "8 GiB"}, "memory: unknown key here. It belongs under [resources]."),
        ({"attempts": 2}, "attempts: unknown key here. It belongs under [retry]."),
        ({"resources": {"image": "a"}}, "resources.image: unknown key here. It belongs at the top"),
        ({"resources": {"memory": 16}}, 'found 16 without a unit. Write "16 GiB" or "16 MiB".'),
        ({"resources": {"memory": "2"}}, 'Write "2 GiB" or "2 MiB".'),
        ({"resources": {"memory": "900 TiB"}}, "resources.memory: found '900 TiB'. At most 100"),
        ({"resources": {"vcpus": 10**12}}, "resources.vcpus: "),
        ({"metrics": [{"name": "a", "pattern": "b"}]}, "loss = 'loss=([0-9.]+)'"),
        ({"metrics": {"name": "a", "pattern": "a=(b)"}}, "loss = 'loss=([0-9.]+)'"),
        ({"metrics": {"a": "("}}, "loss = 'loss=([0-9.]+)'"),
        ({"metrics": {"a": {"pattern": "("}}}, "metrics.a: not a regular expression"),
        ({"metrics": {"a": {"pattern": "a=(.)", "best": "most"}}}, "metrics.a.best: found 'most'."),
        ({"metrics": {"a": {}}}, 'metrics.a: is empty. Give a pattern, best = "max" or "min"'),
        ({"metrics": {"step": {"best": "max"}}}, "metrics.step: is no metric"),
    ],
)
def test_a_mistake_says_how_it_is_written(table: dict[str, Any], mistake: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_job({**SMALLEST, **table}, "job.toml")
    (found,) = caught.value.mistakes
    assert mistake in found


def test_a_bare_number_is_mib_where_it_can_be_meant_so() -> None:
    spec = read_job({**SMALLEST, "resources": {"memory": 1024}}, "job.toml")
    assert spec.resources.memory_mib == 1024


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"launch": {"kind": "torchrn", "hang_after": "5m", "start_within": "5m"},
          "health": {"bandwidth": "1 GiB"}}, "launch.kind: found 'torchrn'."),
        ({"launch": {"kind": "rai"}, "groups": [{"name": "h"}]}, "launch.kind: found 'rai'."),
        (gang({"name": "h"}, {"name": "w", "count": "two", "min": 5}), "groups[1].count: found"),
        (gang({"name": "w"}, {"name": "w"}), "groups[1].name: 'w' is the name of another group"),
    ],
)  # fmt: skip
def test_one_mistake_is_told_once_and_nothing_that_follows_from_it(
    table: dict[str, Any], says: str
) -> None:
    (only,) = mistakes(**table)
    assert only.startswith(says)
    assert "torchrn" not in only or only.endswith("Did you mean 'torchrun'?")
