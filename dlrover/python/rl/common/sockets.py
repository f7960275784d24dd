# SPDX-License-Identifier: Apache-2.0
"""Sockets that listen on this machine, and TCP ports that stay free until they are used."""

import encodings.idna  # noqa: F401 - the resolver's codec, which it would import at its first use
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

_SIOCGIFADDR = 0x8915


def is_loopback(host: str) -> bool:
    """A name other than ``localhost`` may mean anything, and is not."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def listening_socket(address: str, backlog: int) -> socket.socket:
    """Listen on a free TCP port of ``address``; on all addresses of the machine where ``address`` is a gateway's."""
    family, _, _, _, resolved = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server((str(resolved[0]), 0), family=family, backlog=backlog)
    except OSError:
        return socket.create_server(("", 0), family=family, backlog=backlog)


def interface_towards(host: str) -> str:
    """The name of the network interface by which packets to ``host`` leave; ``""`` if it cannot be told."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        own = socket.inet_aton(probe.getsockname()[0])
        return next((name for _, name in socket.if_nameindex() if _address_of(name, probe) == own), "")
    return ""


def _address_of(interface: str, probe: socket.socket) -> bytes:
    with suppress(OSError):  # an interface without an address
        return fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))[20:24]
    return b""


class HeldPort:
    """A TCP port that stays bound until a server of this process listens on it.

    Only a server that sets ``SO_REUSEADDR``, as torch's store does, can bind it too, so it is still free when the
    members meet, many seconds after they have learned of it.
    """

    def __init__(self) -> None:
        self.number = 0  # none
        self._socket: socket.socket | None = None

    def take(self, preferred: Sequence[int] = (), address: str = "") -> int:
        """Reserve one of ``preferred`` where possible, else a port that the system picks; release the former one."""
        self.give_back()
        for port in (*preferred, 0):
            bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                bound.bind((address, port))
            except OSError:
                bound.close()
                continue
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after the bind: that must find it unused
            self._socket, self.number = bound, int(bound.getsockname()[1])
            return self.number
        raise OSError("no free TCP port")

    def give_back(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket, self.number = None, 0
