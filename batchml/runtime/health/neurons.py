"""Check a run's Neuron chips (Trainium, Inferentia): their nodes in /dev, the driver's counters.

BATCHML_NEURONS has the number of chips that the job requested on each node. Sources: AWS Neuron,
"Neuron Sysfs User Guide" and "Neuron Runtime Troubleshooting"; aws/eks-node-monitoring-agent (the
kernel's lines). Driver 2.31 has moved counters, so they are searched for by their names. The
kernel's log is only read where the container may.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Dict, List, Tuple

from batchml.runtime.health.checks import NOT_CHECKED, REPLACE, RETRY, HostCheck
from batchml.runtime.health.efa import sys_folder
from batchml.runtime.processes import read
from batchml.runtime.protocol.launch import NEURONS
from batchml.runtime.protocol.variables import number_of

DEVICES = "devices/virtual/neuron_device"  # below /sys

# Counters of uncorrected errors since the driver was loaded: of DRAM, of DRAM that can be repaired,
# of SRAM. A counter is a folder with the file `total`.
MEMORY, REPAIRABLE, SRAM = COUNTERS = (
    "mem_ecc_uncorrected", "mem_ecc_repairable_uncorrected", "sram_ecc_uncorrected",
)  # fmt: skip

_NODE = re.compile(r"neuron([0-9]+)")
_DEPTH = 5  # folders below that of a chip


def chip_numbers(names: Iterable[str]) -> List[int]:
    """The numbers of the chips among the names in /dev: `neuron0`, `neuron1`."""
    found = (_NODE.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def asked_neurons(environ: Mapping[str, str]) -> int:
    """The number of chips that the run requested on this node."""
    return number_of(environ.get(NEURONS), 0)


def run_chips(environ: Mapping[str, str], dev: str = "/dev") -> List[int]:
    """The numbers of the chips that this run has: the first ones, as its definition lists them."""
    try:
        return chip_numbers(os.listdir(dev))[: asked_neurons(environ)]
    except OSError:
        return []


def core_count(sys: str, chip: int) -> int:
    """The NeuronCores of a chip, which its ranks share; 1 if the driver does not say.

    A program on Trainium2 sees two cores as one. Source: AWS Neuron, "Logical NeuronCore
    configuration".
    """
    folder = f"{sys}/{DEVICES}/neuron{chip}"
    cores = number_of(read(f"{folder}/core_count").strip(), 1)
    is_paired = read(f"{folder}/info/architecture/device_name").strip() == "Trainium2"
    return max(1, cores // 2 if is_paired else cores)


def uncorrected_errors(sys: str, chip: int) -> Dict[str, int]:
    """The counters of a chip's uncorrected errors, by name; without those that it lacks."""
    top = f"{sys}/{DEVICES}/neuron{chip}"
    found: Dict[str, int] = {}
    for folder, folders, files in os.walk(top):
        if folder.count(os.sep) - top.count(os.sep) >= _DEPTH:
            folders.clear()
        for name in COUNTERS:
            path = f"{name}/total" if name in folders else name
            if name in folders or name in files:
                text = read(os.path.join(folder, path)).strip()
                if text.isdigit():
                    found[name] = found.get(name, 0) + int(text)
    return found


# --- Checks ---------------------------------------------------------------------------------------

# AWS's advice: end an instance with one of the first two; load the driver again after the third.
_ERRORS: Dict[str, Tuple[int, str]] = {
    MEMORY: (REPLACE, "uncorrectable errors of its memory"),
    SRAM: (REPLACE, "uncorrectable errors of its SRAM"),
    REPAIRABLE: (RETRY, "errors of its memory that a restart of the driver repairs"),
}
_KERNEL = re.compile(r"NEURON_HW_ERR=(\w+)\b.*?\bnd-id=(\d+)(?:.*?\baction=(\w+))?")
_MAX_LOG = 4 << 20  # bytes of the kernel's log


def check_neurons(
    environ: Mapping[str, str], dev: str = "/dev", kernel_log: str = "/dev/kmsg"
) -> List[HostCheck]:
    """The results for all chips of the run; empty if it requested none."""
    asked, chips, sys = asked_neurons(environ), run_chips(environ, dev), sys_folder(environ)
    if len(chips) < asked:
        text = f"{len(chips)} of the run's {asked} are in {dev}"
        severity = REPLACE if chips else RETRY  # without any, the AMI or the type may be the cause
        return [HostCheck("Neuron chips", severity, text, is_setup=not chips)]
    checks: List[HostCheck] = []
    for chip in chips:
        name = f"neuron{chip}"
        if os.access(f"{dev}/{name}", os.R_OK | os.W_OK):
            checks += check_counters(name, uncorrected_errors(sys, chip))
        else:
            text = f"the run may not open {dev}/{name}"
            checks.append(HostCheck(name, RETRY, text, is_setup=True))
    if chips and not checks:
        checks.append(HostCheck("Neuron chips", NOT_CHECKED, "the driver does not count errors"))
    return checks + kernel_errors(read_kernel_log(kernel_log), chips)


def check_counters(
    name: str, counts: Mapping[str, int], before: Mapping[str, int] = {}
) -> List[HostCheck]:
    """Check the counters of a chip's errors, without those that were there `before`.

    Empty if the driver has no counters.
    """
    found = []
    for counter in COUNTERS:
        count = counts.get(counter, 0) - before.get(counter, 0)
        if count > 0:
            severity, words = _ERRORS[counter]
            found.append(HostCheck(name, severity, f"{count} {words}"))
    return found or [HostCheck(name)] if counts else []


def kernel_errors(lines: Iterable[str], chips: Sequence[int]) -> List[HostCheck]:
    """The errors of these chips that the driver has written to the kernel's log."""
    found: Dict[Tuple[str, str], HostCheck] = {}
    for line in lines:
        match = _KERNEL.search(line)
        if match and int(match[2]) in chips:
            severity = REPLACE if match[3] == "TERMINATE_INSTANCE" else RETRY
            name = f"neuron{match[2]}"
            found[name, match[1]] = HostCheck(name, severity, f"the kernel reports {match[1]}")
    return list(found.values())


def read_kernel_log(path: str = "/dev/kmsg") -> List[str]:
    """The lines of the kernel's log; empty where this process may not read it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    lines: List[str] = []
    size = 0
    try:
        while size < _MAX_LOG:
            try:
                data = os.read(descriptor, 8192)  # of /dev/kmsg: one record
            except BlockingIOError:  # all is read
                break
            except BrokenPipeError:  # a record was overwritten: the next one follows
                continue
            if not data:
                break
            size += len(data)
            lines += data.decode("utf-8", "replace").splitlines()
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return lines
