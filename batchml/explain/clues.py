"""Find the cause of a failure by patterns in the end of a log or in a container's reason. Pure.

The order of the patterns matters: those of a cause stand before those of a symptom.
"""

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

from batchml.cli.render import without_colours
from batchml.model.outcome import MISSING_PACKAGE, REQUIREMENTS, UNREADABLE_LINE


class Clue(Struct, frozen=True):
    """A pattern and its meaning. `{0}`, `{1}` in the texts are the pattern's groups.

    `command`: a word for the command to suggest, which `failing.py` writes; "" for none.
    """

    cause: str
    pattern: str  # compiled when it is first searched: `re` keeps it
    verdict: str
    fix: str
    command: str = "log"


class ClueMatch(Struct, frozen=True):
    """A clue with its groups filled in, and the line that matched."""

    cause: str
    verdict: str
    fix: str
    command: str
    line: str
    groups: tuple[str, ...] = ()


_LAST_LINES = 30  # lines that are searched first
# Variables that launchers set for each rank, and `init_process_group` reads.
_RANKS = "RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
# Characters at each end of a line that are searched: a pattern may take quadratic time.
_SEARCHED = 500

DISK = (
    Clue(
        "disk-full", r"(?i)no space left on device", "The host's disk was full.",
        "Give hosts a larger disk in batchml.toml, or make the image smaller.", "setup",
    ),
)  # fmt: skip

# For containers that could not be started: AWS Batch's `container.reason`. Sources: ECS Developer
# Guide, "Stopped tasks error messages"; messages of Docker and containerd.
START = (
    Clue(
        "no-device", r'error gathering device information.*custom device \\?"([^"\\]+)',
        "Its host has no device {0}, which its containers are given.",
        "Try again with more attempts: another host may have it. If none has it, see the AMI and "
        "the instance types.", "attempts",
    ),
    Clue(
        "cuda-mismatch", r"(?i)requirement error: unsatisfied condition: (cuda>=[\d.]+)",
        "The image needs {0}, and the host's NVIDIA driver is older.",
        "Use an image for an older CUDA, or an AMI with a newer driver.", "",
    ),
    Clue(
        "no-gpu-driver",
        r"(?i)nvidia-container-cli|could not select device driver|unresolvable CDI devices|"
        r"unknown or invalid runtime name: nvidia",
        "The host has no working NVIDIA driver for the container.",
        "Use the GPU AMI and GPU instance types in batchml.toml, and run setup.", "setup",
    ),
    Clue(
        "missing-command",
        r'exec: \\?"([^"\\]+)\\?": (?:executable file not found|stat .*no such file)',
        "The image has no command {0}.",
        "Name a command that the image has, with its whole path.", "submit",
    ),
    Clue(
        "missing-command", r"no such file or directory|no command specified",
        "The command of the run is not in the image.",
        "Name a command that the image has, with its whole path.", "submit",
    ),
    Clue(
        "exec-format", r"(?i)exec format error",
        "The program is for another processor, or a script without a #! line.",
        "Build the image for the processor of the hosts, or name the script's interpreter.",
        "submit",
    ),
    Clue(
        "permission", r'exec: \\?"([^"\\]+)\\?": permission denied',
        "{0} may not be executed in the image.",
        "Make it executable (chmod +x), or name its interpreter.", "submit",
    ),
    Clue(
        "secret", r"(?i)unable to (?:pull|retrieve|fetch) secrets?|secretsmanager|ssm parameter",
        "A secret of the run could not be read.",
        "The name must exist, and `secrets` of the environment must list it.", "setup",
    ),
)  # fmt: skip

