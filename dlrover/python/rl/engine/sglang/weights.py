"""Weights on their way to an SGLang server: a folder in Hugging Face format, and what the server reads back."""

from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dlrover.python.rl.engine.sglang.server import SglangServer
from dlrover.python.rl.engine.torch.loading import CausalLM
from dlrover.python.rl.engine.weights import WeightSnapshot

_FILE = "model.safetensors"
_ROWS = 2
"""How many rows of each matrix, and values of each vector, are read back after a sync."""


def write_folder(weights: WeightSnapshot, lm: CausalLM, folder: Path) -> None:
    """Write a model that a server can load: configuration, tokenizer and ``weights``."""
    lm.model.config.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    tensors = {name: weights.tensor(name) for name in weights.buffers}
    save_file(tensors, folder / _FILE, metadata={"format": "pt"})


def differences(server: SglangServer, folder: Path, served: torch.dtype) -> list[str]:
    """Names of the tensors of which the server's first rows are not those in ``folder``.

    Args:
        server: tells rows by Hugging Face names, as lists of numbers.
        folder: what it was to load.
        served: the dtype that it casts to.
    """
    wrong = []
    with safe_open(folder / _FILE, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            told = server.call("POST", "/get_weights_by_name", {"name": name, "truncate_size": _ROWS})
            sent = file.get_slice(name)[:_ROWS].to(served).float().numpy()
            if not np.array_equal(np.asarray(told, dtype=np.float32), sent, equal_nan=True):
                wrong.append(f"'{name}'")
    return wrong
