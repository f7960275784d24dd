# SPDX-License-Identifier: Apache-2.0
"""Whose fault an exception is, by the words that CUDA, NCCL, Gloo and torch have for it."""

import errno

import pytest
import torch

from dlrover.python.rl.common.errors import DataError, InvocationError, JobFailed, MasterLost, WorkloadStartError
from dlrover.python.rl.control.events import CauseKind, fault_in, fault_of
from dlrover.python.rl.runtime.member.loading import cause_of, starting

DEVICE = [
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: uncorrectable NVLink error detected during the execution",
    "CUDA error: unspecified launch failure",
    "CUDA error: hardware stack error",
    "CUDA error: unknown error",
    "CUDA error: all CUDA-capable devices are busy or unavailable",
    "CUDA error: no CUDA-capable device is detected",
    "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
    "CUDA driver error: CUDA_ERROR_ECC_UNCORRECTABLE",
    "Triton Error [CUDA]: CUDA_ERROR_LAUNCH_FAILED",
    "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    "Failed to initialize NVML: Driver/library version mismatch",
    "GPU 0000:17:00.0: GPU has fallen off the bus (Xid 79)",
    "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error: uncorrectable ECC error encountered",
]
LINK = [
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error\nncclSystemError: System call",
    "NCCL communicator was aborted on rank 1.",
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE) ran for 600000 ms",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:2837",
    "Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error",
    "[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    "Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
    "The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500).",
]
NEITHER = [
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "CUDA error: device-side assert triggered",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA error: invalid device ordinal",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "the judge timed out",
    "connection to the reward server was reset",
    "",
]


@pytest.mark.parametrize("text", DEVICE)
def test_a_device_or_its_driver(text):
    faults = [fault_in(text), fault_of(RuntimeError(text)), fault_of(torch.AcceleratorError(text))]
    assert faults == [CauseKind.DEVICE_FAILED] * 3


@pytest.mark.parametrize("text", LINK)
def test_a_collective_or_a_rendezvous(text):
    assert fault_in(text) is fault_of(RuntimeError(text)) is CauseKind.LINK_FAILED


@pytest.mark.parametrize("text", NEITHER)
def test_fault_with_other_words_is_unknown(text):
    assert fault_in(text) is fault_of(RuntimeError(text)) is fault_of(ConnectionError(text)) is CauseKind.UNKNOWN_ERROR


def test_torchs_own_types_say_it_without_words():
    assert fault_of(torch.distributed.DistNetworkError("failed")) is CauseKind.LINK_FAILED
    assert fault_of(torch.distributed.DistStoreError("failed")) is CauseKind.LINK_FAILED
    assert fault_of(torch.OutOfMemoryError("CUDA out of memory")) is CauseKind.UNKNOWN_ERROR


class Retryable(RuntimeError):
    retryable = True


@pytest.mark.parametrize(
    "error",
    [
        *(kind(DEVICE[0]) for kind in (ValueError, TypeError, KeyError, AssertionError, NotImplementedError)),
        *(FileNotFoundError(2, "no such file"), SystemExit(1), ZeroDivisionError(), DataError("train.jsonl:7")),
        *(UnicodeDecodeError("a", b"", 0, 1, ""), Retryable("tried already")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_fault_of_bug_or_user_error_is_users(error):
    assert fault_of(error) is CauseKind.USER_ERROR


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(DEVICE[0]), CauseKind.DEVICE_FAILED),
        (RuntimeError(LINK[0]), CauseKind.LINK_FAILED),
        (RuntimeError("odd"), CauseKind.UNKNOWN_ERROR),
        (ValueError("wrong"), CauseKind.START_FAILED),
    ],
)
def test_cause_of_constructor_error_has_its_fault(error, kind):
    with pytest.raises(WorkloadStartError) as failed, starting("ACTOR[0]"):
        raise error
    assert cause_of(failed.value, "trainer").kind is kind
    alone = cause_of(failed.value, "trainer", alone=True)
    assert alone.kind is CauseKind.START_FAILED and alone.message.startswith("could not start: ")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CauseKind.NO_SPACE),
        (RuntimeError(DEVICE[0]), CauseKind.DEVICE_FAILED),
        (MasterLost("the master does not answer"), CauseKind.RETRYABLE_ERROR),
        (JobFailed("ROLLOUT[0] was not replaced"), CauseKind.RETRYABLE_ERROR),
    ],
)
def test_cause_of_a_member_is_the_same_as_in_the_trainer(error, kind):
    failure = InvocationError(f"{type(error).__name__}: {error}", role="ACTOR", rank=1, method="update")
    failure.original = error
    assert [(cause.kind, cause.who) for cause in (cause_of(error, "trainer"), cause_of(failure, "trainer"))] == [
        (kind, "trainer"),
        (kind, "ACTOR[1]"),
    ]
