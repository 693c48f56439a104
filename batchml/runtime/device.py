"""Choose the device on which a training program computes, and say it in one line.

    device: NVIDIA H200, 140 GiB, driver 580.159.03, bf16
    device: CPU, 2 threads, fp32, 2 processes (gloo)

A program passes its framework, so that this module needs none: to `open_torch` for one process, to
`join_torch` for ranks, to `confirm_mxnet` after `choose_mxnet`. All of them fall back to the CPU,
and if the host has a GPU all the same, the line says why it is not used.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from importlib import metadata
from typing import Any, Callable, ContextManager, Dict, NamedTuple, Optional, Tuple

from batchml.runtime.processors import count_processors
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR, TRY_ELSEWHERE
from batchml.runtime.telemetry.gpus import Nvml, NvmlError, asked_gpus, gpu_handles, named_gpus

Say = Callable[[str], object]
Load = Callable[[], Nvml]

BF16, FP32 = "bf16", "fp32"
_BF16_SINCE = (8, 0)  # compute capability: A100 and later compute in bf16
NCCL, GLOO = "nccl", "gloo"
_GIB = 1 << 30
_LIMIT = timedelta(minutes=10)  # for which a rank waits for the others


class NoDevice(Exception):
    """The ranks cannot train together on the devices that they found. The text says what to do."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code

    def report(self, environ: Mapping[str, str] = os.environ) -> int:
        """Print the text, on rank 0 alone, and return the exit code."""
        if environ.get("RANK", "0") == "0":
            print(self, file=sys.stderr)
        return self.exit_code


class Gpu(NamedTuple):
    name: str
    memory: int  # bytes
    capability: Tuple[int, int]  # CUDA's compute capability: 9, 0 of an H200


class RankDevice(NamedTuple):
    """The device of one process."""

    gpu: Optional[Gpu] = None  # None: it computes on the CPU
    number: int = 0  # of the GPU, among those that the process sees
    key: str = ""  # distinguishes the GPU from all other GPUs of the run
    driver: str = ""
    threads: int = 1  # of the CPU
    node: str = ""
    why: str = ""  # why a GPU of the host is not used

    @classmethod
    def from_json(cls, text: bytes) -> RankDevice:
        values: Dict[str, Any] = json.loads(text)
        if values["gpu"]:
            name, memory, capability = values["gpu"]
            values["gpu"] = Gpu(name, memory, (capability[0], capability[1]))
        return cls(**values)


class DeviceChoice(NamedTuple):
    """What all ranks of a training use together."""

    precision: str = FP32  # of products of matrices: BF16 or FP32
    backend: str = GLOO  # of torch.distributed
    line: str = ""
    refusal: str = ""  # why they cannot train together; empty: they can
    exit_code: int = 0  # with a refusal


# --- Rules, which are pure ------------------------------------------------------------------------


def has_code_for(capability: Tuple[int, int], built: Iterable[str]) -> bool:
    """Whether a program that is built for these architectures runs on such a GPU.

    Machine code (`sm_86`) runs on GPUs of the same generation from that version on; PTX
    (`compute_86`) is compiled by the driver for all later GPUs. Source: NVIDIA's CUDA C++
    Programming Guide, "Binary Compatibility" and "PTX Compatibility".
    """
    known = False
    for name in built:
        kind, _, digits = name.rstrip("af").partition("_")
        if kind in ("sm", "compute") and digits.isdigit():
            known = True
            since = (int(digits[:-1]), int(digits[-1]))
            if since <= capability and (kind == "compute" or since[0] == capability[0]):
                return True
    return not known


