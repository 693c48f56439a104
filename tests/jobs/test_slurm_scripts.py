"""Scripts as jobs: their lines `#BATCHML` and `#SBATCH`, and the order that they come to."""

import re
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.cli.app import full_command
from batchml.client import Client
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import ConfigError, InputNotFound
from batchml.jobs import slurm
from batchml.jobs.script import ScriptLine, read_script
from batchml.jobs.slurm import (
    GpuRequest,
    SlurmRequest,
    format_ids,
    parse_array,
    parse_dependencies,
    parse_gres,
    parse_size,
    parse_time,
    read_slurm,
)
from batchml.model.job import JobSpec, Resources
from batchml.runs import scripts
from batchml.runs.options import SubmitOptions, option_rows, resolve_job, to_request
from batchml.runs.scripts import apply_script, is_script, read_options, with_slurm_sizes
from batchml.runtime.entry.script import task_ids, unpack
from tests.support.fakes import FakeClock

BASH = ["/bin/bash"]
NUMBERS = st.integers(0, 99_999)


def sbatch(*lines: str, **environ: str) -> SlurmRequest:
    text = "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines)
    return read_slurm(read_script(text, BASH).slurms, environ)


# --- values ---------------------------------------------------------------------------------------


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_slurms_times_in_all_their_forms(d: int, h: int, m: int, s: int) -> None:
    assert parse_time(f"{m}") == m * 60
    assert parse_time(f"{m}:{s}") == m * 60 + s
    assert parse_time(f"{h}:{m}:{s}") == h * 3600 + m * 60 + s
    assert parse_time(f"{d}-{h}") == d * 86400 + h * 3600
    assert parse_time(f"{d}-{h}:{m}") == d * 86400 + h * 3600 + m * 60
    assert parse_time(f"{d}-{h}:{m}:{s}") == d * 86400 + h * 3600 + m * 60 + s


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "-5", "1-", "-1:0", "a", "1 2", "٣"])
def test_what_is_no_time(text: str) -> None:
    assert parse_time(text) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [("512", 512 << 20), ("16G", 16 << 30), ("16gb", 16 << 30), ("1T", 1 << 40), ("2K", 2048),
     ("0", 0), ("1.5G", None), ("G", None), ("-1", None)],
)  # fmt: skip
def test_slurms_sizes(text: str, found: int | None) -> None:
    assert parse_size(text) == found


@pytest.mark.parametrize(
    ("text", "found", "others"),
    [
        ("gpu:2", GpuRequest(2), ()),
        ("gpu", GpuRequest(1), ()),
        ("gpu:a100", GpuRequest(1, "a100"), ()),
        ("gpu:a100:4,nvme:1", GpuRequest(4, "a100"), ("nvme:1",)),
        ("nvme:1", None, ("nvme:1",)),
        ("none", None, ()),
    ],
)
def test_generic_resources(text: str, found: GpuRequest | None, others: tuple[str, ...]) -> None:
    assert parse_gres(text) == (found, others)


@given(st.sets(st.integers(0, 3000), min_size=1, max_size=60))
def test_ids_of_an_array_are_the_same_said_shortly_and_read_again(ids: set[int]) -> None:
    ordered = tuple(sorted(ids))
    found = parse_array(format_ids(ordered))
    assert found is not None and found.ids == ordered
    assert task_ids(format_ids(ordered)) == list(ordered)  # as the run reads them


@pytest.mark.parametrize(
    ("text", "ids", "limit"),
    [("0-3", (0, 1, 2, 3), 0), ("1-9:4", (1, 5, 9), 0), ("3,1,3", (1, 3), 0),
     ("0-2%2", (0, 1, 2), 2)],
)  # fmt: skip
def test_arrays_as_slurm_writes_them(text: str, ids: tuple[int, ...], limit: int) -> None:
    found = parse_array(text)
    assert found is not None and (found.ids, found.limit) == (ids, limit)


@pytest.mark.parametrize("text", ["", "3-1", "a", "0-9:0", "0-9%0", "0-", "1,,2", "0-99999999"])
def test_what_is_no_array(text: str) -> None:
    assert parse_array(text) is None


