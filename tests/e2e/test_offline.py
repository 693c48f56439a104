"""`setup --plan` and `submit --dry-run` without AWS: no credentials, or --offline."""

import subprocess
import sys

import pytest

from tests.support.cli import Cli, Shown

NO_AWS = "this plan is made from batchml.toml and the templates"

# Ends with 99 if anything connects, or looks a name up, elsewhere than on this machine's own disk.
WATCHED = """
import sys
seen = []
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        seen.append((event, arguments[1:]))
sys.addaudithook(watch)
from batchml.__main__ import main
try:
    sys.exit(main())
finally:
    if seen:
        print("SENT", seen, file=sys.stderr)
"""


@pytest.fixture
def fresh(cli: Cli) -> Cli:
    """A folder after `init`, and a user without any AWS file, variable or metadata service."""
    (cli.folder / "home").mkdir()
    cli.environ |= {"HOME": str(cli.folder / "home"), "AWS_EC2_METADATA_DISABLED": "true"}
    assert cli("init", "--region", "us-east-1").code == 0
    return cli


def change(cli: Cli, old: str, new: str) -> None:
    path = cli.folder / "batchml.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def watched(cli: Cli, *arguments: str, **environ: str) -> Shown:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *arguments], cwd=cli.folder, env={**cli.environ, **environ},
        text=True, capture_output=True, timeout=120, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return Shown(done.returncode, done.stdout, done.stderr)


@pytest.mark.journey
def test_init_then_a_plan_with_prices_without_credentials(fresh: Cli) -> None:
    plan = fresh("setup", "--env", "dev", "--plan")
    assert plan.code == 2, plan.err
    assert "create   job queue batchml-dev-default" in plan.out
    assert "Plan: 12 to create." in plan.out
    assert f"No AWS credentials were found: {NO_AWS}" in plan.out
    assert (
        "Idle: $0.05 an hour ($40 a month). With all compute at max_vcpus: $6.99 to $8.64 an hour"
        in plan.out
    )
    assert "list prices of 2026-07-20" in plan.out
    assert "In a new account the queue default can start hosts; the queue gpu" in plan.out

    document = fresh("setup", "--env", "dev", "--plan", "--json").json
    assert document["offline"] and not document["applied"]
    assert {step["action"] for step in document["steps"]} == {"create"}
    assert document["cost"]["compute"]["cpu"]["full"]["dearest"][0]["date"] == "2026-07-20"

    dry = fresh("submit", "--env", "dev", "--dry-run", "hello")
    assert (dry.code, dry.json["SubmitJob"]["jobQueue"]) == (0, "batchml-dev-default"), dry.err
    assert "Queue default: cpu (m7i.large, m7i.xlarge, m7i.2xlarge)." in dry.err
    assert "It costs $0.052 to $0.056 an hour" in dry.err
    assert "No AWS credentials were found" in dry.err


def test_a_run_with_gpus_goes_to_the_queue_that_has_them(fresh: Cli) -> None:
    dry = fresh("submit", "--env", "dev", "--dry-run", "--offline", "hello", "--gpus", "1")
    assert dry.json["SubmitJob"]["jobQueue"] == "batchml-dev-gpu"
    assert (
        "Queue gpu: gpu-spot (spot: g6.xlarge, g5.xlarge), gpu (g6.xlarge, g5.xlarge)." in dry.err
    )
    assert "on-demand price" in dry.err
    named = fresh("submit", "--env", "dev", "--dry-run", "--offline", "hello", "--queue", "mine")
    assert named.json["SubmitJob"]["jobQueue"] == "mine"
    assert "Queue mine: batchml.toml does not describe it, so its price is unknown." in named.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("setup", "--env", "dev", "--plan", "--offline"),
        ("submit", "--env", "dev", "--dry-run", "--offline", "hello", "--max-cost", "2"),
    ],
)
def test_offline_opens_no_connection_although_there_are_credentials(
    fresh: Cli, arguments: tuple[str, ...]
) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret"}
    done = watched(fresh, *arguments, **keys)
    assert done.code in (0, 2) and "SENT" not in done.err, done.err
    # The same watch sees the calls of a plan that does ask AWS.
    asks = watched(
        fresh, "setup", "--env", "dev", "--plan", AWS_ENDPOINT_URL="http://127.0.0.1:9", **keys
    )
    assert "SENT" in asks.err and asks.code == 74


def test_without_credentials_nothing_is_sent_either(fresh: Cli) -> None:
    done = watched(fresh, "setup", "--env", "dev", "--plan")
    assert (done.code, "SENT" in done.err) == (2, False), done.err


def test_credentials_that_are_wrong_are_an_error_and_not_offline(fresh: Cli) -> None:
    half = fresh("setup", "--env", "dev", "--plan", AWS_ACCESS_KEY_ID="AKIDEXAMPLE")
    assert (half.code, "AWS_SECRET_ACCESS_KEY is missing" in half.err) == (77, True), half.err
    absent = fresh("submit", "--env", "dev", "--dry-run", "hello", AWS_PROFILE="nobody")
    assert (absent.code, "'nobody' is not in" in absent.err) == (77, True), absent.err
    wrong = fresh("setup", "--env", "dev", "--plan", "--offline", AWS_PROFILE="nobody")
    assert (wrong.code, "AWS was not asked (--offline)" in wrong.out) == (2, True), wrong.err