def decide(found: Sequence[RankDevice], bf16: bool = True, can_share: bool = True) -> DeviceChoice:
    """Decide for all ranks, whose devices are in the order of the ranks.

    `bf16`: the program gains from it. `can_share`: several of its ranks may use one GPU, for which
    they exchange data by gloo, because NCCL takes a GPU for each rank.
    """
    gpus = [each for each in found if each.gpu is not None]
    if gpus and len(gpus) < len(found):
        return _mixed(found)
    precision = FP32
    if gpus and bf16 and all(each.gpu and each.gpu.capability >= _BF16_SINCE for each in gpus):
        precision = BF16
    distinct = len({each.key for each in gpus})
    is_shared = distinct < len(gpus)
    if is_shared and not can_share:
        return DeviceChoice(
            refusal=f"{len(gpus)} processes have {_count(distinct, 'GPU')}, and this program needs "
            'one for each: set processes_per_node = "auto", or ask for more gpus',
            exit_code=CONFIGURATION_ERROR,
        )
    backend = NCCL if gpus and not is_shared else GLOO
    line = f"device: {_device_text(found)}, {precision}"
    if len(found) > 1:
        shared = f" share {_count(distinct, 'GPU')}" if is_shared else ""
        line += f", {len(found)} processes{shared} ({backend})"
    why = next((each.why for each in found if each.why), "")
    return DeviceChoice(precision, backend, f"{line}; no GPU is used: {why}" if why else line)


def _mixed(found: Sequence[RankDevice]) -> DeviceChoice:
    """The refusal of ranks of which some have a GPU: all would wait for those without."""
    first = next(each.gpu for each in found if each.gpu is not None)
    lacking = [rank for rank, each in enumerate(found) if each.gpu is None]
    without = found[lacking[0]]
    where = f" on {without.node}" if without.node else ""
    why = f": {without.why}" if without.why else ""
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    text = f"rank {lacking[0]}{where}{more} cannot use a GPU, but others have {first.name}{why}"
    return DeviceChoice(refusal=text, exit_code=TRY_ELSEWHERE)


def _device_text(found: Sequence[RankDevice]) -> str:
    kinds = dict.fromkeys(
        f"{each.gpu.name}, {each.gpu.memory / _GIB:.0f} GiB"
        + (f", driver {each.driver}" if each.driver else "")
        if each.gpu
        else f"CPU, {_count(each.threads, 'thread')}"
        for each in found
    )
    return " and ".join(kinds)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


# --- The GPUs of the host, without a framework ----------------------------------------------------


class HostGpus(NamedTuple):
    """What NVML says of the GPUs that this process may use."""

    gpus: Tuple[Gpu, ...] = ()
    driver: str = ""
    why: str = ""  # why NVML says nothing


def read_host(environ: Mapping[str, str], load: Load = Nvml) -> HostGpus:
    """Ask NVML, without any use of the GPUs themselves."""
    try:
        nvml = load()
    except NvmlError as error:
        return HostGpus(why=str(error) if asked_gpus(environ) else "")
    try:
        properties = (nvml.properties(handle) for handle in _visible(nvml, environ))
        gpus = tuple(Gpu(*each) for each in properties if each is not None)
        return HostGpus(gpus, nvml.driver())
    finally:
        nvml.close()


def _visible(nvml: Nvml, environ: Mapping[str, str]) -> Sequence[Any]:
    """The handles of the GPUs that CUDA_VISIBLE_DEVICES names, else of all of the run."""
    own = environ.get("CUDA_VISIBLE_DEVICES")
    if own is None:
        found = [(failed, handle) for _, failed, handle in gpu_handles(nvml, environ)]
    else:
        names = [word.strip() for word in own.split(",")]
        found = [nvml.by_index(int(name)) for name in names if name.isdigit()]
        found += [nvml.by_id(name) for name in named_gpus(own)]
    return [handle for failed, handle in found if not failed]


def _no_code(framework: str, gpu: Gpu) -> str:
    major, minor = gpu.capability
    return f"{framework} has no code for {gpu.name} (compute capability {major}.{minor})"


# --- PyTorch --------------------------------------------------------------------------------------


