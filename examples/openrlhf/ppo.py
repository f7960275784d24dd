# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's PPO over role groups: its workers as workloads, its experience maker, and its loop."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import deepspeed
import import_openrlhf  # noqa: F401 - before OpenRLHF
import numpy as np
import torch
import torch.distributed as dist
from openrlhf.datasets import PromptDataset
from openrlhf.datasets.utils import blending_datasets
from openrlhf.trainer.ppo_utils import AdaptiveKLController, Experience, FixedKLController, balance_experiences
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ray import launcher, ppo_actor, ppo_critic
from openrlhf.utils import get_strategy, get_tokenizer
from openrlhf.utils.agent import SingleTurnAgentExecutor
from openrlhf.utils.distributed_sampler import DistributedSampler
from options import parse

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.names import RLRoleType, run_of
from dlrover.python.rl.config.typed import to_plain
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
        return world_size // config.ds.ring_attn_size

    def init_model(self, path: str, *given: Any) -> None:
        if not self.devices:
            __import__("host")  # with CUDA OpenRLHF has its own strategy
        args = parse(to_plain(self.config))[1]
        args.vllm.sync_backend = None  # this package sends the weights
        ranks = (self.world_size, self.rank, self.torch_master_addr, self.torch_master_port)
        self.worker = undecorated(self.worker_class)(*ranks)
        self.worker.init_model_from_pretrained(get_strategy(args), path, *given)

    @trainer_invocation(blocking=False)
    def execute_batch(self, method: str, columns: dict[str, list[Any]]) -> list[Any]:
        return self.worker.execute_batch(method, columns, 0, len(next(iter(columns.values()))))

    @trainer_invocation(blocking=False)
    def execute(self, method: str, options: dict[str, Any]) -> Any:
        return getattr(self.worker, method)(**options)


class RewardModel(Reference):
    worker_class = launcher.RewardModelActor


class Actor(Reference):
    """Its state is OpenRLHF's checkpoint of all ranks, which rank 0 keeps, and the rank's random numbers."""

    worker_class = ppo_actor.PolicyModelActor

    @property
    def engine(self) -> Any:
        return self.worker.actor.model

    @trainer_invocation(blocking=False)
    def weights(self, step: int) -> Any:
        def whole() -> Iterator[tuple[str, Any]]:
            for name, parameter in self.engine.module.named_parameters():
                with deepspeed.zero.GatheredParameters([parameter], enabled=self.config.ds.zero_stage == 3):
                    yield name, parameter

        return take_snapshot(whole(), step)

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
            path = self.folder() / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
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

    def init_model(self) -> None:
        self.function = SingleTurnAgentExecutor(self.config.reward.remote_url).reward_func

    @trainer_invocation(pre_func=Shard, post_func=join)
    def score(self, samples: list[tuple[str, str, str]]) -> list[float]:
        return [float(self.function([query], [prompt], [label])["rewards"]) for query, prompt, label in samples]


class Group:
    """A role group as OpenRLHF's experience maker calls it, ``RayActorGroup``."""

    def __init__(self, role_group: Any) -> None:
        self.role_group = role_group

    def async_run_method_batch(self, method_name: str, **columns: Any) -> list[Any]:
        return list(self.role_group.execute_batch(method_name, Shard(columns)))


