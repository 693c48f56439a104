"""`batchml.local.server.auth` against botocore's own signer. docs/behaviours.md B70-B75."""

from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import urlsplit

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.local.home import AccessKeys
from batchml.local.server.auth import MAX_SKEW, claimed_service, verify
from batchml.local.server.protocol import ApiError, HttpRequest

KEYS = AccessKeys("BMLLOCALTEST", "a secret/with+signs=")
HOST = "127.0.0.1:8123"


def signed(
    path: str = "/v1/submitjob",
    query: str = "",
    body: bytes = b'{"jobName": "a"}',
    *,
    keys: AccessKeys = KEYS,
    service: str = "batch",
    method: str = "POST",
    headers: dict[str, str] | None = None,
) -> HttpRequest:
    """A request as botocore signs it, now."""
    url = f"http://{HOST}{path}" + (f"?{query}" if query else "")
    given_headers = {"content-type": "application/json", **(headers or {})}
    request = AWSRequest(method, url, headers=given_headers, data=body)
    credentials = Credentials(keys.access_key_id, keys.secret_access_key)
    SigV4Auth(credentials, service, "us-east-1").add_auth(request)
    parts = urlsplit(request.url)
    return HttpRequest(
        method=method,
        path=parts.path,
        query=parts.query,
        headers=(
            ("host", HOST),
            *((name.lower(), str(value)) for name, value in request.headers.items()),
        ),
        body=body,
    )


def time_of(request: HttpRequest) -> float:
    stamp = datetime.strptime(request.header("x-amz-date"), "%Y%m%dT%H%M%SZ")
    return stamp.replace(tzinfo=UTC).timestamp()


def is_refused(request: HttpRequest, later: float = 0.0, keys: AccessKeys = KEYS) -> bool:
    try:
        verify(request, keys, time_of(signed()) + later)
    except ApiError as error:
        assert error.status == 403
        return True
    return False


def with_header(request: HttpRequest, name: str, value: str) -> HttpRequest:
    """The request with one header's value replaced."""
    assert any(key == name for key, _ in request.headers)
    return replace(
        request, headers=tuple((k, value if k == name else v) for k, v in request.headers)
    )


@pytest.mark.parametrize("service", ["batch", "logs", "sts"])
def test_what_botocore_signs_is_accepted_with_who_and_what_for(service: str) -> None:
    request = signed(service=service)
    caller = verify(request, KEYS, time_of(request))
    assert (caller.access_key_id, caller.region, caller.service) == (
        KEYS.access_key_id, "us-east-1", service,
    )  # fmt: skip
    assert claimed_service(request) == service


ODD_PATHS = [
    "/", "//", "/v1//submitjob", "/v1/./submitjob", "/v1/x/../submitjob", "/v1/submitjob/",
    "/v1/tags/arn%3Aaws%3Abatch%3Aus-east-1%3A000000000000%3Ajob-queue%2Fq", "/a%20b", "/a+b",
    "/%C3%A9", "/a~b", "/a%25b", "/a:b@c,d;e=f", "/../..", "/.", "/%2e%2e/x", "/a*b'(c)!$&",
]  # fmt: skip
ODD_QUERIES = [
    "a=1&b=2", "b=2&a=1", "a=2&a=1", "tagKeys=b&tagKeys=a", "a", "a&b=1", "a=1&a-b=2", "a=",
    "a=%20&b=%2B", "=x", "a=1&&b=2", "A=1&a=1", "a=b=c",
]  # fmt: skip


@pytest.mark.parametrize("path", ODD_PATHS)
def test_odd_paths_that_botocore_signs_are_accepted(path: str) -> None:
    assert not is_refused(signed(path))


@pytest.mark.parametrize("query", ODD_QUERIES)
def test_odd_queries_that_botocore_signs_are_accepted(query: str) -> None:
    assert not is_refused(signed(query=query))


_SAFE = st.text("abcXYZ019-._~%25/", max_size=20)
_QUERY = st.text("ab1-._~=&%", max_size=20)


@given(_SAFE, _QUERY, st.binary(max_size=50))
def test_whatever_botocore_signs_is_accepted(path: str, query: str, body: bytes) -> None:
    assert not is_refused(signed(f"/v1/{path}", query, body), 1.0)


def test_extra_signed_headers_and_spaces_in_them_are_accepted() -> None:
    spaced = {"x-amz-target": "Logs_20140328.GetLogEvents", "x-odd": "  a   b  "}
    assert not is_refused(signed(headers=spaced))


ALTERATIONS: dict[str, Callable[[HttpRequest], HttpRequest]] = {
    "the body": lambda r: replace(r, body=b'{"jobName": "b"}'),
    "an emptied body": lambda r: replace(r, body=b""),
    "the path": lambda r: replace(r, path="/v1/terminatejob"),
    "the path's case": lambda r: replace(r, path="/v1/SubmitJob"),
    "the query": lambda r: replace(r, query="x=1"),
    "the method": lambda r: replace(r, method="GET"),
    "the host": lambda r: with_header(r, "host", "evil.example:8123"),
    "the content type": lambda r: with_header(r, "content-type", "text/plain"),
    "the date": lambda r: (
        with_header(r, "x-amz-date", r.header("x-amz-date")[:-2] + "9Z")
        if not r.header("x-amz-date").endswith("9Z")
        else with_header(r, "x-amz-date", r.header("x-amz-date")[:-2] + "8Z")
    ),
    "a target": lambda r: with_header(r, "x-amz-target", "Logs_20140328.DeleteLogGroup"),
    "an invocation id": lambda r: with_header(r, "amz-sdk-invocation-id", "other"),
}


