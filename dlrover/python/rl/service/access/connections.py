# SPDX-License-Identifier: Apache-2.0
"""Limits of a server's connections: one that makes no call is closed, and some descriptors stay for the service."""

import resource

_SILENT_S = 10.0
"""Time for a connection to agree on TLS and HTTP/2, and then between its calls. A stream, such as one that watches,
keeps its connection."""

_RESERVE = 256
"""Descriptors for the store, files of runs, Ray and child processes; half of them all where that is less."""


def connection_options() -> tuple[tuple[str, int], ...]:
    """Raise this process's limit of open files as far as it may, and return gRPC's options that fit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    silent_ms = round(_SILENT_S * 1000)
    return (
        ("grpc.server_handshake_timeout_ms", silent_ms),
        ("grpc.max_connection_idle_ms", silent_ms),
        ("grpc.max_allowed_incoming_connections", hard - min(_RESERVE, hard // 2)),
    )