class PPO(BaseTrainer):
    @classmethod
    def complete_config(cls, config: Any, devices: str) -> Any:
        try:
            return parse(to_plain(config))[0]
        except ValueError as error:
            raise InvalidJob([ConfigError("config", str(error))]) from error

    @classmethod
    def check_config(cls, config: Any, roles: Mapping[RLRoleType, int]) -> Iterator[ConfigError]:
        try:
            args = parse(to_plain(config))[1]
        except ValueError as error:
            yield ConfigError("config", str(error))
            return
        for name, section in (("actor", args.actor), ("critic", args.critic), ("reference", args.ref)):
            if roles.get(RLRoleType(name), section.num_gpus_per_node) != section.num_nodes * section.num_gpus_per_node:
                yield ConfigError(f"workload.{name}.num", "differs from num_nodes x num_gpus_per_node of OpenRLHF")

    def init(self) -> None:
        self.args = args = parse(to_plain(self.config))[1]
        strategy, path = get_strategy(args), args.actor.model_name_or_path
        self.tokenizer = get_tokenizer(path, None, "left", strategy, use_fast=not args.data.disable_fast_tokenizer)
        data, limit = args.data, {"max_count": args.data.max_samples, "dataset_split": args.data.prompt_split}
        rows = blending_datasets(data.prompt_dataset, data.prompt_probs, strategy, args.train.seed, **limit)
        self.prompts = PromptDataset(rows, self.tokenizer, strategy, data.input_template)
        self.order = DistributedSampler(self.prompts, num_replicas=1, rank=0, seed=args.train.seed)
        self.steps_per_episode = -(-len(self.prompts) // args.rollout.batch_size)
        samples = len(self.prompts) * args.rollout.n_samples_per_prompt
        updates = samples // args.train.batch_size * args.train.num_episodes * args.train.max_epochs
        self.RG_ACTOR.init_model(path, updates)
        self.RG_ROLLOUT.init_model(path, EngineConfig())
        if self.references:
            self.RG_REFERENCE.init_model(path)
        if self.critics:
            self.RG_CRITIC.init_model(args.critic.model_name_or_path, updates)
        self.RG_REWARD.init_model(*([] if args.reward.remote_url else [args.reward.model_name_or_path]))
        limit = args.rollout.max_new_tokens or data.max_len
        sampling = (limit, args.rollout.temperature, args.rollout.n_samples_per_prompt, None, args.rollout.top_p)
        self.sampling = SamplingParams(*sampling)
        kl = args.algo.kl
        self.kl = AdaptiveKLController(kl.init_coef, kl.target, kl.horizon) if kl.target else FixedKLController(kl.init_coef)
        self.state["kl_coef"] = self.kl.value
        groups = [
            Group(getattr(self, f"RG_{role}")) if role in self.actor_handles else None
            for role in ("ACTOR", "CRITIC", "REWARD", "REFERENCE")
        ]
        self.maker = RemoteExperienceMaker(*groups, self.kl, strategy, self.tokenizer)

    def fit(self) -> None:
        rollout = self.args.rollout
        for step in self.steps(self.args.train.num_episodes * self.steps_per_episode):
            self.kl.value = self.state["kl_coef"]
            self.RG_ROLLOUT.receive(Replicate(self.RG_ACTOR.weights(step)))
            experiences = self.maker.make_experience_batch(self.sample(step))
            status = self.update(experiences, step)
            if "kl" in status:
                self.kl.update(status["kl"], rollout.batch_size * rollout.n_samples_per_prompt)
            self.state["kl_coef"] = self.kl.value
            self.report(step, {name: float(value) for name, value in status.items()})
        for group in [self.RG_ACTOR, *([self.RG_CRITIC] if self.critics else [])]:
            group.execute("save_model", {}).result()

    def sample(self, step: int) -> list[Experience]:
        """Prompts with their responses, and rewards unless a model gives them."""
        episode, place = divmod(step - 1, self.steps_per_episode)
        self.order.set_epoch(episode, place * self.args.rollout.batch_size)
        drawn = [self.prompts[row] for row in islice(self.order, self.args.rollout.batch_size)]
        _, prompts, labels, _ = self.prompts.collate_fn(drawn)
        wanted = {"prompt_id": np.arange(len(prompts)), "prompt": prompts, "answer": labels}
        seed = Replicate((self.args.train.seed, step))
        batch = Shard(Batch({**wanted, "extra_info": [None] * len(prompts)}))
        done = Batch.concat(self.RG_ROLLOUT.generate(batch, self.sampling, seed).result())
        texts = list(map(self.tokenizer.decode, done.ragged("tokens")))
        rewards: Sequence[float | None] = [None] * len(texts)
        if self.args.reward.remote_url:
            rewards = self.RG_REWARD.score(list(zip(texts, done.objects("prompt"), done.objects("answer"), strict=True)))
        columns = [done.ragged(name) for name in ("tokens", "action_mask", "logprobs")]
        ends = done.dense("finished")
        return [self.experience(*row) for row in zip(*columns, ends, rewards, strict=True)]

    def experience(self, tokens: Any, actions: Any, log_probs: Any, finished: Any, reward: float | None) -> Experience:
        """One row, as OpenRLHF makes it of a response of vLLM."""
        longest = self.args.data.max_len
        sequences, mask = torch.tensor(tokens[None, :longest]), torch.tensor(actions[None, 1:longest]).long()
        scored = None if reward is None else torch.tensor([reward])
        info = {"response_clip_ratio": torch.tensor([sequences.shape[1] >= longest])}
        corrects = self.args.algo.advantage.is_correction_level != "off"
        return Experience(
            sequences=sequences,
            attention_mask=torch.ones_like(sequences),
            action_mask=mask,
            rollout_log_probs=torch.tensor(log_probs[None, 1:longest]) if corrects else None,
            rewards=scored,
            response_length=mask.sum(1),
            truncated=torch.tensor([not finished]),
            total_length=torch.tensor([float(sequences.shape[1])]),
            info=info if scored is None else info | {"reward": scored},
        )

    def update(self, experiences: list[Experience], step: int) -> dict[str, Any]:
        if self.args.train.dynamic_batch_enable:
            experiences = balance_experiences(experiences, self.args)
        trained = {self.RG_CRITIC: {}} if self.critics else {}
        if step > self.args.critic.freezing_steps + 1:
            trained[self.RG_ACTOR] = {"kl_ctl": self.kl.value}
        status: dict[str, Any] = {}
        for pending in [group.execute_batch("append", Shard({"experience": experiences})) for group in trained]:
            pending.result()
        for pending in [group.execute("fit", options) for group, options in trained.items()]:
            status |= pending.result()[0]
        return status

    def report(self, step: int, metrics: dict[str, float]) -> None:
        self.log(step, metrics)
        path = self.job_dir / "metrics.jsonl"
        lines = path.read_text().splitlines()[: step - 1] if step > 1 else []
        path.write_text("\n".join([*lines, json.dumps({"step": step, **metrics})]) + "\n")


