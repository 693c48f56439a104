"""Which host this is, and a run's books of hosts that were unfit for it.

In the run's store: `hosts/bad/HOST`, what was wrong with it, for all children and attempts of the
run; `hosts/tried/CHILD/ATTEMPT-NODE`, a try that was in vain, by which tries are counted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from batchml.runtime.health.checks import REPLACE, RETRY, WORDS, Check, worst
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.store import BRIEF, Store, open_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.storage.credentials import Ask

METADATA = "ECS_CONTAINER_METADATA_URI_V4"  # only the ECS agent sets it
_BAD, _TRIED = "hosts/bad/", "hosts/tried/"
_NO_NAME = re.compile(r"[0-9a-f]{12}")  # of a container, by Docker
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


def host_id(environ: Mapping[str, str], ask: Optional[Ask] = None) -> str:
    """The EC2 instance's id; on `local` a node's address, else this machine's name.

    Where IMDS is closed to containers it is a name made from the boot. BATCHML_HOST_ID says another
    one. Source: EC2 User Guide, "Use the Instance Metadata Service".
    """
    told = environ.get("BATCHML_HOST_ID") or environ.get("BATCHML_NODE_ADDRESS")
    if told:
        return told
    name = os.uname().nodename
    if environ.get(METADATA):
        # A container's own name goes with it, and the boot is that of the host.
        return _instance_id(environ, ask) or _machine() or name
    return _machine() or name if _NO_NAME.fullmatch(name) else name


def _instance_id(environ: Mapping[str, str], ask: Optional[Ask]) -> str:
    """Empty where IMDS does not answer: it may be closed to containers."""
    from http.client import HTTPException

    from batchml.runtime.storage import credentials

    ask = ask or credentials.ask
    base = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    try:
        token = ask("PUT", f"{base}/latest/api/token", lifetime, 2.0).decode()
        headers = {"X-aws-ec2-metadata-token": token}
        return ask("GET", f"{base}/latest/meta-data/instance-id", headers, 2.0).decode().strip()
    except (OSError, ValueError, HTTPException):
        return ""


def _machine() -> str:
    """A name by which containers know the machine that they share, until it starts again."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"machine-{file.read()[:8]}"
    except OSError:
        return ""


class Unfit(NamedTuple):
    """A host that was found unfit, and why."""

    host: str
    why: str
    is_for_good: bool = True  # else it may have been put right since: a full disk, for one


class Books:
    """The books of one run. Every method raises StoreError when the store cannot be had."""

    def __init__(self, store: Store, env: RuntimeEnv, node: str = "0") -> None:
        self._store = store
        self._child = str(env.array_index or 0)
        self._try = f"{env.attempt}-{node}"

    @classmethod
    def open(cls, env: RuntimeEnv, environ: Mapping[str, str]) -> Books:
        node = environ.get("AWS_BATCH_JOB_NODE_INDEX", "0")
        return cls(open_store(env.store, environ, patience=BRIEF), env, node)

    def has_any(self) -> bool:
        return bool(self._store.keys(_BAD))

    def find(self, host: str) -> Optional[Unfit]:
        """What was found wrong with it."""
        return _read(self._store.get(_BAD + _name(host)))

    def enter(self, host: str, checks: Sequence[Check], now: float) -> None:
        """Write down what is wrong with it, with all that was asked."""
        record = {
            "host": host,
            "why": reason(checks),
            "is_for_good": worst(checks) >= REPLACE,
            "at": round(now, 3),
            "checks": [[each.name, WORDS[each.severity], each.text] for each in checks],
        }
        self._store.put(_BAD + _name(host), json.dumps(record).encode())

    def count(self, host: str, why: str) -> List[Unfit]:
        """Write down that this try was in vain; all such tries of this child, first to last."""
        prefix = f"{_TRIED}{self._child}/"
        own = json.dumps({"host": host, "why": why}).encode()
        self._store.put(prefix + self._try, own)
        numbered = sorted((_order(key[len(prefix) :]), key) for key in self._store.keys(prefix))
        found = [_read(self._store.get(key)) for _, key in numbered]
        return [each for each in found if each is not None]


def reason(checks: Sequence[Check]) -> str:
    """What of it makes a host unfit, in words."""
    return "; ".join(check.words() for check in checks if check.severity >= RETRY)


def _read(data: Optional[bytes]) -> Optional[Unfit]:
    try:
        found: Dict[str, Any] = json.loads(data or b"")
        return Unfit(str(found["host"]), str(found["why"]), bool(found.get("is_for_good", True)))
    except (ValueError, TypeError, KeyError):
        return None


def _order(name: str) -> List[int]:
    return [int(part) if part.isdigit() else 0 for part in name.split("-")]


def _name(host: str) -> str:
    """A host's id as a part of a key."""
    return "h-" + _UNSAFE.sub("-", host)[:120]
