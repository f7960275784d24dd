# SPDX-License-Identifier: Apache-2.0
"""verl's PPO over role groups: its workers as workloads, and its loop. Rows are verl's ``DataProto``."""

import json
from collections.abc import Mapping
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss, get_kl_controller
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler, need_critic, need_reference_policy
from verl.utils import hf_tokenizer
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.metric import reduce_metrics
from verl.utils.model import compute_position_id_with_mask
from verl.utils.py_functional import rename_dict
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from dlrover.python.rl.common.names import run_of
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import RolloutSettings, SamplingParams
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_class
from dlrover.python.rl.engine.api.weights import take_snapshot
from dlrover.rl import BaseTrainer, BaseWorkload, Replicate, Shard, trainer_invocation

dp_compute_proto = trainer_invocation(pre_func=Shard, post_func=DataProto.concat)


def verl_method(name: str, **outputs: str) -> Any:
    """A method of verl's worker, called in its layout: its ``outputs`` under new names, padded, or else its metrics."""

    @dp_compute_proto
    def call(self: "VerlWorkload", data: DataProto) -> DataProto | None:
        rows = left_right_2_no_padding(data.to_tensordict())
        found = getattr(self.worker, name)(rows)
        if found is None:
            return None  # the first tensor-parallel rank has the outputs
        padded = {new: no_padding_2_padding(tu.get(found, old), rows).float() for old, new in outputs.items()}
        return DataProto.from_dict(padded, meta_info={} if outputs else {"metrics": tu.get(found, "metrics")})

    return call


class VerlWorkload(BaseWorkload):
    """One of verl's workers on each rank. Its state is verl's own checkpoint, as files."""

    needs_own_process = True
    worker: Any

    @classmethod
    def data_parallel_size(cls, config: Any, world_size: int) -> int:
        sizes = (config.critic if cls is Critic else config.actor_rollout_ref.actor).megatron
        return world_size // (sizes.tensor_model_parallel_size * sizes.context_parallel_size)

    def init_model(self) -> None:
        if self.config.trainer.device == "cpu":
            __import__("host_engine")  # with CUDA verl has its own
            address = f"tcp://{self.torch_master_addr}:{self.torch_master_port}"
            dist.init_process_group("gloo", address, rank=self.rank, world_size=self.world_size)
        self.folder = Path(self.config.trainer.default_local_dir, *run_of(self.name), self.role)
        self.make_worker(OmegaConf.create(OmegaConf.to_container(self.config)))

    def make_worker(self, config: Any) -> None:
        self.worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor" if self.is_actor_role() else "ref")
        self.worker.init_model()

    def state_dict(self) -> dict[str, bytes]:
        """Of all ranks on rank 0."""
        self.worker.save_checkpoint(str(self.folder))
        dist.barrier()
        files = [path for path in self.folder.rglob("*") if path.is_file() and not self.rank]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        for name, content in state.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)
        dist.barrier()
        self.worker.load_checkpoint(str(self.folder))


class Actor(VerlWorkload):
    compute_log_prob = verl_method("compute_log_prob", log_probs="old_log_probs", entropy="entropys")
    update_actor = verl_method("update_actor")

    @trainer_invocation(blocking=False)
    def weights(self, step: int) -> Any:
        return take_snapshot(self.worker.actor.engine.get_per_tensor_param()[0], step)


class Reference(VerlWorkload):
    compute_ref_log_prob = verl_method("compute_ref_log_prob", log_probs="ref_log_prob")
    state_dict = BaseWorkload.state_dict  # none: it never changes


class Critic(VerlWorkload):
    infer_batch = verl_method("infer_batch", values="values")
    train_mini_batch = verl_method("train_mini_batch")

    def make_worker(self, config: Any) -> None:
        critic = omega_conf_to_dataclass(config.critic)
        critic.engine.infer_max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
        critic.engine.max_token_len_per_gpu = critic.ppo_max_token_len_per_gpu
        parts = {"model": critic.model, "engine": critic.engine, "optimizer": critic.optim}
        parts["checkpoint"] = critic.checkpoint
        given = {f"{name}_config": part for name, part in parts.items()}
        self.worker = TrainingWorker(TrainingWorkerConfig(model_type="value_model", **given))
        self.worker.reset()
        self.worker.set_loss_fn(lambda **given: value_loss(critic, **given))


