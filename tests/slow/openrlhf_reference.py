# SPDX-License-Identifier: Apache-2.0
"""What OpenRLHF's models, experience maker and losses give for the rows of a recorded step, in one process.

python openrlhf_reference.py write-critic: a critic with a value head, in the folder ``critic``;
python openrlhf_reference.py compare: the largest differences from ``out/experiences.pt``, in ``differences.json``.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from omegaconf import OmegaConf
from options import parse
from ppo import PPO, Experience, FixedKLController, RemoteExperienceMaker
from openrlhf.models import Actor, PolicyLoss, ValueLoss, get_llm_for_sequence_regression  # isort: skip - after ppo
from openrlhf.models.utils import compute_approx_kl
from openrlhf.trainer.ppo_utils import make_experience_batch, split_experience_batch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = "runs/openrlhf-model"
COLUMNS = ("action_log_probs", "values", "kl", "advantages", "returns")


class RecordingPPO(PPO):
    def update(self, experiences, step):
        torch.save(experiences, self.job_dir / "experiences.pt")
        return super().update(experiences, step)


def make_critic(path, **options):
    return get_llm_for_sequence_regression(path, "critic", attn_implementation="sdpa", **options)


def write_critic():
    torch.manual_seed(0)
    make_critic(MODEL, init_value_head=True).save_pretrained("critic")
    AutoTokenizer.from_pretrained(MODEL).save_pretrained("critic")


def evaluate(models, batch):
    actor, critic = models
    given = (batch.sequences, batch.action_mask, batch.attention_mask)
    return actor(*given), critic(*given)


def make_experiences(args, models, recorded):
    """Of the rows alone: log-probs of the reference are those of the actor, which has not been trained yet."""
    own = []
    for batch in recorded:
        names = ("sequences", "attention_mask", "action_mask", "rewards", "index")
        batch = Experience(**{name: getattr(batch, name) for name in names}, info={})
        batch.action_log_probs, batch.values = evaluate(models, batch)
        batch.kl = compute_approx_kl(
            batch.action_log_probs, batch.action_log_probs, kl_estimator=args.algo.kl.estimator
        )
        own.append(batch)
    controller = FixedKLController(args.algo.kl.init_coef)
    maker = RemoteExperienceMaker(None, None, None, None, controller, SimpleNamespace(args=args), None)
    return maker.compute_advantages_and_returns(own)


def compute_losses(args, models, experiences):
    batch = make_experience_batch([row for part in experiences for row in split_experience_batch(part)])
    log_probs, values = evaluate(models, batch)
    policy_loss, *_ = PolicyLoss(*args.actor.eps_clip_low_high)(
        log_probs, batch.action_log_probs, batch.advantages, batch.action_mask
    )
    value_loss = ValueLoss(args.critic.value_clip)(values, batch.values, batch.returns, batch.action_mask)
    metrics = {"policy_loss": policy_loss.item(), "critic_loss": value_loss.item()}
    metrics["values"] = ((values * batch.action_mask).sum() / batch.action_mask.sum()).item()
    for name, loss, model in (("actor", policy_loss, models[0]), ("critic", value_loss, models[1])):
        loss.backward()
        norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
        metrics[f"{name}_grad_norm"] = torch.stack(norms).norm().item()
    return metrics


def compare():
    args = parse(OmegaConf.load("out/job.yaml").config)[1]
    actor = Actor(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32))
    actor.packing_samples = False
    models = actor.eval(), make_critic("critic").float().eval()
    recorded = torch.load("out/experiences.pt", weights_only=False)
    with torch.no_grad():
        own = make_experiences(args, models, recorded)
    differences = {"rows": float(sum(len(batch.sequences) for batch in own) != 32)}
    for name in COLUMNS:
        pairs = [(getattr(mine, name), getattr(yours, name), mine.action_mask) for mine, yours in zip(own, recorded)]
        differences[name] = max(((mine - yours) * mask).abs().max().item() for mine, yours, mask in pairs)
    differences["metrics"] = compute_losses(args, models, own)
    Path("differences.json").write_text(json.dumps(differences), encoding="utf-8")


if __name__ == "__main__":
    {"write-critic": write_critic, "compare": compare}[sys.argv[1]]()
