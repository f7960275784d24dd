# SPDX-License-Identifier: Apache-2.0
"""vLLM's plugin of this package, which vLLM runs in each of its processes. It does nothing in processes that the
rollout engine has not started."""

import logging
import os
import select
import signal
import threading
from contextlib import suppress

OWNER = "DLROVER_RL_VLLM_OWNER"
"""The environment variable with the id of the process whose rollout engine has started vLLM, and, after a colon, its
descriptor of the file for the causes of vLLM's errors."""

BACKEND = "dlrover_rl"
"""Name of :class:`~dlrover.python.rl.engine.vllm.transfer.SnapshotReceiver` among vLLM's weight transfer engines."""


def register() -> None:
    """Register the weight transfer engine, and let this process end with its owner."""
    if OWNER not in os.environ:
        return
    # Imported on demand: other processes that load vLLM's plugins need neither.
    from vllm import _custom_ops as operators
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    owner, causes = map(int, os.environ[OWNER].split(":"))
    if owner != os.getpid():
        logging.getLogger("vllm").addHandler(_Causes(f"/proc/{owner}/fd/{causes}"))
        threading.Thread(target=_end_with, args=(owner,), name="owner", daemon=True).start()
    with suppress(ValueError):  # it is registered already
        module = "dlrover.python.rl.engine.vllm.transfer"
        WeightTransferEngineFactory.register_engine(BACKEND, module, "SnapshotReceiver")
    if current_platform.is_cpu():
        # vLLM would compute with packed copies of the weights: updates miss the copy of a tied head.
        operators._supports_onednn = False


class _Causes(logging.Handler):
    """Writes the errors that vLLM logs into a file. vLLM reports to its caller only that one has occurred."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() if error is None else f"{type(error).__name__}: {error}"
        with suppress(OSError), open(self._path, "a") as file:
            file.write(f"{' '.join(text.split())}\n")


def _end_with(owner: int) -> None:
    """End this process, which may hold a device's memory, when its owner ends."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(owner)
        select.select([handle], [], [])  # waits: for the owner's end
    os.kill(os.getpid(), signal.SIGKILL)