# For images that could not be pulled.
PULL = (
    Clue(
        "package-missing", MISSING_PACKAGE, f"No index has {{0}} ({REQUIREMENTS}).",
        f"Correct its name or its version in {REQUIREMENTS}, and submit it again.", "again",
    ),
    Clue(
        "requirement-invalid", UNREADABLE_LINE, f"pip cannot read {{0}} ({REQUIREMENTS}).",
        f"Correct its line in {REQUIREMENTS}, and submit it again.", "again",
    ),
    Clue(
        "image-architecture", r"(?i)no matching manifest|does not match the specified platform",
        "The image is not for the processor of the hosts.",
        "Build it on a machine with the processor of the hosts.", "",
    ),
    Clue(
        "image-rate-limit", r"(?i)toomanyrequests|pull rate limit",
        "The registry accepts no more pulls from this address for now.",
        "Push the image to the environment's own registry.", "push",
    ),
    Clue(
        "image-access",
        r"(?i)no basic auth credentials|pull access denied|403 forbidden|not authorized|"
        r"denied: |unauthorized",
        "The registry denies the hosts the image, or has no image of that name.",
        "Correct the image's name, or push it to the environment's own registry.", "push",
    ),
    Clue(
        "image-missing",
        r"(?i)manifest unknown|manifest for .* not found|not found|does not exist|no such image|"
        r"no image ",
        "There is no such image.", "Correct the image's name, or build and push it.", "push",
    ),
    Clue(
        "image-network",
        r"(?i)i/o timeout|request canceled|dial tcp|no such host|tls handshake|connection re|"
        r"timed? ?out",
        "The host cannot reach the image's registry.",
        "Hosts need network access: NAT, or VPC endpoints for ecr.api, ecr.dkr and s3.", "setup",
    ),
)  # fmt: skip

