# SPDX-License-Identifier: Apache-2.0
"""Makes OpenRLHF's workers importable without vLLM and flash-attn. Imported before anything of OpenRLHF.

Its Ray package imports vLLM to export the makers of its engines, which are not used here: the package's modules are found
without that. Without flash-attn, which needs CUDA, the functions that OpenRLHF imports from it for packed samples raise.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import openrlhf.trainer

ray_layer = ModuleType("openrlhf.trainer.ray")
ray_layer.__path__ = [str(Path(openrlhf.trainer.__file__).parent / "ray")]
sys.modules.setdefault(ray_layer.__name__, ray_layer)


def packing(*args: Any, **options: Any) -> Any:
    raise NotImplementedError("ds.packing_samples needs flash-attn")


if find_spec("flash_attn") is None:
    names = {"bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"), "utils.distributed": ()}
    for module, functions in {**names, "utils.distributed": ("all_gather",)}.items():
        absent = sys.modules[f"flash_attn.{module}"] = ModuleType(f"flash_attn.{module}")
        vars(absent).update(dict.fromkeys(functions, packing))
