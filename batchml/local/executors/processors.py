"""The processors of this machine that an attempt has for itself.

An attempt gets as many processors as it has vCPUs, which no other attempt uses. If too few are
free, it may use all, and the system shares them out (docs/decisions/041-processors.md).

A runner claims each of its attempt's processors by the name of an abstract Unix socket. So all
servers on this machine see the claims, they survive a server that is killed, and none is left of a
runner that is gone. A server looks up single names: a list of all sockets takes longer the more
programs run on the machine. Source: unix(7), "Abstract sockets".

Standard library only, because runners import it.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

_CLAIM = "\0batchml/processors/"  # the start of a socket's name; the number follows
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


class Processor(NamedTuple):
    """A processor by Linux's number, and its core, which several processors may share."""

    number: int
    core: tuple[int, int] = (0, 0)  # package, number in the package


def find_processors() -> tuple[Processor, ...]:
    """The processors that this process may use, those of a core side by side; none if not Linux."""
    try:
        numbers = os.sched_getaffinity(0)
    except AttributeError:
        return ()
    found = [Processor(number, _core_of(number)) for number in numbers]
    return tuple(sorted(found, key=lambda each: (each.core, each.number)))


def _core_of(number: int) -> tuple[int, int]:
    try:
        package, core = (
            int(_read(_TOPOLOGY.format(number, name)))
            for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):
        return 0, number
    return package, core


def choose_processors(
    processors: Sequence[Processor], used: Iterable[int], count: int
) -> tuple[int, ...]:
    """The processors for a new attempt with `count` vCPUs; empty if too few are free.

    Cores of which no processor is used come first: one processor has its core alone while there is
    room, and two are those of one core.
    """
    taken = set(used)
    free = [each for each in processors if each.number not in taken]
    if count > len(free):
        return ()
    busy = Counter(each.core for each in processors if each.number in taken)
    chosen = sorted(free, key=lambda each: (busy[each.core], each.core, each.number))
    return tuple(sorted(each.number for each in chosen[:count]))


def claimed_processors(numbers: Iterable[int]) -> set[int]:
    """Those of `numbers` that runners of any server on this machine have claimed."""
    try:
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:  # this process has too many open files
        return set()
    with probe:
        return {number for number in numbers if _is_claimed(probe, number)}


def _is_claimed(probe: socket.socket, number: int) -> bool:
    try:
        probe.connect(f"{_CLAIM}{number}")
    except OSError:
        return False
    return True


class MachineProcessors(NamedTuple):
    """The processors that a server may give to attempts. `claimed` returns those of the given ones
    that are in use.
    """

    own: Sequence[Processor] = ()
    claimed: Callable[[Iterable[int]], set[int]] = claimed_processors

    def choose(self, used: Iterable[int], count: int) -> tuple[int, ...]:
        """As `choose_processors`. `used` are those of this server's attempts, some of which have
        not claimed them yet.
        """
        taken = set(used)
        others = (each.number for each in self.own if each.number not in taken)
        return choose_processors(self.own, taken | self.claimed(others), count)


def give_processors(spec: dict[str, Any], processors: Sequence[int]) -> None:
    """Add an attempt's processors to the spec for its runner; all processors if there are none."""
    spec["processors"] = list(processors)
    if processors and "config" in spec:  # a container's
        spec["config"]["HostConfig"]["CpusetCpus"] = ",".join(map(str, processors))


def claim_processors(processors: Iterable[int]) -> list[socket.socket]:
    """Claim an attempt's processors until the sockets are closed. A processor that two servers have
    given away at the same moment is claimed once.
    """
    claims = []
    for number in processors:
        try:
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            claims.append(claim)
            claim.bind(f"{_CLAIM}{number}")
        except OSError:
            pass  # other servers do not see this claim
    return claims


@contextmanager
def bound_to(processors: Sequence[int]) -> Iterator[None]:
    """Let programs that this thread starts use only these processors; all if there are none."""
    before: set[int] = set()
    if processors:
        try:
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, processors)
        except OSError:  # this machine has lost them meanwhile
            before = set()
    try:
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
