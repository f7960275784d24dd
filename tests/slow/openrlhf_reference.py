# SPDX-License-Identifier: Apache-2.0
"""Results of OpenRLHF's models, experience maker and losses for the rows of a recorded step, in one process.

python openrlhf_reference.py: the largest differences from ``out/recorded.pt``, and metrics, in ``differences.json``.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import import_openrlhf  # noqa: F401 - before all else of OpenRLHF
import torch
from omegaconf import OmegaConf
from openrlhf.models import Actor, PolicyLoss, ValueLoss, get_llm_for_sequence_regression
from openrlhf.models.utils import compute_approx_kl, masked_mean
from openrlhf.trainer.ppo_utils import make_experience_batch, split_experience_batch
from options import parse
from ppo import PPO, Experience, FixedKLController, RemoteExperienceMaker
from transformers import AutoModelForCausalLM

MODEL = "runs/openrlhf-model"
ROWS = ("sequences", "attention_mask", "action_mask", "rewards", "index")
COLUMNS = ("action_log_probs", "values", "advantages", "returns")


class RecordingPPO(PPO):
    """Keeps the rows of its third step, and the weights before it."""

    def update(self, experiences, step):
        if step == 3:
            snapshots = [group.weights(step).result()[0] for group in (self.RG_ACTOR, self.RG_CRITIC)]
            weights = [{name: weights.tensor(name).clone() for name in weights.shapes} for weights in snapshots]
            torch.save((experiences, weights), self.job_dir / "recorded.pt")
        return super().update(experiences, step)


def make_actor():
    actor = Actor(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32))
    actor.packing_samples = False
    return actor.eval()


def evaluate(model, batch):
    return model(batch.sequences, batch.action_mask, batch.attention_mask)


def make_experiences(args, models, recorded):
    own, reference = [], make_actor()
    for batch in recorded:
        batch = Experience(**{name: getattr(batch, name) for name in ROWS}, info={})
        batch.action_log_probs, batch.values = (evaluate(model, batch) for model in models)
        base = evaluate(reference, batch)
        batch.kl = compute_approx_kl(batch.action_log_probs, base, kl_estimator=args.algo.kl.estimator)
        batch.info["kl"] = masked_mean(batch.kl, batch.action_mask, dim=-1)
        own.append(batch)
    controller = FixedKLController(args.algo.kl.init_coef)
    maker = RemoteExperienceMaker(None, None, None, None, controller, SimpleNamespace(args=args), None)
    return maker.compute_advantages_and_returns(own)


def compute_metrics(args, models, experiences):
    batch = make_experience_batch([row for part in experiences for row in split_experience_batch(part)])
    log_probs, values = (evaluate(model, batch) for model in models)
    old, mask = (batch.action_log_probs, batch.advantages), batch.action_mask
    policy_loss, *_ = PolicyLoss(*args.actor.eps_clip_low_high)(log_probs, *old, mask)
    value_loss = ValueLoss(args.critic.value_clip)(values, batch.values, batch.returns, mask)
    metrics = {"policy_loss": policy_loss.item(), "critic_loss": value_loss.item()}
    metrics |= {"values": masked_mean(values, mask).item(), "kl": torch.stack(list(batch.info["kl"])).mean().item()}
    for name, loss, model in (("actor", policy_loss, models[0]), ("critic", value_loss, models[1])):
        loss.backward()
        norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
        metrics[f"{name}_grad_norm"] = torch.stack(norms).norm().item()
    return metrics


def main():
    args = parse(OmegaConf.load("out/job.yaml").config)[1]
    recorded, weights = torch.load("out/recorded.pt", weights_only=False)
    critic = get_llm_for_sequence_regression(MODEL, "critic", attn_implementation="sdpa").float().eval()
    models = make_actor(), critic
    for model, state in zip((models[0].model, critic), weights, strict=True):
        assert not model.load_state_dict(state, strict=False).unexpected_keys
        assert all(torch.equal(parameter, state[name]) for name, parameter in model.named_parameters())
    with torch.no_grad():
        own = make_experiences(args, models, recorded)
    differences = {"rows": float(sum(len(batch.sequences) for batch in own) != args.rollout.batch_size)}
    for name in COLUMNS:
        pairs = [
            (getattr(mine, name) - getattr(recorded_row, name)) * recorded_row.action_mask
            for mine, recorded_row in zip(own, recorded, strict=True)
        ]
        differences[name] = max(pair.abs().max().item() for pair in pairs)
    differences["metrics"] = compute_metrics(args, models, own)
    Path("differences.json").write_text(json.dumps(differences), encoding="utf-8")


if __name__ == "__main__":
    main()
