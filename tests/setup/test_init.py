"""What `init` writes: it parses, shows every key, and comes whole or not at all."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batchml.aws.capacity import quota_names
from batchml.config.environments import read_environments
from batchml.config.settings import CONFIG_NAME
from batchml.errors import UsageError
from batchml.model.environment import (
    Budget,
    Compute,
    Environment,
    FairShare,
    Logs,
    Network,
    Queue,
    Storage,
    choose_queue,
)
from batchml.model.job import read_job
from batchml.runtime.protocol.instance_types import vcpus_of
from batchml.setup.init import first_files, write_files

FILES = {"a.toml": "a", "jobs/x/b.toml": "b", "jobs/x/c.py": "c"}


def config() -> str:
    return first_files("dev", "eu-west-1")[CONFIG_NAME]


def uncommented() -> str:
    return re.sub(r"^#(?! )", "", config(), flags=re.MULTILINE)


def test_the_file_as_it_is_written_parses_and_local_is_the_default() -> None:
    default, environments = read_environments(tomllib.loads(config()), "file")
    assert default == "local"
    dev = environments["dev"]
    assert dev.region == "eu-west-1"
    assert dev.queues["gpu"].compute == ("gpu-spot", "gpu")
    assert all(compute.min_vcpus == 0 for compute in dev.compute.values())


def test_the_file_with_every_comment_taken_away_parses_as_well() -> None:
    _, environments = read_environments(tomllib.loads(uncommented()), "file")
    assert environments["dev"].budget == Budget(500, "you@example.com")
    assert environments["dev"].queues["gpu"].fair_share is not None


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (Environment, "env.dev"), (Network, "env.dev.network"), (Storage, "env.dev.storage"),
        (Logs, "env.dev.logs"), (Budget, "env.dev.budget"), (Compute, "env.dev.compute"),
        (Queue, "env.dev.queues.gpu"), (FairShare, "env.dev.queues.gpu.fair_share"),
    ],
)  # fmt: skip
def test_every_key_is_shown(kind: type[msgspec.Struct], path: str) -> None:
    found: Any = tomllib.loads(uncommented())
    for key in path.split("."):
        found = found[key]
    if kind is Environment:
        found = {**found, **tomllib.loads(uncommented())["env"]["local"]}
    if kind is Compute:
        found = {**found["gpu"], **found["gpu-spot"]}
    assert set(found) == {field.encode_name for field in msgspec.structs.fields(kind)}


# Shown with an example, for what they are without it cannot be written, or is another's default.
EXAMPLES = {
    "project",
    "vpc", "subnets", "security_groups", "gpu_access", "usd", "email", "bid_percentage",
    "allocation_strategy", "ami", "shares", "decay", "reservation",
}  # fmt: skip


def test_what_is_commented_out_is_the_default_unless_it_is_an_example() -> None:
    """Reading a file with a key at its default gives what it gives without."""
    _, plain = read_environments(tomllib.loads(config()), "file")
    lines = re.findall(r"^#([a-z_]+ = .*)$", config(), flags=re.MULTILINE)
    seen = set()
    for line in lines:
        key = line.partition(" ")[0]
        if key in EXAMPLES:
            continue
        seen.add(key)
        before, _, after = config().partition(f"#{line}")
        section = re.findall(r"^#?(\[.*\])$", before, re.MULTILINE)[-1]
        text = f"{before}{line}{after}".replace(f"#{section}", section)
        assert read_environments(tomllib.loads(text), "file")[1] == plain, line
    assert seen and {line.partition(" ")[0] for line in lines} >= EXAMPLES


def test_the_first_job_reads(tmp_path: Path) -> None:
    files = first_files("dev", "eu-west-1")
    spec = read_job(tomllib.loads(files["jobs/hello/job.toml"]), "file")
    assert spec.image == "python"
    assert set(spec.metrics) == {"loss"}
    assert "batchml" not in files["jobs/hello/train.py"]


@pytest.mark.parametrize(
    ("env", "region", "words"),
    [
        ("local", "us-east-1", "built in"),
        ("Dev", "us-east-1", "lower-case"),
        ("a" * 21, "us-east-1", "lower-case"),
        ("dev", "useast", 'Expected a region such as "us-east-1"'),
        ('d"e', "us-east-1", "letters"),
        ("dev", 'us"\n[x]', "letters"),
    ],
)
def test_a_name_that_cannot_be_is_a_usage_error(env: str, region: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        first_files(env, region)


# --- writing -------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


WRITTEN = {**FILES, "jobs": "", "jobs/x": ""}


def test_all_files_are_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    paths = write_files(tmp_path, FILES, force=False)
    assert [str(path.relative_to(tmp_path)) for path in paths] == list(FILES)
    assert tree(tmp_path) == WRITTEN


def test_what_exists_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "x").mkdir(parents=True)
    (tmp_path / "jobs" / "x" / "c.py").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(UsageError, match=r"jobs/x/c\.py exists .*--force"):
        write_files(tmp_path, FILES, force=False)
    assert tree(tmp_path) == before
    (tmp_path / "a.toml").symlink_to("nowhere")
    with pytest.raises(UsageError, match=r"a\.toml, jobs/x/c\.py exist "):
        write_files(tmp_path, FILES, force=False)
    (tmp_path / "a.toml").unlink()
    write_files(tmp_path, FILES, force=True)
    assert tree(tmp_path) == WRITTEN


@pytest.mark.parametrize("force", [False, True])
def test_a_failure_half_way_changes_nothing(tmp_path: Path, force: bool) -> None:
    if force:
        (tmp_path / "a.toml").write_text("mine")
    (tmp_path / "jobs").write_text("a file where a folder has to be")
    before = tree(tmp_path)
    with pytest.raises(OSError):
        write_files(tmp_path, FILES, force=force)
    assert tree(tmp_path) == before


def test_a_failure_while_files_are_put_in_place_puts_the_old_ones_back(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("mine")
    (tmp_path / "jobs" / "x" / ".c.py.batchml-init-old").mkdir(parents=True)
    (tmp_path / "jobs" / "x" / "c.py").write_text("mine too")
    (tmp_path / "jobs" / "x" / ".c.py.batchml-init-old" / "in the way").write_text("")
    with pytest.raises(OSError):
        write_files(tmp_path, FILES, force=True)
    left = tree(tmp_path)
    assert left["a.toml"] == "mine"
    assert left["jobs/x/c.py"] == "mine too"
    assert "jobs/x/b.toml" not in left


def test_the_quota_of_a_new_account_suffices_for_the_default_queue_and_controllers() -> None:
    """Source: EC2 User Guide, "Amazon EC2 service quotas": 5 vCPUs of Standard, 0 of GPU types."""
    dev = read_environments(tomllib.loads(config()), "file")[1]["dev"]
    assert choose_queue(dev, 0) == dev.controller_queue == "default"
    new_account = {"Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances": 5}
    for name in dev.queues["default"].compute:
        compute = dev.compute[name]
        assert not (compute.spot or compute.has_gpus)
        assert any(
            vcpus_of(each) <= new_account.get(quota_names(each, spot=False)[0], 0)
            for each in compute.instance_types
        )
    assert choose_queue(dev, 1) == "gpu"
