# SPDX-License-Identifier: Apache-2.0
"""The service's certificate, read again when its files change."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dlrover.python.rl.common.log import get_logger

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class TlsFiles:
    certificate: Path
    key: Path
    client_ca: Path | None = None  # clients must show a certificate that it has signed

    def credentials(self) -> grpc.ServerCredentials:
        """For new connections what the files hold then; while they cannot be read or do not fit, what they held
        before."""
        reader = _Reader(self)
        return grpc.dynamic_ssl_server_credentials(reader.read(), reader.read_changed, self.client_ca is not None)


class _Reader:
    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen: list[tuple[int, int, int]] = []

    def read(self) -> Any:
        """Raises OSError."""
        files = self._files
        self._seen = self._state()
        pair = (files.key.read_bytes(), files.certificate.read_bytes())
        ca = files.client_ca.read_bytes() if files.client_ca else None
        return grpc.ssl_server_certificate_configuration([pair], ca)

    def read_changed(self) -> Any:
        """Called before each handshake, in a thread of gRPC; None: nothing new."""
        try:
            return self.read() if self._state() != self._seen else None
        except OSError as error:
            _LOG.warning("the certificate stays as it is: %s", error)
            return None

    def _state(self) -> list[tuple[int, int, int]]:
        paths = (self._files.certificate, self._files.key, self._files.client_ca)
        states = [path.stat() for path in paths if path is not None]
        return [(state.st_mtime_ns, state.st_ino, state.st_size) for state in states]
