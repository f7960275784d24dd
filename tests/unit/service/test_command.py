# SPDX-License-Identifier: Apache-2.0
"""``dlrover-rl serve``: what it cannot do is one line."""

import socket

import pytest
from prometheus_client import CollectorRegistry

from dlrover.python.rl.common.errors import JobConflict
from dlrover.python.rl.service import command


def test_a_metrics_port_that_is_taken_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            JobConflict, match=f"^metrics cannot be served at 127.0.0.1:{port}: Address already in use$"
        ):
            command._metrics(CollectorRegistry(), "127.0.0.1", port, "", None)
    served = command._metrics(CollectorRegistry(), "127.0.0.1", 0, "", None)
    served.close()
