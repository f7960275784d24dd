# SPDX-License-Identifier: Apache-2.0
"""``dlrover-rl serve``: what it cannot do is one line."""

import socket

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from dlrover.python.rl.common.errors import InvalidJob, JobConflict
from dlrover.python.rl.service import command
from dlrover.python.rl.service.verbs import enqueue


def test_a_metrics_port_that_is_taken_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            JobConflict, match=f"^metrics cannot be served at 127.0.0.1:{port}: Address already in use$"
        ):
            command._metrics(CollectorRegistry(), "127.0.0.1", port, "", None)
    served = command._metrics(CollectorRegistry(), "127.0.0.1", 0, "", None)
    served.close()


def test_a_name_among_the_overrides_is_refused():
    done = CliRunner().invoke(enqueue, ["job.yaml", "name=second", "--server", "127.0.0.1:1"])
    assert isinstance(done.exception, InvalidJob) and str(done.exception.errors[0]) == "name: is given by --name"
