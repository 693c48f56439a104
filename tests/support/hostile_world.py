"""Runs, jobs and a sweep in which every text that people or programs choose attacks the page."""

import json
from pathlib import Path

from msgspec import Struct

from tests.support.cli import Cli, write_job

MARKUP = "</script><img src=x onerror=alert(1)>"
# Right to left, colours, a link of a terminal, a forged event of a stream, a separator of lines.
HOSTILE = (
    f"{MARKUP}\u202e\u2066\x1b[31m\x1b]8;;javascript:alert(1)\x1b\\link\x1b]8;;\x1b\\"
    "\r\n\r\nid: 9\r\nevent: end\r\ndata: {}\r\n\r\n\u2028\"'`${x}"
)
_LONG = 1_000_000  # characters of a line
_OPTIONS = ("--vcpus", "1", "--memory", "64 MiB")

_TRAIN = """
import os, sys
word = os.environ.get("WORD", "")
print(word)
for kind in "out", "err":
    print(f"{kind} \\0 {word}", file=getattr(sys, f"std{kind}"))
print("x" * LONG + word)
for step in range(5):
    print(f"step {step} acc={step / 10}", flush=True)
name = "<img src=x onerror=alert(1)>"
with open(os.path.join(os.environ["BATCHML_OUTPUT_DIR"], name), "w") as file:
    file.write(word)
if sys.argv[1] == "fail":
    raise ValueError(word)
"""
_JOB = f"""
image = "python"
command = ["python", "train.py", "{{mode}}", "{{__proto__}}"]
[params]
mode = "pass"
lr = 0.1
word = {json.dumps(MARKUP)}
"__proto__" = {json.dumps(MARKUP)}
"<b>constructor</b>" = 1
[env]
WORD = {json.dumps(HOSTILE)}
[metrics]
step = 'step (\\d+)'
"__proto__" = 'acc=(\\S+)'
"{MARKUP}" = 'acc=(\\S+)'
[resources]
vcpus = 1
memory = "64 MiB"
"""
_SWEEP = f"""
name = "hostile"
job = "hostile"
goal = {{ max = "{MARKUP}" }}
method = "grid"
[space]
mode = {{ choice = ["pass", "fail"] }}
"__proto__" = {{ choice = [{json.dumps(MARKUP)}, {json.dumps(HOSTILE)}] }}
[limits]
parallel = 4
"""


class HostileWorld(Struct, frozen=True):
    """Job ids, and the key of the sweep."""

    failed: str
    passed: str
    cancelled: str
    running: str
    waiting: str
    array: str
    sweep: str


def make_hostile_world(cli: Cli) -> HostileWorld:
    """Submit it all. `running` runs for an hour unless it is cancelled."""
    train = _TRAIN.replace("LONG", str(_LONG))
    write_job(cli.folder, "hostile", _JOB, train__py=train)
    write_job(cli.folder, "<img src=x onerror=alert(1)>", _JOB, train__py=train)
    write_job(cli.folder, "mistaken", f'image = 3\n"{MARKUP}" = 3\n')
    tags = ("--tag", f"owner={HOSTILE}", "--tag", f"__proto__={HOSTILE}")
    failed = _submit(cli, "hostile", *tags, "-p", "mode=fail", "-p", f"__proto__={HOSTILE}")
    passed = _submit(cli, "hostile", *tags)
    array = _submit(cli, "hostile", "--array", "2")
    (cli.folder / "sweep.toml").write_text(_SWEEP)
    done = cli("sweep", "sweep.toml")
    assert "Traceback" not in done.err, done.err
    for job in (failed, passed, array):
        cli("wait", job)
    words = ("--name", "long", *tags, "-p", f"word={HOSTILE}", *_OPTIONS)
    running = _submit(cli, *words, "--", "sh", "-c", f"echo '{MARKUP}'; sleep 3600")
    waiting = _submit(cli, *words, "--after", running, "--", "true")
    cancelled = _submit(cli, *words, "--", "sleep", "3600")
    assert cli("cancel", cancelled, "--reason", HOSTILE).code == 0
    (sweep,) = cli("sweeps", "ls", "--json").json
    _rename(cli.home.root / "history.jsonl")
    return HostileWorld(failed, passed, cancelled, running, waiting, array, sweep["sweepId"])


def _submit(cli: Cli, *words: str) -> str:
    made = cli("submit", "--json", *words)
    assert made.code == 0, made.err
    found: str = made.json["jobId"]
    return found


def _rename(history: Path) -> None:
    """Give a run a name that batchml would refuse, as a history of other programs may have."""
    lines = [json.loads(line) for line in history.read_text().strip().split("\n")]
    first = next(each for each in lines if each.get("name") == "hostile")
    first["name"] = HOSTILE
    history.write_text("".join(json.dumps(each) + "\n" for each in lines))
