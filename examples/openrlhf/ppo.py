# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's PPO over role groups: its workers as workloads, its experience maker, and its loop."""

import json
import logging
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from import_openrlhf import launcher, ppo_actor, ppo_critic  # before all else of OpenRLHF
from openrlhf.datasets import PromptDataset, utils
from openrlhf.trainer.ppo_utils import AdaptiveKLController, Experience, FixedKLController, balance_experiences
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.utils import agent, distributed_sampler, get_strategy, get_tokenizer
from options import parse

from dlrover.python.rl.common.errors import ConfigError
from dlrover.python.rl.common.names import run_of
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import SamplingParams
from dlrover.python.rl.engine.api.weights import take_snapshot
from dlrover.python.rl.engine.model.ranks import pack_random_state, unpack_random_state
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.workloads import RolloutWorkload
from dlrover.python.rl.trainer.shard import join
from dlrover.python.rl.trainer.workload import undecorated
from dlrover.rl import BaseTrainer, BaseWorkload, Replicate, Shard, trainer_invocation


class Reference(BaseWorkload):
    """OpenRLHF's worker on each rank, called by the names of its methods."""

    needs_own_process = True
    worker_class: Any = launcher.ReferenceModelActor

    @classmethod
    def data_parallel_size(cls, config: Any, world_size: int) -> int:
        return int(world_size // config.ds.ring_attn_size)

    def init_model(self, path: str, *arguments: Any) -> None:
        if not self.devices:
            __import__("host")  # with CUDA OpenRLHF has its own strategy
        args = parse(self.config)[1]
        args.vllm.sync_backend = None  # this package sends the weights
        ranks = (self.world_size, self.rank, self.torch_master_addr, self.torch_master_port)
        self.worker = undecorated(self.worker_class)(*ranks)
        self.worker.init_model_from_pretrained(get_strategy(args), path, *arguments)

    @trainer_invocation(blocking=False)
    def execute_batch(self, method: str, columns: dict[str, list[Any]]) -> Any:
        return self.worker.execute_batch(method, columns, 0, len(next(iter(columns.values()))))

    @trainer_invocation(blocking=False)
    def execute(self, method: str, options: dict[str, Any]) -> Any:
        return getattr(self.worker, method)(**options)


class RewardModel(Reference):
    worker_class = launcher.RewardModelActor


class Actor(Reference):
    """Trains OpenRLHF's actor; its state is OpenRLHF's checkpoint, which rank 0 keeps, and random numbers."""

    worker_class = ppo_actor.PolicyModelActor

    @property
    def engine(self) -> Any:
        return self.worker.actor.model

    @trainer_invocation(blocking=False)
    def weights(self, step: int) -> Any:
        return take_snapshot(self.engine.module.named_parameters(), step)

    def folder(self) -> Path:
        return Path(self.config.ckpt.path, *run_of(self.name), self.role).absolute()

    def state_dict(self) -> dict[str, Any]:
        self.worker.strategy.save_ckpt(self.engine, str(self.folder()), "commit")
        dist.barrier()
        paths = [] if self.rank else [path for path in sorted(self.folder().rglob("*")) if path.is_file()]
        files = {str(path.relative_to(self.folder())): path.read_bytes() for path in paths}
        return {"files": files, "random": pack_random_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, content in state["files"].items():
            (self.folder() / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder() / name).write_bytes(content)
        dist.barrier()
        self.worker.strategy.load_ckpt(self.engine, str(self.folder()), "commit")
        self.worker.trainer.replay_buffer.clear()
        unpack_random_state(state["random"])


class Critic(Actor):
    worker_class = ppo_critic.CriticModelActor

    @property
    def engine(self) -> Any:
        return self.worker.critic


class Rollout(RolloutWorkload):
    """An engine of this package: OpenRLHF's own start vLLM."""

    def receive(self, weights: list[Any]) -> None:
        self._loop.run(self._scheduler.receive(weights[0]))


class Reward(BaseWorkload):
    """The ``reward_func`` of the file in ``reward.remote_url``."""

    def init_model(self, *arguments: Any) -> None:
        self.function = agent.SingleTurnAgentExecutor(self.config.reward.remote_url).reward_func

    @trainer_invocation(pre_func=Shard, post_func=join)
    def score(self, samples: list[tuple[str, str, str]]) -> list[float]:
        return [float(self.function([query], [prompt], [label])["rewards"]) for query, prompt, label in samples]


class Group:
    """A role group with the method of OpenRLHF's ``RayActorGroup`` that its experience maker calls."""

    def __init__(self, role_group: Any) -> None:
        self.role_group = role_group

    def async_run_method_batch(self, method_name: str, **columns: Any) -> list[Any]:
        return list(self.role_group.execute_batch(method_name, Shard(columns)))


class PPO(BaseTrainer):
    @classmethod
    def complete_config(cls, config: Any, devices: str) -> Any:
        return parse(config)[0]

    @classmethod
    def check_config(cls, config: Any, roles: Any) -> list[ConfigError]:
        fault = ("CRITIC" in roles) != bool(parse(config)[1].critic.model_name_or_path)
        return [ConfigError("workload.critic", "goes with algo.advantage.estimator=gae, and with no other")] * fault

    def init(self) -> None:
        self.args = args = parse(self.config)[1]
        args.actor.num_nodes, args.actor.num_gpus_per_node = 1, len(self.actors)
        logging.getLogger("openrlhf.trainer.ppo_utils.experience_maker").setLevel(logging.WARNING)
        data, rollout, kl, path = args.data, args.rollout, args.algo.kl, args.actor.model_name_or_path
        strategy = get_strategy(args)
        self.tokenizer = get_tokenizer(path, None, "left", strategy, use_fast=not data.disable_fast_tokenizer)
        limits = {"max_count": data.max_samples, "dataset_split": data.prompt_split}
        rows = utils.blending_datasets(data.prompt_dataset, data.prompt_probs, strategy, args.train.seed, **limits)
        self.prompts = PromptDataset(rows, self.tokenizer, strategy, data.input_template)
        self.order = distributed_sampler.DistributedSampler(self.prompts, num_replicas=1, rank=0, seed=args.train.seed)
        self.steps_per_episode = -(-len(self.prompts) // rollout.batch_size)
        updates = len(self.prompts) * rollout.n_samples_per_prompt // args.train.batch_size
        updates *= args.train.num_episodes * args.train.max_epochs
        critic, function = args.critic.model_name_or_path, self.config.reward.remote_url
        arguments = {"ACTOR": (path, updates), "CRITIC": (critic, updates), "ROLLOUT": (path, EngineConfig())}
        arguments |= {"REFERENCE": (path,), "REWARD": (function or args.reward.model_name_or_path,)}
        groups = {role: getattr(self, f"RG_{role}") for role in arguments if role in self.actor_handles}
        for loading in [group.init_model.options(blocking=False)(*arguments[role]) for role, group in groups.items()]:
            loading.result()
        length = rollout.max_new_tokens or data.max_len
        self.sampling = SamplingParams(length, rollout.temperature, rollout.n_samples_per_prompt, None, rollout.top_p)
        adaptive = kl.target and AdaptiveKLController(kl.init_coef, kl.target, kl.horizon)
        self.kl = adaptive or FixedKLController(kl.init_coef)
        self.state["kl_coef"] = self.kl.value
        models = ("ACTOR", "CRITIC", "NONE" if function else "REWARD", "REFERENCE")
        called = [Group(groups[role]) if role in groups else None for role in models]
        self.maker = RemoteExperienceMaker(*called, self.kl, strategy, self.tokenizer)

    def fit(self) -> None:
        for step in self.steps(self.args.train.num_episodes * self.steps_per_episode):
            self.kl.value = self.state["kl_coef"]
            self.RG_ROLLOUT.receive(Replicate(self.RG_ACTOR.weights(step)))
            status = self.update(self.maker.make_experience_batch(self.sample(step)), step)
            if "kl" in status:
                self.kl.update(status["kl"], self.args.rollout.batch_size * self.sampling.samples_per_prompt)
            self.state["kl_coef"] = self.kl.value
            metrics = {name: float(value) for name, value in sorted(status.items())}
            self.log(step, metrics)
            path = self.job_dir / "metrics.jsonl"
            lines = path.read_text().splitlines(keepends=True)[: step - 1] if step > 1 else []
            path.write_text("".join([*lines, json.dumps({"step": step, **metrics}) + "\n"]))
        for group in [self.RG_ACTOR, *([self.RG_CRITIC] if self.critics else [])]:
            group.execute("save_model", {}).result()

    def sample(self, step: int) -> list[Experience]:
        """Prompts with their responses, and rewards unless a model gives them."""
        episode, place = divmod(step - 1, self.steps_per_episode)
        self.order.set_epoch(episode, place * self.args.rollout.batch_size)
        rows = [self.prompts[row] for row in islice(self.order, self.args.rollout.batch_size)]
        _, prompts, labels, _ = self.prompts.collate_fn(rows)
        columns = {"prompt_id": np.arange(len(rows)), "prompt": prompts, "answer": labels}
        wanted, seed = Batch({**columns, "extra_info": [None] * len(rows)}), (self.args.train.seed, step)
        done = Batch.concat(self.RG_ROLLOUT.generate(Shard(wanted), self.sampling, Replicate(seed)).result())
        queries = map(self.tokenizer.decode, done.ragged("tokens"))
        samples = list(zip(queries, done.objects("prompt"), done.objects("answer"), strict=True))
        rewards = self.RG_REWARD.score(samples) if self.args.reward.remote_url else [None] * len(samples)
        ragged = [done.ragged(name) for name in ("tokens", "action_mask", "logprobs")]
        return [self.experience(*row) for row in zip(*ragged, done.dense("finished"), rewards, strict=True)]

    def experience(self, tokens: Any, actions: Any, log_probs: Any, finished: Any, reward: float | None) -> Experience:
        """One row, as OpenRLHF makes it of a response of vLLM."""
        longest = self.args.data.max_len
        sequences, mask = torch.tensor(tokens[None, :longest]), torch.tensor(actions[None, 1:longest]).long()
        corrects = self.args.algo.advantage.is_correction_level != "off"
        steps = {"sequences": sequences, "attention_mask": torch.ones_like(sequences), "action_mask": mask}
        steps["rollout_log_probs"] = torch.tensor(log_probs[None, 1:longest]) if corrects else None
        outcome = {"response_length": mask.sum(1), "total_length": torch.tensor([float(sequences.shape[1])])}
        outcome |= {"truncated": torch.tensor([not finished])}
        if reward is not None:
            outcome |= {"rewards": torch.tensor([reward]), "info": {"reward": torch.tensor([reward])}}
        return Experience(**steps, **outcome)

    def update(self, experiences: list[Experience], step: int) -> dict[str, Any]:
        if self.args.train.dynamic_batch_enable:
            experiences = balance_experiences(experiences, self.args)
        trained = [(self.RG_CRITIC, {})] if self.critics else []
        if step > self.args.critic.freezing_steps + 1:
            trained.append((self.RG_ACTOR, {"kl_ctl": self.kl.value}))
        for pending in [group.execute_batch("append", Shard({"experience": experiences})) for group, _ in trained]:
            pending.result()
        fits = [group.execute("fit", options) for group, options in trained]
        return {name: value for pending in fits for name, value in pending.result()[0].items()}
