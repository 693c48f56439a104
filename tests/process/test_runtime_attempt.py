"""An attempt as in AWS: code and command from S3, one run of a submission, outputs to S3, stops."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.jobs.code import pack
from batchml.runtime.protocol.log_marks import parse_mark
from tests.support.local_server import wait_for
from tests.support.s3 import BUCKET, KEYS, client, moto_s3

JOB = "6b0e0000-0000-4000-8000-000000000001"


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_s3() as address:
        yield address


@pytest.fixture
def key(tmp_path: Path) -> str:
    """Of a submission: another for each test."""
    return hashlib.sha256(str(tmp_path).encode()).hexdigest()[:17]


def start(folder: Path, command: list[str], **env: str) -> "subprocess.Popen[bytes]":
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "batchml.runtime.run", *command],
        cwd=work,
        env={
            "PATH": os.environ["PATH"], "TMPDIR": str(folder),
            "PYTHONPATH": str(Path(__file__).parents[2]), "AWS_BATCH_JOB_ID": JOB, **env,
        },
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run(folder: Path, command: list[str], **env: str) -> tuple[int, list[str]]:
    """The exit code, and the lines that are for people."""
    process = start(folder, command, **env)
    output, _ = process.communicate(timeout=60)
    lines = output.decode().splitlines()
    what, words = parse_mark(lines[-1]) or ("", {})
    words.pop("by", None)  # runtime: it chose the code
    count = str(len(shown(lines)))
    assert (what, words) == ("end", {"code": str(process.returncode), "lines": count})
    return process.returncode, shown(lines)


def shown(lines: list[str]) -> list[str]:
    return [line for line in lines if parse_mark(line) is None]


def aws(moto: str, key: str, **more: str) -> dict[str, str]:
    return {
        **KEYS, "AWS_ENDPOINT_URL_S3": moto, "BATCHML_KEY": key,
        "BATCHML_STORE": f"s3://{BUCKET}/runs/{key}", **more,
    }  # fmt: skip


def put_code(moto: str, folder: Path, **files: str) -> str:
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    archive = pack(folder)
    client(moto).put_object(Bucket=BUCKET, Key=f"code/{archive.name}", Body=archive.data)
    return f"s3://{BUCKET}/code/{archive.name}"


def kept(moto: str, key: str) -> dict[str, bytes]:
    """What the store of a run holds."""
    s3: Any = client(moto)
    found = s3.list_objects_v2(Bucket=BUCKET, Prefix=f"runs/{key}/").get("Contents", ())
    return {
        each["Key"].partition(f"{key}/")[2]: s3.get_object(Bucket=BUCKET, Key=each["Key"])[
            "Body"
        ].read()
        for each in found
    }


PROGRAM = """
import os, pathlib, sys
out = pathlib.Path(os.environ["BATCHML_OUTPUT_DIR"])
(out / "deep").mkdir()
(out / "deep" / "model").write_text("weights")
assert os.path.isdir(os.environ["BATCHML_CHECKPOINT_DIR"])
print(os.environ["BATCHML_RUN"], os.environ["BATCHML_ATTEMPT"], sys.argv[1:])
"""


def test_code_comes_from_s3_and_outputs_go_there(moto: str, tmp_path: Path, key: str) -> None:
    code = put_code(moto, tmp_path / "source", train=PROGRAM)
    command = [sys.executable, "train.py", "--lr", "0.1"]
    assert run(tmp_path, command, **aws(moto, key, BATCHML_CODE=code)) == (
        0, [f"{JOB} 1 ['--lr', '0.1']"],
    )  # fmt: skip
    assert kept(moto, key) == {"claims/0": JOB.encode(), "output/deep/model": b"weights"}
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["source", "work"], "what was made for the attempt goes with it"


def test_outputs_of_children_and_of_runs_that_fail_are_kept_apart(
    moto: str, tmp_path: Path, key: str
) -> None:
    command = ["sh", "-c", "echo half > $BATCHML_OUTPUT_DIR/model; exit 3"]
    env = aws(moto, key, AWS_BATCH_JOB_ARRAY_INDEX="4", AWS_BATCH_JOB_ID=f"{JOB}:4")
    assert run(tmp_path, command, **env) == (3, [])
    assert kept(moto, key) == {"claims/4": f"{JOB}:4".encode(), "output/4/model": b"half\n"}


def test_the_second_job_of_a_submission_runs_nothing(moto: str, tmp_path: Path, key: str) -> None:
    assert run(tmp_path, ["echo", "first"], **aws(moto, key)) == (0, ["first"])
    assert run(tmp_path, ["echo", "again"], **aws(moto, key)) == (0, ["again"]), "an attempt of it"
    code, lines = run(tmp_path, ["echo", "never"], **aws(moto, key, AWS_BATCH_JOB_ID="other"))
    assert code == 77
    duplicate = f"batchml: this is a second run of one submission; {JOB} goes on. Nothing was run."
    assert lines == [duplicate]


def order(moto: str, told: dict[str, Any]) -> str:
    data = json.dumps(told).encode()
    name = f"code/{hashlib.sha256(data).hexdigest()}.json"
    client(moto).put_object(Bucket=BUCKET, Key=name, Body=data)
    return f"s3://{BUCKET}/{name}"


def test_a_command_of_any_length_comes_as_an_order(moto: str, tmp_path: Path, key: str) -> None:
    words = ["x" * 100_000] * 10
    script = (
        "import os, sys; print(len(sys.argv), os.environ['NAME'], os.environ['BATCHML_PARAMS'])"
    )
    where = order(
        moto,
        {
            "command": [sys.executable, "-c", script, *words], "params": {"lr": 0.1},
            "env": {"NAME": "given", "AWS_BATCH_JOB_ID": "forged"},
        },
    )  # fmt: skip
    assert run(tmp_path, ["batchml-order"], **aws(moto, key, BATCHML_ORDER=where)) == (
        0, ['11 given {"lr": 0.1}'],
    )  # fmt: skip


def test_what_linux_does_not_take_is_one_line(moto: str, tmp_path: Path, key: str) -> None:
    where = order(moto, {"command": ["true", "x" * 140_000]})
    code, lines = run(tmp_path, ["batchml-order"], **aws(moto, key, BATCHML_ORDER=where))
    assert (code, len(lines)) == (126, 1)
    assert "128 KiB" in lines[0]


def test_no_file_of_a_job_stands_in_for_a_module_that_the_runtime_imports(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    for name in ("selectors", "ctypes", "glob", "queue", "traceback"):
        (code / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    packed = pack(code)
    (tmp_path / packed.name).write_bytes(packed.data)
    ended = run(tmp_path, ["echo", "hi"], BATCHML_CODE=str(tmp_path / packed.name))
    assert ended == (0, ["hi"])


def test_a_command_that_cannot_be_run_is_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/python\n")
    script.chmod(0o755)
    code, lines = run(tmp_path, [str(script)])
    assert code == 127 and len(lines) == 1 and "first line (#!)" in lines[0]
    code, lines = run(tmp_path, ["no-such-command"])
    assert code == 127 and lines == [
        "batchml: cannot run 'no-such-command': no such command in this image."
    ]
    order = tmp_path / "order.json"
    order.write_text(json.dumps({"command": ["echo", "a\0b"]}))
    code, lines = run(tmp_path, ["batchml-order"], BATCHML_ORDER=str(order))
    assert code == 126 and lines == ["batchml: cannot run 'echo': embedded null byte"]


@pytest.mark.parametrize("told", [{"command": []}, {"command": "sh"}, {"command": [1]}, []])
def test_an_order_that_is_none_is_one_line(
    moto: str, tmp_path: Path, key: str, told: dict[str, Any]
) -> None:
    where = order(moto, told)
    code, lines = run(tmp_path, ["batchml-order"], **aws(moto, key, BATCHML_ORDER=where))
    assert (code, len(lines)) == (78, 1)
    assert "is not a command file of batchml" in lines[0]


def test_code_that_is_not_what_was_sent_never_runs(moto: str, tmp_path: Path, key: str) -> None:
    code = put_code(moto, tmp_path / "source", train="print('theirs')")
    other = put_code(moto, tmp_path / "other", train="print('mine')").rpartition("/")[2]
    body = client(moto).get_object(Bucket=BUCKET, Key=f"code/{other}")["Body"].read()
    client(moto).put_object(Bucket=BUCKET, Key=code.partition(f"{BUCKET}/")[2], Body=body)
    ended, lines = run(tmp_path, [sys.executable, "train.py"], **aws(moto, key, BATCHML_CODE=code))
    assert (ended, len(lines)) == (78, 1)
    assert "is not the one that was sent" in lines[0]


def test_code_that_is_not_there_is_a_configuration_error(
    moto: str, tmp_path: Path, key: str
) -> None:
    code = f"s3://{BUCKET}/code/none.tar.gz"
    ended, lines = run(tmp_path, ["true"], **aws(moto, key, BATCHML_CODE=code))
    assert (ended, len(lines)) == (78, 1)
    assert "does not exist" in lines[0]


STOPPABLE = """
import time
from batchml.runtime import report, should_stop
print("ready", should_stop(), flush=True)
report(step=1, loss=0.5)
print("deaf", flush=True)
while not should_stop():
    time.sleep(0.01)
