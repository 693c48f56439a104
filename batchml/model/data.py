"""`[data]` of a job.toml: the data sets that a host copies once for all its runs."""

import re
from collections.abc import Collection, Iterator, Mapping

from batchml.errors import SPELT_ALIKE, did_you_mean
from batchml.runtime.protocol.variables import DATA_CACHE, STAGED, data_variable

S3 = "s3://"
MAX_DATA = 20  # data sets of one job: AWS Batch limits the variables of a run
MAX_ADDRESS = 1100  # characters; a key of S3 has up to 1,024
_NAME = r"[a-z][a-z0-9_]{0,39}"
_BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"  # Amazon S3 User Guide, naming rules
_FOLDERS = ("{workspace}", "{data}")
_TAKEN = {
    "BATCHML_DATA_DIR": "the folder of data sets",
    DATA_CACHE: "the folder of the cache",
    STAGED: "the time that copying took",
}
_PARTITIONS = (("cn-", "aws-cn"), ("us-gov-", "aws-us-gov"))  # AWS General Reference, ARNs
_EXAMPLE = 'Write "s3://BUCKET/PREFIX", "{workspace}/FOLDER" or the absolute path of a folder.'


def data_mistakes(data: Mapping[str, str]) -> Iterator[str]:
    """The mistakes in `[data]`."""
    if len(data) > MAX_DATA:
        yield f"data: has {len(data)} data sets; at most {MAX_DATA}. Put them below one prefix."
    for name, address in data.items():
        if not re.fullmatch(_NAME, name):
            yield (
                f"data.{name[:80]}: is no name for a data set. Allowed: 1-40 lower-case letters, "
                f"digits and _, starting with a letter."
            )
        elif data_variable(name) in _TAKEN:
            yield f"data.{name}: {data_variable(name)} is {_TAKEN[data_variable(name)]}. Rename it."
        yield from (f"data.{name[:80]}: {mistake}" for mistake in _address_mistakes(address))


def _address_mistakes(address: str) -> Iterator[str]:
    shown = repr(address[:120])
    if len(address) > MAX_ADDRESS or "\0" in address:
        yield f"found {shown}, of {len(address)} characters. {_EXAMPLE}"
    elif address.startswith(S3):
        bucket = address.removeprefix(S3).partition("/")[0]
        if not re.fullmatch(_BUCKET, bucket):
            yield f"found {shown}: {bucket!r} is no name of a bucket. {_EXAMPLE}"
    elif not address.startswith(("/", *(f"{folder}/" for folder in _FOLDERS))):
        yield f"found {shown}. {_EXAMPLE}"
    elif ".." in address.split("/"):
        yield f"found {shown}, which has `..`. {_EXAMPLE}"


def misspelt_data(given: Mapping[str, str], known: Collection[str]) -> list[str]:
    """The mistakes in new names of `--data` that are spelt nearly like a data set of the job.

    The job would train on its own data set, and ignore the new one.
    """
    found = []
    for name in given:
        meant = "" if name in known else did_you_mean(name, known, SPELT_ALIKE)
        if meant:
            found.append(
                f"--data {name}=...: [data] has no such name.{meant} If {name} is a data set of "
                "its own, add it to [data] of job.toml."
            )
    return found


def unlisted_data(data: Mapping[str, str], listed: tuple[str, ...], bucket: str) -> dict[str, str]:
    """The data sets in S3 that an environment does not let its jobs read: name -> address.

    `listed`: the prefixes under `data` of the environment. `bucket`: the environment's own, of
    which jobs may read `data/`, `workspace/` and `runs/`.
    """
    own = [f"{S3}{bucket}/{folder}" for folder in ("data", "workspace", "runs") if bucket]
    return {
        name: address
        for name, address in data.items()
        if address.startswith(S3) and not any(_is_below(address, each) for each in (*listed, *own))
    }


def _is_below(address: str, prefix: str) -> bool:
    return f"{address.rstrip('/')}/".startswith(f"{prefix.rstrip('/')}/")


def prefix_mistakes(prefixes: tuple[str, ...]) -> Iterator[str]:
    """The mistakes in `data` of an environment: the prefixes that its jobs may read."""
    for prefix in prefixes:
        if not prefix.startswith(S3) or any(_address_mistakes(prefix)) or "*" in prefix:
            yield f'data: found {prefix[:120]!r}. Write "s3://BUCKET/PREFIX".'


def prefix_arns(prefixes: tuple[str, ...], region: str) -> tuple[list[str], list[str]]:
    """The ARNs of the objects below prefixes, and of their buckets."""
    partition = next((p for start, p in _PARTITIONS if region.startswith(start)), "aws")
    paths = [prefix.removeprefix(S3).rstrip("/") for prefix in prefixes]
    buckets = dict.fromkeys(path.partition("/")[0] for path in paths)
    ends = [end for path in paths for end in (path, f"{path}/*") if "/" in end]
    return (
        [f"arn:{partition}:s3:::{end}" for end in ends],
        [f"arn:{partition}:s3:::{bucket}" for bucket in buckets],
    )