def test_dependencies_that_aws_batch_knows() -> None:
    assert parse_dependencies("afterok:12:13,afterok:14") == (["12", "13", "14"], [])
    assert parse_dependencies("afterok:12+30") == (["12"], [])
    assert parse_dependencies("afterany:12,singleton") == ([], ["afterany:12", "singleton"])
    assert parse_dependencies("afterok:1?afterok:2")[1]


# --- #SBATCH --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (["-J train", "-p gpu", "-c 8", "--mem=16G", "-G 1", "-t 2:00:00"],
         {"name": "train", "queue": "gpu", "vcpus": 8, "memory": "16384 MiB", "gpus": 1,
          "timeout": "7200s"}),
        (["--job-name 'my job' --time=1-12"], {"name": "my-job", "timeout": "129600s"}),
        (["-n4", "--mem-per-cpu=2G"], {"vcpus": 4, "memory": "8192 MiB"}),
        (["-N 2 --ntasks-per-node=4 -c 2 --gpus-per-task=1"],
         {"vcpus": 8, "gpus": 4, "nodes": 2}),
        (["-N2 -n 8 --gpus=8"], {"vcpus": 4, "gpus": 4, "nodes": 2}),
        (["--gres=gpu:a100:2 --mem-per-gpu 40G --cpus-per-gpu=6"],
         {"gpus": 2, "vcpus": 12, "memory": "81920 MiB"}),
        (["--array=0-9"], {"array": 10}),
        (["--array=5"], {}),  # AWS Batch has no arrays of one
        (["-d afterok:abc:def"], {"after": ["abc", "def"]}),
        (["-A physics"], {"tags": {"account": "physics"}}),
        (["--export=A=1,B"], {"set_env": {"A": "1", "B": "two"}}),
        (["--requeue"], {"attempts": 3}),
        (["--requeue", "--no-requeue"], {"attempts": 1}),
        (["--auto-resume=1"], {"auto_resume": True}),
        (["--auto-resume 1", "--auto-resume=0"], {}),
        (["--no-requeue --auto-resume=1"], {"auto_resume": True}),
        (["--requeue", "--auto-resume=0"], {"attempts": 3}),
        (["--gpus=auto --cpus-per-gpu=6"], {"gpus": "auto", "vcpus": 6}),
        (["--gpus-per-node auto --mem-per-gpu=2G"], {"gpus": "auto", "memory": "2048 MiB"}),
        (["-t 0:30"], {"timeout": "60s"}),
        (["-t UNLIMITED"], {}),
        (["-c 2", "-c 4  # the last counts"], {"vcpus": 4}),
        (["--container-image=nvcr.io#nvidia/pytorch:24.05-py3"],
         {"image": "nvcr.io/nvidia/pytorch:24.05-py3"}),
    ],
)  # fmt: skip
def test_lines_of_slurm_in_our_words(lines: list[str], wanted: dict[str, Any]) -> None:
    asked = sbatch(*lines, B="two")
    assert asked.mistakes == ()
    assert asked.options == wanted


