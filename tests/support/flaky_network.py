# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy on loopback that cuts connections."""

import random
import select
import socket
import threading
from contextlib import suppress


class CuttingProxy:
    """Passes bytes on to ``port``; :meth:`cut` breaks what is connected."""

    def __init__(self, port, seed=0):
        self._target, self._random = port, random.Random(seed)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._pairs, self._lock = set(), threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        try:
            target = socket.create_connection(("127.0.0.1", self._target), timeout=5)
        except OSError:  # the service is away
            client.close()
            return
        pair = (client, target)
        with self._lock:
            self._pairs.add(pair)
        with suppress(OSError, ValueError):
            while _passed_on(pair):
                pass
        self._close(pair)

    def _close(self, pair):
        with self._lock:
            self._pairs.discard(pair)
        for end in pair:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut(self, share=0.5):
        with self._lock:
            chosen = [pair for pair in self._pairs if self._random.random() < share]
        for pair in chosen:
            self._close(pair)

    def close(self):
        self._server.close()
        self.cut(1.0)


def _passed_on(pair):
    """Pass on what has come; False at the end of one side."""
    client, target = pair
    for ready in select.select(pair, (), ())[0]:
        data = ready.recv(1 << 16)
        if not data:
            return False
        (target if ready is client else client).sendall(data)
    return True
