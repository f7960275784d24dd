# SPDX-License-Identifier: Apache-2.0
"""Jobs of the recipes that learn from examples, small enough for a test."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dlrover.python.rl.data.conversation import encode_raw
from dlrover.python.rl.recipe.dpo import DPOTrainer
from dlrover.python.rl.recipe.rm import RMTrainer
from dlrover.python.rl.recipe.sft import SFTTrainer
from dlrover.python.rl.recipe.workloads import ActorWorkload, ReferenceWorkload, ScorerWorkload
from tests.support.recipe_stage import Stage

TRAINERS = {"sft": SFTTrainer, "rm": RMTrainer, "dpo": DPOTrainer}
ROLES = {
    "sft": {"ACTOR": (ActorWorkload, 1)},
    "rm": {"ACTOR": (ScorerWorkload, 1)},
    "dpo": {"ACTOR": (ActorWorkload, 1), "REFERENCE": (ReferenceWorkload, 1)},
}

PAIRS = [
    {"prompt": f"{number}+{number}=", "chosen": str(2 * number), "rejected": str(2 * number + 1)}
    for number in range(1, 5)
]
EXAMPLES = [{"prompt": row["prompt"], "response": row["chosen"]} for row in PAIRS]


def stage(kind, folder, config, roles=None) -> Stage:
    """A job of the recipe ``kind`` that writes to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    return Stage(folder, TRAINERS[kind], roles or ROLES[kind], config)


def log_probs(model: str, rows, side="response") -> list[np.ndarray]:
    """The log-probs of each row's trained tokens, by the plain model."""
    module, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    per_row = []
    for row in rows:
        encoded = encode_raw(tokenizer, row["prompt"], row[side])
        tokens = torch.tensor(encoded.tokens)
        with torch.no_grad():
            scores = torch.log_softmax(module(tokens[None]).logits[0].float(), dim=-1)
        mask = torch.tensor(encoded.action_mask)
        per_row.append(scores[:-1][mask[1:]].gather(1, tokens[mask][:, None])[:, 0].numpy())
    return per_row
