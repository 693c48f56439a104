"""Endpoints of services that the embedded server does not serve: which are allowed, who gets
them.
"""

from pathlib import Path

import pytest

from batchml.config.environments import read_config
from batchml.errors import UsageError
from batchml.local.executors.choice import Permits, choose, read_endpoints, save_endpoints
from batchml.local.executors.container_spec import container_spec
from batchml.local.executors.spec import ExecutorHost, runner_spec
from batchml.local.home import Home
from batchml.setup.commands.local import _read_endpoints
from tests.support.executor_rig import attempt_of, job_of

URL = "http://127.0.0.1:9000"


@pytest.mark.parametrize(
    ("endpoints", "text"),
    [
        ({"batch": URL}, "answers for batch itself"),
        ({"S3": URL}, "s3, dynamodb"),
        ({"s3": "127.0.0.1:9000"}, "Expected a URL"),
        ({"s3": "http://127.0.0.1:nine"}, "Expected a URL"),
        ({"s3": "http://user:secret@host"}, "Expected a URL"),
        ({"s3": "http://a b"}, "Expected a URL"),
    ],
)
def test_mistakes_are_named_in_the_file_and_in_flags(endpoints: dict[str, str], text: str) -> None:
    found = read_config({"env": {"local": {"endpoints": endpoints}}}).mistakes["local"]
    assert len(found) == 1 and "env.local.endpoints." in found[0] and text in found[0]
    with pytest.raises(UsageError, match=text):
        _read_endpoints([f"{service}={url}" for service, url in endpoints.items()])


def test_they_are_for_local_alone() -> None:
    dev = {"region": "us-east-1", "endpoints": {"s3": URL}}
    (found,) = read_config({"env": {"dev": dev}}).mistakes["dev"]
    assert "are for [env.local] only" in found


def test_a_flag_without_a_url_takes_a_service_out() -> None:
    assert _read_endpoints(["s3=", "dynamodb=http://h"]) == {"s3": "", "dynamodb": "http://h"}
    with pytest.raises(UsageError, match="expected SERVICE=URL"):
        _read_endpoints(["s3"])


def test_attempts_find_them_from_the_next_on_unless_the_job_has_its_own(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    host = ExecutorHost(home, home.runtimes / "r", {"PATH": "/bin"})
    save_endpoints(home, {"s3": URL, "secrets_manager": "https://sm"})
    choose(home, "docker", None, None)  # another start keeps them
    own = job_of(["true"], env={"AWS_ENDPOINT_URL_S3": "https://own"})
    for job, expected in ((job_of(["true"]), URL), (own, "https://own")):
        attempt = attempt_of(job)
        process = runner_spec(host, job, attempt)["env"]
        container = container_spec(host, Permits(), job, attempt)["config"]["Env"]
        assert process["AWS_ENDPOINT_URL_S3"] == expected
        assert f"AWS_ENDPOINT_URL_S3={expected}" in container
        assert process["AWS_ENDPOINT_URL_SECRETS_MANAGER"] == "https://sm"
    save_endpoints(home, {"s3": ""})
    assert read_endpoints(home) == {"secrets_manager": "https://sm"}
    job = job_of(["true"])
    assert "AWS_ENDPOINT_URL_S3" not in runner_spec(host, job, attempt_of(job))["env"]
