"""Records a conversation with the embedded server: typed commands that use most of Batch and Logs.

`.venv/bin/python -m tests.support.conversation` writes tests/recorded/embedded-server.jsonl again.
"""

import os
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from batchml import __version__
from batchml.aws.recording import EMBEDDED, RECORDING_VARIABLE
from batchml.clock import SystemClock
from batchml.prove.recording import Recording, make_header, read_call_log, write_recording
from batchml.prove.sanitizing import sanitize

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "recorded" / "embedded-server.jsonl"
FAILS_ONCE = "import os, sys; sys.exit(75 * (os.environ['AWS_BATCH_JOB_ATTEMPT'] == '1'))"
SECOND_FAILS = "import os, sys; sys.exit(int(os.environ['AWS_BATCH_JOB_ARRAY_INDEX']))"
_SUBMITTED = re.compile(r"Submitted job \[.* - ([0-9a-f-]{36})\]")
# Each is a command; {run} is the id of the newest run that a command before it has named.
COMMANDS = (
    "submit --name quick -- {python} -c print(1)",
    "wait {run}",
    "submit --wait --name hello -- {python} -c print(1)",
    "submit --wait --name broken -- {python} -c exit(3)",
    "explain {run}",
    "show {run}",
    "submit --wait --name nodes --nodes 2 -- {python} -c print(1)",
    "submit --wait --name retried --attempts 2 -- {python} -c {fails_once}",
    "submit --wait --name several --array 2 -- {python} -c {second_fails}",
    "show {run}",
    "explain {run}",
    "rerun --failed --wait {run}",
    "submit --name long -- {python} -c __import__('time').sleep(60)",
    "cancel {run}",
    "wait {run}",
    "logs {run}",
    "queue create second --priority 3 --compute this-machine",
    "queue list",
    "submit --wait --queue second --name other -- {python} -c print(1)",
    "queue update second --priority 4",
    "queue delete second --yes",
    "compute list",
    "jobdef list",
    "submit --wait --queue missing --name nothing -- true",
    "ls --all",
    "top --json",
)


def record(folder: Path) -> Path:
    """Run the commands in a state folder of their own; the file that they wrote."""
    log = folder / "calls.jsonl"
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "BATCHML_"))}
    environ |= {"BATCHML_HOME": str(folder / "home"), RECORDING_VARIABLE: str(log)}
    work = folder / "work"
    work.mkdir()
    words = {"python": "python3", "fails_once": FAILS_ONCE, "second_fails": SECOND_FAILS, "run": ""}
    try:
        for command in COMMANDS:
            arguments = [
                each.format(**words) if each.startswith("{") else each for each in command.split()
            ]
            named = _SUBMITTED.findall(_run(work, environ, *arguments))
            words["run"] = named[-1] if named else words["run"]
    finally:
        _run(work, environ, "local", "stop")
    return log


def _run(work: Path, environ: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "batchml", *arguments], cwd=work, env=environ, text=True,
        capture_output=True, timeout=120, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    print(f"{' '.join(arguments)}: {done.returncode} {done.stderr[-300:]}", file=sys.stderr)
    return done.stdout + done.stderr


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        calls, _ = read_call_log(record(Path(folder)))
    found = tuple(sanitize(calls))
    today = datetime.fromtimestamp(SystemClock().now(), UTC).date().isoformat()
    write_recording(RECORDED, Recording(make_header(found, EMBEDDED, today, __version__), found))
    print(f"{RECORDED}: {len(found)} calls")


if __name__ == "__main__":
    main()
