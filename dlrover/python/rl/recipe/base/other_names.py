# SPDX-License-Identifier: Apache-2.0
"""Other names: keys of RL2, TRL and verl, which are read as ours or answered with the place to look; former names of
metrics."""

from collections.abc import Mapping

from dlrover.python.rl.config.typed import Translation

_RL2_ACTOR = {
    "model_name": "model",
    "ddp_size": "engine.parallel.ddp_size",
    "tp_size": "engine.parallel.tensor_parallel_size",
    "sp_size": "engine.parallel.context_parallel_size",
    "max_length_per_device": "engine.max_tokens_per_microbatch",
    "gradient_checkpointing": "engine.gradient_checkpointing",
    "lr": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.max_grad_norm",
}
"""With ``actor.`` before them, or alone."""

_TRAINED = {
    **_RL2_ACTOR,
    **{f"actor.{name}": ours for name, ours in _RL2_ACTOR.items()},
    "model_name_or_path": "model",
    "learning_rate": "optimizer.lr",
    "warmup_steps": "optimizer.warmup_steps",
    "max_steps": "steps",
    "eval_steps": "eval_every",
}

EXAMPLE_NAMES: Mapping[str, str] = {
    **_TRAINED,
    "data.path": "data.train",
    "data.batch_size": "batch_size",
    "num_train_epochs": "epochs",
    "chat_template_kwargs": "data.chat_template_kwargs",
}
"""Of recipes that learn from examples."""

POLICY_NAMES: Mapping[str, str | Translation] = {
    **_TRAINED,
    # RL2
    "train_data.path": "data.train",
    "test_data.path": "data.eval",
    "train_data.prompts_per_rollout": "prompts_per_step",
    "train_data.responses_per_prompt": "rollout.samples_per_prompt",
    "actor.update_per_rollout": "updates_per_step",
    "actor.avg_level": "algorithm.averaging",
    "actor.rollout.env_path": "rollout.env_path",
    "actor.rollout.max_turns": "rollout.max_turns",
    "actor.rollout.train_sampling_params.max_new_tokens": "rollout.max_new_tokens",
    "actor.rollout.train_sampling_params.temperature": "rollout.temperature",
    "actor.rollout.train_sampling_params.stop": "rollout.stop",
    "rollout.train_sampling_params.max_new_tokens": "rollout.max_new_tokens",
    "rollout.train_sampling_params.temperature": "rollout.temperature",
    "rollout.train_sampling_params.stop": "rollout.stop",
    "kl.coef": "algorithm.kl_coef",
    "kl.type": "algorithm.kl_in",
    "kl.loss_estimator": "algorithm.kl_estimator",
    "kl.reward_estimator": "algorithm.kl_estimator",
    "adv.estimator": Translation("algorithm.name", {"gae": "ppo", "reinforce": "dr_grpo"}),
    "adv.norm_var": Translation("algorithm.normalize", {True: "std_unbiased", False: "none"}),
    "adv.gamma": "algorithm.gamma",
    "adv.lamda": "algorithm.lam",
    # TRL
    "num_generations": "rollout.samples_per_prompt",
    "num_generations_eval": "eval.samples",
    "max_prompt_length": "data.max_prompt_tokens",
    "vllm_gpu_memory_utilization": "engine.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "engine.rollout_tensor_parallel_size",
    "max_completion_length": "rollout.max_new_tokens",
    "mask_truncated_completions": "rollout.mask_truncated",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "rollout.chat_template_kwargs": "data.chat_template_kwargs",  # its former name
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "beta": "algorithm.kl_coef",
    "epsilon_high": "algorithm.clip_high",
    "delta": "algorithm.dual_clip",
    "num_iterations": "epochs",
    # verl
    "data.train_files": "data.train",
    "data.val_files": "data.eval",
    "data.train_batch_size": "prompts_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
    "data.max_response_length": "rollout.max_new_tokens",
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "engine.gradient_checkpointing",
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coef",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl_estimator",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
    "actor_rollout_ref.actor.ppo_epochs": "epochs",
    "actor_rollout_ref.rollout.name": "engine.rollout",
    "actor_rollout_ref.rollout.n": "rollout.samples_per_prompt",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.val_kwargs.n": "eval.samples",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "eval.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "engine.rollout_tensor_parallel_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "engine.gpu_memory_utilization",
}
"""Of recipes that learn from samples."""

_CLIP = "algorithm.clip_low and algorithm.clip_high"
_ROWS = "the rows of an optimizer step over all ranks: batch_size, or prompts_per_step x rollout.samples_per_prompt"

_LORA_SETTINGS = {
    "lora_rank": "engine.lora.rank",
    "lora_r": "engine.lora.rank",
    "lora_alpha": "engine.lora.alpha",
    "lora_target_modules": "engine.lora.targets, the last parts of layers' names",
    "target_modules": "engine.lora.targets, the last parts of layers' names",
    "lora_dropout": "none: adapters have no dropout",
    "lora.r": "engine.lora.rank",
    "lora.lora_alpha": "engine.lora.alpha",
    "lora.target_modules": "engine.lora.targets, the last parts of layers' names",
}
"""Of TRL, OpenRLHF and verl."""

_LORA = {
    **{
        f"{before}{name}": place
        for before in ("", "engine.", "actor_rollout_ref.model.")
        for name, place in _LORA_SETTINGS.items()
    },
    **dict.fromkeys(
        ("lora", "actor.lora", "actor_rollout_ref.model.lora", "ds.lora", "use_peft", "peft_config"),
        "engine.lora, such as {rank: 16, alpha: 32}",
    ),
}

