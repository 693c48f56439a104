"""Which requests the dashboard answers: hosts, methods, origins, cookie, secrets."""

import pytest
from msgspec.structs import replace

from batchml.dashboard.access import AccessSecrets, RequestHead, check, make_secrets, take_token

# Fixed values, because pytest's workers must collect tests of the same names.
KNOWN = AccessSecrets(8123, "batchml-0a1b2c3d4e5f.localhost", ("t" * 43,), "c" * 43, "a" * 43)
COOKIE = ("cookie", f"{KNOWN.cookie_name}={KNOWN.cookie}")
HOST = ("host", "127.0.0.1:8123")
SAME = ("origin", "http://127.0.0.1:8123")
JSON = ("content-type", "application/json")
SECRET = ("x-batchml-act", KNOWN.act)
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "get", "")
PATHS = ("/", "/enter", "/static/app.js", "/api/runs", "/events", "/run/x", "/act/cancel")


def refused(method: str, path: str, *headers: tuple[str, str]) -> int:
    refusal = check(RequestHead(method, path, headers), KNOWN)
    return refusal.status if refusal else 0


@pytest.mark.parametrize(
    "host",
    [
        "evil.test:8123", "evil.test", "127.0.0.1", "127.0.0.1:8124", "127.0.0.1.evil:8123",
        "localhost.evil:8123", "LOCALHOST:8123", "localhost.:8123", "a@127.0.0.1:8123",
        "127.0.0.1:8123.", "127.0.0.1:08123", "[::1]", "0.0.0.0:8123", "",
    ],
)  # fmt: skip
def test_another_host_is_refused_everywhere_and_first(host: str) -> None:
    """DNS rebinding: the name is the attacker's, the address is ours."""
    for method in METHODS:
        for path in PATHS:
            assert refused(method, path, ("host", host), COOKIE, SAME, JSON, SECRET) == 421


def test_two_hosts_or_none_are_refused() -> None:
    assert refused("GET", "/", HOST, HOST, COOKIE) == 421
    assert refused("GET", "/", COOKIE) == 421


@pytest.mark.parametrize("host", sorted(KNOWN.hosts))
def test_own_names_are_answered(host: str) -> None:
    assert refused("GET", "/", ("host", host), COOKIE) == 0


def test_a_name_of_the_option_host_is_answered() -> None:
    head = RequestHead("GET", "/", (("host", "box:8123"), COOKIE))
    assert check(head, replace(KNOWN, allowed=("box",))) is None


def test_without_the_cookie_only_the_entry_and_static_files_are_answered() -> None:
    for path in PATHS:
        is_open = path in ("/enter", "/static/app.js")
        method = "POST" if path.startswith("/act/") else "GET"
        found = refused(method, path, HOST, SAME, JSON, SECRET)
        assert found == (0 if is_open else 401), path


@pytest.mark.parametrize(
    "cookie", ["", "x", f"{KNOWN.cookie_name}=", f"{KNOWN.cookie_name}={KNOWN.cookie}x",
               f"batchml-9={KNOWN.cookie}", f"{KNOWN.cookie_name}={KNOWN.tokens[0]}",
               f"{KNOWN.cookie_name}={KNOWN.cookie}; {KNOWN.cookie_name}={KNOWN.cookie}"],
)  # fmt: skip
def test_a_wrong_cookie_reads_nothing(cookie: str) -> None:
    assert refused("GET", "/api/runs", HOST, ("cookie", cookie)) == 401


@pytest.mark.parametrize("site", ["cross-site", "same-site", "x"])
def test_other_sites_read_nothing_although_the_cookie_is_sent(site: str) -> None:
    assert refused("GET", "/", HOST, COOKIE, ("sec-fetch-site", site)) == 403
    assert refused("GET", "/events", HOST, COOKIE, ("sec-fetch-site", site)) == 403


def test_other_methods_are_refused() -> None:
    for method in METHODS:
        for path in PATHS:
            if method not in ("GET", "HEAD", "POST"):
                assert refused(method, path, HOST, COOKIE, SAME, JSON, SECRET) == 405


def test_an_action_needs_post_json_origin_and_secret() -> None:
    full = (HOST, COOKIE, SAME, JSON, SECRET)
    assert refused("POST", "/act/cancel", *full) == 0
    assert refused("GET", "/act/cancel", *full) == 405
    for missing in (SAME, JSON, SECRET):
        assert refused("POST", "/act/cancel", *(each for each in full if each != missing)) == 403
    wrong = {
        SAME: ("origin", "http://127.0.0.1:9000"), JSON: ("content-type", "text/plain"),
        SECRET: ("x-batchml-act", KNOWN.cookie),
    }  # fmt: skip
    for right, other in wrong.items():
        assert (
            refused("POST", "/act/x", *(other if each == right else each for each in full)) == 403
        )
    assert refused("POST", "/act/x", *full, ("sec-fetch-site", "same-site")) == 403
    assert refused("POST", "/api/runs", *full) == 405


def test_read_only_refuses_every_action() -> None:
    head = RequestHead("POST", "/act/cancel", (HOST, COOKIE, SAME, JSON, SECRET))
    refusal = check(head, replace(KNOWN, read_only=True))
    assert refusal is not None and "--read-only" in refusal.text


def test_secrets_are_long_and_differ() -> None:
    one, other = make_secrets(8123, links=3), make_secrets(8123)
    values = {*one.tokens, one.cookie, one.act, *other.tokens, other.cookie, other.act}
    assert len(values) == 8 and min(map(len, values)) >= 43
    assert one.name != other.name


def test_a_token_works_once_and_leaves_those_of_the_other_links() -> None:
    assert take_token("b", "abc") == ("a", "c")
    for given in ("", "\ud800", "d"):
        assert take_token(given, "abc") is None
