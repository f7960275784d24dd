# SPDX-License-Identifier: Apache-2.0
"""A device that has failed is tried before it is used again; programs stand in for the one that computes on it."""

import pytest

from dlrover.python.rl.control.events import CauseKind, fault_of
from dlrover.python.rl.runtime.run.machine import try_devices


def test_devices_that_compute_are_used_again():
    try_devices([0, 2], "import sys; assert sys.argv[1:] == ['0', '2']")


@pytest.mark.parametrize(
    ("program", "within_s", "words"),
    [
        ("raise RuntimeError('CUDA error: uncorrectable ECC error encountered')", 60, "uncorrectable ECC error"),
        ("import os; os._exit(3)", 60, "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", 60, "exit code -9"),
        ("import time; time.sleep(60)", 0.5, "no answer within 0.5 s"),
    ],
)
def test_devices_that_do_not_are_the_devices_fault_again(program, within_s, words):
    with pytest.raises(RuntimeError, match=words) as caught:
        try_devices([0], program, within_s)
    assert fault_of(caught.value) is CauseKind.DEVICE_FAILED


@pytest.mark.slow
def test_without_cuda_there_is_nothing_to_use():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        try_devices([0])
    else:
        with pytest.raises(RuntimeError, match="device check failed"):
            try_devices([0])
