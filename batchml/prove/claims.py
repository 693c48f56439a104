"""What `batchml prove` asks: the claims, and the assumptions of our documents that they decide."""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

# Where a proof runs: the embedded server; another implementation of AWS (`--endpoint`); AWS.
World = Literal["local", "endpoint", "aws"]
Need = Literal["", "gpu", "nodes"]  # the option without which a claim is not asked

EVERYWHERE: tuple[World, ...] = ("local", "endpoint", "aws")
_ACCOUNT: tuple[World, ...] = ("aws",)
_SERVICES: tuple[World, ...] = ("endpoint", "aws")


class Claim(Struct, frozen=True):
    """A sentence that is true or false. `step` asks it, in the worlds of `where`."""

    id: str
    text: str
    step: str
    where: tuple[World, ...] = EVERYWHERE
    needs: Need = ""


CLAIMS = (
    Claim("doctor", "doctor finds no problem", "doctor"),
    Claim("setup", "setup makes the environment", "setup"),
    Claim("plan-empty", "a second plan has nothing to do", "plan"),
    Claim("image-pushed", "image push brings the image to ECR", "image", _SERVICES),
    Claim("image-processor", "the image in ECR is for the hosts' processor", "image", _SERVICES),
    Claim("run-ends", "a run starts, and ends with its program's exit code", "probe"),
    Claim("code-there", "the program finds the code that was sent", "probe"),
    Claim("log-complete", "the log arrives complete and in order", "probe"),
    Claim("output-kept", "get brings a file that the program wrote", "probe"),
    Claim("checkpoint-kept", "get --checkpoints brings the checkpoint", "probe"),
    Claim("batch-reachable", "a program reaches AWS Batch", "probe"),
    Claim("shared-memory", "/dev/shm has half of the job's memory", "probe"),
    Claim("user-1000", "the program runs as user 1000", "probe", _ACCOUNT),
    Claim("metadata-blocked", "the program cannot reach the host's metadata", "probe", _ACCOUNT),
    Claim("role-limited", "the program's role is the job's, and limited", "probe", _ACCOUNT),
    Claim("missing-key", "S3 answers a GET of a missing key as missing", "probe", _ACCOUNT),
    Claim("workspace-shared", "a second run sees the workspace of the first", "second"),
    Claim("array-fails", "an array with a failed child fails", "array"),
    Claim("explain-names", "explain names the child's exception", "array"),
    Claim("rerun-failed", "rerun --failed runs the failed child alone", "array"),
    Claim("sweep-detached", "a detached sweep of two trials ends by itself", "sweep"),
    Claim("follow-order", "logs -f shows every line once, in order", "follow"),
    Claim("follow-latency", "logs -f shows a line soon after it was printed", "follow"),
    Claim("shell-runs", "shell runs a command in the run, and has its exit code", "shell"),
    Claim("cancel-stops", "cancel ends the run as cancelled", "cancel"),
    Claim("stop-signal", "the program gets the stop file and SIGTERM", "cancel"),
    Claim("grace-given", "the program may go on for its grace", "cancel"),
    Claim("host-lost", "a run that loses its host resumes from its checkpoint", "host"),
    Claim("gpu-smi", "nvidia-smi sees the GPU that was asked for", "gpu", EVERYWHERE, "gpu"),
    Claim("gpu-driver", "the GPU's driver is in the container", "gpu", _ACCOUNT, "gpu"),
    Claim("gpu-step", "PyTorch makes a training step on the GPU", "gpu", EVERYWHERE, "gpu"),
    Claim("nodes-meet", "two nodes find each other", "nodes", EVERYWHERE, "nodes"),
    Claim("all-reduce", "two nodes agree on a sum (all-reduce)", "nodes", EVERYWHERE, "nodes"),
    Claim("as-submitter", "the policy for submitters suffices to submit", "submitter", _SERVICES),
    Claim("as-doctor", "doctor's statement suffices to submit", "doctor-role", _SERVICES),
    Claim("teardown", "teardown deletes the environment", "teardown"),
    Claim("nothing-left", "a search by tag finds nothing", "search", _SERVICES),
)
BY_ID = {claim.id: claim for claim in CLAIMS}


def claims_of(step: str, world: World, options: Iterable[str] = ()) -> tuple[Claim, ...]:
    """The claims that a step asks in a world. `options`: `gpu` and `nodes`, if they were given."""
    wanted = {"", *options}
    return tuple(
        claim
        for claim in CLAIMS
        if claim.step == step and world in claim.where and claim.needs in wanted
    )


def why_not_asked(claim: Claim, world: World, options: Iterable[str]) -> str:
    """Why a claim cannot be asked there; "" if it can be."""
    if world not in claim.where:
        return "only AWS can show it"
    if claim.needs and claim.needs not in options:
        return f"without --{claim.needs}"
    return ""


class Assumption(Struct, frozen=True):
    """A line of our documents or code that says "(U)" or "unverified".

    `words` are in the line. `claims` decide it, or `undecided` says why `prove` does not.
    """

    file: str
    words: str
    claims: tuple[str, ...] = ()
    undecided: str = ""


_NO_AMI = "prove builds no machine image: that takes most of an hour"

ASSUMPTIONS = (
    Assumption("docs/ami.md", "build fails CloudFormation returns", undecided=_NO_AMI),
    Assumption("docs/ami.md", "`imagebuilder`, `logs` and S3's gateway", undecided=_NO_AMI),
    Assumption("docs/ami.md", "Image Builder is free", undecided=_NO_AMI),
    Assumption(
        "docs/checkpoints.md", "in its own way are all copied",
        undecided="the sentence is about files, and not about AWS",
    ),
    Assumption(
        "docs/decisions/020-instances.md", "takes a new version number",
        undecided="prove changes no launch template",
    ),
    Assumption("docs/decisions/021-gpus-are-counted.md", "the runtime and the mount", ("gpu-smi",)),
    Assumption(
        "docs/decisions/022-instance-credentials.md", "on an instance", ("metadata-blocked",)
    ),
    Assumption(
        "docs/decisions/027-notices.md", "on an instance",
        undecided="prove uses no spot host, whose notice nobody can ask for",
    ),
    Assumption("docs/decisions/028-inside-a-run.md", "the target's form", ("shell-runs",)),
    Assumption(
        "docs/decisions/031-archives.md", "FSx exports",
        undecided="prove makes no FSx file system: the smallest costs more than a proof may",
    ),
    Assumption(
        "docs/decisions/032-sharing.md", "`ListImports`",
        undecided="prove makes one environment, which shares nothing",
    ),
    Assumption(
        "docs/decisions/033-project-images.md", "micromamba",
        undecided="prove pushes one image, that of the job folder `python`",
    ),
    Assumption("docs/decisions/034-cluster-view.md", "in ListContainerInstances", ("host-lost",)),
    Assumption(
        "docs/decisions/035-capacity.md", "shows the overrides of the nodes",
        undecided="prove moves no multi-node run to another queue",
    ),
    Assumption(
        "docs/decisions/035-capacity.md", "one submission to a real block",
        undecided="a capacity block is paid in advance",
    ),
    Assumption(
        "docs/decisions/035-capacity.md", "is not bound to a queue",
        undecided="prove makes one queue for each kind of host",
    ),
    Assumption("docs/decisions/046-missing-objects.md", "what S3 answers", ("missing-key",)),
    Assumption(
        "docs/decisions/045-environments.md", "a machine with a GPU",
        undecided="prove asks PyPI only for what its jobs need, which is nothing",
    ),
)  # fmt: skip
