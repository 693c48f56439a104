"""The network interfaces of this machine. Imports nothing heavy: every run counts their traffic.

Source: netdevice(7).
"""

from __future__ import annotations

from typing import List, Tuple

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h


def interface_of(address: str) -> str:
    """The network interface that has an address; empty where none is found.

    Without its name gloo takes the address of the host name, which in containers is often
    127.0.0.1.
    """
    try:
        import socket

        wanted, near = socket.inet_aton(address), ""
        for name, own, mask in interfaces():
            if own == wanted:
                return name
            if all((a ^ b) & m == 0 for a, b, m in zip(own, wanted, mask)):  # noqa: B905
                near = name  # a second address of it, as all of 127.0.0.0/8 are
        return near
    except (ImportError, OSError):
        return ""


def interfaces() -> List[Tuple[str, bytes, bytes]]:
    """Name, address and mask of each interface with an address. Raises ImportError, OSError."""
    import fcntl
    import socket
    import struct

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                own = fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, request)[20:24]
                mask = fcntl.ioctl(asker.fileno(), _SIOCGIFNETMASK, request)[20:24]
            except OSError:
                continue  # it has no such address
            found.append((name, own, mask))
    return found
