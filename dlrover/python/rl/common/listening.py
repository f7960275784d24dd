"""A socket that listens at an address of this machine."""

import encodings.idna  # noqa: F401 - the resolver's codec, which it would import when it is first asked
import socket


def listening_socket(address: str, backlog: int) -> socket.socket:
    """One at a free port of ``address``, of its family; where that is no address of this machine's own, as a name of a
    gateway is none, at all addresses that the machine has."""
    family, _, _, _, found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server((str(found[0]), 0), family=family, backlog=backlog)
    except OSError:
        return socket.create_server(("", 0), family=family, backlog=backlog)