# For programs that failed at a GPU, and for hosts that our runtime refused because of theirs.
# Sources: CUDA Runtime API, cudaGetErrorString; NCCL's debug.h; torch's CUDAException.cpp.
GPU = (
    Clue(
        "gpu-broken",
        r"(?i)uncorrectable ECC error encountered|uncorrectable NVLink error|GPU is lost|"
        r"fallen off the bus",
        "A GPU of its host is broken.",
        "Try again with more attempts: another host is used. With --resume it goes on from its "
        "checkpoint.", "attempts",
    ),
    Clue(
        "gpu-memory",
        r"(?i)CUDA out of memory|OutOfMemoryError: CUDA|CUDA error: out of memory|"
        r"CUBLAS_STATUS_ALLOC_FAILED|HIP out of memory|Cuda failure (?:\d+ )?'out of memory'|"
        r"cudaMalloc (?:retry )?failed: out of memory|CUDA: out of memory|"
        r"RESOURCE_EXHAUSTED: Out of memory",
        "It ran out of the GPU's memory.",
        "Use a smaller batch, or a GPU with more memory.",
    ),
    Clue(
        "fabric-manager",
        r"(?i)system not yet initialized|cuInit: error 802|the GPUs' fabric is not ready",
        "The fabric between the host's GPUs is not ready, so CUDA does not start.",
        "The AMI's fabric manager must run, in the same version as the driver.", "setup",
    ),
    Clue(
        "cuda-mismatch",
        r"(?i)unsupported display driver ?/ ?cuda driver combination|driver/library version "
        r"mismatch|libraries in the container are of another version",
        "The driver's libraries in its container are of another version than the host's driver.",
        "Remove libcuda and CUDA's `compat` folder from the image, or build the AMI again.", "",
    ),
    Clue(
        "cuda-mismatch",
        r"(?i)CUDA driver version is insufficient for CUDA runtime version|"
        r"NVIDIA driver on your system is too old|forward compatibility was attempted|"
        r"unsatisfied condition: cuda|is for CUDA \d+, which needs|compatibility libraries do not",
        "The image's CUDA is newer than the host's NVIDIA driver.",
        "Use an image for an older CUDA, or an AMI with a newer driver.", "",
    ),
    Clue(
        "cuda-mismatch",
        r"(?i)no kernel image is available|CUDA error: invalid device function|"
        r"is not compatible with the current PyTorch installation",
        "The program's CUDA code was not built for this model of GPU.",
        "Use an image whose framework supports that GPU.", "",
    ),
    Clue(
        "no-gpu-driver",
        r"(?i)its container has no NVIDIA device|the container has no driver|"
        r"the driver is at /\S+, which is not in|NVIDIA driver is not loaded|"
        r"driver's libraries are not all in|cuInit: error|CUDA unknown error",
        "It requested GPUs, and its container has no driver or device for them.",
        "Use the GPU AMI and GPU instance types in batchml.toml, and run setup.", "setup",
    ),
    Clue(
        "no-gpu",
        r"(?i)Found no NVIDIA driver|no CUDA-capable device|Torch not compiled with CUDA|"
        r"libcuda\.so\.1: cannot open|libnvidia-ml\.so\.1: cannot open|"
        r"No CUDA GPUs are available|Compile with USE_CUDA=1",
        "It needs a GPU, and has none.",
        "Request a GPU with --gpus, and use an image with CUDA.", "gpus",
    ),
    Clue(
        "gpu-busy", r"(?i)CUDA-capable device(?:s|\(s\))? (?:is/)?are busy or unavailable",
        "Another process holds the GPU for itself.",
        "End that process, or let the GPU be shared: nvidia-smi -c DEFAULT.", "",
    ),
    Clue(
        "gpu-number", r"(?i)(invalid device ordinal|Duplicate GPU detected)",
        "A process used a GPU that it does not have, or that another rank uses ({0}).",
        "Request one GPU for each process of a node, and let it use the one of LOCAL_RANK.", "gpus",
    ),
    Clue(
        "nccl", r"(?i)(peer access (?:is|has)\b[^']*|peer mapping resources exhausted)",
        "The GPUs of its host cannot use each other's memory ({0}).",
        'Set NCCL_P2P_DISABLE = "1" in [env] of job.toml.', "submit",
    ),
    Clue(
        "cuda-program",
        r"(?:CUDA error:|Cuda failure(?: \d+)?) '?(device-side assert triggered|"
        r"an illegal memory access was encountered|misaligned address|"
        r"an illegal instruction was encountered|unspecified launch failure)",
        "The program's code on the GPU failed ({0}).",
        'Set CUDA_LAUNCH_BLOCKING = "1" in [env] of job.toml: the traceback then shows the call. '
        "Often an index is out of range.", "submit",
    ),
    Clue(
        "nccl", r"Cuda failure (?:\d+ )?'([^']+)'", "NCCL failed in a call to CUDA ({0}).",
        'Set NCCL_DEBUG = "INFO" in [env] of job.toml: the log then shows the call.', "submit",
    ),
    Clue(
        "nccl", r"(?i)unhandled cuda error|ncclUnhandledCudaError",
        "NCCL failed in a call to CUDA.",
        'Set NCCL_DEBUG = "INFO" in [env] of job.toml: the log then shows the call.', "submit",
    ),
    Clue(
        "nccl", r"(?i)ncclRemoteError|remote process exited or there was a network error|"
        r"ncclSystemError|unhandled system error",
        "NCCL lost the connection between its processes.",
        "See whether another rank ended first. Between nodes, the security group must allow all "
        "traffic to itself.",
    ),
    Clue(
        "nccl", r"(?i)Watchdog caught collective operation timeout",
        "Its ranks waited for each other longer than NCCL's timeout.",
        "A rank was late, has ended, or was in another operation: see its log.",
    ),
)  # fmt: skip

# For runs of several nodes: our runtime's line about NCCL, and messages of libfabric.
NETWORK = (
    Clue(
        "efa-unused", r"gives each node \d+ EFA interfaces?, but NCCL uses (\w+)",
        "Its nodes have EFA, and NCCL used {0}: the image, or a variable, is the cause.",
        "Use the image pytorch in its CUDA flavour, or install EFA's libraries in yours: "
        "docs/health.md.", "submit",
    ),
    Clue(
        "efa-devices",
        r"fi_getinfo\S* (?:call )?failed: (?:.*-61\b|No data available)|fi_getinfo: -61\b",
        "libfabric finds no EFA device (-61): the container has none, or may not open one.",
        "Use an environment with efa = true, and see /dev/infiniband on its hosts.", "setup",
    ),
)  # fmt: skip

