"""The spec of a container: what the Docker engine is asked to create."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.local.batch.state import Job, SubmittedSpec
from batchml.local.executors.choice import Permits
from batchml.local.executors.container_spec import container_spec
from batchml.local.executors.runner.container_setup import through_runtime
from batchml.local.executors.spec import ExecutorHost, RunnerSpecError
from batchml.local.home import Home
from batchml.local.images import publish
from batchml.local.machine import Needs

from tests.support.executor_rig import attempt_of, job_of  # isort: skip

MIB = 1 << 20


IDENTITY = "0123456789abcdef"


@pytest.fixture
def host(tmp_path: Path) -> ExecutorHost:
    home = Home(tmp_path / "home")
    return ExecutorHost(
        home, home.runtimes / "r", {"PATH": "/bin", "SECRET": "s"}, has_gpus=True, identity=IDENTITY
    )


def spec_of(
    host: ExecutorHost, job: Job, permits: Permits | None = None, **attempt: Any
) -> dict[str, Any]:
    return container_spec(host, permits or Permits(), job, attempt_of(job, **attempt))


def host_config(host: ExecutorHost, job: Job, permits: Permits | None = None) -> dict[str, Any]:
    return dict(spec_of(host, job, permits)["config"]["HostConfig"])


def environment(spec: dict[str, Any]) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in spec["config"]["Env"])


def test_limits_are_the_jobs_needs_and_swap_is_off(host: ExecutorHost) -> None:
    asked = host_config(host, job_of(["true"], memory=512, vcpus=3))
    assert asked["Memory"] == asked["MemorySwap"] == 512 * MIB
    assert asked["CpuShares"] == 3072
    assert asked["PidsLimit"] == 4096
    assert "MemorySwappiness" not in asked


def test_a_job_of_4_mib_gets_the_engines_least(host: ExecutorHost) -> None:
    assert host_config(host, job_of(["true"], memory=4))["Memory"] == 6 * MIB


def test_many_vcpus_mean_more_processes_and_no_more_shares_than_there_are(
    host: ExecutorHost,
) -> None:
    asked = host_config(host, job_of(["true"], vcpus=448))
    assert (asked["PidsLimit"], asked["CpuShares"]) == (458_752, 262_144)


@pytest.mark.parametrize(
    ("linux", "swap", "swappiness"),
    [
        ({"maxSwap": 100, "swappiness": 10}, 356, 10),
        ({"maxSwap": 100}, 356, None),
        ({"maxSwap": 0, "swappiness": 10}, 256, None),
        ({"swappiness": 10}, 256, None),
    ],
)
def test_swap_is_what_the_job_asks_for(
    host: ExecutorHost, linux: dict[str, int], swap: int, swappiness: int | None
) -> None:
    asked = host_config(host, job_of(["true"], linuxParameters=linux))
    assert (asked["MemorySwap"], asked.get("MemorySwappiness")) == (swap * MIB, swappiness)


def test_linux_parameters_in_the_engines_words(host: ExecutorHost) -> None:
    asked = host_config(
        host,
        job_of(
            ["true"],
            readonlyRootFilesystem=True,
            ulimits=[{"name": "nofile", "softLimit": 10, "hardLimit": 20}],
            linuxParameters={
                "initProcessEnabled": False,
                "sharedMemorySize": 128,
                "tmpfs": [{"containerPath": "/t", "size": 5, "mountOptions": ["ro", "noexec"]}],
                "devices": [{"hostPath": "/dev/fuse", "permissions": ["READ", "WRITE"]}],
            },
        ),
    )
    assert asked["ShmSize"] == 128 * MIB
    assert asked["Tmpfs"] == {"/t": "size=5m,ro,noexec"}
    assert asked["Ulimits"] == [{"Name": "nofile", "Soft": 10, "Hard": 20}]
    assert asked["ReadonlyRootfs"] is True
    assert asked["Init"] is False
    assert asked["Devices"] == [
        {"PathOnHost": "/dev/fuse", "PathInContainer": "/dev/fuse", "CgroupPermissions": "rw"}
    ]


@pytest.mark.parametrize("asked", [True, False, None])
def test_an_init_process_is_the_parent_when_the_job_asks_for_one(
    host: ExecutorHost, asked: bool | None
) -> None:
    linux = {} if asked is None else {"initProcessEnabled": asked}
    assert host_config(host, job_of(["true"], linuxParameters=linux))["Init"] is bool(asked)


def test_rights_are_few_unless_the_server_lets_jobs_have_more(host: ExecutorHost) -> None:
    asked = host_config(host, job_of(["true"]))
    assert asked["CapDrop"] == ["ALL"]
    assert not {"NET_RAW", "MKNOD", "SYS_ADMIN"} & set(asked["CapAdd"])
    assert asked["SecurityOpt"] == ["no-new-privileges"]
    assert asked["NetworkMode"] == "bridge"
    privileged = job_of(["true"], privileged=True)
    with pytest.raises(RunnerSpecError, match="--allow-privileged"):
        spec_of(host, privileged)
    allowed = host_config(host, privileged, Permits(privileged=True))
    assert allowed["Privileged"] is True
    assert "CapDrop" not in allowed


def test_a_device_of_the_machine_itself_is_as_good_as_privileged(host: ExecutorHost) -> None:
    job = job_of(["true"], linuxParameters={"devices": [{"hostPath": "/dev/../dev/sda"}]})
    with pytest.raises(RunnerSpecError, match=r"the device /dev/sda .*--allow-privileged"):
        spec_of(host, job)
    assert host_config(host, job, Permits(privileged=True))["Devices"][0]["PathOnHost"] == (
        "/dev/sda"
    )


def test_variables_name_the_containers_paths_and_nothing_of_the_server(host: ExecutorHost) -> None:
    spec = spec_of(host, job_of(["true"], env={"MINE": "1"}))
    env = environment(spec)
    assert env["BATCHML_OUTPUT_DIR"] == "/batchml/output"
    assert env["BATCHML_WORKSPACE"] == "/workspace"
    assert env["MINE"] == "1"
    assert not {"PATH", "SECRET", "BATCHML_TASK"} & set(env)
    assert spec["config"]["Image"] == "python:3.11-slim-bookworm"


def test_the_runs_folders_are_mounted_and_may_be_made(host: ExecutorHost) -> None:
    job = job_of(["true"])
    sources = {source["target"]: source for source in spec_of(host, job)["sources"]}
    assert set(sources) == {
        "/batchml/output", "/batchml/checkpoints", "/batchml/data", "/workspace",
    }  # fmt: skip
    output = sources["/batchml/output"]
    assert output["path"] == str(host.home.runs / job.id / "output")
    assert (output["make"], output["ours"], output["read_only"]) == (True, True, False)


def test_what_a_job_mounts_or_sets_itself_wins(host: ExecutorHost) -> None:
    job = job_of(
        ["true"],
        env={"BATCHML_OUTPUT_DIR": "/elsewhere"},
        volumes=[{"name": "w", "host": {"sourcePath": "/srv/w"}}],
        mountPoints=[{"sourceVolume": "w", "containerPath": "/workspace/", "readOnly": True}],
    )
    spec = spec_of(host, job)
    assert environment(spec)["BATCHML_OUTPUT_DIR"] == "/elsewhere"
    sources = {source["target"]: source for source in spec["sources"]}
    assert set(sources) == {"/workspace/", "/batchml/checkpoints", "/batchml/data"}
    mine = sources["/workspace/"]
    assert (mine["path"], mine["read_only"], mine["ours"]) == ("/srv/w", True, False)


def test_a_volume_without_a_folder_is_the_engines_and_efs_is_a_folder_here(
    host: ExecutorHost,
) -> None:
    job = job_of(
        ["true"],
        volumes=[
            {"name": "scratch"},
            {
                "name": "fs",
                "efsVolumeConfiguration": {"fileSystemId": "fs-1/..", "rootDirectory": "/../a/b"},
            },
        ],
        mountPoints=[
            {"sourceVolume": "scratch", "containerPath": "/scratch"},
            {"sourceVolume": "fs", "containerPath": "/fs"},
        ],
    )
    spec = spec_of(host, job)
    assert spec["config"]["HostConfig"]["Mounts"] == [
        {"Type": "volume", "Target": "/scratch", "ReadOnly": False}
    ]
    (efs,) = [s for s in spec["sources"] if s["target"] == "/fs"]
    root = host.home.volumes / "fs-1---"
    assert (efs["path"], efs["roots"]) == (str(root / "a" / "b"), [str(root)])
    assert efs["before"] == (str(host.home.root / "workspace"), "efs", "fs-1---")


def test_no_container_may_write_to_the_folder_of_all_runs(host: ExecutorHost) -> None:
    """Or it could rename the folders that are mounted for others."""
    runs = str(host.home.runs)
    for read_only in (False, True):
        job = job_of(
            ["true"],
            volumes=[{"name": "r", "host": {"sourcePath": runs}}],
            mountPoints=[{"sourceVolume": "r", "containerPath": "/r", "readOnly": read_only}],
        )
        sources = spec_of(host, job)["sources"]
        (found,) = [s for s in sources if s["target"] == "/r"]
        assert (runs in found["roots"], found["fixed"]) == (read_only, False)
        assert all(s["fixed"] for s in sources if s is not found)


def test_a_mount_of_no_volume_says_so(host: ExecutorHost) -> None:
    job = job_of(["true"], mountPoints=[{"sourceVolume": "w", "containerPath": "/w"}])
    with pytest.raises(RunnerSpecError, match="the volume 'w'"):
        spec_of(host, job)


def test_gpus_are_requested_by_name_and_no_others_are_visible(host: ExecutorHost) -> None:
    job = job_of(["true"])
    none = spec_of(host, job)
    assert environment(none)["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert none["config"]["HostConfig"]["DeviceRequests"] == []
    two = spec_of(host, job, gpus=("GPU-1", "GPU-2"))
    assert environment(two)["NVIDIA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert two["config"]["HostConfig"]["DeviceRequests"] == [
        {"Driver": "nvidia", "DeviceIDs": ["GPU-1", "GPU-2"], "Capabilities": [["gpu"]]}
    ]


def test_user_labels_and_name_find_a_container_again(host: ExecutorHost) -> None:
    job = job_of(["true"], user="1000:100")
    spec = spec_of(host, job)
    assert spec["config"]["User"] == "1000:100"
    assert spec["config"]["Labels"] == {
        "batchml.home": host.identity,
        "batchml.task": spec["task_id"],
        "batchml.job": job.id,
    }
    assert spec["name"] == f"batchml-{IDENTITY[:8]}-{spec['task_id']}"


def test_code_of_ours_is_mounted_and_no_other_file_is(host: ExecutorHost) -> None:
    ours = str(host.home.code / "abc.tar.gz")
    spec = spec_of(host, job_of(["true"], env={"BATCHML_CODE": ours}))
    assert environment(spec)["BATCHML_CODE"] == "/batchml/code.tar.gz"
    assert [s["path"] for s in spec["sources"] if s["read_only"]] == [ours]
    for path in ("/etc/shadow", f"{host.home.code}/../local/keys.json"):
        spec = spec_of(host, job_of(["true"], env={"BATCHML_CODE": path}))
        assert environment(spec)["BATCHML_CODE"] == path
        assert not [s for s in spec["sources"] if s["read_only"]]


def test_the_nodes_of_a_job_share_a_network_and_other_attempts_have_another(
    host: ExecutorHost,
) -> None:
    job = job_of(["true"])
    assert spec_of(host, job)["network"] is None
    spec = SubmittedSpec(id=job.id, container=job.container, needs=Needs(1, 64))
    node = Job(id=f"{job.id}#1", spec=spec, sequence=2, node=1)
    first, again = (
        container_spec(host, Permits(), node, attempt_of(node, number)) for number in (1, 2)
    )
    assert first["network"]["aliases"] == ["node-1"]
    assert job.id in first["network"]["name"]
    assert first["network"]["name"] != again["network"]["name"]


def test_a_published_image_is_built_and_never_fetched(host: ExecutorHost, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "requirements.txt").write_text("")
    name = publish(host.home.images, folder)
    spec = spec_of(host, replaced(job_of(["true"]), image=name))
    assert (spec["pull"], Path(spec["build"]).name) == (False, name[8:].replace(":", "-"))
    unknown = spec_of(host, replaced(job_of(["true"]), image="batchml/python:0123456789ab"))
    assert (unknown["pull"], unknown["build"]) == (False, "")
    assert spec_of(host, job_of(["true"]))["pull"] is True


def replaced(job: Job, **container: Any) -> Job:
    return replace(job, spec=replace(job.spec, container={**job.container, **container}))


# --- our runtime in an image --------------------------------------------------------------------


def test_an_image_with_our_runtime_is_left_as_it_is(host: ExecutorHost) -> None:
    spec = spec_of(host, job_of(["train"], env={"BATCHML_CODE": "/x"}))
    image = {"Entrypoint": ["python", "-m", "batchml.runtime.run"]}
    assert through_runtime(spec, image) == spec["config"]


def test_code_runs_in_any_image_through_the_runtime_that_is_mounted(host: ExecutorHost) -> None:
    spec = spec_of(host, job_of(["train"], env={"BATCHML_CODE": "/x"}))
    config = through_runtime(spec, {"Entrypoint": ["/entry"], "Env": ["PYTHONPATH=/theirs", "A=b"]})
    assert config["Entrypoint"] == ["python3", "-m", "batchml.runtime.run"]
    assert config["Cmd"] == ["/entry", "train"]
    assert "PYTHONPATH=/opt/batchml:/theirs" in config["Env"]
    assert config["HostConfig"]["Mounts"][-1]["Target"] == "/opt/batchml"
    assert spec["config"]["HostConfig"]["Mounts"] == [], "the spec is not changed"


def test_without_code_an_image_runs_as_it_is(host: ExecutorHost) -> None:
    spec = spec_of(host, job_of(["train"]))
    assert through_runtime(spec, {"Entrypoint": ["/entry"]}) == spec["config"]


def test_data_sets_are_mounted_and_the_cache_is_shared(host: ExecutorHost, tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    data = {"a": str(tmp_path / "sets"), "b": "s3://bucket/b", "c": "/of/the/image"}
    job = job_of(["true"], env={"BATCHML_DATA": json.dumps(data)})
    spec = spec_of(host, job)
    assert environment(spec)["BATCHML_DATA_CACHE"] == "/batchml/cache" and spec["wrap"]
    sources = {source["target"]: source for source in spec["sources"]}
    assert sources["/batchml/cache"]["path"] == str(host.home.cache)
    mine = sources[str(tmp_path / "sets")]
    assert mine["read_only"] and str(tmp_path) not in mine["roots"], "the user has to permit it"
    assert "/of/the/image" not in sources
    permitted = spec_of(host, job, Permits(paths=(str(tmp_path),)))["sources"]
    assert any(str(tmp_path) in source["roots"] for source in permitted)
    others = spec_of(host, job_of(["true"]))
    assert "/batchml/cache" not in {source["target"] for source in others["sources"]}
