# SPDX-License-Identifier: Apache-2.0
"""Reading weights back from an SGLang server, as far as SGLang can."""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from dlrover.python.rl.engine.model.loading import CausalLM
from dlrover.python.rl.engine.model.spec import get_head_width
from dlrover.python.rl.engine.sglang.server import RequestRefused, SglangServer

WEIGHTS_FILE = "model.safetensors"

_ROWS = 2
"""Rows of each matrix, and values of each vector, that are compared."""

_LOG = logging.getLogger(__name__)


class ReadBack:
    """Compares the weights of a server with a folder, tensor by tensor.

    SGLang reads tensors by their names for few architectures: Llama and those that extend it (Mistral, Phi-3), OPT,
    Granite and EXAONE 4. Its checksums, for all architectures, are of tensors that it has merged, padded and split, and
    so cannot be compared. What cannot be read is not compared, and logged once.
    """

    def __init__(self, server: SglangServer, lm: CausalLM, dtype: torch.dtype, ranks: int) -> None:
        """``dtype`` and ``ranks`` are the server's."""
        self._server, self._dtype = server, dtype
        embedding = lm.model.get_input_embeddings().weight
        self._embedding = next((name for name, tensor in lm.named_weights() if tensor is embedding), "")
        self._misread = _misread_parts(lm, ranks)
        self._names: list[str] | None = None  # of the tensors that can be read; None: not known yet

    def different(self, folder: Path) -> list[str]:
        """Names of the tensors whose first rows differ from those in ``folder``, cast as by the server."""
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            if self._names is None:
                self._names = self._find_readable(list(file.keys()))
            return [name for name in self._names if not self._equals(self._read(name), file.get_slice(name))]

    def _find_readable(self, names: Collection[str]) -> list[str]:
        readable = []
        if self._read(self._embedding) is not None:
            candidates = [name for name in names if not any(part in name for part in self._misread)]
            readable = [name for name in candidates if self._read(name) is not None]
        if len(readable) < len(names):
            _LOG.warning(
                "SGLang cannot read back %d of this model's %d tensors: that they have arrived rests on its own answer",
                len(names) - len(readable),
                len(names),
            )
        return readable

    def _read(self, name: str) -> Any:
        """The first rows; None if SGLang refuses."""
        try:
            return self._server.call("POST", "/get_weights_by_name", {"name": name, "truncate_size": _ROWS})
        except RequestRefused:
            return None

    def _equals(self, rows: Any, tensor: Any) -> bool:
        expected = tensor[:_ROWS].to(self._dtype).float().numpy()
        return rows is not None and np.array_equal(np.asarray(rows, dtype=np.float32), expected, equal_nan=True)


def _misread_parts(lm: CausalLM, ranks: int) -> tuple[str, ...]:
    """Parts of the names of tensors that SGLang reads at wrong rows of its merged projection: it takes heads to be
    ``hidden_size / num_attention_heads`` wide, and each rank to have heads of its own."""
    config = lm.model.config.get_text_config()
    heads = int(config.num_attention_heads)
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    is_usual = get_head_width(lm) == int(config.hidden_size) // heads and key_heads % ranks == 0
    return () if is_usual else (".k_proj.", ".v_proj.")