# For programs that ended: the last lines of the log. Messages of our runtime stand first.
LOG = (
    Clue(
        "budget", r"^batchml: the budget of --max-cost is spent",
        "Its budget was spent, so it was asked to save and stop.",
        "Run it again with a higher --max-cost; with --resume it goes on.", "rerun",
    ),
    Clue(
        "duplicate", r"^batchml: this is a second run of one submission; (\S+) goes on",
        "It is a second run of the same submission, and ended at once: {0} goes on.",
        "Follow that run.", "other",
    ),
    Clue(
        "no-launcher",
        rf"KeyError: '({_RANKS})'|environment variable ({_RANKS}) expected, but not set|"
        rf"\b({_RANKS}): (?:unbound variable|parameter (?:null or )?not set)",
        "The program expects {0}, which no launcher has set; --launch torchrun sets it.",
        "Let batchml start it as torchrun does, also with kind under [launch] of job.toml.",
        "launch",
    ),
    Clue(
        "disk-full", r"(?i)No space left on device|Errno 28\b|Disk quota exceeded",
        "The disk was full.",
        "Write less, or give hosts a larger disk in batchml.toml.",
    ),
    Clue(
        "shared-memory",
        r"(?i)DataLoader worker .*Bus error|insufficient shared memory|shared memory.*shm",
        "It ran out of shared memory, which data loaders use.",
        "Request more memory: /dev/shm is half of it, unless shm in [resources] of job.toml sets "
        "its size. Or use fewer workers.", "submit",
    ),
    *NETWORK,
    *GPU,
    Clue(
        "missing-library", r"version \W(GLIBC[A-Z]*_[\d.]+)\W not found",
        "A program in the image was built for a newer system: it needs {0}.",
        "Build it on the image's own system, or use a newer image.", "",
    ),
    Clue(
        "missing-library",
        r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file|"
        r"Library not loaded.*?(lib[\w.+-]+)",
        "The image lacks the shared library {0}.",
        "Install the package that has {0} in the image.", "image",
    ),
    Clue(
        "missing-module",
        r"(?:ModuleNotFoundError|ImportError): No module named '?([\w.]+)'?",
        "The image has no Python module {0}.",
        "Add the package that has {0} to the image's requirements.txt.", "image",
    ),
    Clue(
        "missing-module", r"ImportError: cannot import name '(\w+)' from '?([\w.]+)'?",
        "The image's {1} has no {0}: the program needs another version.",
        "Pin the version in the image's requirements.txt.", "image",
    ),
    Clue(
        "missing-module", r"No module named ([\w.]+)$",
        "The image has no Python module {0}.",
        "Add the package that has {0} to the image's requirements.txt.", "image",
    ),
    Clue(
        "unknown-flag",
        r"(?:unrecognized arguments?|[Nn]o such option|unexpected (?:extra )?argument|"
        r"[Uu]nknown (?:option|flag|argument))\b.*?(--[A-Za-z0-9]+_\w*)",
        "The program has no flag {0}.",
        'If it writes flags with hyphens: flags = "kebab" at the top of job.toml.', "job",
    ),
    Clue(
        "unknown-flag",
        r"(?:the following arguments are required:|Missing option).*?(--[A-Za-z0-9]+-[\w-]+)",
        "The program did not get its flag {0}.",
        'If the parameter has that name with _: flags = "kebab" at the top of job.toml.', "job",
    ),
    Clue(
        "unknown-flag",
        r"^[\w./+-]+(?: [\w-]+)?: error: unrecognized arguments: (-\S+)|"
        r"^Error: No such option:? '?(-[\w-]+)|^error: unexpected argument '(-[^']+)' found",
        "The program has no flag {0}.",
        "Correct its command, or the parameter of that name.",
    ),
    Clue(
        "bad-argument",
        r"^[\w./+-]+(?: [\w-]+)?: error: ((?:argument |ambiguous option|one of the arguments |"
        r"unrecognized arguments|the following arguments are required).*?)\.?$|"
        r"^Error: ((?:Invalid value|Missing (?:option|argument|parameter|command)|No such command|"
        r"Got unexpected extra argument|Option ).*?)\.?$",
        "The program refused its arguments: {0}.",
        "Correct its command, or the parameter of that name.",
    ),
    Clue(
        "missing-file", r"can't open file '([^']+)': \[Errno 2\]",
        "The program file {0} is not there.",
        "It must be in the job's folder, and not be ignored.", "again",
    ),
    Clue(
        "missing-command",
        r"(?:batchml: cannot run|srun: \[Errno 2\][^']*) '([^'/]\S*/bin/[^']+)'|"
        r": ([^\s/:]\S*/bin/\S+): No such file or directory",
        "The image has no command {0}, and virtual environments are not sent with the run.",
        "Name the command without its folder, as torchrun: it comes from the image.", "submit",
    ),
    Clue(
        "missing-command",
        r"batchml: cannot run '([^']+)': no such command|srun: \[Errno 2\][^']*'([^']+)'|"
        r"sh: (?:line )?(?:\d+: )?(\S+): not found|(\S+): command not found|exec: (\S+): not found",
        "The image has no command {0}.",
        "Install it in the image, or name a command that the image has.", "submit",
    ),
    Clue(
        "exec-format", r"(?i)exec format error",
        "The program is for another processor, or a script without a #! line.",
        "Build it for the processor of the hosts, or name the script's interpreter.", "submit",
    ),
    Clue(
        "aws-permission",
        r"\((?:AccessDenied\w*|UnauthorizedOperation|403)\) when calling the (\w+) operation",
        "AWS denies the run the call {0}: its job role has no permission.",
        "Allow it in the job role's policy.",
    ),
    Clue(
        "credentials", r"Unable to locate credentials|NoCredentialsError",
        "The run has no AWS credentials.", "Give the environment a job role: run setup.", "setup",
    ),
    Clue(
        "permission",
        r"batchml: cannot run '([^']+)': Permission denied|"
        r"PermissionError: \[Errno 13\] Permission denied: '([^']+)'|(\S+): Permission denied",
        "It has no permission to use {0}.",
        "Files of the image belong to another user: write to BATCHML_OUTPUT_DIR, or chmod in the "
        "image.",
    ),
    Clue(
        "port-in-use", r"(?i)address already in use|EADDRINUSE",
        "A port that it needs is in use: runs on one host share its network.",
        "Let the program choose a free port.",
    ),
    Clue(
        "network",
        r"(?i)Temporary failure in name resolution|Could not resolve host|Name or service not "
        r"known|Network is unreachable|Connect timeout on endpoint URL|ConnectTimeoutError|"
        r"Failed to connect to \S+ port \d+|ssh: connect to host",
        "It cannot reach the network.",
        'Hosts reach the internet on port 443 only, and with egress = "endpoints" only services of '
        "AWS that have an endpoint.", "doctor",
    ),
    Clue(  # of NumPy (`_ArrayMemoryError: Unable to allocate 146. TiB for an array`); of PyTorch
        "python-memory",
        r"MemoryError: Unable to allocate (\d+(?:\.\d+)?)\.? (\w+)|"
        r"can't allocate memory: you tried to allocate (\d+) (bytes)",
        "It asked for {0} {1} of memory at once.",
        "Let it ask for less, or give it more memory.", "memory",
    ),
    Clue(
        "python-memory", r"^(?:\S+\.)?MemoryError\b|std::bad_alloc|Cannot allocate memory",
        "It could not allocate memory.",
        "Give it more memory.", "memory",
    ),
)  # fmt: skip

