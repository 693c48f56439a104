"""Why a run failed: each cause by the texts that Docker, ECS, the loader and Python write."""

import re
import shlex
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import batchml.explain
from batchml.explain import clues
from batchml.explain.clues import informative_lines
from batchml.explain.failing import why_ended
from batchml.explain.missing import EndedRun
from batchml.explain.rank_logs import program_lines
from batchml.explain.suggest import CommandWriter
from batchml.model.run import JobStatus, Run
from batchml.runtime.protocol.exit_codes import LOG_TOO_LARGE
from batchml.runtime.protocol.variables import IDLE_AFTER
from tests.support.explain_world import (
    DEV,
    EXITED,
    ID,
    LOST,
    OOM,
    TIMED_OUT,
    ended,
)

LOGS: list[tuple[str, int, str, str, str]] = [  # cause, exit code, line, in the verdict, command
    ("missing-module", 1, "ModuleNotFoundError: No module named 'einops'", "einops", "image push"),
    ("missing-module", 1, "ImportError: No module named einops.layers", "einops.layers",
     "image push"),
    ("missing-module", 1, "/usr/bin/python3: No module named torch.distributed.run", "torch",
     "image push"),
    ("missing-module", 1, "ImportError: cannot import name 'x' from 'torch.utils'", "torch.utils",
     "image push"),
    ("missing-library", 127, "/app/train: error while loading shared libraries: libgomp.so.1: "
     "cannot open shared object file: No such file or directory", "libgomp.so.1", "image push"),
    ("missing-library", 1, "ImportError: libGL.so.1: cannot open shared object file: No such file",
     "libGL.so.1", "image push"),
    ("missing-library", 1, "OSError: libcudart.so.11.0: cannot open shared object file: No such",
     "libcudart.so.11.0", "image push"),
    ("missing-library", 1, "./train: /lib/libm.so.6: version `GLIBC_2.34' not found (required by "
     "./train)", "GLIBC_2.34", ""),
    ("cuda-mismatch", 1, "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA "
     "runtime version", "newer than the host's", ""),
    ("cuda-mismatch", 1, "The NVIDIA driver on your system is too old (found version 11040).",
     "newer than the host's", ""),
    ("cuda-mismatch", 1, "RuntimeError: CUDA error: no kernel image is available for execution on "
     "the device", "model of GPU", ""),
    ("no-gpu", 1, "RuntimeError: Found no NVIDIA driver on your system.", "GPU", "rerun"),
    ("no-gpu", 1, "AssertionError: Torch not compiled with CUDA enabled", "GPU", "--gpus 1"),
    ("no-gpu", 1, "ImportError: libcuda.so.1: cannot open shared object file", "GPU", "--gpus 1"),
    ("gpu-memory", 1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
     "GPU's memory", "logs"),
    ("gpu-memory", 1, "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled cuda "
     "error. Last error: Cuda failure 2 'out of memory'", "GPU's memory", "logs"),
    ("gpu-memory", 1, "mxnet.base.MXNetError: Check failed: e == cudaSuccess: CUDA: out of memory",
     "GPU's memory", "logs"),
    ("gpu-broken", 1, "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
     "GPU of its host is broken", "--attempts 2"),
    ("cuda-mismatch", 1, "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: "
     "system has unsupported display driver / cuda driver combination", "another version", ""),
    ("cuda-mismatch", 1, "Failed to initialize NVML: Driver/library version mismatch",
     "another version", ""),
    ("cuda-mismatch", 1, "RuntimeError: Error 804: forward compatibility was attempted on non "
     "supported HW", "newer than the host's", ""),
    ("cuda-mismatch", 1, "mxnet.base.MXNetError: Name: Check failed: err == cudaSuccess: mxnet_op "
     "ErrStr:no kernel image is available for execution on the device", "model of GPU", ""),
    ("fabric-manager", 1, "RuntimeError: Unexpected error. Error 802: system not yet initialized",
     "fabric", "setup"),
    ("gpu-busy", 1, "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
     "Another process", ""),
    ("gpu-number", 1, "RuntimeError: CUDA error: invalid device ordinal", "does not have",
     "--gpus 1"),
    ("gpu-number", 1, "torch.distributed.DistBackendError: NCCL error: invalid usage. Duplicate "
     "GPU detected : rank 1 and rank 0 both on CUDA device 10000", "another rank uses",
     "--gpus 1"),
    ("cuda-program", 1, "torch.AcceleratorError: CUDA error: device-side assert triggered",
     "device-side assert", "submit"),
    ("cuda-program", 1, "RuntimeError: CUDA error: an illegal memory access was encountered",
     "illegal memory access", "submit"),
    ("nccl", 1, "ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure "
     "'peer access is not supported between these two devices'", "each other's memory", "submit"),
    ("nccl", 1, "torch.distributed.DistBackendError: Last error: Cuda failure 999 'unknown error'",
     "call to CUDA (unknown error)", "submit"),
    ("nccl", 1, "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled cuda error",
     "call to CUDA.", "submit"),
    ("nccl", 1, "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited "
     "or there was a network error", "lost the connection", "logs"),
    ("nccl", 1, "[E1128 ProcessGroupNCCL.cpp:1] Watchdog caught collective operation timeout: x",
     "waited for each other", "logs"),
    ("efa-devices", 1, "ip-172-31-3-90:1929:1937 [0] nccl_net_ofi_rdma_init:7978 NCCL WARN NET/OFI "
     "OFI fi_getinfo() call failed: No data available", "no EFA device (-61)", "setup"),
    ("efa-devices", 1, "fi_getinfo: -61 (No data available)", "no EFA device (-61)", "setup"),
    ("efa-unused", 78, "batchml: the environment gives each node 32 EFA interfaces, but NCCL uses "
     "Socket on all nodes: NCCL finds no plugin for it", "NCCL used Socket", "submit"),
    ("disk-full", 1, "OSError: [Errno 28] No space left on device: '/tmp/x'", "disk", "logs"),
    ("shared-memory", 1, "RuntimeError: DataLoader worker (pid 9) is killed by signal: Bus error. "
     "It is possible that dataloader's workers are out of shared memory.", "shared", "submit"),
    ("missing-command", 127, "sh: 1: tarin: not found", "tarin", "submit"),
    ("missing-command", 127, "bash: line 1: tarin: command not found", "tarin", "submit"),
    ("missing-command", 127, "/job/run.sh: line 3: tarin: command not found", "tarin", "submit"),
    ("missing-command", 127, "batchml: cannot run 'tarin': no such command in this image.", "tarin",
     "submit"),
    ("missing-command", 127, "something else", "127", "submit"),
    ("missing-command", 127, "srun: [Errno 2] No such file or directory: 'tarin'", "command tarin.",
     "submit"),
    ("missing-command", 127, "srun: [Errno 2] No such file or directory: './pt/bin/torchrun'",
     "./pt/bin/torchrun, and virtual environments are not sent", "submit"),
    ("missing-command", 127, "batchml: cannot run './venv/bin/python': no such command in this "
     "image.", "virtual environments are not sent", "submit"),
    ("missing-command", 127, "train.sh: line 3: ./venv/bin/python: No such file or directory",
     "virtual environments are not sent", "submit"),
    ("missing-command", 127, "batchml: cannot run '/usr/bin/tarin': no such command in this image.",
     "command /usr/bin/tarin.", "submit"),
    ("missing-file", 2, "python: can't open file '/job/tarin.py': [Errno 2] No such file",
     "/job/tarin.py", "submit"),
    ("permission", 1, "PermissionError: [Errno 13] Permission denied: '/data'", "/data", "logs"),
    ("permission", 126, "sh: 1: ./train.sh: Permission denied", "train.sh", "logs"),
    ("permission", 126, "something else", "126", "submit"),
    ("aws-permission", 1, "botocore.exceptions.ClientError: An error occurred (AccessDenied) when "
     "calling the PutObject operation: Access Denied", "PutObject", "logs"),
    ("credentials", 1, "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
     "credentials", "setup"),
    ("exec-format", 126, "batchml: cannot run './train': Exec format error", "processor", "submit"),
    ("port-in-use", 1, "OSError: [Errno 98] Address already in use", "port", "logs"),
    ("network", 1, "curl: (6) Could not resolve host: example.org", "network", "doctor"),
    ("network", 1, 'Connect timeout on endpoint URL: "https://batch.us-east-1.amazonaws.com/"',
     "cannot reach the network", "doctor"),
    ("network", 128, "ssh: connect to host github.com port 22: Connection timed out",
     "cannot reach the network", "doctor"),
    ("python-memory", 1, "MemoryError", "memory", "--memory '2 GiB'"),
    ("python-memory", 1, "numpy.core._exceptions.MemoryError: Unable to allocate 9 GiB", "memory",
     "--memory"),
    ("signal", 139, "epoch 3", "SIGSEGV", "logs"),
    ("signal", 134, "terminate called", "SIGABRT", "logs"),
    ("signal", 137, "epoch 3", "SIGKILL", "--memory '2 GiB'"),
    ("exception", 1, "torch.distributed.DistBackendError: NCCL timed out", "NCCL", "logs"),
    ("exception", 1, "ValueError: lr must be positive", "lr must be positive", "logs"),
    ("exit-code", 3, "no luck today", "code 3", "logs"),
    ("budget", 143, "batchml: the budget of --max-cost is spent: 60 of 60 seconds.", "budget",
     "rerun"),
    ("duplicate", 77, "batchml: this is a second run of one submission; 0abc goes on. Nothing was "
     "run.", "0abc goes on", "show 0abc"),
    ("not-prepared", 78, "batchml: the code archive c.tar.gz cannot be unpacked: no", "never run",
     "submit"),
    ("store-unreachable", 75, "batchml: s3://b/code: no answer", "never run", "rerun"),
    ("data-cache-full", 75, "batchml: data.a: 2.0 TiB of s3://b/a do not fit into this host's "
     "cache: 1.0 TiB are free, and other runs use the rest.", "no room for its data", "rerun"),
    ("crash-loop", 76, "batchml: a crash loop: the last 3 starts (generations 1, 2, 3) made no new "
     "checkpoint. The last of them: Rank 3 on node 1 ended with 1.", "Rank 3 on node 1", "logs"),
    ("unfit-hosts", 78, "batchml: 4 hosts were unfit: i-0a: GPU 2 has ECC errors", "i-0a", "logs"),
]  # fmt: skip