open(__import__("os").environ["BATCHML_OUTPUT_DIR"] + "/last", "w").write("saved")
print("saved")
"""


def test_a_stop_makes_the_stop_file_and_what_is_saved_then_is_sent(
    moto: str, tmp_path: Path, key: str
) -> None:
    process = start(tmp_path, [sys.executable, "-c", STOPPABLE], **aws(moto, key))
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready False\n"
    while process.stdout.readline() != b"deaf\n":
        continue
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert shown(rest.decode().splitlines()) == ["saved"]
    assert process.returncode == 0
    assert kept(moto, key)["output/last"] == b"saved"


def test_files_of_the_working_folder_are_sent_and_come_back(
    moto: str, tmp_path: Path, key: str
) -> None:
    script = "cat ckpt 2>/dev/null; echo state > ckpt; mkdir -p o; echo o > o/x"
    env = aws(moto, key)
    run(tmp_path, ["sh", "-c", script], **env)
    assert kept(moto, key)["output/work/ckpt"] == b"state\n"
    assert kept(moto, key)["output/work/o/x"] == b"o\n"
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    lines = run(fresh, ["sh", "-c", script], **env, AWS_BATCH_JOB_ATTEMPT="2")[1]
    assert lines[0] == "batchml notice: from the attempt before: ckpt (6 B) and o/x (2 B)"
    assert lines[1] == "state"


def test_who_does_not_stop_is_killed_in_time_for_its_outputs(
    moto: str, tmp_path: Path, key: str
) -> None:
    script = "trap '' TERM; echo x > $BATCHML_OUTPUT_DIR/x; echo deaf; while :; do sleep 0.05; done"
    process = start(tmp_path, ["sh", "-c", script], **aws(moto, key, BATCHML_GRACE="1"))
    assert process.stdout is not None
    assert process.stdout.readline() == b"deaf\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 137
    assert kept(moto, key)["output/x"] == b"x\n"


def test_a_budget_that_is_spent_stops_the_run_and_keeps_what_it_saved(
    moto: str, tmp_path: Path, key: str
) -> None:
    script = (
        "trap 'echo saved > $BATCHML_OUTPUT_DIR/x; exit 0' TERM; echo on; "
        "while :; do sleep 0.05; done"
    )
    env = aws(moto, key, BATCHML_MAX_SECONDS="1", BATCHML_GRACE="1")
    code, lines = run(tmp_path, ["sh", "-c", script], **env)
    assert code == 143
    lines.remove("on")
    said = [line for line in lines if line != "Terminated"]  # a shell's, of its sleep
    assert "budget" in said[0] and len(said) == 1
    assert kept(moto, key)["output/x"] == b"saved\n"
    assert "spent/0" in kept(moto, key)


def test_a_stop_while_the_store_does_not_answer_ends_the_wait(tmp_path: Path, key: str) -> None:
    """Nobody listens there, which would be tried again for half a minute."""
    process = start(tmp_path, ["echo", "never"], **aws("http://127.0.0.1:9", key))
    children = Path(f"/proc/{process.pid}/status")
    # The handler is in place once the process catches TERM (bit 15 of SigCgt).
    wait_for(lambda: _catches_term(children), "the runtime listens", 20)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 143
    assert b"stopped (SIGTERM) before the command began" in output


def _catches_term(status: Path) -> bool:
    caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_a_store_that_is_away_is_worth_another_host(tmp_path: Path, key: str) -> None:
    env = aws("http://127.0.0.1:9", key, AWS_ENDPOINT_URL_S3="", AWS_ACCESS_KEY_ID="")
    env |= {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:9/keys"}
    code, lines = run(tmp_path, ["echo", "never"], **env)
    assert (code, len(lines)) == (75, 1)
    assert "no AWS credentials" in lines[0]


def test_checkpoints_outlive_an_attempt_in_the_workspace(tmp_path: Path, key: str) -> None:
    (tmp_path / "space").mkdir()
    script = "cat $BATCHML_CHECKPOINT_DIR/c 2>/dev/null; echo one > $BATCHML_CHECKPOINT_DIR/c"
    env = {"BATCHML_WORKSPACE": str(tmp_path / "space"), "BATCHML_KEY": key}
    assert run(tmp_path, ["sh", "-c", script], **env) == (0, [])
    assert run(tmp_path, ["sh", "-c", script], **env, AWS_BATCH_JOB_ATTEMPT="2") == (0, ["one"])