class TorchDevice(NamedTuple):
    """The device of this process, and its place among all processes."""

    torch: Any
    device: Any  # torch.device
    precision: str = FP32
    backend: str = ""  # of the process group; empty without one
    rank: int = 0
    world: int = 1

    def autocast(self) -> ContextManager[Any]:
        """The context of a forward pass. With FP32 it changes nothing and costs nothing."""
        if self.precision != BF16:
            return contextlib.nullcontext()
        found: ContextManager[Any] = self.torch.autocast(self.device.type, self.torch.bfloat16)
        return found


def open_torch(
    torch: Any,
    environ: Mapping[str, str] = os.environ,
    bf16: bool = True,
    say: Say = print,
    load: Load = Nvml,
) -> TorchDevice:
    """Choose the device of a program that computes in one process."""
    found = find_torch(torch, environ, load=load)
    choice = decide([found], bf16)
    say(choice.line)
    return TorchDevice(torch, _torch_device(torch, found), choice.precision)


def join_torch(
    torch: Any,
    environ: Mapping[str, str] = os.environ,
    bf16: bool = True,
    can_share: bool = True,
    say: Say = print,
    load: Load = Nvml,
) -> TorchDevice:
    """Choose the device of this rank together with all other ranks, and make the process group.

    A launcher such as torchrun has set the variables of the rank; without them it is alone. A group
    that exists already, as in Ray Train, is used. Raises NoDevice on all ranks if they cannot train
    together.
    """
    dist = torch.distributed
    found = find_torch(torch, environ, int(environ.get("LOCAL_RANK", "0")), load)
    if dist.is_initialized():
        rank, world, store = dist.get_rank(), dist.get_world_size(), None
        every = [found] * world
        dist.all_gather_object(every, found)
        choice = decide(every, bf16, can_share)
    else:
        rank, world = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
        if "RANK" in environ:
            store = next(dist.rendezvous("env://", rank, world, timeout=_LIMIT))[0]
        else:
            store = dist.HashStore()
        choice = _agree(store, rank, world, found, bf16, can_share)
    if choice.refusal:
        raise NoDevice(choice.refusal, choice.exit_code)
    device = _torch_device(torch, found)
    if found.gpu:
        torch.cuda.set_device(device)
    if store is not None:
        # What is on the CPU, such as pickled objects, is exchanged by gloo.
        backend = f"cpu:{GLOO},cuda:{NCCL}" if choice.backend == NCCL else choice.backend
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_LIMIT)
    if rank == 0:
        say(choice.line)
    return TorchDevice(torch, device, choice.precision, choice.backend, rank, world)


def find_torch(
    torch: Any, environ: Mapping[str, str], local: int = 0, load: Load = Nvml
) -> RankDevice:
    """Find the device of the rank with this number on its node. Ranks may share a GPU."""
    host = socket.gethostname()
    on_cpu = RankDevice(threads=torch.get_num_threads(), node=host)
    if not torch.cuda.is_available():
        return on_cpu._replace(why=_why_no_cuda(torch, read_host(environ, load)))
    index = local % torch.cuda.device_count()
    values = torch.cuda.get_device_properties(index)
    gpu = Gpu(values.name, values.total_memory, (values.major, values.minor))
    if not has_code_for(gpu.capability, torch.cuda.get_arch_list()):
        return on_cpu._replace(why=_no_code(f"PyTorch {torch.__version__}", gpu))
    # Only if torch does not know the GPU's own id:
    place = (host, environ.get("GROUP_RANK", "0"), environ.get("CUDA_VISIBLE_DEVICES", ""), index)
    key = str(getattr(values, "uuid", place))
    return on_cpu._replace(gpu=gpu, number=index, key=key, driver=read_host(environ, load).driver)


def _why_no_cuda(torch: Any, host: HostGpus) -> str:
    """Why PyTorch cannot use the GPUs that the host has; empty if it has none."""
    if not host.gpus:
        return f"the driver cannot be used: {host.why}" if host.why else ""
    if not torch.version.cuda:
        return f"PyTorch {torch.__version__} is a build without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return f"PyTorch {torch.__version__} finds none"