def test_a_wrong_data_set_is_to_be_corrected() -> None:
    found = why_ended(ended(78, "batchml: data.train: s3://b/trian/ has no objects."))
    assert found.cause == "not-prepared" and "s3://b/trian/" in found.verdict
    assert found.fix == "Correct the data set under [data], or give another one with --data."


@pytest.mark.parametrize(("cause", "code", "line", "said", "command"), LOGS)
def test_the_last_page_of_the_log_tells_why_a_program_failed(
    cause: str, code: int, line: str, said: str, command: str
) -> None:
    found = why_ended(ended(code, "epoch 0 loss 2.3", "Traceback (most recent call last):", line))
    assert found.cause == cause
    assert said in found.verdict
    assert command in found.command and bool(command) == bool(found.command)
    assert any(line.startswith(each.removesuffix("...")) for each in found.evidence)
    assert not command or shlex.split(found.command)[-2:] == ["--env", "dev"]


@pytest.mark.parametrize(
    ("line", "cause", "said", "command"),
    [
        ("ImportError: libcuda.so.1: cannot open shared object file", "no-gpu-driver",
         "It requested 2 GPU, and its container has no driver or device.", "setup"),
        ("RuntimeError: No CUDA GPUs are available", "no-gpu-driver", "It requested 2 GPU",
         "setup"),
        ("AssertionError: Torch not compiled with CUDA enabled", "no-gpu", "built without CUDA",
         "image push"),
        ("mxnet.base.MXNetError: GPU is not enabled. Compile with USE_CUDA=1 to enable it.",
         "no-gpu", "built without CUDA", "image push"),
        ("RuntimeError: CUDA error: invalid device ordinal", "gpu-number", "does not have", ""),
    ],
)  # fmt: skip
def test_a_run_that_requested_gpus_is_not_told_to_request_them(
    line: str, cause: str, said: str, command: str
) -> None:
    found = why_ended(ended(1, "Traceback (most recent call last):", line, gpus=2))
    assert (found.cause, said in found.verdict) == (cause, True), found
    assert command in found.command and bool(command) == bool(found.command)


