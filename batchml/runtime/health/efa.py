"""Count this host's EFA devices, read their counters, and name the host's instance type.

BATCHML_EFA has the number of interfaces that the environment gives each node. A host with fewer
devices is unfit: interfaces cannot be attached to a running instance.
Sources: EC2 User Guide, "Elastic Fabric Adapter"; aws/eks-node-monitoring-agent (ids, counters).
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Callable, Dict, List

from batchml.runtime.health.checks import MONITOR, REPLACE, RETRY, HostCheck
from batchml.runtime.health.host_records import host_id
from batchml.runtime.processes import read
from batchml.runtime.protocol.variables import EFA, number_of

SYS = "BATCHML_SYS"  # a folder in place of /sys, to simulate devices; `{host}` is the host's id

_VENDOR, _DEVICE = "0x1d0f", "0xefa"  # Amazon; all generations of EFA begin with this
_COUNTERS = (
    "rx_drops", "retrans_pkts", "retrans_timeout_events", "unresponsive_remote_events",
    "impaired_remote_conn_events",
)  # fmt: skip
_LATE_TRIES, _LATE_PAUSE = 3, 5.0  # p5en hosts show their devices late
_TYPE = re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+")


def asked_interfaces(environ: Mapping[str, str]) -> int:
    """The number of EFA interfaces that each node of the run was given."""
    return number_of(environ.get(EFA), 0)


def check_efa(
    environ: Mapping[str, str], dev: str = "/dev", sleep: Callable[[float], None] = time.sleep
) -> List[HostCheck]:
    """Compare the EFA devices of this host with what was asked for. Empty if nothing was."""
    asked = asked_interfaces(environ)
    if not asked:
        return []
    devices = efa_devices(sys_folder(environ))
    if len(devices) < asked:
        cards = _cards_of(instance_type(environ))
        for _ in range(_LATE_TRIES if cards >= asked else 0):
            sleep(_LATE_PAUSE)
            devices = efa_devices(sys_folder(environ))
            if len(devices) >= asked:
                break
        else:
            # Without any, the launch template or the AMI is as likely the cause as the host.
            text = _describe_missing(devices, asked, environ)
            severity = REPLACE if devices else RETRY
            return [HostCheck("EFA", severity, text, is_setup=not devices)]
    closed = _closed_nodes(f"{dev}/infiniband")
    if closed:
        text = f"{', '.join(closed)} cannot be opened, for which libfabric may leave out EFA"
        return [HostCheck("EFA", MONITOR, text)]
    return [HostCheck("EFA")]


def _cards_of(type_name: str) -> int:
    """The EFA interfaces that a type can have; 0 for a type that is unknown."""
    from batchml.runtime.protocol.instance_types import devices_of  # late: it is rarely needed

    devices = devices_of(type_name) if type_name else None
    return devices.efa_cards if devices is not None else 0


def _describe_missing(devices: Sequence[str], asked: int, environ: Mapping[str, str]) -> str:
    have = f"only {', '.join(devices)}" if devices else "none"
    text = f"{len(devices)} of {asked} devices are there ({have} in /sys/class/infiniband)"
    name = instance_type(environ)
    few = name and _cards_of(name) < asked
    return f"{text}: {name} has at most {_cards_of(name)}" if few else text


def efa_devices(sys: str) -> List[str]:
    """The names of the EFA devices, such as `rdmap0s6`."""
    top = f"{sys}/class/infiniband"
    found = []
    for name in _names(top):
        vendor = read(f"{top}/{name}/device/vendor").strip().lower()
        device = read(f"{top}/{name}/device/device").strip().lower()
        if vendor == _VENDOR and device.startswith(_DEVICE):
            found.append(name)
    return found


def efa_counters(sys: str) -> Dict[str, int]:
    """What all EFA devices counted since they were started; empty without such counters."""
    total: Dict[str, int] = {}
    for name in efa_devices(sys):
        ports = f"{sys}/class/infiniband/{name}/ports"
        for port in _names(ports):
            for counter in _COUNTERS:
                text = read(f"{ports}/{port}/hw_counters/{counter}").strip()
                if text.isdigit():
                    total[counter] = total.get(counter, 0) + int(text)
    return total


def counted_since(before: Mapping[str, int], after: Mapping[str, int]) -> Dict[str, int]:
    """The differences of two results of `efa_counters`."""
    return {name: max(0, count - before.get(name, 0)) for name, count in after.items()}


def instance_type(environ: Mapping[str, str]) -> str:
    """The EC2 instance type of this host, such as `p5.48xlarge`; empty on other machines.

    Nitro instances have it as their product name, so no service needs to be asked.
    """
    name = read(f"{sys_folder(environ)}/devices/virtual/dmi/id/product_name").strip()
    return name if _TYPE.fullmatch(name) else ""


def sys_folder(environ: Mapping[str, str]) -> str:
    path = environ.get(SYS) or "/sys"
    return path.replace("{host}", host_id(environ)) if "{host}" in path else path


def _closed_nodes(folder: str) -> List[str]:
    """The verbs devices of a folder that this process may not open.

    Source: ofiwg/libfabric issue 12708: with one of these the provider for EFA finds no device.
    """
    closed = []
    for name in _names(folder):
        if name.startswith("uverbs"):
            try:
                os.close(os.open(f"{folder}/{name}", os.O_RDWR | os.O_CLOEXEC))
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EPERM):
                    closed.append(f"{folder}/{name}")
    return closed


def _names(folder: str) -> List[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
