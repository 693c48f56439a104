"""Write the files of `batchml init`, all or none: a commented `batchml.toml` and a first job."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from batchml.config.environments import read_environments
from batchml.config.settings import CONFIG_NAME
from batchml.errors import ConfigError, UsageError
from batchml.model.environment import LOCAL

FIRST_JOB = "hello"

_SUFFIX = ".batchml-init"


def first_files(env: str, region: str) -> dict[str, str]:
    """Path -> text of the files for an environment in AWS.

    Raises UsageError for a name or a region that is not possible.
    """
    if env == LOCAL:
        raise UsageError(
            f"--env {env}: `local` is built in. Name an environment in AWS, such as --env dev."
        )
    config = CONFIG.replace("@ENV@", env).replace("@REGION@", region)
    try:
        read_environments(tomllib.loads(config), CONFIG_NAME)
    except ConfigError as error:
        raise UsageError("--env, --region: " + " ".join(error.mistakes)) from error
    except tomllib.TOMLDecodeError as error:  # a name with a quote or a newline in it
        text = f"--env {env!r}, --region {region!r}: names have letters, digits and hyphens."
        raise UsageError(text) from error
    job = f"jobs/{FIRST_JOB}"
    return {CONFIG_NAME: config, f"{job}/job.toml": JOB, f"{job}/train.py": TRAIN}


def write_files(folder: Path, files: Mapping[str, str], *, force: bool) -> list[Path]:
    """Write `files` below `folder`; after a failure nothing is changed.

    Raises UsageError if a file exists and `force` is not set; OSError.
    """
    targets = {folder / name: text for name, text in files.items()}
    existing = [str(path.relative_to(folder)) for path in targets if os.path.lexists(path)]
    if existing and not force:
        verb = "exists" if len(existing) == 1 else "exist"
        names = ", ".join(existing)
        raise UsageError(f"{names} {verb} in {folder}. To replace what exists: --force")
    made: list[Path] = []
    try:
        for path, text in targets.items():
            made += _make_folder(path.parent)
            _beside(path, "new").write_text(text, "utf-8")
        _swap(list(targets), force=force)
    except BaseException:
        _tidy(targets, made)
        raise
    _tidy(targets, [])
    return list(targets)


def _make_folder(folder: Path) -> list[Path]:
    """Create a folder and its parents; return the created folders, the outermost first."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _beside(path: Path, what: str) -> Path:
    """The path of a temporary file in the same folder. `what`: `new` or `old`."""
    return path.with_name(f".{path.name}{_SUFFIX}-{what}")


def _swap(paths: list[Path], *, force: bool) -> None:
    """Put the new files in place; after a failure put the old files back."""
    done: list[Path] = []
    try:
        for path in paths:
            if force and os.path.lexists(path):
                path.rename(_beside(path, "old"))
            done.append(path)
            os.link(_beside(path, "new"), path)  # fails if another process was faster
    except BaseException:
        for path in done:
            if _is_ours(path):
                path.unlink()
            if os.path.lexists(_beside(path, "old")):
                _beside(path, "old").rename(path)
        raise


def _is_ours(path: Path) -> bool:
    return path.exists() and path.samefile(_beside(path, "new"))


def _tidy(paths: Mapping[Path, str], made: list[Path]) -> None:
    """Delete the temporary files, and the folders that were made."""
    for path in paths:
        for what in ("new", "old"):
            _beside(path, what).unlink(missing_ok=True)
    for folder in reversed(made):
        try:
            folder.rmdir()
        except OSError:  # another process put a file there
            pass


# --- the texts ------------------------------------------------------------------------------
# In CONFIG, a line that begins with `#` and no space is a key with its default, or an example for a
# key without a default. A test removes every such `#`.