NO_DEVICE = (
    "GPUs: the run requested 1, and its container has no NVIDIA device: the AMI needs the driver "
    "and the container toolkit, or the container must be privileged"
)
WRONG_DRIVER = "CUDA: cuInit: error 803: the driver's libraries in the container are of another"
NEWER_CUDA = (
    "CUDA: the image's torch is for CUDA 13, which needs driver 580 or newer; the host's supports "
    "CUDA 12.8"
)


@pytest.mark.parametrize(
    ("fault", "fix", "command"),
    [
        (NO_DEVICE, "Use the GPU AMI and GPU instance types", "setup"),
        (f"{WRONG_DRIVER} version than the host's driver", "or build the AMI again", ""),
        (NEWER_CUDA, "Use an image for an older CUDA, or an AMI with a newer driver", ""),
        ("CUDA: cuInit: error 802: the GPUs' fabric is not ready: x", "fabric manager", "setup"),
    ],
)
def test_a_fault_of_setup_that_our_runtime_found_has_its_own_fix(
    fault: str, fix: str, command: str
) -> None:
    many = f"batchml: 2 hosts (i-1, i-2) were unfit for the same reason: {fault}."
    one = f"batchml: this host (i-1) is unfit: {fault}; another one is tried (1 of 3)"
    for code, line, cause in ((78, many, "unfit-hosts"), (75, one, "unfit-host")):
        found = why_ended(ended(code, line, gpus=1))
        assert found.cause == cause and fault[:200] in found.verdict
        assert fix in found.fix and command in found.command
        assert bool(command) == bool(found.command)