@pytest.mark.parametrize("what", ALTERATIONS)
def test_an_altered_request_is_refused(what: str) -> None:
    headers = {"x-amz-target": "Logs_20140328.GetLogEvents", "amz-sdk-invocation-id": "one"}
    request = signed(headers=headers)
    assert not is_refused(request)
    assert is_refused(ALTERATIONS[what](request))


def test_another_access_key_or_secret_is_refused_in_the_same_words() -> None:
    texts = set()
    for keys in (
        AccessKeys("OTHER", KEYS.secret_access_key),
        AccessKeys(KEYS.access_key_id, "other"),
    ):
        request = signed(keys=keys)
        with pytest.raises(ApiError) as refused:
            verify(request, KEYS, time_of(request))
        texts.add(refused.value.message)
    assert len(texts) == 1


AUTHORIZATIONS: dict[str, Callable[[str], str]] = {
    "nothing": lambda a: "",
    "basic": lambda a: "Basic YTpi",
    "bearer": lambda a: "Bearer token",
    "another algorithm": lambda a: a.replace("AWS4-HMAC-SHA256", "AWS4-HMAC-SHA1"),
    "no signature": lambda a: a.rpartition(", Signature")[0],
    "an empty signature": lambda a: a.rpartition("=")[0] + "=",
    "a short signature": lambda a: a[:-1],
    "a long signature": lambda a: a + "0",
    "an upper-case signature": lambda a: a[:-64] + "A" + a[-63:],
    "zeros": lambda a: a[:-64] + "0" * 64,
    "another region": lambda a: a.replace("us-east-1", "eu-west-1"),
    "another service": lambda a: a.replace("/batch/", "/logs/"),
    "another day": lambda a: a.replace("/20", "/19", 1),
    "fewer signed headers": lambda a: a.replace("content-type;", ""),
    "no host signed": lambda a: a.replace("host;", ""),
    "something before": lambda a: "x " + a,
    "something after": lambda a: a + " x",
    "a second line": lambda a: a + "\n",
}


@pytest.mark.parametrize("what", AUTHORIZATIONS)
def test_an_altered_authorization_is_refused(what: str) -> None:
    request = signed()
    altered = AUTHORIZATIONS[what](request.header("authorization"))
    assert altered != request.header("authorization")
    assert is_refused(with_header(request, "authorization", altered))


@pytest.mark.parametrize("name", ["authorization", "x-amz-date", "host", "content-type"])
def test_a_signed_header_sent_twice_is_refused(name: str) -> None:
    request = signed()
    twice = (name, request.header(name))
    assert is_refused(replace(request, headers=(*request.headers, twice)))
    assert is_refused(replace(request, headers=(twice, *request.headers)))


def test_an_amz_header_that_is_not_signed_is_refused() -> None:
    added = ("x-amz-target", "Logs_20140328.DeleteLogGroup")
    request = signed()
    assert is_refused(replace(request, headers=(*request.headers, added)))


@pytest.mark.parametrize("name", ["authorization", "x-amz-date", "host", "content-type"])
def test_a_missing_header_is_refused(name: str) -> None:
    request = signed()
    kept = tuple((key, value) for key, value in request.headers if key != name)
    assert is_refused(replace(request, headers=kept))


@pytest.mark.parametrize(
    ("later", "refused"),
    [
        (0.0, False), (MAX_SKEW - 5, False), (5 - MAX_SKEW, False), (MAX_SKEW + 5, True),
        (-MAX_SKEW - 5, True), (86_400.0, True), (-86_400.0, True), (1e9, True),
    ],
)  # fmt: skip
def test_a_signature_lives_five_minutes_either_way(later: float, refused: bool) -> None:
    """B73."""
    assert is_refused(signed(), later) is refused


@pytest.mark.parametrize("stamp", ["", "now", "20240101", "2024-01-01T00:00:00Z", "9" * 40])
def test_what_is_not_a_date_is_refused(stamp: str) -> None:
    assert is_refused(with_header(signed(), "x-amz-date", stamp))


def test_a_body_hash_that_is_not_the_body_s_is_refused() -> None:
    right = signed(headers={"x-amz-content-sha256": "UNSIGNED-PAYLOAD"})
    assert is_refused(right)


@given(st.binary(max_size=200), st.integers(0, 10_000))
def test_one_flipped_bit_of_the_body_is_refused(body: bytes, place: int) -> None:
    request = signed(body=body + b"x")
    bits = bytearray(request.body)
    bits[place % len(bits)] ^= 1 << (place % 8)
    assert is_refused(replace(request, body=bytes(bits)))
