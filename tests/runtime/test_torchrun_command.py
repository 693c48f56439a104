"""The command of a rank, read from the user's command, and its environment."""

import pytest

from batchml.runtime.nodes.link.address import interface_of, is_reachable, own_address
from batchml.runtime.nodes.supervisor.settings import (
    RankLayout,
    SupervisorTimes,
    count_processes,
    rank_environment,
)
from batchml.runtime.processors import with_processors
from batchml.runtime.protocol.launch import BadCommand, RankCommand, choose_kind, rank_command


def command(*words: str, nodes: int = 2) -> RankCommand:
    return rank_command(words, nodes, lambda name: f"/bin/{name}" if name == "python" else None)


SCRIPT = ("/bin/python", "-u", "ddp.py", "10", "--x")


@pytest.mark.parametrize(
    ("words", "expected", "processes"),
    [
        ("python ddp.py", ("python", "ddp.py"), 0),
        ("ddp.py 10 --x", SCRIPT, 0),
        ("./train --nnodes 3", ("./train", "--nnodes", "3"), 0),
        ("torchrun ddp.py 10 --x", SCRIPT, 0),
        ("torchrun --nproc-per-node 4 ddp.py 10 --x", SCRIPT, 4),
        ("torchrun --nproc_per_node=4 --nnodes=2 ddp.py 10 --x", SCRIPT, 4),
        ("torchrun --nproc-per-node=gpu --nnodes 1:4 -- ddp.py 10 --x", SCRIPT, 0),
        ("python -m torch.distributed.run --nproc-per-node 2 ddp.py 10 --x", SCRIPT, 2),
        ("python3 -u -m torch.distributed.launch --use-env ddp.py 10 --x", SCRIPT, 0),
        ("/opt/bin/torchrun -m pkg.train a", ("/bin/python", "-u", "-m", "pkg.train", "a"), 0),
        ("torchrun --no-python ./train a", ("./train", "a"), 0),
        ("python -m pytest -m torch.distributed.run", None, 0),
    ],
)
def test_a_line_with_torchrun_becomes_its_script(
    words: str, expected: tuple[str, ...] | None, processes: int
) -> None:
    found = command(*words.split())
    assert found == RankCommand(expected or tuple(words.split()), processes)


def test_what_we_set_is_passed_over_and_told() -> None:
    found = command(
        *[
            "torchrun",
            "--max-restarts",
            "3",
            "--rdzv-backend=c10d",
            "--rdzv_endpoint",
            "a:1",
            "--standalone",
            "--node-rank",
            "1",
            "--tee",
            "3",
            "ddp.py",
            "10",
            "--x",
        ]
    )
    flags = ("--max-restarts", "--rdzv-backend", "--rdzv-endpoint", "--standalone", "--node-rank")
    assert found == RankCommand(SCRIPT, 0, (*flags, "--tee"))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("torchrun --nnodes 4 ddp.py", "--nnodes is 4, and this run has 2: set nodes"),
        ("torchrun --nnodes many ddp.py", "give a number"),
        ("torchrun --nproc-per-node x ddp.py", "'x': give a number, or gpu"),
        ("torchrun --nproc-per-node", "needs a value"),
        ("torchrun --nnodes 2", "no script"),
        ("torchrun --colour red ddp.py", "--colour is not a flag that batchml knows"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: str, why: str) -> None:
    with pytest.raises(BadCommand, match=why):
        command(*words.split())


NODE = {"AWS_BATCH_JOB_NUM_NODES": "2"}
LAYOUT = RankLayout(1, 2, 4, 4, 8, "10.0.0.1", 23_456, 7, 2, "job", processors=8, interface="eth0")


def test_a_rank_finds_what_torchrun_would_set() -> None:
    """Every name that torch 2.13's agent gives its workers, with static rendezvous."""
    found = rank_environment({"PATH": "/bin"}, LAYOUT, 2, {"TORCHELASTIC_ERROR_FILE": "/e"})
    assert found == {
        "PATH": "/bin", "RANK": "6", "LOCAL_RANK": "2", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "NODE_RANK": "1", "NNODES": "2",
        "ROLE_RANK": "6", "ROLE_NAME": "default", "ROLE_WORLD_SIZE": "8",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456", "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_ERROR_FILE": "/e",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0", "BATCHML_GENERATION": "7",
        **with_processors({}, 2),
    }  # fmt: skip