GAVE_UP = [
    ("unfit-host", "this host (i-0abc) is unfit: GPU 2 has 3 uncorrected errors", "i-0abc"),
    (
        "node-lost",
        "node 1 (ip-10-0-0-2) does not answer any more. It did not connect again",
        "node 1",
    ),
    ("nodes-missing", "nodes 2, 3 did not connect within 1200 s", "2, 3"),
    ("hung", "No rank gave a sign of life for 600 s.", "600 s"),
    ("spot", "spot notice: the host goes at 12:00:00", "12:00:00"),
    ("not-ended", "processes on node 3 could not be ended", "node 3"),
    ("gave-up", "something that is not in any table", "any table"),
]


@pytest.mark.parametrize(("cause", "line", "said"), GAVE_UP)
def test_a_run_that_another_host_may_do_says_what_was_wrong_with_this_one(
    cause: str, line: str, said: str
) -> None:
    found = why_ended(ended(75, "step 7", f"batchml: {line}", key="k" * 17, max_attempts=2,
                            environment={"BATCHML_LAUNCH": "{}"}))  # fmt: skip
    assert found.cause == cause
    assert said in found.verdict
    assert found.evidence[0].startswith("host-lost: attempt 1 of 2 gave up with code 75")
    assert "rerun" in found.command
    assert "--attempts 4" in found.command


@pytest.mark.parametrize(
    ("line", "fix", "command"),
    [
        (
            "OSError: [Errno 28] No space left on device",
            "this machine's disk",
            "batchml local clean",
        ),
        ("curl: (6) Could not resolve host: example.org", "Connect this machine", ""),
        ("NoCredentialsError: Unable to locate credentials", "Log in to AWS on this machine", ""),
    ],
)
def test_on_this_machine_a_fix_is_for_this_machine(line: str, fix: str, command: str) -> None:
    found = why_ended(EndedRun(ended(1).run, CommandWriter(), lines=(line,)))
    assert fix in found.fix and found.command == command


@pytest.mark.parametrize(
    "line",
    [
        "KeyError: 'RANK'",
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment "
        "variable RANK expected, but not set",
        "train.sh: line 3: RANK: unbound variable",
    ],
)
def test_a_program_without_a_launcher_is_run_again_with_one(line: str) -> None:
    found = why_ended(ended(1, "Traceback (most recent call last):", line, key="k" * 17, nodes=2))
    assert (found.cause, found.command) == (
        "no-launcher", f"batchml rerun {ID} --launch torchrun --env dev"
    )  # fmt: skip
    assert "expects RANK" in found.verdict and "--launch torchrun" in found.verdict
    has_launcher = ended(1, line, environment={"BATCHML_LAUNCH": '{"kind":"mpi"}'})
    assert why_ended(has_launcher).command == f"batchml logs {ID} --env dev"


def test_of_many_ranks_the_one_that_failed_first_is_read() -> None:
    printed = [
        "[r1] Traceback (most recent call last):", "[r3] Traceback (most recent call last):",
        "[r1] RuntimeError: Connection closed by peer", "[r3] KeyError: 'loss'",
        "batchml: its last lines were:", "  Traceback (most recent call last):",
        '    File "/job/train.py", line 4, in main', "  KeyError: 'loss'",
        "batchml: Rank 3 on node 1 (10.0.0.7) ended with 1. The start before it ended the same way",
    ]  # fmt: skip
    found = why_ended(ended(1, *program_lines(printed)))
    assert found.cause == "exception"
    assert "KeyError: 'loss'" in found.verdict
    assert found.evidence[1].startswith("Rank 3 on node 1 (10.0.0.7) ended with 1.")
    assert program_lines(printed[:4])[2] == "RuntimeError: Connection closed by peer"


def test_a_rank_s_lines_in_the_log_are_read_where_they_are_not_repeated() -> None:
    printed = [
        "[r1] Traceback (most recent call last):", "[r0] epoch 1",
        '[r1]   File "/job/train.py", line 4, in main', "[r1]     main()", "[r1] KeyError: 'loss'",
        "[r0] RuntimeError: Connection closed by peer",
        "[r2] KeyError: 'loss' (the same traceback as rank 1 above)",
        "batchml: Rank 2 on node 0 (10.0.0.7) ended with 1, as did rank 1. The start before it "
        "ended the same way",
    ]  # fmt: skip
    found = why_ended(ended(1, *program_lines(printed)))
    assert found.cause == "exception" and "KeyError: 'loss'" in found.verdict
    assert "line 4" in " ".join((found.verdict, *found.evidence))
    assert not any("Connection closed" in line for line in program_lines(printed))