def test_what_slurm_would_tell_the_script() -> None:
    facts = sbatch("-N 2 --ntasks-per-node 4 -c 2 --gpus-per-node 4", "-a 1-9:2").variables
    assert facts["SLURM_CPUS_PER_TASK"] == "2"
    assert (facts["SLURM_NTASKS_PER_NODE"], facts["SLURM_GPUS"]) == ("4", "8")
    assert facts["BATCHML_SLURM_ARRAY"] == "1-9:2"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-o out.txt", "all output is kept"),
        ("--mail-type=END", "no mail is sent"),
        ("-C a100 --nodelist=n1", "the queue decides the hosts"),
        ("--array=0-9%2", "%2 is passed over"),
        ("--exclusive", "request all vCPUs"),
        ("-p gpu,cpu", "one queue, here gpu"),
        ("-N 2-4", "a fixed number, 2"),
        ("--export=ALL", "does not get the variables"),
        ("--gres=gpu:h100:1", "type h100"),
        ("--gres=fpga:1", "fpga:1 is passed over"),
    ],
)
def test_what_is_passed_over_is_told_of_with_its_line(line: str, words: str) -> None:
    asked = sbatch("-J a", line)
    assert asked.mistakes == ()
    assert any(words in said and said.startswith("line 3: ") for said in asked.notices)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--mme=3", "Did you mean '--mem'"),
        ("-c many", "found 'many'"),
        ("-t 1h", "--time: found '1h'"),
        ("--mem=0", "all memory of a host"),
        ("--begin=now+1hour", "as soon as the queue has room"),
        ("-d afterany:1", "only afterok:RUN"),
        ("--hold", "cannot be held"),
        ("-n 3 -N 2", "the same number of tasks"),
        ("-G a100:1,v100:1", "of one type"),
        ("--gres", "has no value"),
        ("--requeue=yes", "takes no value"),
        ("--auto-resume=2", "--auto-resume: found '2'. Write 0 or 1."),
        ("--auto-resume", "has no value"),
        ("--gpus=all", "--gpus: found 'all'"),
        ("-vv", "-vv: write each option separately."),
        ("-QH", "-QH: write each option separately."),
        ("-a 0-20000", "AWS Batch allows 10,000"),
        ("hello", "no option of sbatch"),
        ("--mem-per-gpu=1G", "no GPUs"),
    ],
)
def test_what_would_be_another_run_is_a_mistake(line: str, words: str) -> None:
    (mistake,) = sbatch("-J a", line).mistakes
    assert mistake.startswith("line 3: ") and words in mistake


def test_every_option_of_sbatch_is_read_passed_over_or_refused_and_only_one_of_them() -> None:
    assert not slurm.READ & slurm.PASSED_OVER.keys()
    assert not slurm.PASSED_OVER.keys() & slurm.REFUSED.keys()
    assert not slurm.READ & slurm.REFUSED.keys()
    assert set(slurm.SHORT.values()) <= slurm.KNOWN
    assert slurm.BARE <= slurm.KNOWN


WORDS = st.one_of(
    st.sampled_from([f"--{name}" for name in sorted(slurm.KNOWN)]),
    st.sampled_from([f"-{letter}" for letter in slurm.SHORT]),
    st.sampled_from(["4", "gpu:1", "1-9:2", "a=b", "16G", "2-12:00", "''", "afterok:1", "0"]),
    st.text(max_size=8),
)


@given(st.lists(st.tuples(st.sampled_from(["#SBATCH", "#BATCHML"]), st.lists(WORDS, max_size=4))))
def test_whatever_the_lines_say_every_mistake_names_its_line(
    lines: list[tuple[str, list[str]]],
) -> None:
    text = "#!/bin/bash\n" + "".join(f"{kind} {' '.join(words)}\n" for kind, words in lines)
    found = read_script(text, BASH)
    asked = read_slurm(found.slurms, {})
    wanted, wrong = read_options(found.ours)
    named = [m for m in (*found.mistakes, *asked.mistakes, *wrong) if not m.startswith("it")]
    assert all(re.match(r"line \d+: ", mistake) for mistake in named)
    to_request(options=wanted)
    to_request(options=cast(SubmitOptions, asked.options))


# --- #BATCHML -------------------------------------------------------------------------------------


def test_its_flags_are_those_of_submit() -> None:
    submit = full_command().commands["submit"]
    flags = {flag for param in submit.params for flag in (*param.opts, *param.secondary_opts)}
    flags = {flag for flag in flags if flag.startswith("--")} - {"--help"}
    rows = option_rows().values()
    assert flags == {row.flag for row in rows} | scripts._COMMAND_FLAGS


def test_flags_of_ours() -> None:
    lines = [
        ScriptLine(2, ("--gpus", "1", "--memory", "8 GiB", "-p", "lr=0.1", "-pepochs=3")),
        ScriptLine(3, ("--tag=a=b", "--after", "x", "--after=y", "--max-cost", "2.5", "--gpus=2")),
        ScriptLine(4, ("--strict-resources", "--set-env", "A=-1")),
    ]
    assert read_options(lines) == (
        {
            "gpus": 2, "memory": "8 GiB", "params": {"lr": "0.1", "epochs": "3"},
            "tags": {"a": "b"}, "after": ["x", "y"], "max_cost": 2.5, "strict_resources": True,
            "set_env": {"A": "-1"},
        },
        [],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "1"), "Did you mean '--gpus'"),
        (("--gpus", "one"), "Give a number"),
        (("--gpus",), "has no value"),
        (("--queue", "--gpus", "1"), "--queue: has no value"),
        (("--tag", "a"), "NAME=VALUE"),
        (("--wait",), "belongs on the command line"),
    ],
)
def test_mistakes_of_ours(words: tuple[str, ...], said: str) -> None:
    (mistake,) = read_options([ScriptLine(7, words)])[1]
    assert mistake.startswith("line 7: ") and said in mistake


