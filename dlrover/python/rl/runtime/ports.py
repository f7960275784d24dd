"""Finding a free TCP port."""

import socket
from collections.abc import Sequence


def free_port(preferred: Sequence[int] = (), address: str = "") -> int:
    """A port that was free a moment ago: one of ``preferred`` where possible, else one that the system picks."""
    for port in (*preferred, 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no free TCP port")
