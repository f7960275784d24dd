# SPDX-License-Identifier: Apache-2.0
"""Files for the results of benchmarks, and the description of the machine."""

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

RESULTS = Path(__file__).resolve().parent / "results"


def machine(threads: int, **versions: str) -> dict[str, Any]:
    """Processor, cores, threads, and the versions of the libraries that are compared."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **versions,
    }


def describe(model: Path | None, shape: Mapping[str, int]) -> str:
    """The name of a model's folder and what its configuration says, or ``shape``, the sizes of a random one."""
    if model is not None:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        keys = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
        shape = {name: config[key] for name, key in {**keys, "vocabulary": "vocab_size"}.items()}
    sizes = ", ".join(f"{name} {size}" for name, size in shape.items())
    return sizes if model is None else f"{model.parent.name}/{model.name} ({sizes})"


def keep(folder: Path, name: str, results: Any, text: str) -> None:
    """Print the text, and write both: ``name.json`` and ``name.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    file.with_suffix(".md").write_text(f"{text}\n", encoding="utf-8")
    print(text)
    print(f"\nkept in {file}")
