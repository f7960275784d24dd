# SPDX-License-Identifier: Apache-2.0
"""Where a service keeps its state, and where a client on the same machine finds it."""

import os
from pathlib import Path

ADDRESS = "address"


def default_state() -> Path:
    """``DLROVER_RL_STATE``, or a folder of the user's home."""
    named = os.environ.get("DLROVER_RL_STATE")
    return Path(named) if named else Path.home() / ".dlrover-rl" / "service"


def write_address(state: Path, address: str) -> None:
    """For clients, which find a service on any free port."""
    temporary = state / f"{ADDRESS}.{os.getpid()}"
    temporary.write_text(f"{address}\n", encoding="ascii")
    temporary.replace(state / ADDRESS)
