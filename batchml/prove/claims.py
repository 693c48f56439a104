"""The claims that `batchml prove` tests, and the unverified statements of our documents that they
decide.
"""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

# Where a proof runs: the embedded server; an AWS-compatible server (`--endpoint`); AWS.
World = Literal["local", "endpoint", "aws"]
Need = Literal["", "gpu", "nodes"]  # the option without which a claim is not tested

EVERYWHERE: tuple[World, ...] = ("local", "endpoint", "aws")
_ACCOUNT: tuple[World, ...] = ("aws",)
_SERVICES: tuple[World, ...] = ("endpoint", "aws")


class Claim(Struct, frozen=True):
    """A sentence that is true or false. `step` tests it, in the worlds of `where`."""

    id: str
    text: str
    step: str
    where: tuple[World, ...] = EVERYWHERE
    needs: Need = ""


CLAIMS = (
    Claim("doctor", "doctor finds no problem", "doctor"),
    Claim("setup", "setup makes the environment", "setup"),
    Claim("plan-empty", "a second plan has no changes", "plan"),
    Claim("image-pushed", "image push puts the image into ECR", "image", _SERVICES),
    Claim("image-processor", "the image in ECR is for the hosts' processor", "image", _SERVICES),
    Claim("run-ends", "a run starts and ends with its program's exit code", "probe"),
    Claim("code-there", "the program finds the code that was sent", "probe"),
    Claim("log-complete", "the log is complete and in order", "probe"),
    Claim("output-kept", "get downloads a file that the program wrote", "probe"),
    Claim("checkpoint-kept", "get --checkpoints downloads the checkpoint", "probe"),
    Claim("batch-reachable", "the program can reach AWS Batch", "probe"),
    Claim("shared-memory", "/dev/shm has at least half of the job's memory", "probe"),
    Claim("user-1000", "the program runs as user 1000", "probe", _ACCOUNT),
    Claim("metadata-blocked", "the program cannot reach the instance metadata", "probe", _ACCOUNT),
    Claim(
        "role-limited", "the program has the job role, which cannot write code", "probe", _ACCOUNT
    ),
    Claim("missing-key", "a program reads a missing S3 object as missing", "probe", _ACCOUNT),
    Claim("workspace-shared", "a second run sees the workspace of the first", "second"),
    Claim("array-fails", "an array with a failed child fails", "array"),
    Claim("explain-names", "explain names the child's exception", "array"),
    Claim("rerun-failed", "rerun --failed runs only the failed child", "array"),
    Claim("sweep-detached", "a detached sweep of two trials ends by itself", "sweep"),
    Claim("follow-order", "logs -f shows every line once, in order", "follow"),
    Claim("follow-latency", "logs -f shows a line soon after it was printed", "follow"),
    Claim("shell-runs", "shell runs a command in the run and returns its exit code", "shell"),
    Claim("cancel-stops", "cancel ends the run as cancelled", "cancel"),
    Claim("stop-signal", "the program receives SIGTERM and finds the stop file", "cancel"),
    Claim("grace-given", "the program keeps running for its grace period", "cancel"),
    Claim("host-lost", "a run that loses its host resumes from its checkpoint", "host"),
    Claim("gpu-smi", "nvidia-smi shows the requested GPU", "gpu", EVERYWHERE, "gpu"),
    Claim("gpu-driver", "the GPU driver is in the container", "gpu", _ACCOUNT, "gpu"),
    Claim("gpu-step", "PyTorch runs a training step on the GPU", "gpu", EVERYWHERE, "gpu"),
    Claim("nodes-meet", "two nodes connect to each other", "nodes", EVERYWHERE, "nodes"),
    Claim("all-reduce", "an all-reduce over two nodes gives the sum", "nodes", EVERYWHERE, "nodes"),
    Claim("as-submitter", "the submitter policy suffices to submit", "submitter", _SERVICES),
    Claim(
        "as-doctor", "the policies that doctor prints suffice to submit", "doctor-role", _SERVICES
    ),
    Claim("teardown", "teardown deletes the environment", "teardown"),
    Claim("nothing-left", "a search by tag and name finds nothing left", "search", _SERVICES),
)
BY_ID = {claim.id: claim for claim in CLAIMS}


def claims_of(step: str, world: World, options: Iterable[str] = ()) -> tuple[Claim, ...]:
    """The claims that a step tests in a world. `options`: `gpu` and `nodes`, if they were given."""
    wanted = {"", *options}
    return tuple(
        claim
        for claim in CLAIMS
        if claim.step == step and world in claim.where and claim.needs in wanted
    )


def why_not_asked(claim: Claim, world: World, options: Iterable[str]) -> str:
    """Why a claim cannot be tested there; "" if it can be."""
    if world not in claim.where:
        return "it needs AWS, or --endpoint" if "endpoint" in claim.where else "it needs AWS"
    if claim.needs and claim.needs not in options:
        return f"it needs --{claim.needs}"
    return ""


