"""A history of many runs that have ended, made from one that really ran."""

import json
import uuid
from pathlib import Path
from typing import Any

HOUR = 3_600_000  # milliseconds
_FAILURES = ("app-error", "out-of-memory", "timed-out", "host-lost")


def copy_run(history: Path, count: int) -> None:
    """Add `count` copies of the only run of a history, an hour after another into the past.

    They have names, parameters, metrics and ends of their own; every seventh has failed.
    """
    made, settled, end = (json.loads(line) for line in history.read_text().splitlines())
    lines: list[dict[str, Any]] = []
    for number in range(count, 0, -1):
        key = f"copy{number:013d}"
        job_id = str(uuid.UUID(int=number))
        shift = {name: end[name] - number * HOUR for name in ("created_at", "started_at")}
        own: dict[str, Any] = {
            **end, **shift, "key": key, "job_id": job_id,
            "stopped_at": end["stopped_at"] - number * HOUR + number % 97 * 1000,
            "metrics": {"loss": number / count},
        }  # fmt: skip
        if number % 7 == 0:
            outcome = _FAILURES[number % len(_FAILURES)]
            own |= {"status": "FAILED", "outcome": outcome, "exit_code": 1}
        params = {"lr": str(10 ** -(number % 5)), "seed": str(number)}
        lines += [
            {**made, "key": key, "name": f"train-{number}", "job_name": f"train-{number}-{key}",
             "at": made["at"] - number * HOUR, "params": params,
             "tags": {**made["tags"], "batchml:key": key, "team": f"t{number % 9}"}},
            {**settled, "key": key, "job_id": job_id},
            own,
        ]  # fmt: skip
    text = "".join(json.dumps(each) + "\n" for each in [*lines, made, settled, end])
    history.write_text(text)
