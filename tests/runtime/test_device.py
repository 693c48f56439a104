"""The device of a training program: what is chosen, what is said, and on what ranks agree."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchml.runtime.device import (
    Gpu,
    NoDevice,
    RankDevice,
    TorchDevice,
    choose_mxnet,
    confirm_mxnet,
    decide,
    find_torch,
    has_code_for,
    join_torch,
    open_torch,
    why_mxnet_fails,
)
from batchml.runtime.telemetry.gpus import Nvml, NvmlError
from tests.support.nvml_fake import FakeDriver, build

H200 = Gpu("NVIDIA H200", 150_754_820_096, (9, 0))
A10G = Gpu("NVIDIA A10G", 23_836_033_024, (8, 6))
T4 = Gpu("Tesla T4", 15_642_329_088, (7, 5))
V100 = Gpu("Tesla V100-SXM2-16GB", 16_935_682_048, (7, 0))
CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
DRIVER = "580.95.05"
GIVEN = {"NVIDIA_VISIBLE_DEVICES": "GPU-aaaa"}


def no_driver() -> Nvml:
    raise NvmlError("libnvidia-ml.so.1: cannot open shared object file")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(library: Path) -> FakeDriver:
    return FakeDriver(library)


# --- what PyTorch finds ---------------------------------------------------------------------------


class FakeTorch:
    """What is used of torch, on a host with these GPUs. `cuda_error` is why none can be used."""

    bfloat16 = "bfloat16"

    def __init__(
        self, *gpus: Gpu, built: Sequence[str] = CUDA_13, cuda: str | None = "13.0",
        cuda_error: str = "", store: Any = None,
    ) -> None:  # fmt: skip
        self.__version__ = "2.13.0"
        self.version = SimpleNamespace(cuda=cuda)
        self.set_devices: list[Any] = []
        self.groups: list[tuple[str, int, int]] = []

        def init() -> None:
            if cuda_error:
                raise RuntimeError(cuda_error)

        self.cuda = SimpleNamespace(
            init=init,
            is_available=lambda: bool(gpus) and not cuda_error and cuda is not None,
            device_count=lambda: len(gpus),
            get_arch_list=lambda: list(built),
            set_device=self.set_devices.append,
            get_device_properties=lambda at: SimpleNamespace(
                name=gpus[at].name, total_memory=gpus[at].memory, uuid=f"{id(gpus)}-{at}",
                major=gpus[at].capability[0], minor=gpus[at].capability[1],
            ),
        )  # fmt: skip
        self.distributed = SimpleNamespace(
            is_initialized=lambda: False,
            HashStore=FakeStore,
            rendezvous=lambda url, rank, world, timeout: iter([(store, rank, world)]),
            init_process_group=self._join,
        )

    def _join(
        self, backend: str, *, store: Any, rank: int, world_size: int, timeout: timedelta
    ) -> None:
        self.groups.append((backend, rank, world_size))

    def get_num_threads(self) -> int:
        return 2

    def device(self, kind: str, index: int | None = None) -> Any:
        return SimpleNamespace(type=kind, index=index)

    def autocast(self, *arguments: Any) -> Any:
        return ("autocast", *arguments)


class FakeStore:
    """A store of torch.distributed, for ranks that are threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 30), f"nobody sets {key}"
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            count = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(count).encode()
            return count


def opened(
    torch: FakeTorch, load: Callable[[], Nvml], environ: Mapping[str, str] | None = None
) -> tuple[TorchDevice, str]:
    said: list[str] = []
    found = open_torch(torch, GIVEN if environ is None else environ, say=said.append, load=load)
    (line,) = said
    return found, line


def test_a_gpu_is_used_and_said_with_its_driver(driver: FakeDriver) -> None:
    found, line = opened(FakeTorch(H200), driver.open)
    assert line == f"device: NVIDIA H200, 140 GiB, driver {DRIVER}, bf16"
    assert (found.device.type, found.device.index, found.precision) == ("cuda", 0, "bf16")
    context: Any = found.autocast()
    assert context == ("autocast", "cuda", "bfloat16")
    assert driver.users == 0