def test_of_taste_the_users_own_value_wins_and_of_facts_ours() -> None:
    own = {"OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "ens5", "RANK": "99"}
    found = rank_environment(own, LAYOUT, 0, {})
    assert (found["OMP_NUM_THREADS"], found["NCCL_SOCKET_IFNAME"]) == ("1", "ens5")
    assert found["RANK"] == "4"


@pytest.mark.parametrize(
    ("asked", "environ", "devices", "count"),
    [
        (3, {}, ["nvidia0"], 3),
        (0, {}, ["null", "nvidiactl", "nvidia-uvm"], 1),
        (0, {}, ["nvidia0", "nvidia1", "nvidiactl"], 2),
        (0, {"NVIDIA_VISIBLE_DEVICES": "all"}, ["nvidia0", "nvidia1"], 2),
        (0, {"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, ["nvidia0", "nvidia1", "nvidia2"], 2),
        (0, {"NVIDIA_VISIBLE_DEVICES": "void"}, ["nvidia0"], 1),
        (0, {"BATCHML_GPUS": "2"}, ["nvidia0", "nvidia1", "nvidia2"], 2),
        (0, {"BATCHML_GPUS": "2", "CUDA_VISIBLE_DEVICES": ""}, ["nvidia0", "nvidia1"], 1),
        (0, {"BATCHML_GPUS": "2", "CUDA_VISIBLE_DEVICES": "-1"}, ["nvidia0", "nvidia1"], 1),
    ],
)
def test_ranks_of_a_node_are_one_per_gpu_unless_told(
    asked: int, environ: dict[str, str], devices: list[str], count: int
) -> None:
    assert count_processes(asked, environ, devices) == count


def test_the_node_knows_its_interface_and_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.3.2.1") == "lo"
    assert interface_of("203.0.113.77") == ""
    assert own_address({"BATCHML_NODE_ADDRESS": "10.1.1.1"}) == "10.1.1.1"
    main = {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "127.0.0.1"}
    assert own_address({**NODE, **main}) == "127.0.0.1"
    assert is_reachable("10.1.1.1", "") and is_reachable("127.0.0.2", "127.0.0.1")
    assert not is_reachable("127.0.0.1", "") and not is_reachable("127.0.0.1", "10.1.1.1")


def test_a_main_node_that_was_given_no_address_never_takes_the_loopback() -> None:
    """AWS gives none. It is empty on a machine without a network, where there is no other node."""
    found = own_address(NODE)
    assert not found.startswith("127.")
    assert not found or interface_of(found) not in ("", "lo")


def test_a_limit_of_another_version_does_not_drop_the_limits_that_are_known() -> None:
    limits = '{"beat": 0.5, "no_such_limit": "a word", "gone": 3}'
    found = SupervisorTimes.read({"BATCHML_GANG_LIMITS": limits})
    assert found == SupervisorTimes()._replace(beat=0.5, gone=3.0)
    for wrong in ("", "{", "[]", "7", '{"beat": "soon"}'):
        assert SupervisorTimes.read({"BATCHML_GANG_LIMITS": wrong}) == SupervisorTimes(), wrong


@pytest.mark.parametrize(
    ("words", "nodes", "kind"),
    [
        ("torchrun --nproc-per-node 1 train.py", 2, "torchrun"),
        ("python -m torch.distributed.run train.py", 2, "torchrun"),
        ("torchrun --standalone --nnodes=1:4 train.py", 2, "torchrun"),
        ("torchrun --rdzv_endpoint=head:29500 train.py", 2, "plain"),
        ("torchrun train.py --rdzv-endpoint x", 2, "torchrun"),
        ("torchrun --nproc-per-node 4 train.py", 1, "plain"),
        ("torchrun --nnodes 1 train.py", 1, "plain"),
        ("torchrun --help", 1, "plain"),
        ("mpirun -np 4 ./solve", 2, "mpi"),
        ("/usr/bin/mpiexec ./solve", 2, "mpi"),
        ("mpirun --hostfile hosts ./solve", 2, "plain"),
        ("mpirun -np 4 ./solve", 1, "plain"),
        ("srun ./solve", 1, "plain"),
        ("python train.py --nnodes 3", 2, "plain"),
    ],
)
def test_a_launcher_as_the_command_chooses_the_kind_on_several_nodes(
    words: str, nodes: int, kind: str
) -> None:
    assert choose_kind(words.split(), nodes) == kind


@pytest.mark.parametrize(
    ("words", "nodes", "why"),
    [
        ("torchrun --nnodes 3 train.py", 2, "--nnodes is 3, and this run has 2: .* --nodes 3"),
        ("torchrun --nnodes=3 train.py", 1, "--nnodes is 3, and this run has 1"),
        ("torchrun --nnodes 3 --rdzv-endpoint a:1 t.py", 2, "--nnodes is 3, and this run has 2"),
        ("srun python train.py", 2, "leave it out"),
    ],
)
def test_a_launch_line_for_another_number_of_nodes_is_refused(
    words: str, nodes: int, why: str
) -> None:
    with pytest.raises(BadCommand, match=why):
        choose_kind(words.split(), nodes)
