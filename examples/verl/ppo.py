# SPDX-License-Identifier: Apache-2.0
"""verl's PPO over role groups: its workers as workloads, and its loop. Rows are verl's ``DataProto``."""

import json
import shutil
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from options import complete
from torchdata.stateful_dataloader import StatefulDataLoader
from verl import DataProto
from verl.trainer.ppo import core_algos, metric_utils, ray_trainer, reward, utils
from verl.utils import config as verl_config
from verl.utils import hf_tokenizer, metric, model, py_functional, tensordict_utils
from verl.utils.dataset.rl_dataset import collate_fn
from verl.workers import engine_workers
from verl.workers.utils import losses, padding

from dlrover.python.rl.common.names import run_of
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.base import SamplingParams
from dlrover.python.rl.engine.api.weights import take_snapshot
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.workloads import RolloutWorkload
from dlrover.rl import BaseTrainer, BaseWorkload, Replicate, Shard, trainer_invocation

dp_compute_proto = trainer_invocation(pre_func=Shard, post_func=DataProto.concat)


class Reference(BaseWorkload):
    """verl's worker on each rank, called in its layout."""

    needs_own_process = True

    @classmethod
    def data_parallel_size(cls, config: Any, world_size: int) -> int:
        sizes = (config.critic if cls is Critic else config.actor_rollout_ref.actor).megatron
        return world_size // (sizes.tensor_model_parallel_size * sizes.context_parallel_size)

    def init_model(self) -> None:
        if self.config.trainer.device == "cpu":
            __import__("host_engine")  # with CUDA verl has its own
            address = f"tcp://{self.torch_master_addr}:{self.torch_master_port}"
            dist.init_process_group("gloo", address, rank=self.rank, world_size=self.world_size)
        models, is_critic = self.config.actor_rollout_ref, self.is_critic_role()
        section = {"ACTOR": models.actor, "REFERENCE": models.ref, "CRITIC": self.config.critic}[self.role]
        # Of the reference the sizes of micro-batches have names of their own.
        section = {name.replace("log_prob_use", "use").replace("log_prob", "ppo"): section[name] for name in section}
        config = verl_config.omega_conf_to_dataclass(section)
        engine = config.engine
        engine.use_dynamic_bsz, engine.max_token_len_per_gpu = config.use_dynamic_bsz, config.ppo_max_token_len_per_gpu
        engine.micro_batch_size_per_gpu = engine.infer_micro_batch_size_per_gpu = config.ppo_micro_batch_size_per_gpu
        engine.infer_max_token_len_per_gpu = config.ppo_infer_max_token_len_per_gpu
        parts = {"engine_config": engine, "optimizer_config": config.optim, "checkpoint_config": config.checkpoint}
        parts["model_config"] = config.model if is_critic else verl_config.omega_conf_to_dataclass(models.model)
        parts["model_type"] = "value_model" if is_critic else "language_model"
        self.worker = engine_workers.TrainingWorker(engine_workers.TrainingWorkerConfig(**parts))
        self.worker.reset()
        self.worker.set_loss_fn(partial(losses.value_loss if is_critic else losses.ppo_loss, config))

    @dp_compute_proto
    def infer_batch(self, data: DataProto) -> DataProto | None:
        """``meta_info["outputs"]`` has the names of the columns to return, and verl's."""
        rows = padding.left_right_2_no_padding(data.to_tensordict())
        outputs = self.worker.infer_batch(rows)
        if outputs is None:
            return None  # the first tensor-parallel rank has the outputs
        nested = {name: tensordict_utils.get(outputs, output) for name, output in data.meta_info["outputs"].items()}
        return DataProto.from_dict({n: padding.no_padding_2_padding(c, rows).float() for n, c in nested.items()})


