"""How long a command takes to start, which a user waits for fifty times a day.

Compared with `python -c pass`, the lower bound, and a boto3 script that makes the same one call.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home
from benchmarks.pairs import compare, rows, sample
from benchmarks.rows import Finding
from benchmarks.running import main

_BOTO3 = """
import boto3
client = boto3.client("batch")
answer = client.submit_job(jobName="true", jobQueue="default", jobDefinition={definition!r},
                           containerOverrides={{"command": ["true"]}})
print(answer["jobId"])
"""


def measure(full: bool) -> Iterator[Finding]:
    binaries, pairs = Path(sys.executable).parent, 15 if full else 5
    batchml, python = str(binaries / "batchml"), str(binaries / "python")
    floor = [python, "-c", "pass"]
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        environ = {"BATCHML_HOME": str(home.root)}
        empty = Path(folder) / "empty"
        empty.mkdir()
        for name, arguments, goal in (
            ("version", ["--version"], 1.5),
            ("help", ["--help"], 6),
            ("help_submit", ["submit", "--help"], 6),
        ):
            command = [batchml, *arguments]
            found = compare(command, floor, environ=environ, folder=str(empty), pairs=pairs)
            yield from rows(
                f"startup/{name}", f"batchml {' '.join(arguments)}", found,
                beside="python -c pass", goal=goal,
            )  # fmt: skip
        endpoint = control.ensure_server(home, SystemClock())
        try:
            submit = [batchml, "submit", "--detach", "--", "true"]
            sample(submit, environ, str(empty))  # registers the definition
            keys = home.keys()
            environ |= {
                "AWS_ENDPOINT_URL_BATCH": endpoint.url,
                "AWS_ACCESS_KEY_ID": keys.access_key_id,
                "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            script = [python, "-c", _BOTO3.format(definition=_definition(home, endpoint.url))]
            for name, arguments in (
                ("submit", submit[1:]),
                ("ls", ["ls"]),
                ("show", ["show", "@last"]),
            ):
                found = compare(
                    [batchml, *arguments], script, environ=environ, folder=str(empty), pairs=pairs
                )
                yield from rows(
                    f"startup/{name}", f"batchml {' '.join(arguments)}", found,
                    beside="a boto3 script that submits", goal=0.5,
                )  # fmt: skip
        finally:
            control.stop_server(home, SystemClock())


def _definition(home: Home, url: str) -> str:
    """The definition that `submit -- true` made."""
    from batchml.aws.session import Access, Session

    keys = home.keys()
    access = Access(
        "us-east-1",
        endpoint=url,
        access_key_id=keys.access_key_id,
        secret_access_key=keys.secret_access_key,
    )
    found = Session(access).client("batch").describe_job_definitions(status="ACTIVE")
    return str(found["jobDefinitions"][0]["jobDefinitionName"])


if __name__ == "__main__":
    main(measure)