MISSING_FILE = (
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 4, in main',
    "    open('x.txt')",
    "FileNotFoundError: [Errno 2] No such file or directory: 'x.txt'",
)


@pytest.mark.parametrize(
    "prefix",
    [
        "[rank0]: ", "[rank 3] ", "[default0]:", "[default1]:[rank1]: ", "[r1] [rank1]: ",
        "[1,0]<stderr>:", "[1,0]<stderr>: ", "(worker pid=123) ",
        "\x1b[36m(RayTrainWorker pid=123, ip=10.0.0.1)\x1b[0m ",
    ],
)  # fmt: skip
def test_an_error_is_explained_whatever_label_a_launcher_writes_before_its_lines(
    prefix: str,
) -> None:
    found = why_ended(ended(1, *program_lines([f"{prefix}{line}" for line in MISSING_FILE])))
    assert (found.cause, found.verdict) == ("missing-file", "x.txt does not exist.")
    assert "/job/train.py, line 4, in main: open('x.txt')" in found.evidence


def test_memory_that_was_full_on_another_node_is_the_cause() -> None:
    end = "Rank 1 on node 1 was ended by SIGKILL: its container's memory is full."
    why = (
        f"batchml: a crash loop: the last 3 starts made no new checkpoint. The last of them: {end}"
    )
    found = why_ended(ended(137, "batchml: Rank 0 on node 0 ended with 1. It begins", why))
    assert (found.cause, found.fix) == ("out-of-memory", "Give it more memory.")
    assert sum("Rank 1 on node 1" in each for each in found.evidence) == 1


def test_the_end_of_a_rank_is_evidence_only_once() -> None:
    end = "Rank 0 on node 0 ended with 3. The start before it ended the same way"
    found = why_ended(ended(3, "epoch 1", f"batchml: {end}"))
    assert found.evidence[1:] == (end, "epoch 1")


def test_a_program_s_own_text_in_brackets_is_kept() -> None:
    lines = ("[12/100] loss 1", "[2026-11-28] began", "[1, 2]", "(see pid 3)", "[train] a")
    assert program_lines(lines) == lines


def test_the_report_of_a_torchrun_that_the_program_starts_itself_does_not_hide_its_error() -> None:
    report = [
        "E1128 08:30:00.000000 7 torch/distributed/elastic/multiprocessing/api.py:984] failed "
        "(exitcode: 1) local_rank: 0 (pid: 9) of binary: /usr/bin/python",
        "Traceback (most recent call last):",
        '  File "/usr/bin/torchrun", line 8, in <module>',
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    ]
    found = why_ended(ended(1, *program_lines([*MISSING_FILE, *report])))
    assert found.cause == "missing-file"
    only_report = why_ended(ended(1, *program_lines(report)))
    assert "ChildFailedError" in only_report.verdict


STARTS = [
    ("image-access", "CannotPullContainerError: Error response from daemon: pull access denied for "
     "lenet, repository does not exist or may require 'docker login'", "image push pytorch"),
    ("image-missing", "CannotPullContainerError: manifest for img:v9 not found: manifest unknown",
     "image push pytorch"),
    ("image-rate-limit", "CannotPullContainerError: toomanyrequests: You have reached your pull "
     "rate limit", "image push pytorch"),
    ("image-network", "CannotPullContainerError: Get https://registry/v2/: net/http: request "
     "canceled while waiting for connection", "setup"),
    ("image-network", "CannotPullContainerError: dial tcp 10.0.0.1:443: i/o timeout", "setup"),
    ("image-architecture", "CannotPullContainerError: no matching manifest for linux/arm64/v8",
     ""),
    ("package-missing", "CannotPullContainerError: ERROR: No matching distribution found for "
     "torhc==2", "submit jobs/lenet"),
    ("package-missing", "CannotPullContainerError: Could not find a version that satisfies the "
     "requirement torhc==2 (from versions: none)", "submit jobs/lenet"),
    ("requirement-invalid", "CannotPullContainerError: pip._vendor.InvalidMarker: Invalid marker: "
     "\"os_nam<'3'\", parse error", "submit jobs/lenet"),
    ("disk-full", "CannotPullContainerError: write /var/lib/docker/tmp/x: no space left on device",
     "setup"),
    ("disk-full", "CannotCreateContainerError: mkdir /var: no space left on device", "setup"),
    ("missing-command", 'CannotStartContainerError: OCI runtime create failed: exec: "tarin": '
     "executable file not found in $PATH: unknown", "submit"),
    ("missing-command", 'CannotStartContainerError: exec: "/app/x": stat /app/x: no such file or '
     "directory: unknown", "submit"),
    ("permission", 'CannotStartContainerError: exec: "./run.sh": permission denied: unknown',
     "submit"),
    ("exec-format", "CannotStartContainerError: exec /app/train: exec format error", "submit"),
    ("no-device", "CannotStartContainerError: Error response from daemon: error gathering device "
     'information while adding custom device "/dev/infiniband/uverbs3": no such file or directory',
     "--attempts 2"),
    ("cuda-mismatch", "CannotStartContainerError: nvidia-container-cli: requirement error: "
     "unsatisfied condition: cuda>=12.4, please update your driver", ""),
    ("no-gpu-driver", "CannotStartContainerError: nvidia-container-cli: initialization error: nvml "
     "error: driver not loaded", "setup"),
    ("secret", "ResourceInitializationError: unable to pull secrets or registry auth: execution "
     "resource retrieval failed", "setup"),
    ("not-started", "DockerTimeoutError: Could not transition to created; timed out after waiting "
     "4m0s", "rerun"),
    ("not-started", "CannotCreateContainerError: something new", ""),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "reason", "command"), STARTS)