def test_a_quote_without_credentials_has_list_prices(fresh: Cli) -> None:
    quote = fresh("cost", "--env", "dev", "--quote", "hello")
    assert quote.code == 0
    assert quote.out.startswith("It costs $0.0") and "today's prices may differ" in quote.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("setup", "--env", "dev", "--offline"), "needs --plan"),
        (("setup", "--env", "dev", "--offline", "--yes"), "needs --plan"),
        (("setup", "--env", "local", "--offline", "--plan"), "local never calls AWS"),
        (("submit", "--env", "dev", "--offline", "hello"), "needs --dry-run"),
        (("submit", "--offline", "--dry-run", "hello"), "local never calls AWS"),
        (("setup", "--env", "dev", "--offline", "--plan", "--push"), "--push needs AWS"),
        (
            ("setup", "--env", "dev", "--offline", "--plan", "--allow-loss", "x", "--push"),
            "--push, --allow-loss need AWS",
        ),
        (("setup", "--env", "dev", "--offline", "--plan", "--skip-resource", "x"), "need"),
    ],
)
def test_what_cannot_be_offline_is_refused_with_the_reason(
    fresh: Cli, arguments: tuple[str, ...], words: str
) -> None:
    done = fresh(*arguments)
    assert (done.code, words in done.err) == (2, True), done.err
    assert not done.out


def test_without_credentials_options_that_need_aws_have_no_effect_on_a_plan(fresh: Cli) -> None:
    done = fresh("setup", "--env", "dev", "--plan", "--allow-loss", "batchml-dev-storage")
    assert (done.code, "--allow-loss has no effect on it." in done.out) == (2, True), done.err
    made = fresh("setup", "--env", "dev", "--yes")
    assert (made.code, "no AWS credentials were found" in made.err) == (77, True), made.err


def test_a_region_that_does_not_exist_is_told_with_the_likely_one(fresh: Cli) -> None:
    change(fresh, 'region = "us-east-1"', 'region = "us-esat-1"')
    done = fresh("setup", "--env", "dev", "--plan")
    assert done.code == 2
    assert "Idle: at least $0.01 an hour" in done.out
    assert "has no prices for us-esat-1. Did you mean 'us-east-1'?" in done.out


def test_an_environment_that_shares_a_workspace_is_planned_too(fresh: Cli) -> None:
    text = (fresh.folder / "batchml.toml").read_text()
    more = '[env.cheap]\nregion = "us-east-1"\n[env.cheap.storage]\nshared_with = "dev"\n'
    more += '[env.cheap.compute.cpu]\ninstance_types = ["m7i.large"]\nmax_vcpus = 4\n'
    more += '[env.cheap.queues.default]\ncompute = ["cpu"]\n'
    (fresh.folder / "batchml.toml").write_text(f"{text}\n{more}")
    done = fresh("setup", "--env", "cheap", "--plan", "--offline")
    assert done.code == 2, done.err
    assert "It uses the workspace of dev. Run first: batchml setup --env dev" in done.out
    assert "create   compute environment batchml-cheap-cpu" in done.out


def test_jobs_of_the_environment_wait_for_their_image(fresh: Cli) -> None:
    change(fresh, "#jobs = []", 'jobs = ["hello"] #')
    done = fresh("setup", "--env", "dev", "--plan")
    assert "job definition of hello: not yet." in done.out
    assert "batchml image push --env dev python" in done.out
    (fresh.folder / "jobs/hello/job.toml").write_text('image = "python"\n')
    wrong = fresh("setup", "--env", "dev", "--plan")
    assert (wrong.code, "command" in wrong.err) == (78, True), wrong.err


def test_local_is_as_before(fresh: Cli) -> None:
    try:
        done = fresh("submit", "--dry-run", "hello", "--gpus", "0")
        assert done.json["SubmitJob"]["jobQueue"] == "default"
        assert "It costs" not in done.err
    finally:
        fresh("local", "stop")


def test_a_dry_run_names_data_sets_and_what_jobs_may_not_read(fresh: Cli) -> None:
    change(fresh, "#data = []", 'data = ["s3://team-sets/a"]')
    words = (
        "--env",
        "dev",
        "--dry-run",
        "--offline",
        "hello",
        "--data",
        "a=s3://team-sets/a/train",
    )
    dry = fresh("submit", *words, "--data", "b=s3://others/b")
    assert "keep no copies" not in dry.err
    change(fresh, "data_cache = true", "data_cache = false")
    without = fresh("submit", *words)
    assert "hosts of dev keep no copies of data sets, so each run copies its own" in without.err
    assert "/batchml/cache" not in without.out
    assert "Data a, copied to the host first: s3://team-sets/a/train." in dry.err
    assert "jobs of dev may read s3://others/b only if the bucket's own policy" in dry.err
    assert 'data = ["s3://team-sets/a", "s3://others/b"], then: batchml setup --env dev' in dry.err
    names = {
        each["name"] for each in dry.json["RegisterJobDefinition"]["containerProperties"]["volumes"]
    }
    assert "cache" in names