# --- the script -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-c 2 # it's cores", ["-c", "2"]),
        ("--image=a#b", ["--image=a#b"]),
        ("-J 'a # b' #", ["-J", "a # b"]),
        ('--comment="say \\"#\\" x" -c 2', ['--comment=say "#" x', "-c", "2"]),
        ("# all of it", []),
    ],
)
def test_comments_behind_words(line: str, words: list[str]) -> None:
    (found,) = read_script(f"#!/bin/sh\n#SBATCH {line}\n", ["/bin/sh"]).slurms
    assert list(found.words) == words


@given(st.lists(st.text(st.characters(exclude_categories=["C", "Z"])), max_size=5))
def test_a_line_has_the_words_that_a_shell_would_find(words: list[str]) -> None:
    (found,) = read_script(f"#!/bin/sh\n#SBATCH {shlex.join(words)}\n", ["/bin/sh"]).slurms
    assert list(found.words) == words


def test_lines_are_read_up_to_the_first_command() -> None:
    found = read_script("#!/bin/bash\n\n# words\n#SBATCH -c 2\necho\n#SBATCH -c 4\n", BASH)
    assert [line.number for line in found.slurms] == [4]
    assert "line 6: #SBATCH after the first command (line 5)" in found.notices[0]
    assert read_script("#!/bin/bash\n#SBATCHED -c 2\n##SBATCH -c 2\n", BASH).slurms == ()


@pytest.mark.parametrize(
    ("text", "program", "said"),
    [
        ("", [], "is empty"),
        ("\ufeff#!/bin/sh\n", [], "line 1: has a byte order mark"),
        ("echo\n", [], "line 1: has no #!"),
        ("#!\n", [], "names no program"),
        ("#!/bin/sh\r\necho\r\n", ["/bin/sh"], "Windows"),
        ("#!/bin/sh\n#SBATCH -J 'a\n", ["/bin/sh"], "line 2: a quote is not closed"),
    ],
)
def test_what_is_no_script(text: str, program: list[str], said: str) -> None:
    assert any(said in mistake for mistake in read_script(text, program).mistakes)


def test_habits_of_clusters_are_told_of() -> None:
    text = "#!/bin/bash\n#PBS -l x\nmodule load cuda\nconda activate me\nsbatch next.sh\n"
    notices = read_script(text, BASH).notices
    assert [notice.split(":")[0] for notice in notices] == ["line 2", "line 3", "line 4", "line 5"]
    assert read_script("#!/usr/bin/python\nml = 3\n", ["/usr/bin/python"]).notices == ()


def test_a_program_of_slurm_gets_its_own_advice() -> None:
    notices = read_script("#!/bin/bash\nsbatch a.sh\nsqueue --me\nscancel 3\n", BASH).notices
    said = [
        "the next run with batchml submit --after",
        "batchml ls outside of the run",
        "batchml cancel outside of the run",
    ]
    for notice, words in zip(notices, said, strict=True):
        assert notice.endswith(f"{words}.")


def test_the_sizes_are_those_that_it_has() -> None:
    env: dict[str, Any] = {
        "BATCHML_SLURM": "1", "SLURM_CPUS_PER_TASK": "8", "SLURM_GPUS": "2", "MINE": "1",
        "SLURM_CPUS_ON_NODE": "8", "SLURM_GPUS_ON_NODE": "2",
    }  # fmt: skip
    cut = with_slurm_sizes(JobSpec(env=env, resources=Resources(vcpus=2, memory="1 GiB")))
    assert cut.env == {
        "BATCHML_SLURM": "1", "SLURM_CPUS_PER_TASK": "2", "MINE": "1",
        "SLURM_CPUS_ON_NODE": "2", "SLURM_MEM_PER_NODE": "1024",
    }  # fmt: skip
    more = with_slurm_sizes(JobSpec(env=env, nodes=2, resources=Resources(vcpus=9, gpus=4))).env
    assert (more["SLURM_GPUS"], more["SLURM_GPUS_ON_NODE"]) == ("8", "4")
    assert (more["SLURM_CPUS_PER_TASK"], more["SLURM_CPUS_ON_NODE"]) == ("8", "9")
    other = JobSpec(env={"SLURM_GPUS": "2"})
    assert with_slurm_sizes(other) is other


