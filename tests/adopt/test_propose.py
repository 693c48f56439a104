"""What an attempt shows, and the job.toml that is proposed."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.adopt.observe import (
    Observation,
    find_metrics,
    keep_patterns,
    memory_to_request,
    placed_files,
    written_files,
)
from batchml.adopt.packages import ImageChoice
from batchml.adopt.propose import check_script, find_place, missing_arguments, write_job
from batchml.adopt.service import AttemptWatch, find_script, is_sent
from batchml.errors import UsageError
from batchml.jobs.source import Flag, ProgramSource, read_program
from batchml.model.job import JobSpec, read_job
from batchml.model.params import with_params
from batchml.model.run import JobStatus, Run
from batchml.runs.watch.events import OutputLine, PollingPaused, RunEnded, StatusChanged
from batchml.runs.watch.events import UsageReported as Usage
from tests.support.fakes import FakeClock

# --- Metrics --------------------------------------------------------------------------------------


def values_of(text: str) -> dict[str, list[str]]:
    """The values that the found patterns find in the output itself."""
    return {
        metric.name: [
            each for line in text.splitlines() for each in re.findall(metric.pattern, line)
        ]
        for metric in find_metrics(text.splitlines())
    }


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("epoch 1 loss=0.5 acc=0.9\nepoch 2 loss=0.4 acc=0.8",
         {"loss": ["0.5", "0.4"], "acc": ["0.9", "0.8"]}),
        ("Train Epoch: 1 [0/60000 (0%)]\tLoss: 2.3\nTest set: Average loss: 0.05, "
         "Accuracy: 9842/10000 (98%)",
         {"loss": ["2.3"], "average_loss": ["0.05"], "accuracy": ["98"]}),
        ("step 0: train loss 4.19, val loss 4.2\niter 0: loss 4.1, time 12.5ms, mfu -100.00%",
         {"loss": ["4.1"], "train_loss": ["4.19"], "val_loss": ["4.2"]}),
        ("469/469 [====] - 3s 6ms/step - loss: 0.25 - accuracy: 0.9 - val_loss: 0.1",
         {"loss": ["0.25"], "accuracy": ["0.9"], "val_loss": ["0.1"]}),
        ("{'loss': 0.5, 'grad_norm': 2.5}\n{'loss': 0.3, 'grad_norm': 1.5}",
         {"loss": ["0.5", "0.3"], "grad_norm": ["2.5", "1.5"]}),
        ("Epoch: [0][ 10/50]\tTime 0.5 (1.2)\tLoss 6.98e+00 (7.0)\tAcc@1   0.39 ( 0.10)\n"
         " * Acc@1 10.1", {"acc_1": ["0.39", "10.1"], "loss": ["6.98e+00"]}),
        ("[0]\tvalidation_0-logloss:0.55", {"validation_0_logloss": ["0.55"]}),
        ("epoch=1 lr=0.1 seed: 3 time: 1.5s eta 00:12 size=12.5MB at 10:31 device: 0\nepoch=2",
         {}),
        ("version: 2.5\nversion: 2.5\nthreshold=0.5\nthreshold=0.5", {}),  # they never change
    ],
)  # fmt: skip
def test_metrics_of_an_output(text: str, found: dict[str, list[str]]) -> None:
    assert values_of(text) == found


def test_a_metric_between_others_has_a_plain_pattern() -> None:
    plain = "epoch 1 loss 0.31 acc 0.90\nepoch 2 loss 0.21 acc 0.95"
    found = {each.name: each.pattern for each in find_metrics(plain.splitlines())}
    assert found == {"loss": "loss (nan|-?inf|[0-9.eE+-]+)", "acc": "acc (nan|-?inf|[0-9.eE+-]+)"}
    more = f"{plain}\nepoch 3 loss 0.12 acc 0.96\nbest acc 0.96"
    found = {each.name: each.pattern for each in find_metrics(more.splitlines())}
    assert found["acc"] == r"\d acc (nan|-?inf|[0-9.eE+-]+)"
    assert values_of(more)["acc"] == ["0.90", "0.95", "0.96"]


def test_a_pattern_finds_the_values_of_a_run_that_diverges() -> None:
    """The attempt has finite values; a later run prints others."""
    for format_ in ("rmse={}", "epoch 1 rmse {} lr 0.1", '{{"rmse": {}}}', "1 | rmse: {} | 2s"):
        lines = [format_.format(value) for value in ("0.51", "0.25")]
        (pattern,) = (each.pattern for each in find_metrics(lines) if each.name == "rmse")
        for value in ("nan", "inf", "-inf", "1e-05"):
            assert re.findall(pattern, format_.format(value)) == [value], (pattern, value)
        assert values_of("\n".join([*lines, format_.format("nan")]))["rmse"][-1] == "nan"
    assert values_of("loss=information loss=nanny loss in 0.5") == {}


def test_a_program_whose_processes_train_together_gets_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for text, shown in (
        ("import torch.distributed as dist\ndist.init_process_group('gloo')", "init_process_group"),
        ("from accelerate import Accelerator\na = Accelerator()", "Accelerator"),
        ("import lightning as L\nL.Trainer(devices=2)", "Trainer"),
        ("import lightning as L\nL.Trainer(max_epochs=2)", ""),
        ("from transformers import Trainer\nTrainer(devices=1)", ""),
    ):
        script.write_text(text)
        source = read_program(script, tmp_path)
        spec, written = job_of(source=source)
        assert spec.launch.kind == ("torchrun" if shown else "plain"), text
        assert not shown or f"it calls {shown}(), line 2" in written


def test_ranks_have_no_parameter_and_no_log_of_their_own() -> None:
    flags = (Flag("local_rank", "value", 0, 3), Flag("lr", "value", 0.1, 4))
    spec, text = job_of(source=ProgramSource(flags, ranks="init_process_group(), line 9"))
    assert spec.params == {"lr": 0.1} and "--local_rank (line 3) differs by rank" in text
    outputs = [("ranks/rank-0.log", 1), ("a.png", 2), ("work/m.pt", 3), ("{checkpoints}/c.pt", 4)]
    assert placed_files(outputs) == (("{outputs}/a.png", 2), ("{checkpoints}/c.pt", 4))


def test_a_metric_whose_name_says_so_has_a_best_value() -> None:
    (loss, accuracy) = find_metrics(["loss=0.5 val_acc=0.9"])
    assert (loss.best, accuracy.best) == ("min", "max")


@given(st.lists(st.text(max_size=80), max_size=5))
def test_any_output_makes_patterns_with_one_group(lines: list[str]) -> None:
    for metric in find_metrics([*lines, *(f"{line} loss=1.5" for line in lines)]):
        assert re.compile(metric.pattern).groups == 1


# --- Files ----------------------------------------------------------------------------------------


def test_files_of_the_working_folder_become_patterns() -> None:
    outputs = [
        ("work/model.pt", 9), ("work/best.pt", 9), ("work/runs/a/events", 1), ("work/.done", 0),
        ("work/data/MNIST/raw", 50), ("report.json", 1), ("work/odd[1]*.npz", 3), ("work/LOG", 1),
    ]  # fmt: skip
    files = written_files(outputs)
    assert keep_patterns(files) == (".done", "LOG", "*.pt", "*.npz", "runs/**")
    assert keep_patterns([("a[b]/x", 1)]) == ("a?b?/**",)
    assert keep_patterns([(f"f.{n}", 1) for n in range(60)]) == ()


def test_the_memory_to_request_is_half_more_than_the_peak() -> None:
    assert [memory_to_request(peak) for peak in (10, 2000, 10_000)] == ["2 GiB", "3 GiB", "15 GiB"]


# --- Arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("data-dir", "./data", "{data}"),
        ("data", "data", "{data}"),
        ("output_dir", "out", "{outputs}"),
        ("out", "results/", "{outputs}"),
        ("log-dir", None, "{outputs}"),
        ("checkpoint", "model.pth.tar", "{checkpoints}/model.pth.tar"),
        ("save", "model.pt", "{outputs}/model.pt"),
        ("save_dir", "saved/x", "{outputs}"),
        ("save-path", "out", "{outputs}"),
        ("save-ckpt-path", "out", "{checkpoints}"),
        ("snapshot_path", "snapshot.pt", "{checkpoints}/snapshot.pt"),
        ("model", "resnet18", ""),
        ("model-dir", "m", "{outputs}"),
        ("model", "google/bert", ""),
        ("ckpt_path", None, ""),
        ("output_dir", None, "{outputs}"),
        ("dataset", "./cifar", "{data}"),
        ("log-interval", 10, ""),
        ("save", 1, ""),
        ("dataset", "mnist", ""),
        ("resume", "x.pt", ""),
        ("pretrained-model-path", "a/b", ""),
        ("data", "s3://bucket/data", ""),
        ("lr", 0.1, ""),
    ],
)
def test_flags_that_name_folders(name: str, value: object, place: str) -> None:
    assert find_place(name, value) == place  # type: ignore[arg-type]


SOURCE = ProgramSource(
    flags=(
        Flag("batch-size", "value", 64, 3),
        Flag("lr", "value", 0.1, 4),
        Flag("out", "value", "out", 5),
        Flag("amp", "switch", None, 6),
        Flag("resume", "value", None, 7),
        Flag("config", "positional", None, 8, is_required=True),
    ),
    variables=("WANDB_API_KEY", "RANK", "HOME"),
    makes_folders=True,
)
IMAGE = ImageChoice("python", "it imports only the standard library")


def job_of(
    arguments: tuple[str, ...] = (), seen: Observation | None = None, source: ProgramSource = SOURCE
) -> tuple[JobSpec, str]:
    text = write_job("train.py", arguments, source, IMAGE, seen)
    return read_job(tomllib.loads(text), "job.toml"), text


def test_the_job_of_a_program() -> None:
    spec, text = job_of(("base.yaml", "--amp", "--lr=0.5", "--unknown", "x"))
    assert spec.command == (
        "python", "train.py", "base.yaml", "--amp", "--unknown", "x", "{params}",
    )  # fmt: skip
    assert spec.params == {"batch_size": 64, "lr": 0.5, "out": "out"} and spec.flags == "kebab"
    assert (
        "line 4; its default is 0.1" in text
        and "It reads WANDB_API_KEY: set it in [env], a secret in [secrets]." in text
    )
    assert "--resume (line 7) has no default" in text and "HOME" not in text


def test_data_beside_the_program_travels_with_it(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "points.csv").write_text("1,2")
    words = ("data/points.csv", "data", "missing.csv", ".", "..", "/etc/hosts", "")
    assert [each for each in words if is_sent(tmp_path, each)] == ["data/points.csv", "data"]
    source = ProgramSource((Flag("data", "value", "data/points.csv"),))
    spec = read_job(tomllib.loads(write_job("train.py", (), source, IMAGE, None, words[:1])), "")
    assert spec.argv() == ["python", "train.py", "--data", "data/points.csv"]


def test_data_elsewhere_on_this_machine_stays_a_parameter() -> None:
    flags = (Flag("data", "value", "/mnt/here", 3), Flag("train-data", "value", "/mnt/gone", 4))
    source = ProgramSource((*flags, Flag("out", "value", "/mnt/here", 5)))
    text = write_job("train.py", (), source, IMAGE, None, (), ("/mnt/here",))
    spec = read_job(tomllib.loads(text), "job.toml")
    assert spec.params == {"data": "/mnt/here"}
    assert spec.command[2:] == ("--train-data", "{data}", "--out", "{outputs}", "{params}")
    assert "line 3; exists on this machine only: elsewhere {data}\n" in text


def test_results_in_the_working_folder_stay_there_so_that_a_resumed_run_finds_them() -> None:
    flags = (
        Flag("out", "value", "runs/", 3), Flag("log", "value", "../x.log", 4),
        Flag("output_dir", "value", "/mnt/out", 5), Flag("save-dir", "value", "~/saves", 6),
        Flag("results", "value", None, 7, is_required=True),
        Flag("checkpoint-dir", "value", "ckpt", 8),
    )  # fmt: skip
    wrote = Observation(files=(("runs/a.json", 1),))
    source = ProgramSource(flags, makes_folders=True)
    spec, text = job_of(seen=wrote, source=source)
    assert spec.params == {"out": "runs/"} and "line 3; in the working folder, whose new" in text
    assert spec.command[2:] == (
        "--log", "{outputs}/x.log", "--output_dir", "{outputs}", "--save-dir", "{outputs}",
        "--results", "{outputs}", "--checkpoint-dir", "{checkpoints}", "{params}",
    )  # fmt: skip
    assert text.count("rerun --resume brings back {checkpoints}, not {outputs}") == 4
    assert spec.keep is True, "-p out=other would write files that no pattern keeps"
    assert '#keep = ["runs/**"]' in text
    text = write_job("train.py", (), source, IMAGE, wrote, ("runs/",))
    assert "runs/ is sent, too, unless .batchmlignore names it" in text
    spec, _ = job_of(source=ProgramSource((*flags, Flag("save", "value", "m.pt"))))
    assert spec.params == {"save": "m.pt"}, "the program would not find its folder runs/"
    assert spec.command[2:4] == ("--out", "{outputs}")


def test_a_value_that_the_user_gave_stays() -> None:
    flags = (Flag("data", "value", "./data"), Flag("save-path", "value", "out"))
    given = ("--data", "data", "--save-path=here/")
    spec, _ = job_of(given, source=ProgramSource(flags))
    assert spec.argv() == ["python", "train.py", "--data", "data", "--save-path", "here/"]


def test_a_switch_is_a_parameter_that_writes_its_flag_or_nothing() -> None:
    flags = (
        Flag("resume", "switch", False, 3), Flag("amp", "switch", True, 4, off="--no-amp"),
        Flag("verbose", "switch", None, 5, aliases=("-v",)), Flag("no-cuda", "switch", False, 6),
    )  # fmt: skip
    spec, text = job_of(("--resume", "--no-amp", "-v"), source=ProgramSource(flags))
    assert spec.params == {"resume": True, "amp": False, "no-cuda": False}
    assert spec.argv() == ["python", "train.py", "-v", "--resume", "--no-amp"]
    assert "line 4; true writes --amp, false --no-amp" in text and "Not in the command" not in text
    spec, text = job_of(source=ProgramSource((*flags, Flag("batch-size", "value", 4))))
    assert spec.argv() == ["python", "train.py", "--amp", "--batch-size", "4"]
    assert with_params(spec, {"no_cuda": "true"}, "-p").argv()[3] == "--no-cuda"
    assert "# Not in the command: --verbose (line 5) is no single value" in text


def test_a_flag_of_two_names_is_one_parameter(tmp_path: Path) -> None:
    script = tmp_path / "mf.py"
    script.write_text(
        "p.add_argument('-r', '--learning-rate', '--lr', type=float, default=0.02)\n"
        "p.add_argument('--no-bias', '--nb', action='store_true')\n"
    )
    source = read_program(script, tmp_path)
    for words, value in (
        ((), 0.02), (("--lr", "0.05"), 0.05), (("--learning-rate=1",), 1), (("-r", "3"), 3),
        (("-r0.5",), 0.5),
    ):  # fmt: skip
        spec, text = job_of(words, source=source)
        assert spec.params == {"learning_rate": value, "no_bias": False}
        assert spec.command[2:] == ("{--no-bias}", "{params}")
        assert "also -r, --lr, but -p takes this name" in text
    spec, text = job_of(("--nb",), source=source)
    assert spec.params["no_bias"] is True and "Not in the command" not in text


def test_how_a_run_goes_on_is_a_comment() -> None:
    flags = (Flag("resume", "value"), Flag("save-path", "value", "out"))
    seen = Observation(placed=(("{checkpoints}/best.pt", 9), ("{checkpoints}/checkpoint.pt", 9)))
    spec, text = job_of(seen=seen, source=ProgramSource(flags))
    assert spec.command[2:] == ("--save-path", "{checkpoints}", "{params}")
    assert "batchml rerun --resume RUN -p 'resume={checkpoints}/checkpoint.pt'" in text
    _, text = job_of(source=ProgramSource(flags))
    assert "batchml rerun --resume RUN -p 'resume={checkpoints}/FILE'" in text


def test_a_file_of_the_working_folder_is_what_a_run_goes_on_from_if_it_saves_nothing_else() -> None:
    source = ProgramSource((Flag("resume", "value"), Flag("lr", "value", 0.1)))
    files = (("runs/1/args.json", 5), ("runs/1/model.pt", 9), ("runs/1/ckpt.pt", 9))
    _, text = job_of(seen=Observation(files=files), source=source)
    assert "batchml rerun --resume RUN -p resume=runs/1/ckpt.pt\n" in text
    _, text = job_of(seen=Observation(files=files[:2]), source=source)
    assert "-p resume=runs/1/model.pt\n" in text
    for seen in (None, Observation(files=files[:1])):
        _, text = job_of(seen=seen, source=source)
        assert "-p resume=FILE\n" in text and "{checkpoints}" not in text


def test_a_flag_without_a_default_is_left_to_the_program_unless_it_is_required() -> None:
    flags = (Flag("data", "value", None, 3), Flag("max-iters", "value", None, 4))
    spec, text = job_of(source=ProgramSource((*flags, Flag("fast", "switch", None, 5, off="--no"))))
    assert spec.argv() == ["python", "train.py"] and spec.flags == "kebab"
    assert "--data (line 3) has no default: -p 'data={data}'; --max-iters (line 4)" in text
    assert "(line 4) has no default: -p max_iters=...; --fast (line 5) has no default: to" in text
    assert 'write "{--fast/--no}" into command and fast = true or false under [params]' in text
    assert with_params(spec, {"max_iters": "3"}, "-p").argv()[2:] == ["--max-iters", "3"]
    spec, text = job_of(source=ProgramSource((Flag("data", is_required=True),)))
    assert spec.argv() == ["python", "train.py", "--data", "{data}"]
    both = (Flag("a-b", "value", 1), Flag("c_d", "value", 2), Flag("e-f", "value", None, 3))
    spec, text = job_of(source=ProgramSource(both))
    assert "--e-f (line 3) has no default: -p e-f=..." in text
    assert with_params(spec, {"e-f": "3"}, "-p").argv()[6:] == ["--e-f", "3"]
    _, text = job_of(source=ProgramSource((both[0], Flag("c_d", "value", None, 3))))
    assert "--c_d (line 3) has no default: to use it, write it into command" in text


def test_flags_of_two_spellings_are_named_one_by_one() -> None:
    flags = (Flag("batch-size", "value", 64), Flag("max_steps", "value", 5))
    spec, _ = job_of(source=ProgramSource(flags))
    assert spec.argv() == ["python", "train.py", "--batch-size", "64", "--max_steps", "5"]


def test_an_attempt_adds_what_it_showed() -> None:
    metrics = find_metrics(["epoch 1 loss=0.5"])
    plain = ProgramSource((Flag("lr", "value", 0.1),))
    spec, text = job_of(seen=Observation(metrics, (("model.pt", 2048),), 3000.0), source=plain)
    assert spec.keep == ("*.pt",) and spec.resources.memory == "5 GiB"
    assert spec.patterns == {"loss": "loss=(nan|-?inf|[0-9.eE+-]+)"} and spec.directions == {
        "loss": "min"
    }
    assert "it wrote model.pt (2.0 KiB)" in text and "# it printed: epoch 1 loss=0.5" in text


@given(st.text(min_size=1), st.text(), st.text(max_size=200))
def test_any_texts_make_a_file_that_can_be_read(name: str, value: str, line: str) -> None:
    source = ProgramSource((Flag("name", "value", value), Flag("x", "value", 1e-05)))
    metrics = find_metrics([f"{line} loss=1.5"])
    seen = Observation(metrics, ((name.replace("/", "_").replace("\0", "_"), 1),))
    tomllib.loads(write_job("train.py", (), source, IMAGE, seen))


def test_an_attempt_that_did_not_end_by_itself_does_not_limit_what_is_kept() -> None:
    spec, text = job_of(seen=Observation(files=(("a.pt", 1),), is_whole=False))
    assert spec.keep is True and '#keep = ["*.pt"]' in text
    assert "all new files; so far it wrote a.pt" in text


def test_arguments_that_the_program_requires_are_named() -> None:
    source = ProgramSource((*SOURCE.flags, Flag("name", "value", is_required=True)))
    assert missing_arguments(source, []) == ["CONFIG", "--name"]
    assert missing_arguments(source, ["a.yaml", "--name", "x"]) == []


def test_a_flag_of_adopt_after_the_script_is_refused() -> None:
    with pytest.raises(UsageError, match="Write: batchml adopt --force"):
        check_script("train.py", ["--force"], ("--force",), SOURCE)
    own = ProgramSource((Flag("force", "switch"),))
    check_script("train.py", ["--force"], ("--force",), own)


# --- The attempt ----------------------------------------------------------------------------------


def run_in(status: JobStatus) -> Run:
    return Run("j", "train", "default", status)


def test_an_attempt_is_stopped_when_its_time_is_over() -> None:
    clock, stopped, said = FakeClock(), list[str](), list[str]()
    watch = AttemptWatch(60, clock, lambda: stopped.append("stop"), said.append)
    running = StatusChanged(run_in(JobStatus.RUNNING))
    seen = []
    for event in watch.watch(
        iter((running, OutputLine(0, "loss=1.5"), PollingPaused(), Usage("s", {"memory": 300.0}),
              PollingPaused(), PollingPaused(), RunEnded(run_in(JobStatus.FAILED))))
    ):  # fmt: skip
        seen.append(event)
        clock.sleep(25)
    assert len(seen) == 7 and stopped == ["stop"] and not watch.has_failed
    assert said == ["It has run for 1 minute, and is stopped now."]
    found = watch.observe([("work/model.pt", 1)])
    assert (found.memory_mib, found.files) == (300.0, (("model.pt", 1),))
    assert [metric.name for metric in found.metrics] == ["loss"]


def test_a_program_that_ends_by_itself_is_not_stopped() -> None:
    clock = FakeClock()
    watch = AttemptWatch(60, clock, lambda: pytest.fail("stopped"), print)
    list(watch.watch(iter((StatusChanged(run_in(JobStatus.RUNNING)),))))
    clock.sleep(100)
    list(watch.watch(iter((RunEnded(run_in(JobStatus.FAILED)),))))
    assert watch.has_failed


def test_words_that_name_no_program_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "sub").mkdir()
    for word, reason in (
        ("sub", "is a folder"), ("tran.py", "Did you mean 'train.py'"), ("no", "does not exist"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=reason):
            find_script(tmp_path, word)
    with pytest.raises(UsageError, match="is not below"):
        find_script(tmp_path / "sub", "../train.py")