ELSEWHERE: Mapping[str, str] = {
    "scheduler": "optimizer.schedule",
    "actor.scheduler": "optimizer.schedule",
    "actor.warmup_ratio": "optimizer.warmup_steps, a number of steps",
    "warmup_ratio": "optimizer.warmup_steps, a number of steps",
    "lr_scheduler_type": "optimizer.schedule",
    "actor.clip": _CLIP,
    "clip": _CLIP,
    "epsilon": _CLIP,
    "actor_rollout_ref.actor.clip_ratio": _CLIP,
    "tis_coef": "algorithm.correction=truncate and algorithm.correction_high",
    "actor.tis_coef": "algorithm.correction=truncate and algorithm.correction_high",
    "vllm_importance_sampling_correction": "algorithm.correction=truncate",
    "actor.freeze_steps": "critic.warmup_steps",
    "loss_type": "algorithm.name and algorithm.averaging",
    "scale_rewards": "algorithm.normalize: std_unbiased for true, none for false",
    "importance_sampling_level": "algorithm.name: gspo for 'sequence'",
    "per_device_train_batch_size": _ROWS,
    "gradient_accumulation_steps": _ROWS,
    "steps_per_generation": "updates_per_step: steps_per_generation / gradient_accumulation_steps",
    "num_train_epochs": "steps, a number of steps",
    "algorithm.adv_estimator": "the recipe (ppo for gae) and algorithm.name",
    "algorithm.use_kl_in_reward": "algorithm.kl_in=reward",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.normalize: std_unbiased for true, none for false",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.averaging",
    "actor_rollout_ref.actor.strategy": "engine.train",
    "data.prompt_key": "data.keys={prompt: name-of-the-column}",
    "data.truncation": "data.over_long",
    "data.shuffle": "seed: the order is always drawn from it",
    "reward_model": "reward.model",
    "log_completions": "samples.jsonl, which has all of them",
    "run_name": "name",
    "optim": "optimizer.name",
    "vllm_mode": "engine.rollout=vllm; workload_group says which roles share devices",
    "train_dataset": "the argument 'dataset', or data.train",
    "bf16": "engine.precision",
    "use_vllm": "engine.rollout=vllm",
    "packing": "the only way: rows are packed, and attend only to themselves",
    "load_in_4bit": "engine.lora.quantize_base=nf4",
    **_LORA,
    "reward_funcs": "reward.function, or the argument 'reward' of rl.train_grpo",
    "reward_weights": "reward.function: {module:first: 1.0, module:second: 0.2}",
    "custom_reward_function": "reward.function=module:function",
    "output_dir": "job_dir",
    "save_steps": "checkpoint.every, and keep.save_every for models",
    "save_freq": "checkpoint.every, and keep.save_every for models",
    "save_dir": "job_dir",
    "load_ckpt_from": "checkpoint.resume",
    "resume_from_checkpoint": "checkpoint.resume",
    "logging_steps": "none: every step is logged",
    "report_to": "log.trackers",
    "dataset_name": "data.train",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "updates_per_step: their number instead of their size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "engine.max_tokens_per_microbatch, in tokens",
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl_coef and algorithm.kl_in",
    "critic.optim": "critic.optimizer",
}
"""What answers a key that has no equal."""

DISTILLATION_NAMES: Mapping[str, str | Translation] = {
    name: ours for name, ours in POLICY_NAMES.items() if name != "beta"
}
"""Of the recipe that learns from teachers."""

DISTILLATION_ELSEWHERE: Mapping[str, str] = {
    **ELSEWHERE,
    "beta": (
        "none: the divergence is always the reverse KL, GKD's beta=1 (algorithm.name=vocabulary_distillation, or"
        " distillation by sampled tokens); the KL penalty to a reference is algorithm.kl_coef"
    ),
}
"""What answers a key there."""

_UPDATE = (
    "ratio", "clip_fraction", "approx_kl", "kl", "entropy", "weight", "mismatch_kl", "mismatch_bounded", "reverse_kl",
)  # fmt: skip
_CRITIC = ("loss", "grad_norm", "lr", "value", "value_error", "value_clip_fraction")

METRIC_NAMES: Mapping[str, str] = {
    "reward": "reward/mean",
    "score": "reward/score",
    "completion_tokens": "completions/length_mean",
    "failed_samples": "samples/failed",
    "redrawn_samples": "samples/redrawn",
    "steps_without_reward": "samples/steps_without_reward",
    "staleness": "samples/staleness_mean",
    "staleness_max": "samples/staleness_max",
    "dropped_groups": "groups/dropped",
    "filtered_groups": "groups/filtered",
    "groups_without_signal": "groups/without_signal",
    **{name: f"policy/{name}" for name in _UPDATE},
    **{f"critic_{name}": f"critic/{name}" for name in _CRITIC},
    "accuracy": "eval/accuracy",
    "held_out_reward": "eval/reward",
    "held_out_failed": "eval/failed",
    "held_out_score": "eval/score",
    "eval_reward": "eval/reward",
    "eval_failed": "eval/failed",
    "eval_loss": "eval/loss",
    "eval_perplexity": "eval/perplexity",
    "margins": "rewards/margins",
    "eval_accuracy": "eval/rewards/accuracies",
    "eval_margins": "eval/rewards/margins",
    "eval_rewards/chosen": "eval/rewards/chosen",
    "eval_rewards/rejected": "eval/rewards/rejected",
    "step_s": "time/step",
    "tokens_per_s": "speed/tokens_per_s",
    "train_tflops": "speed/train_tflops",
    "mfu": "speed/mfu",
}
"""The name of each metric that had another one; ``keep.best`` may be either."""
