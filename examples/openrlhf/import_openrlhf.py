# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's workers without what this example does not use; imported before all else of OpenRLHF.

Its Ray package imports vLLM to export engines: its modules are found without it. Functions of flash-attn, which needs
CUDA, raise where it is not installed. The bars of its workers, which would fill the log, are off."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import openrlhf.trainer
from tqdm import tqdm

ray_layer = sys.modules["openrlhf.trainer.ray"] = ModuleType("openrlhf.trainer.ray")
ray_layer.__path__ = [str(Path(openrlhf.trainer.__file__).parent / "ray")]


def absent(*args: Any, **options: Any) -> Any:
    raise NotImplementedError("ds.packing_samples and ds.ring_attn_size need flash-attn")


USED = {"bert_padding": "index_first_axis pad_input rearrange unpad_input", "utils.distributed": "all_gather"}
for module, functions in USED.items() if find_spec("flash_attn") is None else ():
    sys.modules[f"flash_attn.{module}"] = ModuleType(f"flash_attn.{module}")
    vars(sys.modules[f"flash_attn.{module}"]).update(dict.fromkeys(functions.split(), absent))

from openrlhf.trainer.ray import launcher, ppo_actor, ppo_critic  # noqa: E402

for workers in (launcher, ppo_actor, ppo_critic):
    workers.tqdm = lambda rows, **options: tqdm(rows, disable=True)