# Only for the exception that ended the program: many programs try to open files that do not exist.
LAST = (
    Clue(
        "missing-file",
        r"FileNotFoundError: (?:\[Errno 2\] No such file or directory: '([^']+)'|"
        r"([^\s:]*[./][^\s:]*) not found\.$)",  # of numpy.loadtxt and genfromtxt
        "{0} does not exist.",
        "Files that a run reads must be in its folder and not be ignored, or in BATCHML_DATA_DIR.",
        "submit",
    ),
)  # fmt: skip

_EXCEPTION = re.compile(r"^((?:\w+\.)*_?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)\b.*)$")


def match_reason(reason: str) -> ClueMatch | None:
    """The clue in the reason of a container that could not be started."""
    was_pull = reason.startswith(("CannotPull", "CannotInspect", "ResourceInit"))
    return find_clue(DISK + PULL if was_pull else DISK, [reason]) or find_clue(START, [reason])


def match_log(lines: Sequence[str]) -> ClueMatch | None:
    """The clue in the last page of a log.

    The last lines are searched first. Earlier lines may be harmless, so they count only if the log
    does not end with an exception.
    """
    exception = find_last_exception(lines[-_LAST_LINES:])
    found = find_clue(LOG, lines[-_LAST_LINES:])
    found = found or (find_clue(LAST, [exception]) if exception else None)
    return found if found or exception else find_clue(LOG, lines)


