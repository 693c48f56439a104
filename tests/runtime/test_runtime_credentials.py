"""Where a container's keys come from, in which order, and when they are renewed."""

import json
from pathlib import Path

import pytest

from batchml.runtime.storage.credentials import Credentials, CredentialsProvider
from batchml.runtime.storage.store import StoreError


class Host:
    """The addresses that a host answers at, and who asked."""

    def __init__(self, expires: str = "2027-01-15T09:00:00Z") -> None:
        self.expires = expires
        self.asked: list[tuple[str, str, dict[str, str]]] = []

    def ask(self, method: str, url: str, headers: dict[str, str], timeout: float) -> bytes:
        self.asked.append((method, url, headers))
        if url.endswith("/api/token"):
            return b"session"
        if url.endswith("/security-credentials/"):
            return b"our-role"
        return json.dumps(
            {"AccessKeyId": f"A{len(self.asked)}", "SecretAccessKey": "S", "Token": "T",
             "Expiration": self.expires}
        ).encode()  # fmt: skip


EXPIRES = 1800003600.0  # 2027-01-15T09:00:00Z


def keyring(host: Host, now: float = EXPIRES - 3600, /, **environ: str) -> CredentialsProvider:
    return CredentialsProvider(environ, lambda: now, host.ask)


VARIABLES = {
    "AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "S", "AWS_SESSION_TOKEN": "T",
}  # fmt: skip


def test_variables_are_taken_without_a_role() -> None:
    host = Host()
    assert keyring(host, **VARIABLES).get() == Credentials("A", "S", "T")
    assert host.asked == []


def test_the_role_that_may_use_the_bucket_comes_before_keys_of_the_jobs_own() -> None:
    ring = keyring(Host(), **VARIABLES, AWS_CONTAINER_CREDENTIALS_RELATIVE_URI="/v2/x")
    assert ring.get().access_key_id == "A1"


def test_a_jobs_role_is_asked_of_the_ecs_agent() -> None:
    host = Host()
    ring = keyring(host, AWS_CONTAINER_CREDENTIALS_RELATIVE_URI="/v2/credentials/id")
    assert ring.get() == Credentials("A1", "S", "T", EXPIRES)
    assert ring.get().access_key_id == "A1"
    assert host.asked == [("GET", "http://169.254.170.2/v2/credentials/id", {})]


def test_a_full_address_comes_with_its_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    host = Host()
    keyring(
        host, AWS_CONTAINER_CREDENTIALS_FULL_URI="http://169.254.170.23/v1/credentials",
        AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=str(tmp_path / "token"),
    ).get()  # fmt: skip
    assert host.asked[0][2] == {"Authorization": "secret"}


def test_no_keys_are_taken_from_a_stranger_over_plain_http() -> None:
    host = Host()
    with pytest.raises(StoreError, match="neither https"):
        keyring(host, AWS_CONTAINER_CREDENTIALS_FULL_URI="http://example.org/keys").get()
    assert host.asked == []


def test_an_instance_is_asked_last_and_with_a_session() -> None:
    host = Host()
    assert keyring(host).get().access_key_id == "A3"
    assert [(method, url.partition("/latest")[2]) for method, url, _ in host.asked] == [
        ("PUT", "/api/token"),
        ("GET", "/meta-data/iam/security-credentials/"),
        ("GET", "/meta-data/iam/security-credentials/our-role"),
    ]
    assert host.asked[2][2] == {"X-aws-ec2-metadata-token": "session"}


def test_keys_are_renewed_before_they_end_and_when_they_were_refused() -> None:
    host = Host()
    ring = keyring(host, EXPIRES - 200, AWS_CONTAINER_CREDENTIALS_RELATIVE_URI="/x")
    assert [ring.get().access_key_id for _ in range(2)] == ["A1", "A2"]
    ring = keyring(host, AWS_CONTAINER_CREDENTIALS_RELATIVE_URI="/x")
    ring.get()
    ring.forget()
    assert ring.get().access_key_id == "A4"


@pytest.mark.parametrize(
    "broken", [OSError("unreachable"), b"not JSON", b"{}", b"[]", b'{"Expiration": 3}']
)
def test_what_a_host_says_amiss_is_one_error_that_may_pass(broken: OSError | bytes) -> None:
    def ask(*_: object) -> bytes:
        if isinstance(broken, OSError):
            raise broken
        return broken

    ring = CredentialsProvider({"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/x"}, lambda: 0.0, ask)
    with pytest.raises(StoreError, match="no AWS credentials") as caught:
        ring.get()
    assert caught.value.temporary


def test_without_any_of_them_the_error_says_so() -> None:
    with pytest.raises(StoreError, match="neither variables nor a job role"):
        keyring(Host(), AWS_EC2_METADATA_DISABLED="true").get()