class Actor(Reference):
    """Trains verl's actor; the state is verl's checkpoint of all ranks, which rank 0 keeps."""

    @dp_compute_proto
    def train_mini_batch(self, data: DataProto) -> DataProto | None:
        outputs = self.worker.train_mini_batch(padding.left_right_2_no_padding(data.to_tensordict()))
        return None if outputs is None else DataProto(meta_info={"metrics": tensordict_utils.get(outputs, "metrics")})

    @trainer_invocation(blocking=False)
    def weights(self, step: int) -> Any:
        return take_snapshot(self.worker.engine.get_per_tensor_param()[0], step)

    def folder(self) -> str:
        return str(Path(self.config.trainer.default_local_dir, *run_of(self.name), self.role).absolute())

    def state_dict(self) -> dict[str, bytes]:
        self.worker.save_checkpoint(self.folder())
        dist.barrier()
        return {} if self.rank else {"tar": Path(shutil.make_archive(self.folder(), "tar", self.folder())).read_bytes()}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        if "tar" in state:
            Path(self.folder()).mkdir(parents=True, exist_ok=True)
            Path(f"{self.folder()}.tar").write_bytes(state["tar"])
            shutil.unpack_archive(f"{self.folder()}.tar", self.folder())
        dist.barrier()
        self.worker.load_checkpoint(self.folder())


class Critic(Actor):
    """Trains verl's critic: the actor's model with a value head."""


class Rollout(RolloutWorkload):
    """An engine of this package: verl's own start servers."""

    def receive(self, weights: list[Any]) -> None:
        self._loop.run(self._scheduler.receive(weights[0]))


class Reward(BaseWorkload):
    """verl's reward manager, with the reward function that the config names."""

    def init_model(self) -> None:
        self.manager = reward.load_reward_manager(self.config, hf_tokenizer(self.config.actor_rollout_ref.model.path))

    @dp_compute_proto
    def compute_rm_score(self, data: DataProto) -> DataProto:
        wait = self.manager.loop.run_until_complete
        scores = [wait(self.manager.run_single(data[row : row + 1]))["reward_score"] for row in range(len(data))]
        return DataProto.from_dict({"rm_scores": self.manager.assemble_rm_scores(data, scores)})


