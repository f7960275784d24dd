# SPDX-License-Identifier: Apache-2.0
"""Sockets that listen on this machine, and TCP ports that stay free until they are used."""

import encodings.idna  # noqa: F401 - the resolver's codec, which it would import at its first use
import errno
import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from dlrover.python.rl.common.errors import ConfigError, InvalidJob

LISTEN_ON_ALL = "DLROVER_RL_LISTEN_ON_ALL"

_SIOCGIFADDR = 0x8915
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.2


def is_loopback(host: str) -> bool:
    """Return True for a loopback address and ``localhost``; other names may resolve to any address."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def listening_socket(address: str, backlog: int, port: int = 0) -> socket.socket:
    """Listen on a TCP port (0: any free one) of ``address``, or of all addresses with ``DLROVER_RL_LISTEN_ON_ALL=1``.

    Raises:
        InvalidJob: ``address`` belongs to another machine, such as a gateway.
        OSError: the port is in use, or the name is unknown."""
    family, _, _, _, resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    everywhere = os.environ.get(LISTEN_ON_ALL) == "1"
    try:
        return socket.create_server(("" if everywhere else str(resolved[0]), port), family=family, backlog=backlog)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        advice = f"not an address of this machine: name one that is, or set {LISTEN_ON_ALL}=1 to listen on all"
        raise InvalidJob([ConfigError(address, advice)]) from error


def wait_until_listening(address: str, port: int, timeout_s: float) -> None:
    """Wait until a server listens, until a connection fails for another reason, or for ``timeout_s``."""
    deadline_s, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), left_s).close()
        except ConnectionRefusedError:
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            continue
        except OSError:  # the client that connects next reports it better
            return
        return


def machine_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine except loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = [_address_of(name, probe) for _, name in socket.if_nameindex()]
    addresses = [socket.inet_ntoa(each) for each in packed if each]
    return [address for address in addresses if not is_loopback(address)]


def interface_towards(host: str) -> str:
    """Return the name of the network interface for packets to ``host``; ``""`` if it is unknown."""
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

    Only a server that sets ``SO_REUSEADDR``, as torch's store does, can also bind it, so it is still free when the
    workers connect, many seconds after they have received its number."""

    def __init__(self) -> None:
        self.number = 0  # none
        self._socket: socket.socket | None = None

    def take(self, preferred: Sequence[int] = (), address: str = "") -> int:
        """Release the former port, and reserve one of ``preferred`` if possible, else any free port."""
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