def test_the_containers_reason_tells_why_it_was_not_started(
    cause: str, reason: str, command: str
) -> None:
    found = why_ended(ended(None, status_reason="Task failed to start", reason=reason))
    assert found.cause == cause
    assert command in found.command and bool(command) == bool(found.command)
    if cause == "package-missing":  # AWS's text looks like a failure of Docker
        assert found.verdict == "No index has torhc==2 (requirements.txt)."
        pip = reason.removeprefix("CannotPullContainerError: ").removeprefix("ERROR: ")
        assert found.evidence == (pip,)
        return
    if cause == "requirement-invalid":
        assert found.verdict == "pip cannot read \"os_nam<'3'\" (requirements.txt)."
        assert found.evidence == (reason[reason.index("Invalid marker") :],)
        return
    assert len([each for each in found.evidence if reason[:60] in each]) == 1


def test_what_a_table_of_clues_means_is_in_words_for_people() -> None:
    for clue in (*clues.GPU, *clues.DISK, *clues.START, *clues.PULL, *clues.LOG):
        assert clue.verdict.endswith(".") and clue.fix.endswith("."), clue
        assert clue.verdict.count("{") <= re.compile(clue.pattern).groups, clue


def test_the_page_about_explain_names_every_cause() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explain.md").read_text("utf-8")
    sources = (Path(batchml.explain.__file__).parent).glob("*.py")
    text = "\n".join(path.read_text("utf-8") for path in sources)
    named = re.findall(r'(?:Explanation\(|_clue\()\s*"([a-z0-9-]+)"', text)
    assert len(set(named)) > 50
    assert [cause for cause in sorted(set(named)) if f"`{cause}`" not in page] == []


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("train.py: error: unrecognized arguments: --batch_size 8 --x 1", "no flag --batch_size."),
        ("Error: No such option: --batch_size", "no flag --batch_size."),
        ("error: unexpected argument '--batch_size' found", "no flag --batch_size."),
        (
            "train.py: error: the following arguments are required: --lr, --batch-size",
            "did not get its flag --batch-size.",
        ),
        ("Error: Missing option '--batch-size'.", "did not get its flag --batch-size."),
    ],
)
def test_flags_that_are_spelt_otherwise_have_a_key_of_the_job(line: str, verdict: str) -> None:
    found = why_ended(ended(2, "usage: train.py [-h]", line))
    assert (found.cause, found.verdict.endswith(verdict)) == ("unknown-flag", True)
    assert 'flags = "kebab"' in found.fix


def test_a_flag_with_an_underscore_is_corrected_in_a_command_without_a_job() -> None:
    run = replace(ended(2).run, command=("python", "t.py", "--batch_size", "8"))
    line = "t.py: error: unrecognized arguments: --batch_size 8"
    found = why_ended(EndedRun(run, CommandWriter(), lines=(line,)))
    assert found.fix == "If it writes flags with hyphens, write --batch-size."
    assert found.command.endswith(" -- python t.py --batch-size 8")