class PPO(BaseTrainer):
    @classmethod
    def complete_config(cls, config: Any, devices: str) -> Any:
        return complete(config, devices)

    def init(self) -> None:
        self.models, data = self.config.actor_rollout_ref, self.config.data
        rollout, path = self.models.rollout, self.models.model.path
        for name in self.get_role_groups():
            arguments = () if name != "RG_ROLLOUT" else (path, EngineConfig(rollout=rollout.name))
            getattr(self, name).init_model(*arguments)
        nucleus = (max(rollout.top_k, 0) or None, rollout.top_p)
        self.sampling = SamplingParams(rollout.response_length, rollout.temperature, rollout.n, *nucleus)
        self.tokenizer = hf_tokenizer(path)
        dataset = utils.create_rl_dataset(data.train_files, data, self.tokenizer, None)
        order = {"sampler": utils.create_rl_sampler(data, dataset), "drop_last": True, "collate_fn": collate_fn}
        self.state["data"] = self.loader = StatefulDataLoader(dataset, data.train_batch_size, **order)
        self.state["kl_coef"] = self.config.algorithm.kl_ctrl.kl_coef

    def fit(self) -> None:
        config, batches = self.config.trainer, chain.from_iterable(repeat(self.loader))
        for step in self.steps(config.total_training_steps or config.total_epochs * len(self.loader)):
            self.RG_ROLLOUT.receive(Replicate(self.RG_ACTOR.weights(step)))
            batch = self.sample(DataProto.from_single_dict(next(batches)), step)
            metrics = self.annotate(batch) | metric_utils.compute_data_metrics(batch, bool(self.critics))
            if self.critics:
                metrics |= self.update(self.RG_CRITIC, batch, self.config.critic, "critic/")
            if config.critic_warmup <= step:
                metrics |= self.update(self.RG_ACTOR, batch, self.models.actor, "actor/")
            metrics = {name: float(value) for name, value in metrics.items()}
            self.log(step, metrics)
            with (self.job_dir / "metrics.jsonl").open("a" if step > 1 else "w") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")
            if config.rollout_data_dir:
                Path(config.rollout_data_dir).mkdir(parents=True, exist_ok=True)
                batch.save_to_disk(Path(config.rollout_data_dir, f"{step}.pkl"))

    def sample(self, batch: DataProto, step: int) -> DataProto:
        """Prompts padded on the left, responses on the right, and the rewards of the responses."""
        rows, seed = batch.non_tensor_batch, Replicate((self.models.rollout.seed, step))
        rows["uid"], nothing = np.arange(len(batch)), [None] * len(batch)
        named = {"prompt_id": rows["uid"], "prompt": rows["raw_prompt"].tolist(), "answer": nothing}
        wanted = Shard(Batch({**named, "extra_info": nothing}))
        done = Batch.concat(self.RG_ROLLOUT.generate(wanted, self.sampling, seed).result())

        def pad(part: str, side: str) -> Any:
            masks = [mask if part == "response" else ~mask for mask in done.ragged("action_mask")]
            tokens = {"input_ids": [ids[mask] for ids, mask in zip(done.ragged("tokens"), masks, strict=True)]}
            length = {"max_length": self.config.data[f"max_{part}_length"], "padding_side": side}
            return self.tokenizer.pad(tokens, "max_length", **length, return_tensors="pt")

        prompts, responses = pad("prompt", "left"), pad("response", "right")
        columns = {name: torch.cat([prompts[name], responses[name]], 1) for name in ("input_ids", "attention_mask")}
        columns["position_ids"] = model.compute_position_id_with_mask(columns["attention_mask"])
        columns |= {"prompts": prompts["input_ids"], "responses": responses["input_ids"]}
        columns["response_mask"] = responses["attention_mask"]
        batch = batch.repeat(self.sampling.samples_per_prompt).union(DataProto.from_dict(columns))
        return batch.union(self.RG_REWARD.compute_rm_score(batch))

    def rows(self, batch: DataProto, **meta: Any) -> DataProto:
        tensors = batch.select(non_tensor_batch_keys=[])
        tensors.meta_info = {"temperature": self.sampling.temperature, **meta}
        return tensors

    def annotate(self, batch: DataProto) -> dict[str, float]:
        """Add log-probs, values and advantages."""
        config, columns, actor = self.config.algorithm, batch.batch, self.models.actor

        def infer(group: Any, **outputs: str) -> None:
            meta = {"outputs": outputs, "compute_loss": False, "calculate_entropy": "entropys" in outputs}
            batch.union(group.infer_batch(self.rows(batch, **meta)))

        infer(self.RG_ACTOR, old_log_probs="log_probs", entropys="entropy")
        if self.references:
            infer(self.RG_REFERENCE, ref_log_prob="log_probs")
        if self.critics:
            infer(self.RG_CRITIC, values="values")
        entropy = core_algos.agg_loss(columns.pop("entropys"), columns["response_mask"], actor.loss_agg_mode)
        columns["token_level_scores"] = columns["token_level_rewards"] = columns.pop("rm_scores")
        metrics = {"actor/entropy": entropy.item()}
        if config.use_kl_in_reward:
            controller = core_algos.get_kl_controller(config.kl_ctrl)
            controller.value = self.state["kl_coef"]
            metrics |= ray_trainer.apply_kl_penalty(batch, controller, config.kl_penalty)[1]
            self.state["kl_coef"] = controller.value
        options = {"norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo, "config": config}
        ray_trainer.compute_advantage(batch, config.adv_estimator, config.gamma, config.lam, **options)
        return metrics

    def update(self, group: Any, batch: DataProto, config: Any, prefix: str) -> dict[str, float]:
        size = config.ppo_mini_batch_size * config.rollout_n
        sizes = {"global_batch_size": size, "mini_batch_size": size, "epochs": config.ppo_epochs}
        order = {"seed": config.data_loader_seed, "dataloader_kwargs": {"shuffle": config.shuffle}}
        wants_entropy = config.get("calculate_entropy", False) or config.get("entropy_coeff", 0) != 0
        rows = self.rows(batch, **sizes, **order, calculate_entropy=wants_entropy)
        metrics = group.train_mini_batch(rows).meta_info["metrics"]
        return metric.reduce_metrics(py_functional.rename_dict(metrics, prefix))
