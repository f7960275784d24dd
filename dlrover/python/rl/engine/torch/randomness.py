"""The random states of this process: Python's, numpy's and torch's."""

import hashlib
import random
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from dlrover.python.rl.data import state_tree


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


def packed_random_state() -> Any:
    """:func:`random_state` as a tensor of bytes: the lengths of its parts, then the parts."""
    skeleton, buffers = state_tree.dump(random_state())
    parts = [skeleton, *map(bytes, buffers)]
    lengths = struct.pack(f"<{len(parts) + 1}q", len(parts), *map(len, parts))
    return torch.frombuffer(bytearray(lengths + b"".join(parts)), dtype=torch.uint8)


def set_packed_random_state(packed: Any) -> None:
    """Go back to what :func:`packed_random_state` gave."""
    content = packed.numpy().tobytes()
    (count,) = struct.unpack_from("<q", content)
    lengths = struct.unpack_from(f"<{count}q", content, 8)
    ends = list(accumulate(lengths, initial=8 * (count + 1)))
    skeleton, *buffers = (content[start:end] for start, end in pairwise(ends))
    set_random_state(state_tree.load(skeleton, [memoryview(buffer) for buffer in buffers]))