def _torch_device(torch: Any, found: RankDevice) -> Any:
    return torch.device("cuda", found.number) if found.gpu else torch.device("cpu")


def _agree(
    store: Any, rank: int, world: int, found: RankDevice, bf16: bool, can_share: bool
) -> DeviceChoice:
    """Let rank 0 decide for all ranks: if their backends differed, they would wait for ever."""
    store.set(f"batchml/device/{rank}", json.dumps(found._asdict()))
    if rank == 0:
        every = [
            RankDevice.from_json(store.get(f"batchml/device/{other}")) for other in range(world)
        ]
        choice = decide(every, bf16, can_share)
        store.set("batchml/device/choice", json.dumps(choice._asdict()))
    else:
        choice = DeviceChoice(**json.loads(store.get("batchml/device/choice")))
    if choice.refusal:
        # The store ends with rank 0, which therefore waits until all others have read it.
        if rank and store.add("batchml/device/read", 1) == world - 1:
            store.set("batchml/device/all", "yes")
        elif rank == 0 and world > 1:
            store.get("batchml/device/all")
    return choice


# --- MXNet ----------------------------------------------------------------------------------------


MXNET_CUDA = "mxnet-cu112"
# Its machine code. It has no PTX that a driver could compile for later GPUs. Source: libmxnet.so of
# the wheel 1.9.1, and config/distribution/linux_cu112.cmake of apache/mxnet.
_MXNET_CODE = ("sm_50", "sm_60", "sm_70", "sm_80", "sm_86")


def is_mxnet_for_cuda() -> bool:
    """Whether the installed MXNet is the wheel for CUDA."""
    try:
        metadata.version(MXNET_CUDA)
    except metadata.PackageNotFoundError:
        return False
    return True


def choose_mxnet(environ: Mapping[str, str], for_cuda: bool, load: Load = Nvml) -> RankDevice:
    """Choose the device before MXNet is imported.

    NVML is asked, and not MXNet, because on a GPU for which MXNet has no code its first operation
    would end the process.
    """
    host = read_host(environ, load)
    given = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    is_given = given.isdigit() and int(given) > 0
    on_cpu = RankDevice(threads=int(given) if is_given else count_processors(environ))
    if not host.gpus:
        return on_cpu._replace(why=f"the driver cannot be used: {host.why}" if host.why else "")
    if not for_cuda:
        return on_cpu._replace(why=f"this MXNet is the build for CPUs, not {MXNET_CUDA}")
    gpu = host.gpus[0]
    if not has_code_for(gpu.capability, _MXNET_CODE):
        return on_cpu._replace(why=_no_code(MXNET_CUDA, gpu))
    return on_cpu._replace(gpu=gpu, driver=host.driver)


def confirm_mxnet(mxnet: Any, found: RankDevice, say: Say = print) -> Any:
    """Say the device, and return it as a context of MXNet: the CPU if CUDA cannot start."""
    if found.gpu:
        try:
            if not mxnet.context.num_gpus():
                found = found._replace(gpu=None, why="CUDA finds none")
        except mxnet.base.MXNetError as error:
            found = found._replace(gpu=None, why=str(error).strip().splitlines()[-1])
    say(decide([found], bf16=False).line)
    return mxnet.gpu(found.number) if found.gpu else mxnet.cpu()


def why_mxnet_fails(error: OSError) -> str:
    """Say what to do if MXNet cannot be imported: its wheels bring few of their libraries."""
    text = str(error)
    if "libcuda.so" in text:
        advice = "The driver is not in this container: run it with a GPU, or with the flavor cpu"
    elif "libgomp" in text or "libquadmath" in text:
        advice = "On Debian: apt-get install libgomp1 libquadmath0"
    elif is_mxnet_for_cuda():
        advice = "It needs CUDA 11.2, cuDNN 8 and NCCL 2, as the base of images/mxnet has them"
    else:
        advice = "Make the environment again"
    return f"MXNet cannot be loaded: {text}. {advice}"