class Rollout(BaseWorkload):
    """A rollout engine of this package, ``actor_rollout_ref.rollout.name``: verl's own start servers on their own."""

    def init_model(self) -> None:
        on_gpu, config = self.config.trainer.device == "cuda", self.config.actor_rollout_ref
        device, precision = (f"cuda:{(*self.devices, 0)[0]}", "bf16") if on_gpu else ("cpu", "fp32")
        share = config.rollout.gpu_memory_utilization
        settings = RolloutSettings(device, precision, gpu_memory_utilization=share, devices=self.devices)
        self.engine = engine_class(ROLLOUT_ENGINES, config.rollout.name)(config.model.path, settings)

    def receive(self, weights: list[Any]) -> None:
        self.engine.receive(weights[0], rewind=True)

    @dp_compute_proto
    def generate_sequences(self, data: DataProto) -> DataProto:
        """Prompts padded on the left, responses on the right."""
        config, rollout, tokenizer = self.config.data, self.config.actor_rollout_ref.rollout, self.engine.tokenizer
        padded = {"padding": "max_length", "return_tensors": "pt"}
        render = {"add_generation_prompt": True, "return_dict": True, "tokenizer_kwargs": {"padding_side": "left"}}
        chats = [list(messages) for messages in data.non_tensor_batch["raw_prompt"]]
        render |= {"max_length": config.max_prompt_length, **config.apply_chat_template_kwargs}
        left = tokenizer.apply_chat_template(chats, **padded, **render)
        prompts = [ids[mask > 0] for ids, mask in zip(left["input_ids"], left["attention_mask"], strict=True)]
        cut = (rollout.top_k if rollout.top_k > 0 else None, rollout.top_p)
        sampling = SamplingParams(rollout.response_length, rollout.temperature, rollout.n, *cut)
        batch = Batch({"prompt_id": data.non_tensor_batch["uid"], "tokens": Ragged.from_rows(prompts)})
        whole = self.engine.generate(batch, sampling, (rollout.seed, data.meta_info["global_steps"]))
        answers = [ids[mask] for ids, mask in zip(whole.ragged("tokens"), whole.ragged("action_mask"), strict=True)]
        limit = {"max_length": config.max_response_length, "padding_side": "right"}
        right = tokenizer.pad({"input_ids": answers}, **padded, **limit)
        left = {name: column.repeat_interleave(rollout.n, 0) for name, column in left.items()}
        ids, mask = (torch.cat([left[name], right[name]], 1) for name in ("input_ids", "attention_mask"))
        found = {"prompts": left["input_ids"], "responses": right["input_ids"], "input_ids": ids}
        found |= {"response_mask": right["attention_mask"], "position_ids": compute_position_id_with_mask(mask)}
        return DataProto.from_dict({**found, "attention_mask": mask})


class Reward(BaseWorkload):
    """verl's reward manager, with the reward function that the config names."""

    def init_model(self) -> None:
        self.manager = load_reward_manager(self.config, hf_tokenizer(self.config.actor_rollout_ref.model.path))

    @dp_compute_proto
    def compute_rm_score(self, data: DataProto) -> DataProto:
        wait = self.manager.loop.run_until_complete
        found = [wait(self.manager.run_single(data[row : row + 1]))["reward_score"] for row in range(len(data))]
        return DataProto.from_dict({"rm_scores": self.manager.assemble_rm_scores(data, found)})