CONFIG = """\
# The environments in which batchml runs jobs. `local`, the embedded AWS Batch of this machine, is
# built in and needs no account. `batchml setup` makes the environments below in AWS.
# To change a key, remove its #. The value shown is the default, or an example.

default = "local"                     # the environment of commands without --env
#project = "NAME"                      # default: the folder; a name is the same on all machines

#[env.local]
#usd_per_hour = 0.0                    # what this machine costs, for `batchml cost`
#endpoints = {}                        # endpoints for jobs: { s3 = "http://127.0.0.1:9000" }

[env.@ENV@]
region = "@REGION@"
#profile = ""                          # of ~/.aws/config; default: AWS_PROFILE
#ami = "ecs-gpu"                       # AWS's AMI; build: setup builds one; ami-0123...: your own
#gpu_access = "toolkit"                # or driver-mount (privileged), the default with build
#jobs = []                             # jobs whose definitions setup registers: ["hello"]
data_cache = true                      # hosts keep copies of jobs' data sets, on NVMe disks
#data = []                             # data sets of jobs: ["s3://bucket/prefix"]
#secrets = []                          # ARNs of SSM parameters and secrets that jobs may use
#tags = {}                             # on all resources, such as { team = "research" }
controller_queue = "default"           # for detached sweeps, transfers and fallbacks
#quarantine = false                    # true: runs that ask for it may drain unfit hosts

#[env.@ENV@.network]
#cidr = "10.42.0.0/16"                 # range of the network that setup creates, /16 to /22
#zones = 6                             # subnets at most, one in each zone with the types
#egress = "nat"                        # or endpoints: only services of AWS can be reached
#vpc = "vpc-0123abcd"                  # an existing one, with the two below, without those above
#subnets = ["subnet-0123abcd"]
#security_groups = ["sg-0123abcd"]

#[env.@ENV@.storage]
#workspace = "efs"                     # the shared folder of all jobs: efs, fsx-lustre or none
#size = "1200 GiB"                     # of fsx-lustre: 1200 GiB, or n x 2400 GiB
#throughput = 125                      # of fsx-lustre, MB/s for each TiB: 125, 250, 500 or 1000
#shared_with = ""                      # an environment whose folder and network it uses instead

#[env.@ENV@.logs]
#retention_days = 90                   # a value of CloudWatch: 1, 3, 5, 7, 14, 30, 60, 90, ...

#[env.@ENV@.budget]
#usd = 500                             # a month; AWS sends a mail if the environment costs more
#email = "you@example.com"

# Instances start when jobs wait and stop afterwards. With min_vcpus = 0 none runs without jobs.
# For runs without GPUs. The quotas of a new account suffice for it.
[env.@ENV@.compute.cpu]
instance_types = ["m7i.large", "m7i.xlarge", "m7i.2xlarge"]
max_vcpus = 8                          # limits the cost; an m7i.xlarge has 4 vCPUs

# New accounts have GPU quotas of 0: `batchml doctor` prints the command that raises them.
[env.@ENV@.compute.gpu]
instance_types = ["g6.xlarge", "g5.xlarge"]   # or whole families: ["g6", "g5"]
max_vcpus = 16
#min_vcpus = 0                         # vCPUs that run, and cost, even without jobs
#spot = false
#allocation_strategy = "BEST_FIT_PROGRESSIVE" # spot: SPOT_PRICE_CAPACITY_OPTIMIZED
#ami = "ecs-gpu"                       # default: that of the environment
#bootstrap = ""                         # a script for hosts, relative to this file
#disk = "100 GiB"                      # of each instance; it holds the images
#placement_group = ""                  # cluster: hosts close together, for multi-node jobs
#efa = false                           # true, "auto": AWS's fast network between nodes
#capacity_reservation = ""             # cr-0123..., open or none
#capacity_block = ""                   # cr-0123...: hosts that were paid in advance
#scale_down_delay = 0                  # time for which an idle instance stays: 0, "20m" to "7d"
#stop_timeout = "110s"                 # from the stop signal to the kill, "30s" to "120s"
#tags = {}                             # of its instances

# The same on spot: several times cheaper, but AWS may reclaim an instance with two minutes' notice.
[env.@ENV@.compute.gpu-spot]
instance_types = ["g6.xlarge", "g5.xlarge"]
spot = true
max_vcpus = 16
#bid_percentage = 100                  # of the on-demand price, at most

# Runs without a queue go to `default`; with GPUs, to the first queue whose hosts have GPUs. A job
# with gpus = "auto" uses a GPU in a queue that has some: batchml submit --queue gpu lenet
[env.@ENV@.queues.default]
compute = ["cpu"]

[env.@ENV@.queues.gpu]
compute = ["gpu-spot", "gpu"]          # in order of use
#priority = 1                          # queues with a higher number are served first
# The time after which a stuck run is cancelled: "10m" to "24h"; 0: never. no-capacity has no
# default, because GPUs are worth a wait.
#time_limits = { too-large-for-compute = "30m", too-large-for-instances = "30m" }

# Without this section runs start in the order of their submission.
#[env.@ENV@.queues.gpu.fair_share]
#shares = { research = 2.0, students = 1.0 }  # a share of weight 2 gets twice that of one of 1
#decay = 3600                          # seconds, or up to "7d": the time for which use counts
#reservation = 0                       # percent kept free for shares without a run
"""

JOB = """\
# A first job: it fits a line to points, in seconds, anywhere. Run it: batchml submit --wait hello
image = "python"                       # a folder below images/, or docker.io/library/python:3.12
command = ["python", "train.py", "--steps", "{steps}", "--lr", "{lr}"]

[params]                               # batchml submit --wait hello -p lr=0.5
steps = 200
lr = 0.1

[resources]
vcpus = 1
memory = "256 MiB"

[metrics]                              # read from the output
loss = 'loss=(nan|-?inf|[0-9.e+-]+)'
"""

TRAIN = '''\
"""Fit a line to points by gradient descent, and print the loss."""

import argparse
import json
import os
import random


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()

    draw = random.Random(0)
    xs = [draw.uniform(-1, 1) for _ in range(500)]
    points = [(x, 3 * x + 1 + draw.gauss(0, 0.1)) for x in xs]
    slope = offset = 0.0
    for step in range(1, options.steps + 1):
        errors = [(slope * x + offset - y, x) for x, y in points]
        loss = sum(error * error for error, _ in errors) / len(errors)
        slope -= options.lr * 2 * sum(error * x for error, x in errors) / len(errors)
        offset -= options.lr * 2 * sum(error for error, _ in errors) / len(errors)
        if step % 50 == 0 or step == options.steps:
            print(f"step {step} loss={loss:.6f} slope={slope:.3f} offset={offset:.3f}", flush=True)

    # The files in this folder become the run's outputs.
    folder = os.environ.get("BATCHML_OUTPUT_DIR", ".")
    with open(os.path.join(folder, "line.json"), "w") as file:
        json.dump({"slope": slope, "offset": offset}, file)


if __name__ == "__main__":
    main()
'''