def test_a_gpu_before_ampere_computes_in_fp32() -> None:
    found, line = opened(FakeTorch(T4), no_driver)
    assert line == "device: Tesla T4, 15 GiB, fp32"
    with found.autocast():
        pass  # changes nothing


def test_without_a_gpu_the_cpu_computes_in_fp32() -> None:
    found, line = opened(FakeTorch(), no_driver, {})
    assert line == "device: CPU, 2 threads, fp32"
    assert (found.device.type, found.precision) == ("cpu", "fp32")


def test_a_gpu_that_torch_cannot_use_is_said_with_the_reason(driver: FakeDriver) -> None:
    """A host with a GPU costs money: a training that runs on its CPU must not do so silently."""
    cpu = "device: CPU, 2 threads, fp32; no GPU is used: "
    old = "The NVIDIA driver on your system is too old (found version 12020).\nPlease update"
    for torch, why in (
        (FakeTorch(cuda=None), "PyTorch 2.13.0 is a build without CUDA"),
        (FakeTorch(cuda_error=old), old.partition("\n")[0]),
        (FakeTorch(), "PyTorch 2.13.0 finds none"),
        (FakeTorch(V100), f"PyTorch 2.13.0 has no code for {V100.name} (compute capability 7.0)"),
    ):
        assert opened(torch, driver.open)[1] == cpu + why
    why = "the driver cannot be used: libnvidia-ml.so.1: cannot open shared object file"
    assert opened(FakeTorch(), no_driver)[1] == cpu + why


def test_a_run_that_was_given_no_gpu_says_nothing_of_those_of_its_host(driver: FakeDriver) -> None:
    for environ in (
        {"NVIDIA_VISIBLE_DEVICES": "void"},
        {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": ""},
        {"CUDA_VISIBLE_DEVICES": "-1"},
    ):
        assert opened(FakeTorch(), driver.open, environ)[1] == "device: CPU, 2 threads, fp32"


@pytest.mark.parametrize(
    ("capability", "built", "has"),
    [
        ((7, 0), CUDA_13, False),  # a V100: CUDA 13 has no Volta
        ((8, 9), CUDA_13, True),  # an L4 runs code of 8.6
        ((9, 0), ("sm_80", "sm_86"), False),
        ((9, 0), ("sm_80", "compute_80"), True),  # the driver compiles PTX
        ((9, 0), ("sm_90a",), True),
        ((10, 3), ("sm_100",), True),
        ((8, 0), ("sm_86",), False),
        ((9, 0), (), True),  # not known
        ((9, 4), ("gfx942",), True),  # another maker's names
    ],
)
def test_code_runs_on_its_own_generation_of_gpus(
    capability: tuple[int, int], built: Sequence[str], has: bool
) -> None:
    assert has_code_for(capability, built) is has


# --- what ranks agree on --------------------------------------------------------------------------


def on_gpu(gpu: Gpu, key: str) -> RankDevice:
    return RankDevice(gpu, key=key, driver=DRIVER)


def test_all_ranks_compute_in_what_each_of_their_gpus_can() -> None:
    found = decide([on_gpu(A10G, "1"), on_gpu(T4, "2")])
    assert (found.precision, found.backend) == ("fp32", "nccl")
    assert found.line == (
        f"device: NVIDIA A10G, 22 GiB, driver {DRIVER} and Tesla T4, 15 GiB, driver {DRIVER}, "
        "fp32, 2 processes (nccl)"
    )
    assert decide([on_gpu(H200, "1")] * 1, bf16=False).precision == "fp32"


def test_ranks_that_share_a_gpu_use_gloo_or_are_refused() -> None:
    four = [on_gpu(H200, "the only one")] * 4
    found = decide(four)
    assert found.backend == "gloo"
    assert found.line.endswith("bf16, 4 processes share 1 GPU (gloo)")
    refused = decide(four, can_share=False)
    assert refused.exit_code == 78
    assert refused.refusal.startswith("4 processes have 1 GPU, and this program needs one for each")
    assert 'processes_per_node = "auto"' in refused.refusal


def test_ranks_of_which_one_has_no_gpu_are_refused() -> None:
    lacking = RankDevice(node="ip-10-0-0-7", why="the driver is too old")
    found = decide([on_gpu(H200, "1"), lacking, lacking])
    assert found.exit_code == 75
    assert found.refusal == (
        "rank 1 on ip-10-0-0-7 and 1 more cannot use a GPU, but others have NVIDIA H200: "
        "the driver is too old"
    )


def join_all(
    torches: Sequence[FakeTorch], store: FakeStore, can_share: bool = True
) -> tuple[list[TorchDevice | NoDevice], list[str]]:
    """Ranks of one node join, each in a thread; and the lines that they say."""
    said: list[str] = []

    def join(rank: int) -> TorchDevice | NoDevice:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(torches)}
        environ = {name: str(number) for name, number in numbers.items()}
        try:
            return join_torch(
                torches[rank], environ, can_share=can_share, say=said.append, load=no_driver
            )
        except NoDevice as error:
            return error

    with ThreadPoolExecutor(len(torches)) as pool:
        return [*pool.map(join, range(len(torches)))], said


