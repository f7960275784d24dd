"""Finding a free TCP port, and keeping it free."""

import socket
from collections.abc import Sequence


class HeldPort:
    """A TCP port of this process that nobody else gets, until somebody here listens on it.

    The port is bound, and stays so. A server that sets ``SO_REUSEADDR``, as torch's store does, can bind it as well;
    one that does not cannot, and the system gives it to nobody. So what was free when the members were told of it is
    still free when they meet, many seconds later.

    Attributes:
        number: the port, 0 for none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._socket: socket.socket | None = None

    def take(self, preferred: Sequence[int] = (), address: str = "") -> int:
        """A free port: one of ``preferred`` where possible, else one that the system picks. The one that was held
        before is given back."""
        self.give_back()
        for port in (*preferred, 0):
            held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                held.bind((address, port))
            except OSError:
                held.close()
                continue
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after the bind, which was to find it unused
            self._socket, self.number = held, int(held.getsockname()[1])
            return self.number
        raise OSError("no free TCP port")

    def give_back(self) -> None:
        """Hold nothing any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket, self.number = None, 0
