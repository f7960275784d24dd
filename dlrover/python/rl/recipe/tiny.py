# SPDX-License-Identifier: Apache-2.0
"""Write a tiny model: ``python -m dlrover.python.rl.recipe.tiny --out runs/tiny``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dlrover.python.rl.recipe.tiny",
        description="Write a tiny byte-level model with random weights in Hugging Face format.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    shape = {"hidden": 128, "layers": 3, "heads": 4, "kv_heads": 2, "max_positions": 512, "seed": 0}
    for name, default in shape.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default {default}")
    options = parser.parse_args(argv)
    path = write_tiny_model(options.out, **{name: getattr(options, name) for name in shape})
    sys.stdout.write(f"wrote {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