class PPO(BaseTrainer):
    @classmethod
    def complete_config(cls, config: Any, devices: str) -> Any:
        """verl's ``ppo_megatron_trainer``, which refuses unknown keys, with the job's; checked by verl."""
        with initialize_config_module("verl.trainer.config", version_base=None):
            whole = compose("ppo_megatron_trainer")
        whole.merge_with(OmegaConf.to_container(config, resolve=True))
        whole.trainer.device = "cpu" if devices == "CPU" else "cuda"
        validate_config(whole, need_reference_policy(whole), need_critic(whole))
        return OmegaConf.to_container(whole, resolve=True)

    def init(self) -> None:
        config, data = self.config, self.config.data
        for name in self.get_role_groups():
            getattr(self, name).init_model()
        dataset = create_rl_dataset(data.train_files, data, hf_tokenizer(config.actor_rollout_ref.model.path), None)
        order = {"sampler": create_rl_sampler(data, dataset), "drop_last": True, "collate_fn": collate_fn}
        self.state["data"] = self.loader = StatefulDataLoader(dataset, data.train_batch_size, **order)
        self.state["kl_coef"] = config.algorithm.kl_ctrl.kl_coef

    def fit(self) -> None:
        config, batches = self.config, chain.from_iterable(repeat(self.loader))
        ours, critic, actor = config.trainer, config.critic, config.actor_rollout_ref.actor
        for step in self.steps(ours.total_training_steps or ours.total_epochs * len(self.loader)):
            self.RG_ROLLOUT.receive(Replicate(self.RG_ACTOR.weights(step)))
            batch = self.sample(next(batches), step)
            metrics = self.annotate(batch) | compute_data_metrics(batch, need_critic(config))
            if need_critic(config):
                metrics |= self.update(self.RG_CRITIC.train_mini_batch, batch, critic, "critic/")
            if ours.critic_warmup <= step:
                wants_entropy = actor.calculate_entropy or actor.entropy_coeff != 0
                metrics |= self.update(self.RG_ACTOR.update_actor, batch, actor, "actor/", calculate_entropy=wants_entropy)
            self.log(step, metrics)
            with (self.job_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step} | {name: float(value) for name, value in metrics.items()}) + "\n")
            if ours.rollout_data_dir:
                batch.save_to_disk(Path(ours.rollout_data_dir, f"{step}.pkl"))

    def sample(self, rows: dict[str, Any], step: int) -> DataProto:
        rollout = self.config.actor_rollout_ref.rollout
        meta = {"temperature": rollout.temperature, "global_steps": step}
        batch = DataProto.from_single_dict({**rows, "uid": np.arange(len(rows["raw_prompt"]))}, meta)
        batch = batch.repeat(rollout.n).union(self.RG_ROLLOUT.generate_sequences(batch))
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        return batch.union(self.RG_REWARD.compute_rm_score(batch))

    def annotate(self, batch: DataProto) -> dict[str, float]:
        """Log-probs, values, rewards and advantages; as in verl, entropy is a metric."""
        config, actor = self.config.algorithm, self.config.actor_rollout_ref.actor
        rows = batch.select(non_tensor_batch_keys=[])
        rows.meta_info = {**batch.meta_info, "compute_loss": False, "calculate_entropy": True}
        calls = [self.RG_ACTOR.compute_log_prob]
        calls += [self.RG_REFERENCE.compute_ref_log_prob] if need_reference_policy(self.config) else []
        calls += [self.RG_CRITIC.infer_batch] if need_critic(self.config) else []
        for pending in [call.options(blocking=False)(rows) for call in calls]:
            batch.union(pending.result())
        entropy = agg_loss(batch.batch.pop("entropys"), batch.batch["response_mask"], actor.loss_agg_mode)
        scores = batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = batch.batch.pop("rm_scores")
        metrics = {"actor/entropy": entropy.item()}
        if config.use_kl_in_reward:
            controller = get_kl_controller(config.kl_ctrl)
            controller.value = self.state["kl_coef"]
            metrics |= apply_kl_penalty(batch, controller, config.kl_penalty)[1]
            self.state["kl_coef"] = controller.value
        normalise = config.norm_adv_by_std_in_grpo
        compute_advantage(batch, config.adv_estimator, config.gamma, config.lam, 1, normalise, config)
        return metrics

    def update(self, call: Any, batch: DataProto, config: Any, prefix: str, **meta: Any) -> dict[str, float]:
        rows = batch.select(non_tensor_batch_keys=[])
        size = config.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        sizes = {"global_batch_size": size, "mini_batch_size": size, "epochs": config.ppo_epochs}
        order = {"seed": config.data_loader_seed, "dataloader_kwargs": {"shuffle": config.shuffle}}
        rows.meta_info = {**batch.meta_info, **sizes, **order, **meta}
        return reduce_metrics(rename_dict(call(rows).meta_info["metrics"], prefix))
