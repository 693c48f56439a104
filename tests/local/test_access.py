"""The keys of jobs, and the variables that give jobs access. docs/behaviours.md B240-B246."""

import pytest

from batchml.local.home import AccessKeys
from batchml.local.server import auth
from batchml.local.server.protocol import ApiError

SERVER = AccessKeys("BMLLOCALTEST", "a secret")
TASK = "0123456789abcdef0123456789abcdef"
MINE = auth.job_keys(SERVER, TASK)


def told(*given: str, has_role: bool = False, has_user_credentials: bool = False) -> dict[str, str]:
    return auth.access_variables(
        "http://x", MINE, given, has_role=has_role, has_user_credentials=has_user_credentials
    )


def test_each_attempt_has_keys_of_its_own_that_follow_from_the_server_s() -> None:
    assert auth.job_keys(SERVER, TASK) == MINE
    assert auth.task_of(MINE.access_key_id) == TASK
    assert auth.task_of(SERVER.access_key_id) == "" == auth.task_of("")
    others = [auth.job_keys(SERVER, "f" * 32), auth.job_keys(AccessKeys("a", "other"), TASK)]
    assert len({MINE.secret_access_key, *(keys.secret_access_key for keys in others)}) == 3
    assert SERVER.secret_access_key not in MINE.secret_access_key


def test_a_job_gets_the_endpoints_of_the_served_services_only() -> None:
    """(B240)"""
    names = {*told()}
    assert {"AWS_ENDPOINT_URL_BATCH", "AWS_ENDPOINT_URL_CLOUDWATCH_LOGS", "AWS_REGION"} <= names
    assert not {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"} & names


@pytest.mark.parametrize(
    ("given", "role", "others", "by_aws_names"),
    [
        ((), False, False, True),
        ((), False, True, False),
        ((), True, True, True),
        (("AWS_PROFILE",), True, False, False),
        (("AWS_ACCESS_KEY_ID",), False, False, False),
        (("AWS_MAX_ATTEMPTS", "OMP_NUM_THREADS"), False, False, True),
    ],
)
def test_whose_credentials_a_job_has(
    given: tuple[str, ...], role: bool, others: bool, by_aws_names: bool
) -> None:
    """(B245, B246)"""
    found = told(*given, has_role=role, has_user_credentials=others)
    assert found["BATCHML_ACCESS_KEY_ID"] == MINE.access_key_id
    assert ("AWS_ACCESS_KEY_ID" in found) is by_aws_names
    assert ("AWS_ENDPOINT_URL_BATCH" in found) is by_aws_names


def test_proxies_are_passed_by_unless_the_job_says_otherwise() -> None:
    assert auth.proxy_exceptions({"PATH": "/bin"}, ()) == {}
    proxies = {"http_proxy": "http://p:1", "NO_PROXY": "example.org"}
    assert auth.proxy_exceptions(proxies, ()) == {
        "no_proxy": "example.org,127.0.0.1",
        "NO_PROXY": "example.org,127.0.0.1",
    }
    assert auth.proxy_exceptions(proxies, {"NO_PROXY"}) == {}


def test_a_job_may_look_submit_and_cancel_and_not_rebuild_the_place() -> None:
    """(B243)"""
    for operation in ("SubmitJob", "DescribeJobs", "TerminateJob", "RegisterJobDefinition"):
        auth.check_permitted(MINE.access_key_id, "batch", operation)
    for operation in ("DeleteJobQueue", "UpdateComputeEnvironment", "CreateSchedulingPolicy"):
        auth.check_permitted(SERVER.access_key_id, "batch", operation)
        with pytest.raises(ApiError) as refused:
            auth.check_permitted(MINE.access_key_id, "batch", operation)
        assert (refused.value.code, refused.value.status) == ("AccessDeniedException", 403)


def test_the_server_forgets_what_points_at_itself_and_nothing_else() -> None:
    """(B222)"""
    users = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_ENDPOINT_URL_STS": "https://sts", "PATH": "/bin"}
    kept = dict(users)
    auth.drop_own_credentials(kept)
    assert kept == users
    for key in (SERVER.access_key_id, MINE.access_key_id):
        environ = {**users, "AWS_ACCESS_KEY_ID": key, "AWS_PROFILE": "research"}
        auth.drop_own_credentials(environ)
        assert environ == {"PATH": "/bin", "AWS_PROFILE": "research"}
