"""The folders of a proof: the first stays, with record and report; the second is for its jobs.

STATE/proofs/ID/   record.json, batchml.toml, recording.jsonl, proof.html, proof.json
TEMP/batchml-ID-*/   the jobs, and on `local` the state folder of the proof's own server

The record is written before anything is made, so that a later proof finds what a killed proof left.
"""

import fcntl
import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.prove.claims import World
from batchml.runtime.storage.files import is_locked, read_json, write_atomically

FOLDER = "proofs"  # in the state folder
_LOCK = "lock"
_RECORD = "record.json"
_PROBE = Path(__file__).with_name("probe")


class ProofRecord(Struct, frozen=True):
    """What a proof has made, or is about to make. `made` is False once it is taken away."""

    id: str
    began: float  # seconds since the epoch
    world: World
    env: str
    config: str  # the path of the batchml.toml that describes the environment
    work: str  # the folder of its jobs
    made: bool = False
    kept: bool = False  # --keep: the user takes it away
    throw_away: bool = True
    endpoint: str = ""

    @property
    def home(self) -> str:
        """The state folder of the proof's commands."""
        return os.path.join(self.work, "home")

    def removal(self) -> str:
        """The shell command that removes what the proof has made."""
        if self.world == "local":
            home = shlex.quote(self.home)
            return f"BATCHML_HOME={home} batchml local stop; rm -r {shlex.quote(self.work)}"
        return f"batchml prove --remove {self.id}"


class ProofFolder:
    """The folders of one proof, which it holds by a lock until it ends, in whatever way."""

    def __init__(self, root: Path, record: ProofRecord, lock: IO[bytes]) -> None:
        self.root = root
        self.record = record
        self._lock = lock

    @property
    def call_log(self) -> Path:
        """The file of BATCHML_RECORDING: private, because it has the account's names."""
        return self.root / "calls.jsonl"

    @property
    def recording(self) -> Path:
        return self.root / "recording.jsonl"

    @property
    def job(self) -> Path:
        """The folder of the job that looks around."""
        return Path(self.record.work) / "jobs" / "probe"

    def update(self, **changes: bool) -> None:
        """Change fields of the record, on disk: `made`, `kept`."""
        self.record = replace(self.record, **changes)
        write_atomically(str(self.root / _RECORD), msgspec.json.encode(self.record))

    def close(self) -> None:
        """Delete the folder of jobs, unless something is left in it, and let the lock go."""
        if not self.record.made:
            shutil.rmtree(self.record.work, ignore_errors=True)
        self._lock.close()


def make_folder(
    state: Path, name: str, config: str, *, began: float, world: World, env: str,
    throw_away: bool = True, endpoint: str = "", config_path: str = "",
    temporary: Path | None = None, images: Sequence[Path] = (),
) -> ProofFolder:  # fmt: skip
    """Make the folders of a proof. `name` is its id; `config` is the content of a batchml.toml of
    its own, unless it uses the one at `config_path`. `temporary` is by default the system's folder.
    `images`: folders of images, of which the first `python` becomes the proof's own image, whose
    repository in ECR nobody else uses.

    Raises OSError; FileExistsError for an id that is taken.
    """
    root = state / FOLDER / name
    root.mkdir(parents=True, mode=0o700)
    lock = open(root / _LOCK, "wb")  # noqa: SIM115  (closed by `close`)
    fcntl.flock(lock, fcntl.LOCK_EX)
    work = tempfile.mkdtemp(prefix=f"batchml-{name}-", dir=temporary)
    own = root / "batchml.toml"
    if not config_path:
        own.write_text(config, "utf-8")
    record = ProofRecord(
        name, began, world, env, config_path or str(own), work,
        throw_away=throw_away, endpoint=endpoint,
    )  # fmt: skip
    folder = ProofFolder(root, record, lock)
    folder.update(made=False)
    shutil.copytree(_PROBE, folder.job, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    if images:
        _copy_image(folder, images)
    return folder


def _copy_image(folder: ProofFolder, images: Sequence[Path]) -> None:
    own = Path(folder.record.work) / "images"
    source = next(each / "python" for each in images if (each / "python").is_dir())
    shutil.copytree(source, own / folder.record.id)
    for each in images[:-1]:  # the project's; batchml's own are found in any case
        for other in each.iterdir() if each.is_dir() else ():
            os.symlink(other, own / other.name)
    job = folder.job / "job.toml"
    job.write_text(job.read_text("utf-8").replace('"python"', f'"{folder.record.id}"', 1), "utf-8")


def find_leftovers(state: Path) -> list[ProofRecord]:
    """The records of proofs that were killed and have left something, the oldest first."""
    return [
        record for record in read_records(state)
        if (record.made or os.path.isdir(record.work)) and not record.kept
        and not is_locked(str(state / FOLDER / record.id / _LOCK))
    ]  # fmt: skip


def read_records(state: Path) -> list[ProofRecord]:
    """The records of all proofs of this state folder, the oldest first."""
    found = []
    for path in (state / FOLDER).glob(f"*/{_RECORD}"):
        try:
            found.append(msgspec.convert(read_json(str(path)), ProofRecord))
        except (OSError, ValueError, msgspec.ValidationError):
            continue  # the file is of a later version, or cut off
    return sorted(found, key=lambda record: record.began)


def reopen_folder(state: Path, record: ProofRecord) -> ProofFolder | None:
    """Lock the folders of a proof that has ended; None if another process holds them."""
    root = state / FOLDER / record.id
    lock = open(root / _LOCK, "wb")  # noqa: SIM115  (closed by `close`)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return ProofFolder(root, record, lock)


def aws_config(name: str, region: str, profile: str, options: tuple[str, ...] = ()) -> str:
    """The batchml.toml of a throw-away environment in AWS: one kind of host, four vCPUs at most."""
    env = f"env.{name}"
    lines = [
        f'default = "{name}"', f'project = "{name}"', "", f"[{env}]", f'region = "{region}"',
        *([f'profile = "{profile}"'] if profile else []), 'controller_queue = "default"',
        f"tags = {{ proof = \"{name}\" }}", "", f"[{env}.logs]", "retention_days = 1", "",
        f"[{env}.compute.cpu]", 'instance_types = ["m7i.large", "m6i.large"]', "max_vcpus = 4",
        "", f"[{env}.queues.default]", 'compute = ["cpu"]',
    ]  # fmt: skip
    if "gpu" in options:
        lines += [
            "", f"[{env}.compute.gpu]", 'instance_types = ["g6.xlarge", "g4dn.xlarge"]',
            "max_vcpus = 4", "", f"[{env}.queues.gpu]", 'compute = ["gpu"]',
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def local_config(name: str) -> str:
    """The batchml.toml of a proof of the embedded server."""
    return (
        f'project = "{name}"\n\n[env.local.compute.cpu]\ninstance_types = ["m7i.large"]\n'
        'max_vcpus = 4\n\n[env.local.queues.default]\ncompute = ["cpu"]\n'
    )