def test_each_rank_has_a_gpu_of_its_own_and_one_says_so() -> None:
    store = FakeStore()
    host = FakeTorch(H200, H200, store=store)
    found, said = join_all([host, host], store)
    assert said == ["device: NVIDIA H200, 140 GiB, bf16, 2 processes (nccl)"]
    assert sorted(device.index for device in host.set_devices) == [0, 1]
    assert {*host.groups} == {("cpu:gloo,cuda:nccl", 0, 2), ("cpu:gloo,cuda:nccl", 1, 2)}
    assert [(each.rank, each.backend) for each in found if isinstance(each, TorchDevice)] == [
        (0, "nccl"), (1, "nccl"),
    ]  # fmt: skip


def test_four_ranks_of_a_host_with_one_gpu_do_not_meet_there_with_nccl() -> None:
    store = FakeStore()
    host = FakeTorch(H200, store=store)
    _, said = join_all([host] * 4, store)
    assert said == ["device: NVIDIA H200, 140 GiB, bf16, 4 processes share 1 GPU (gloo)"]
    assert {backend for backend, _, _ in host.groups} == {"gloo"}
    assert {device.index for device in host.set_devices} == {0}

    store = FakeStore()
    host = FakeTorch(H200, store=store)
    found, said = join_all([host] * 4, store, can_share=False)
    assert all(isinstance(each, NoDevice) and each.exit_code == 78 for each in found)
    assert (said, host.groups, host.set_devices) == ([], [], [])


def test_every_rank_ends_if_one_has_no_gpu() -> None:
    """Without an agreement those with a GPU would wait in NCCL for the one in gloo."""
    store = FakeStore()
    found, said = join_all([FakeTorch(store=store), FakeTorch(H200, H200, store=store)], store)
    assert [str(each).partition(" on ")[0] for each in found] == ["rank 0", "rank 0"]
    assert said == []


def test_a_process_without_a_launcher_is_a_group_of_its_own() -> None:
    torch, said = FakeTorch(), list[str]()
    found = join_torch(torch, {}, say=said.append, load=no_driver)
    assert said == ["device: CPU, 2 threads, fp32"]
    assert (torch.groups, found.world, found.backend) == ([("gloo", 0, 1)], 1, "gloo")


def test_a_group_that_exists_is_used() -> None:
    """Ray Train has made it."""
    torch, said = FakeTorch(H200), list[str]()

    def gather(every: list[Any], own: RankDevice) -> None:
        every[:] = [own, own._replace(key="another")]

    torch.distributed.is_initialized = lambda: True
    torch.distributed.get_rank = lambda: 0
    torch.distributed.get_world_size = lambda: 2
    torch.distributed.all_gather_object = gather
    found = join_torch(torch, {"RANK": "0"}, say=said.append, load=no_driver)
    assert said == ["device: NVIDIA H200, 140 GiB, bf16, 2 processes (nccl)"]
    assert (found.world, torch.groups) == (2, [])


def test_ranks_of_srun_that_each_see_one_gpu_do_not_share_it() -> None:
    found = [find_torch(FakeTorch(H200), {}, local, no_driver) for local in range(2)]
    assert [each.number for each in found] == [0, 0]
    assert decide(found).backend == "nccl"