def test_a_script_that_is_not_there_is_said_to_be_missing(context: Context) -> None:
    (context.folder / "training.py").touch()
    with pytest.raises(InputNotFound, match=r"File 'missing\.sh' does not exist"):
        apply_script(context, to_request("missing.sh"), [])
    with pytest.raises(InputNotFound, match=r"Did you mean 'training\.py'\?$") as caught:
        apply_script(context, to_request("trainig.py"), [])
    assert caught.value.exit_code == 78
    assert apply_script(context, to_request("lenet"), []).job == "lenet"


def test_a_python_program_runs_as_a_command_with_its_arguments(context: Context) -> None:
    (context.folder / "src").mkdir()
    (context.folder / "src" / "train.py").write_text("print(1)\n")
    notices: list[str] = []
    options: SubmitOptions = {"command": ["--lr", "0.1"], "params": {"epochs": 3}}
    request = apply_script(context, to_request("src/train.py", options), notices)
    assert (request.job, request.folder) == (None, str(context.folder))
    assert request.command == ("python", "src/train.py", "--lr", "0.1", "{params}")
    assert notices == ["src/train.py runs as the command: python src/train.py --lr 0.1 --epochs 3"]
    job = resolve_job(context, request)
    assert job.spec.argv() == ["python", "src/train.py", "--lr", "0.1", "--epochs", "3"]
    assert (job.spec.name, job.spec.image) == ("train", "python")


def test_the_job_beside_a_python_program_is_named(
    context: Context, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "job.toml").touch()
    (elsewhere / "train.py").write_text("print(1)\n")
    notices: list[str] = []
    request = apply_script(context, to_request(str(elsewhere / "train.py")), notices)
    assert (request.command, request.folder) == (("python", "train.py", "{params}"), str(elsewhere))
    assert f"batchml submit {elsewhere}" in notices[-1]


@pytest.mark.parametrize("line", [" #SBATCH -c 2", "#sbatch -c 2", "#SBATCH--mem=1G", "#batchml -"])
def test_a_line_that_was_meant_is_told_of(line: str) -> None:
    (notice,) = read_script(f"#!/bin/bash\n{line}\necho\n", BASH).notices
    assert notice.startswith("line 2: ") and "is a comment" in notice


@pytest.mark.parametrize("line", ["##SBATCH -c 2", "# SBATCH -c 2", "#SBATCHED x"])
def test_a_line_that_was_put_out_is_not(line: str) -> None:
    assert read_script(f"#!/bin/bash\n{line}\necho\n", BASH).notices == ()


# --- the order ------------------------------------------------------------------------------------

TRAIN = """#!/bin/bash
#SBATCH -J slurms -c 2 --array=1-5:2
#BATCHML --name ours --vcpus 3 --tag a=b
echo
"""


@pytest.fixture
def context(tmp_path: Path) -> Context:
    environ = {"BATCHML_HOME": str(tmp_path / "home")}
    (tmp_path / "train.sh").write_text(TRAIN)
    return Context(load_settings(environ, tmp_path, None), FakeClock(), tmp_path)