@pytest.mark.parametrize(
    ("line", "cause", "verdict"),
    [
        ("train.py: error: unrecognized arguments: --learning-rate 3", "unknown-flag",
         "The program has no flag --learning-rate."),
        ("Error: No such option: --epoch (Possible options: --epochs)", "unknown-flag",
         "The program has no flag --epoch."),
        ("train.py: error: unrecognized arguments: 3 4", "bad-argument",
         "The program refused its arguments: unrecognized arguments: 3 4."),
        ("train.py: error: argument --lr: invalid float value: 'x'", "bad-argument",
         "The program refused its arguments: argument --lr: invalid float value: 'x'."),
        ("t.py fit: error: argument --opt: invalid choice: 'a' (choose from 'b')", "bad-argument",
         "The program refused its arguments: argument --opt: invalid choice: 'a' (choose from "
         "'b')."),
        ("train.py: error: argument --lr: expected one argument", "bad-argument",
         "The program refused its arguments: argument --lr: expected one argument."),
        ("Error: Invalid value for '--n': 'x' is not a valid integer.", "bad-argument",
         "The program refused its arguments: Invalid value for '--n': 'x' is not a valid "
         "integer."),
    ],
)  # fmt: skip
def test_arguments_that_a_program_refuses_are_the_cause(
    line: str, cause: str, verdict: str
) -> None:
    found = why_ended(ended(2, "usage: train.py [-h]", line))
    assert (found.cause, found.verdict) == (cause, verdict)
    assert line in found.evidence and "kebab" not in found.fix
    compiler = why_ended(ended(2, "a.c:3:5: error: argument 1 is not a pointer"))
    assert compiler.cause == "exit-code"


@pytest.mark.parametrize(
    ("line", "verdict", "command"),
    [
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 146. TiB for an array with "
         "shape (4472136, 4472136) and data type float64",
         "It asked for 146 TiB of memory at once. It had 1 GiB.", "batchml logs {}"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 EiB for an array with "
         "shape (1,) and data type float64",
         "It asked for 7.45 EiB of memory at once. It had 1 GiB.", "batchml logs {}"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array with "
         "shape (1000000000,) and data type float64",
         "It asked for 7.45 GiB of memory at once. It had 1 GiB.",
         "batchml rerun {} --memory '9 GiB'"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't "
         "allocate memory: you tried to allocate 400000000 bytes. Error code 12 (Cannot allocate "
         "memory)",
         "It asked for 400000000 bytes of memory at once.", "batchml rerun {} --memory '2 GiB'"),
    ],
)  # fmt: skip
def test_an_array_larger_than_the_memory_is_told_with_its_size(
    line: str, verdict: str, command: str
) -> None:
    where = ["Traceback (most recent call last):", '  File "mf.py", line 3, in <module>',
             "    np.zeros(n)"]  # fmt: skip
    found = why_ended(ended(1, *where, line))
    assert (found.cause, found.verdict) == ("python-memory", verdict)
    assert found.command == f"{command.format(ID)} --env dev"
    assert "mf.py, line 3: np.zeros(n)" in found.evidence


def test_a_kill_far_below_the_limit_is_not_a_lack_of_memory() -> None:
    far = why_ended(replace(ended(137, "epoch 3"), memory=173.4))
    assert far.verdict == (
        "SIGKILL ended it from outside: it used 173 of 1024 MiB, so its own memory is not the "
        "cause."
    )
    assert far.command == f"batchml logs {ID} --env dev"
    near = why_ended(replace(ended(137, "epoch 3"), memory=900.0))
    assert "--memory '2 GiB'" in near.command


def test_what_stands_far_up_is_no_cause_when_an_exception_stands_at_the_end() -> None:
    early = "cp: cannot create '/data/x': Permission denied"
    lines = [early, *["epoch"] * 50, "ValueError: lr"]
    assert why_ended(ended(1, *lines)).cause == "exception"
    assert why_ended(ended(1, early, *["epoch"] * 50)).cause == "permission"