def find_clue(clues: Iterable[Clue], lines: Iterable[str]) -> ClueMatch | None:
    """The first clue that any line matches, and the last line that matches it."""
    cut = [remove_work_folder(_cut_middle(line.rstrip("\r\n"))) for line in lines]
    for clue in clues:
        for line in reversed(cut):
            match = re.search(clue.pattern, line)
            if match:
                groups = tuple(group for group in match.groups() if group)
                verdict, fix = _fill(clue.verdict, groups), _fill(clue.fix, groups)
                return ClueMatch(clue.cause, verdict, fix, clue.command, line, groups)
    return None


def _cut_middle(line: str) -> str:
    if len(line) <= 2 * _SEARCHED:
        return line
    return f"{line[:_SEARCHED]} ... {line[-_SEARCHED:]}"


def _fill(text: str, groups: tuple[str, ...]) -> str:
    for position, group in enumerate(groups):
        text = text.replace(f"{{{position}}}", group)
    return text


def find_last_exception(lines: Iterable[str]) -> str:
    """The last line that ends a Python traceback; empty without one."""
    found = reversed([remove_work_folder(_cut_middle(line)) for line in lines])
    return next((line for line in found if _EXCEPTION.match(line)), "")


# The work folder of an attempt, on `local` or made by the runtime. Its path tells a user nothing.
_WORK = re.compile(r"(?:/[^\s\"':]*)?/attempts/[0-9a-f]{32}/work/|/tmp/job-\w{8}/")
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)(?:, in (.+))?$')
_MARKERS = re.compile(r"^[\s~^]+$")  # the line below a traceback's code, which marks a part of it


def remove_work_folder(line: str) -> str:
    """Remove the path of the attempt's folder from a line: `File "train.py", line 11`."""
    return _WORK.sub("", line)


def informative_lines(lines: Sequence[str]) -> list[str]:
    """The informative lines in order, without the path of the attempt's folder."""
    return [
        remove_work_folder(without_colours(line).strip())
        for line in lines
        if line.strip() and not _MARKERS.match(line)
    ]


def find_raising_frame(lines: Sequence[str]) -> str:
    """Where the last exception was raised: `train.py, line 11, in main: raise ValueError(`.

    The innermost frame in a file of the run's folder, or else the innermost frame. Empty without a
    traceback.
    """
    cut = [remove_work_folder(_cut_middle(line)) for line in lines]
    ends = [at for at, line in enumerate(cut) if _EXCEPTION.match(line)]
    frames: list[tuple[str, str]] = []  # path, text; the innermost first
    for at in range(ends[-1] - 1 if ends else -1, -1, -1):
        if cut[at].startswith("Traceback (") or not cut[at].strip():
            break
        frame = _FRAME.match(cut[at])
        if frame:
            where = f", in {frame[3]}" if frame[3] and frame[3] != "<module>" else ""
            below = cut[at + 1].strip()
            is_code = not (_EXCEPTION.match(below) or _FRAME.match(below))
            code = f": {below}" if is_code and below else ""
            frames.append((frame[1], f"{frame[1]}, line {frame[2]}{where}{code}"))
    own = (text for path, text in frames if not path.startswith(("/", "<")))
    return next(own, frames[0][1] if frames and not frames[0][0].startswith("<") else "")