def test_flags_win_over_ours_and_ours_over_slurms(context: Context) -> None:
    order = apply_script(context, to_request("train.sh", {"name": "flags", "tags": {"c": "d"}}), [])
    assert order.changes["name"] == "flags"
    assert order.changes["resources"]["vcpus"] == 3
    assert (order.array, order.tags) == (3, {"a": "b", "c": "d"})
    assert with_slurm_sizes(resolve_job(context, order).spec).env["SLURM_CPUS_ON_NODE"] == "3"
    assert order.changes["env"]["BATCHML_SLURM_ARRAY"] == "1-5:2"
    assert order.command == ("python3", "-m", "batchml.runtime.entry.script", "train.sh")


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        (["#SBATCH -c 2", "#SBATCH -p gpu"], "train.sh, line 3"),
        (["#BATCHML --queue gpu", "#SBATCH --partition=cpu"], "train.sh, line 2"),
        (["#SBATCH -c 2"], ""),
    ],
)
def test_the_line_that_names_the_queue_is_known(
    context: Context, lines: list[str], where: str
) -> None:
    (context.folder / "train.sh").write_text("\n".join(["#!/bin/bash", *lines, "echo"]))
    assert apply_script(context, to_request("train.sh"), []).queue_at == where
    assert apply_script(context, to_request("train.sh", {"queue": "mine"}), []).queue_at == ""


def test_another_array_than_the_scripts_has_numbers_of_its_own(context: Context) -> None:
    order = apply_script(context, to_request("train.sh", {"array": 7}), [])
    assert order.array == 7
    assert "BATCHML_SLURM_ARRAY" not in order.changes["env"]


def test_a_script_that_speaks_no_slurm_is_told_nothing_of_it(context: Context) -> None:
    (context.folder / "train.sh").write_text("#!/bin/sh\n#BATCHML --gpus 1\necho\n")
    order = apply_script(context, to_request("train.sh"), [])
    assert order.changes["name"] == "train"
    assert "env" not in order.changes


def test_the_current_folder_travels_and_that_of_a_script_elsewhere(context: Context) -> None:
    below = context.folder / "scripts"
    below.mkdir()
    (below / "a.sh").write_text(TRAIN)
    order = apply_script(context, to_request("scripts/a.sh", {"command": ["x"]}), [])
    assert (order.folder, order.command) == (
        str(context.folder),
        ("python3", "-m", "batchml.runtime.entry.script", "scripts/a.sh", "x"),
    )
    inside = Context(context.settings, FakeClock(), below)
    order = apply_script(inside, to_request("../train.sh"), [])
    assert order.folder == str(context.folder)
    assert order.command is not None and order.command[3:] == ("train.sh",)


def test_a_script_on_stdin_is_packed_into_its_command(context: Context) -> None:
    order = apply_script(context, to_request("-", {"command": ["x"]}), [], read=TRAIN.encode)
    assert order.command is not None
    packed, name, argument = order.command[-3:]
    assert (unpack(packed), name, argument) == (TRAIN.encode(), "stdin", "x")
    assert order.folder == str(context.folder)


def test_chdir_names_the_folder_that_travels(context: Context) -> None:
    (context.folder / "data").mkdir()
    (context.folder / "train.sh").write_text("#!/bin/sh\n#SBATCH -D data\necho\n")
    order = apply_script(context, to_request("train.sh"), [])
    assert order.folder == str(context.folder / "data")
    assert order.command is not None and order.command[3] == "--packed"


def test_all_mistakes_come_at_once_in_the_order_of_their_lines(context: Context) -> None:
    (context.folder / "train.sh").write_text(
        "#!/bin/sh\n#BATCHML --gpus x\n#SBATCH -c y\n#BATCHML --what\necho\n"
    )
    with pytest.raises(ConfigError) as raised:
        apply_script(context, to_request("train.sh"), [])
    assert [m.split(":")[0] for m in raised.value.mistakes] == ["line 2", "line 3", "line 4"]


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.sh", "echo\n", True),
        ("a.py", "#!/usr/bin/env python\n", True),
        ("a.py", "print()\n", False),
        ("a.txt", "#SBATCH -c 2\n", True),
        ("job.toml", "#!/bin/sh\n", False),
    ],
)
def test_which_files_are_scripts(context: Context, name: str, text: str, found: bool) -> None:
    (context.folder / name).write_text(text)
    assert is_script(context, name) is found


def test_the_plan_is_one_request_with_the_scripts_folder(context: Context) -> None:
    client = Client(folder=context.folder, environ={"BATCHML_HOME": str(context.folder / "home")})
    request = client.plan("train.sh")["SubmitJob"]
    assert request["arrayProperties"] == {"size": 3}
    assert request["jobName"].startswith("ours-")
