# SPDX-License-Identifier: Apache-2.0
"""The transports that a job chooses from with ``engine.weight_sync``, and what each one requires."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt

from dlrover.python.rl.common.disk_space import is_disk_full
from dlrover.python.rl.common.errors import ClassNotFound, ConfigError, EngineError
from dlrover.python.rl.common.extensions import ExtensionPoint
from dlrover.python.rl.config.typed import lies_in, parse, salvage
from dlrover.python.rl.engine.weight_sync.adapters import AdapterTransport
from dlrover.python.rl.engine.weight_sync.base import ALIGN, SyncSettings, WeightTransport, waits_for_receivers

_PACKAGE = "dlrover.python.rl.engine.weight_sync"

TRANSPORTS = ExtensionPoint(
    "weight transport",
    "dlrover_rl.weight_transports",
    {
        "auto": f"{_PACKAGE}.pull:PullTransport",
        "pull": f"{_PACKAGE}.pull:PullTransport",
        "disk": f"{_PACKAGE}.disk:DiskTransport",
        "broadcast": f"{_PACKAGE}.collective:BroadcastTransport",
        "cuda_ipc": f"{_PACKAGE}.cuda_ipc:CudaIpcTransport",
    },
)
"""Classes that are made as ``Transport(settings)`` on each side, see ``WeightTransport``. One with a true attribute
``waits_for_receivers`` sends while the receivers receive; the others keep what was sent. Of one with a true attribute
``sends_adapters_alone`` each side has two more where adapters are trained, with a ``channel`` each."""


@dataclass(frozen=True)
class WeightSyncOptions:
    folder: str | None = None
    """A folder that all members see; required by ``disk``, and of no use to other built-in transports."""

    bucket_bytes: Annotated[int, Ge(ALIGN)] | None = None
    """Bytes handed over at a time; None: 1 MiB on a host, 64 MiB on a device."""

    timeout_s: Annotated[float, Gt(0.0)] | None = None
    """Longest wait for the other side without progress; None: 5 s for transports that keep what was sent, 60 s for
    others."""


def validate_transport_options(options: Mapping[str, Any]) -> list[ConfigError]:
    """What of :func:`validate_transport` does not depend on the machine."""
    return parse(WeightSyncOptions, dict(options), "config.engine.weight_sync_options")[1]


def validate_transport(
    name: str, options: Mapping[str, Any], device: str, where: str = "config.engine.weight_sync"
) -> list[ConfigError]:
    """Check name (key ``where``) and options (key ``{where}_options``) of a transport before the start."""
    parsed, errors = salvage(WeightSyncOptions, dict(options), f"{where}_options")
    try:
        if TRANSPORTS.place(name) not in TRANSPORTS.builtin.values():
            TRANSPORTS.load(name)
    except ClassNotFound as error:
        errors.append(ConfigError(where, str(error)))
    if name in TRANSPORTS.builtin and parsed is not None:
        places = [error.where for error in errors]
        fault = ConfigError(f"{where}_options.folder", _find_folder_fault(name, parsed.folder, device))
        errors += [fault] if fault.what and not lies_in(fault.where, places) else []
    if name == "cuda_ipc" and not device.startswith("cuda"):
        errors.append(ConfigError(where, f"'cuda_ipc' needs engine.device cuda, which is {device}"))
    if name == "broadcast" and device.startswith("cuda:"):
        errors.append(ConfigError(where, f"'broadcast' needs a device for each member: engine.device is {device}"))
    return errors


def _find_folder_fault(name: str, option: str | None, device: str) -> str:
    """Why a built-in transport cannot have this folder; "" if it can, or may on the machines that the job runs on."""
    if name != "disk":
        return "" if option is None else f"is not used by '{name}', but by 'disk'"
    if not option:
        return f"{'' if option is None else 'is empty: '}'disk' needs a folder that all members see"
    folder = Path(option).expanduser().absolute()
    # os.path: Path.exists raises below a folder that may not be entered.
    existing = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    if not existing.is_dir():
        return f"{existing} is a file, not a folder"
    is_here = existing == folder and not device.startswith("cuda")
    return f"{folder} cannot be written to" if is_here and not os.access(folder, os.W_OK | os.X_OK) else ""


def prepare_folder(name: str, options: Mapping[str, Any]) -> None:
    """Make the folder in the options of a built-in transport, if there is one, and write to it: on the machine of the
    side that sends, before the first step. Raises EngineError; an error of a full disk stays what it is."""
    folder = options.get("folder")
    if folder is None or name != "disk":
        return
    path = Path(folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        if is_disk_full(error):
            raise
        what = f"weights cannot be written to {path}: {error.strerror or error}"
        raise EngineError(f"engine.weight_sync_options.folder: {what}") from error


def check_collocation(
    name: str, device: str, is_collocated: bool, in_one_process: bool = False, receivers: int = 1
) -> None:
    """Refuse a transport where sender and receivers share their devices, or do not, or their process.

    Raises:
        EngineError: nccl needs each device once; CUDA IPC opens memory of a device that both sides see; receivers of
            one process receive one after the other where the sender waits for them.
    """
    if name == "broadcast" and is_collocated and device.startswith("cuda"):
        raise EngineError("engine.weight_sync 'broadcast' needs actor and rollout on separate devices")
    if name == "cuda_ipc" and not is_collocated:
        raise EngineError("engine.weight_sync 'cuda_ipc' needs actor and rollout in one workload_group")
    if in_one_process and receivers > 1 and waits_for_receivers(TRANSPORTS.load(name)):
        raise EngineError(
            f"engine.weight_sync '{name}' sends to {receivers} rollouts at once, which in one process receive one after"
            " the other: leave out --local, or use 'pull', or one rollout"
        )


def make_transport(name: str, options: Mapping[str, Any], settings: SyncSettings) -> WeightTransport:
    transport = TRANSPORTS.load(name)
    parsed = WeightSyncOptions(**options)
    timeout_s = parsed.timeout_s or (60.0 if waits_for_receivers(transport) else settings.timeout_s)
    folder = settings.folder if parsed.folder is None else Path(parsed.folder).expanduser()
    settings = replace(settings, bucket_bytes=parsed.bucket_bytes, timeout_s=timeout_s, folder=folder)
    if waits_for_receivers(transport) or not getattr(transport, "sends_adapters_alone", False):
        made: WeightTransport = transport(settings)
        return made

    def make(part: str) -> WeightTransport:
        channel = f"{settings.channel}-{part}" if part else settings.channel
        of_part: WeightTransport = transport(replace(settings, channel=channel))
        return of_part

    return AdapterTransport(make, settings)