class Assumption(Struct, frozen=True):
    """A line of our documents or code that says "(U)" or "unverified".

    `words` are in the line, and `statement` says for people what is not verified. `claims` decide
    it in AWS, or `undecided` says why `prove` does not.
    """

    file: str
    words: str
    statement: str
    claims: tuple[str, ...] = ()
    undecided: str = ""


_NO_AMI = "prove builds no AMI: a build takes up to an hour"
_NO_EFA = "prove starts no hosts with EFA, which are large"
_DECISIONS = "docs/decisions/"

ASSUMPTIONS = (
    Assumption(
        "docs/ami.md", "build fails CloudFormation returns",
        "If an image build fails, CloudFormation returns to the previous image.",
        undecided=_NO_AMI,
    ),
    Assumption(
        "docs/ami.md", "`imagebuilder`, `logs` and S3's gateway",
        "The listed VPC endpoints suffice for an image build.", undecided=_NO_AMI,
    ),
    Assumption(
        "docs/ami.md", "Image Builder is free",
        "An image build takes 20 to 60 minutes and costs about $0.20.", undecided=_NO_AMI,
    ),
    Assumption(
        _DECISIONS + "020-instances.md", "takes a new version number",
        "AWS updates a compute environment in place to a new launch template version.",
        undecided="prove changes no launch template",
    ),
    Assumption(
        _DECISIONS + "021-gpus-are-counted.md", "the runtime and the mount",
        "NVIDIA's container runtime and the mounted driver work together.", ("gpu-smi",),
    ),
    Assumption(
        "docs/setup.md", "no run has used one",
        "A job reaches the Neuron chips of its host through the devices of its definition, with "
        "AWS's AMI and image for them.",
        undecided="prove uses no hosts with Neuron chips",
    ),
    Assumption(
        _DECISIONS + "022-instance-credentials.md", "on an instance",
        "The firewall rule keeps jobs from the instance metadata.", ("metadata-blocked",),
    ),
    Assumption(
        _DECISIONS + "027-notices.md", "on an instance",
        "A run learns of a spot interruption from its host.",
        undecided="prove uses no spot hosts",
    ),
    Assumption(
        _DECISIONS + "028-inside-a-run.md", "the target's form",
        "shell finds the container through ECS and Session Manager.", ("shell-runs",),
    ),
    Assumption(
        _DECISIONS + "031-archives.md", "FSx exports",
        "S3 lists a file soon after FSx has exported it.",
        undecided="prove makes no FSx file system",
    ),
    Assumption(
        _DECISIONS + "032-sharing.md", "`ListImports`",
        "An import in the outputs of a stack keeps the exporting stack from being deleted.",
        undecided="prove makes one environment, and sharing needs two",
    ),
    Assumption(
        _DECISIONS + "033-project-images.md", "micromamba",
        "An environment.yml builds with micromamba's image; ECS takes a secret's ARN without its "
        "last six characters.",
        undecided="prove uses neither an environment.yml nor secrets",
    ),
    Assumption(
        _DECISIONS + "034-cluster-view.md", "in ListContainerInstances",
        "ECS lists a host soon after its start.",
        ("host-lost",),
    ),
    Assumption(
        _DECISIONS + "047-efa.md", "That ECS takes that room",
        "A node of a multi-node job finds a free interface on a host's first network card.",
        undecided=_NO_EFA,
    ),
    Assumption(
        _DECISIONS + "047-efa.md", "That it takes both",
        "AWS Batch takes security groups in the compute environment and in the launch template's "
        "interfaces.",
        undecided=_NO_EFA,
    ),
    Assumption(
        _DECISIONS + "047-efa.md", "a capacity block needs none",
        "Hosts of a capacity reservation or block start without a placement group.",
        undecided=_NO_EFA,
    ),
    Assumption(
        _DECISIONS + "047-efa.md", "brings the NCCL plugin there",
        "AWS's EFA installer has NCCL's plugin for Debian 12.",
        undecided="prove builds no image with CUDA",
    ),
    Assumption(
        _DECISIONS + "035-capacity.md", "shows the overrides of the nodes",
        "DescribeJobs shows the overrides of a multi-node job's nodes.",
        undecided="prove moves no multi-node run to another queue",
    ),
    Assumption(
        _DECISIONS + "035-capacity.md", "one submission to a real block",
        "AWS Batch starts hosts in a capacity block with batchml's launch template.",
        undecided="a capacity block must be paid in advance",
    ),
    Assumption(
        _DECISIONS + "035-capacity.md", "is not bound to a queue",
        "A job can depend on a job of another queue.",
        undecided="prove submits no dependent jobs",
    ),
    Assumption(
        _DECISIONS + "046-missing-objects.md", "what S3 answers",
        "batchml tells a missing S3 object from one that may not be read.", ("missing-key",),
    ),
    Assumption(
        _DECISIONS + "045-environments.md", "a machine with a GPU",
        "uv installs PyTorch for the GPU of the machine.",
        undecided="prove does not check which build of PyTorch uv installs",
    ),
)  # fmt: skip
