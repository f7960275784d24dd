"""The random states of this process: Python's, numpy's and torch's."""

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_random(*parts: int | str) -> None:
    """Seed all of them from a hash of ``parts``: the same in every process that is given the same."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    random.seed(digest)
    np.random.seed(np.frombuffer(digest, dtype="<u4"))
    torch.manual_seed(int.from_bytes(digest, "little"))


def random_state() -> dict[str, Any]:
    """All of them, as a tree of plain values, arrays and tensors."""
    cuda = [state.clone() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else []
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


@contextmanager
def random_state_kept() -> Iterator[None]:
    """What is drawn or seeded inside changes nothing after it."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go back to what :func:`random_state` gave. Devices that have not been used, then or now, keep theirs."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_initialized():
        for device, kept in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(kept, device)