@pytest.mark.parametrize("word", ["lib", "A", "A.", "version 'GLIBC_", "exec: ", " "])
def test_a_very_long_line_takes_no_longer_than_others(word: str) -> None:
    """CloudWatch Logs takes 1 MiB in one event."""
    line = word * (2**20 // len(word))
    began = time.process_time()
    assert clues.match_log([line]) is None
    assert clues.match_reason(line) is None
    assert clues.find_last_exception([line]) == ""
    assert time.process_time() - began < 5
    found = clues.match_log([line + "\rImportError: No module named 'torch'"])
    assert found is not None and "torch" in found.verdict


def test_a_child_says_which_of_how_many_it_is() -> None:
    array = Run("a", "lenet", "q", JobStatus.FAILED, array_size=10, children={"FAILED": 1})
    run = Run(f"{ID}:3", "lenet", "q", JobStatus.FAILED, exit_code=2, array_index=3)
    assert why_ended(EndedRun(run, DEV, array=array)).evidence[0] == "child 3 of 10"


_LINE = st.text(max_size=60) | st.sampled_from([line for _, _, line, *_ in LOGS])


@given(
    st.none() | st.integers(-3, 300),
    st.sampled_from([EXITED, OOM, LOST, TIMED_OUT, "", "x", "Task failed to start",
                     "Dependent Job failed", "Array Child Job failed", "JobQueue deleted"]),
    st.sampled_from(["", OOM, *(reason for _, reason, _ in STARTS)]) | st.text(max_size=30),
    st.lists(_LINE, max_size=5), st.booleans(),
)  # fmt: skip
def test_every_end_has_one_verdict_and_says_what_to_do_whatever_was_printed(
    code: int | None, because: str, reason: str, lines: list[str], ended_by_user: bool
) -> None:
    found = why_ended(
        ended(code, *lines, status_reason=because, reason=reason, is_terminated=ended_by_user)
    )
    assert found.verdict and found.cause and found.evidence
    assert found.cause == "succeeded" or found.command or found.fix or code is None
    assert max(map(len, found.evidence)) <= 303


def test_a_log_that_could_grow_no_more_is_the_cause_and_not_the_signal() -> None:
    reason = f"{LOG_TOO_LARGE}: the log of this attempt has reached the largest file size"
    found = why_ended(ended(143, "x", reason=reason))
    assert (found.cause, found.verdict) == (
        "log-too-large", "It was stopped because its log reached the limit of the file size."
    )  # fmt: skip
    assert found.evidence[0].endswith(f"with code 143, signal SIGTERM: {reason}")


LOOP = (
    "batchml: a crash loop: the last 3 starts (generations 1, 2, 3) made no new checkpoint. The "
    "last of them: Rank 0 on node 0 was ended by SIGKILL."
)


@pytest.mark.parametrize(
    ("begun", "why", "says", "not_said"),
    [
        ("", LOOP, "see MEMORY in batchml show", "saves nothing"),
        (", from step 20", LOOP, "mostly the kernel", "saves nothing"),
        (".", LOOP, "each start began anew", "Correct the program"),
        (
            ".",
            LOOP.replace("was ended by SIGKILL", "ended"),
            "Correct the program",
            "MEMORY",
        ),
    ],
)
def test_a_crash_loop_is_advised_on_by_how_it_ended_and_by_what_it_saved(
    begun: str, why: str, says: str, not_said: str
) -> None:
    start = f"batchml: generation 3: 1 node, 2 ranks{begun.rstrip('.')}."
    lines = (*((start,) if begun else ()), "[r0] epoch 1", "batchml: its last lines were:", why)
    fix = why_ended(
        EndedRun(ended(76, key="k").run, CommandWriter(), lines=program_lines(lines))
    ).fix
    assert says in fix and not_said not in fix


def test_an_unfit_host_is_the_only_one_on_this_machine() -> None:
    line = "batchml: this host (a) is unfit: no space; another one is tried (1 of 3)"
    gave_up = EndedRun(ended(75, key="k").run, CommandWriter(), lines=(line,))
    assert "only host" in why_ended(gave_up).fix
    assert (
        "another host may be fit" in why_ended(replace(gave_up, commands=CommandWriter("dev"))).fix
    )
    final = EndedRun(
        ended(78, key="k").run, CommandWriter(), lines=("batchml: 3 hosts were unfit: a: full",)
    )
    assert why_ended(final).verdict.startswith("This machine is not fit")


def test_a_run_that_was_ended_while_idle_says_since_when_and_what_it_waited_for() -> None:
    line = (
        "batchml: idle for 30 min, since 10:42:00 UTC: no CPU, network, disk or GPU use, no "
        "output, no progress; rank 1 waits to connect to 10.0.0.1:29500, where nobody listens. "
        "The run saves and stops (idle_after)."
    )
    end = ended(79, "epoch 3", line, "saved", key="k", environment={IDLE_AFTER: "1800"})
    found = why_ended(end)
    assert (found.cause, found.command) == ("idle", f"batchml logs {ID} --env dev")
    assert found.verdict.startswith("It was idle for 30 min, since 10:42:00 UTC: no CPU")
    assert found.verdict.endswith("where nobody listens. idle_after has ended it.")
    assert found.evidence == (
        "app-error: the program did nothing for 30 min and was ended (79)", "epoch 3", "saved"
    )  # fmt: skip


def test_lines_of_the_evidence_have_no_colours() -> None:
    assert informative_lines(["\x1b[32mepoch 7/15\x1b[0m loss 0.5"]) == ["epoch 7/15 loss 0.5"]
