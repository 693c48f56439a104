"""How long a command takes to start, which a user waits for fifty times a day.

Compared with `python -c pass`, the lower bound, and a boto3 script that makes the same one call.
"""

import sys
import tempfile
from pathlib import Path

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home
from benchmarks.pairs import compare, row, sample

_BOTO3 = """
import boto3
client = boto3.client("batch")
answer = client.submit_job(jobName="true", jobQueue="default", jobDefinition={definition!r},
                           containerOverrides={{"command": ["true"]}})
print(answer["jobId"])
"""


def main() -> None:
    binaries = Path(sys.executable).parent
    batchml, python = str(binaries / "batchml"), str(binaries / "python")
    floor = [python, "-c", "pass"]
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        environ = {"BATCHML_HOME": str(home.root)}
        empty = Path(folder) / "empty"
        empty.mkdir()
        for arguments, goal in (
            (["--version"], "1.5"),
            (["--help"], "6"),
            (["submit", "--help"], "6"),
        ):
            found = compare([batchml, *arguments], floor, environ=environ, folder=str(empty))
            print(row(f"batchml {' '.join(arguments)}", "python -c pass", found, goal), flush=True)
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
            found = compare(submit, script, environ=environ, folder=str(empty))
            print(row("batchml submit --detach", "a minimal boto3 script", found, "1"))
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
    main()