# --- MXNet ----------------------------------------------------------------------------------------


class FakeMxnet:
    """What is used of mxnet. Its CUDA finds so many GPUs, or fails with a message."""

    class MXNetError(Exception):
        pass

    def __init__(self, finds: int | str) -> None:
        self.base = SimpleNamespace(MXNetError=self.MXNetError)
        self.context = SimpleNamespace(num_gpus=self._count)
        self._finds = finds

    def _count(self) -> int:
        if isinstance(self._finds, str):
            raise self.MXNetError(self._finds)
        return self._finds

    def gpu(self, index: int) -> str:
        return f"gpu({index})"

    def cpu(self) -> str:
        return "cpu"


def confirmed(found: RankDevice, mxnet: FakeMxnet) -> tuple[str, str]:
    said: list[str] = []
    return confirm_mxnet(mxnet, found, said.append), said[0]


def test_mxnet_trains_on_a_gpu_for_which_it_has_code(driver: FakeDriver) -> None:
    found = choose_mxnet(GIVEN, True, driver.open)
    line = f"device: NVIDIA A10G, 16 GiB, driver {DRIVER}, fp32"
    assert confirmed(found, FakeMxnet(1)) == ("gpu(0)", line)
    driver.set("capability", 89)  # an L4
    assert choose_mxnet(GIVEN, True, driver.open).gpu
    assert driver.users == 0


def test_mxnet_is_not_asked_of_a_gpu_for_which_it_has_no_code(driver: FakeDriver) -> None:
    driver.set("capability", 90)
    found = choose_mxnet({**GIVEN, "OMP_NUM_THREADS": "16"}, True, driver.open)

    def never() -> int:
        raise AssertionError("MXNet would crash")

    mxnet = FakeMxnet(1)
    mxnet.context.num_gpus = never
    assert confirmed(found, mxnet) == (
        "cpu",
        "device: CPU, 16 threads, fp32; no GPU is used: mxnet-cu112 has no code for NVIDIA H200 "
        "(compute capability 9.0)",
    )


def test_mxnet_trains_on_the_cpu_where_cuda_cannot_start(driver: FakeDriver) -> None:
    one = {**GIVEN, "OMP_NUM_THREADS": "1"}
    cpu = "device: CPU, 1 thread, fp32; no GPU is used: "
    found = choose_mxnet(one, True, driver.open)
    broken = FakeMxnet("[10:00:00] base.cc:1\nCheck failed: CUDA: unknown error\n")
    assert confirmed(found, broken) == ("cpu", cpu + "Check failed: CUDA: unknown error")
    assert confirmed(found, FakeMxnet(0)) == ("cpu", cpu + "CUDA finds none")
    found = choose_mxnet(one, False, driver.open)
    why = "this MXNet is the build for CPUs, not mxnet-cu112"
    assert confirmed(found, FakeMxnet(0)) == ("cpu", cpu + why)
    found = choose_mxnet({"OMP_NUM_THREADS": "1"}, True, no_driver)
    assert confirmed(found, FakeMxnet(0)) == ("cpu", "device: CPU, 1 thread, fp32")


def test_the_gpu_that_a_run_may_use_is_the_one_that_mxnet_gets(driver: FakeDriver) -> None:
    """The first GPU is lost, and the run has the second."""
    driver.set("lost", 28)
    for name in ("GPU-bbbb", "1"):
        assert choose_mxnet({"CUDA_VISIBLE_DEVICES": name}, True, driver.open).gpu
    for name in ("GPU-aaaa", "0", ""):
        assert not choose_mxnet({"CUDA_VISIBLE_DEVICES": name}, True, driver.open).gpu


def test_mxnet_that_cannot_be_imported_says_what_to_do() -> None:
    missing = "{}: cannot open shared object file: No such file or directory"
    for name, advice in (
        ("libcuda.so.1", "The driver is not in this container: run it with a GPU"),
        ("libquadmath.so.0", "On Debian: apt-get install libgomp1 libquadmath0"),
    ):
        text = why_mxnet_fails(OSError(missing.format(name)))
        assert name in text and advice in text and "\n" not in text
