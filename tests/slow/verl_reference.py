# SPDX-License-Identifier: Apache-2.0
"""Results of verl's functions for the rows of a recorded step, with transformers' models in one process.

python verl_reference.py JOB.yaml ROWS.pkl: largest differences of columns, losses, gradient norms.
"""

import json
import sys

import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from verl import DataProto
from verl.trainer.ppo import core_algos, ray_trainer
from verl.utils import config as verl_config
from verl.utils import torch_functional

config, recorded = OmegaConf.load(sys.argv[1]).config, DataProto.load_from_disk(sys.argv[2])
columns, algorithm = recorded.batch, config.algorithm
responses, mask = columns["responses"], columns["response_mask"]


def forward(kind, path):
    model = kind.from_pretrained(path, dtype=torch.float32).eval()
    # transformers gives the padding token's embedding no gradient, megatron-core does; here completions have the token.
    model.get_input_embeddings().padding_idx = None
    inputs = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
    return model, model(**inputs).logits[:, -responses.shape[1] - 1 : -1]


actor, logits = forward(AutoModelForCausalLM, config.actor_rollout_ref.model.path)
log_probs = torch_functional.logprobs_from_logits_v2(
    logits / config.actor_rollout_ref.rollout.temperature, responses.long()
)
critic, scores = forward(AutoModelForTokenClassification, config.critic.model.path)
values = scores.squeeze(-1)

own = {name: columns[name] for name in ("responses", "response_mask", "attention_mask", "token_level_scores")}
own |= {"old_log_probs": log_probs.detach(), "ref_log_prob": log_probs.detach(), "values": values.detach()}
rows = DataProto.from_dict(own)
controller = core_algos.get_kl_controller(algorithm.kl_ctrl)
rows, _ = ray_trainer.apply_kl_penalty(rows, controller, algorithm.kl_penalty)
rows = ray_trainer.compute_advantage(rows, algorithm.adv_estimator, algorithm.gamma, algorithm.lam, config=algorithm)

results = {}
for name in ("old_log_probs", "ref_log_prob", "values", "token_level_rewards", "advantages", "returns"):
    results[name] = ((rows.batch[name] - columns[name]) * mask).abs().max().item()

section = verl_config.omega_conf_to_dataclass(config.actor_rollout_ref.actor)
policy_loss, _ = core_algos.compute_policy_loss_vanilla(
    log_probs.detach(), log_probs, rows.batch["advantages"], mask, section.loss_agg_mode, section
)
value_loss, _ = core_algos.compute_value_loss(
    values, rows.batch["returns"], values.detach(), mask, config.critic.cliprange_value, config.critic.loss_agg_mode
)
for name, loss, model in (("actor/pg_loss", policy_loss, actor), ("critic/vf_loss", value_loss, critic)):
    loss.backward()
    gradients = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    results |= {name: loss.item(), f"{name.partition('/')[0]}/grad_norm": torch.stack(gradients).norm().item()}
sys.stdout.write(json.dumps(results) + "\n")
