# SPDX-License-Identifier: Apache-2.0
"""TRL's ``GRPOTrainer`` under the control plane: a script changes its import line, and runs.

    from trl import GRPOConfig, GRPOTrainer              # before
    from dlrover_trl import GRPOConfig, GRPOTrainer      # after

``GRPOConfig`` is TRL's own. Its fields become keys of the recipe; one that has none is refused unless it is at its
default.
"""

import dataclasses
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl import GRPOConfig

import dlrover.rl as rl

__all__ = ["GRPOConfig", "GRPOTrainer"]

_KEYS: Mapping[str, str] = {
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.max_grad_norm",
    "warmup_steps": "optimizer.warmup_steps",
    "seed": "seed",
    "num_generations": "rollout.samples_per_prompt",
    "max_completion_length": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "mask_truncated_completions": "rollout.mask_truncated",
    "num_iterations": "epochs",
    "beta": "algorithm.kl_coef",
    "epsilon": "algorithm.clip_low",
    "entropy_coef": "algorithm.entropy_coef",
}
_LOSSES: Mapping[str, Mapping[str, Any]] = {
    "dapo": {"name": "grpo", "averaging": "token"},
    "bnpo": {"name": "grpo", "averaging": "token"},
    "grpo": {"name": "grpo", "averaging": "sequence"},
    "dr_grpo": {"name": "dr_grpo", "averaging": "constant"},
    "cispo": {"name": "cispo"},
}
_SCALES: Mapping[Any, str] = {"group": "std_unbiased", True: "std_unbiased", "none": "none", False: "none"}
_READ = frozenset(
    {
        *_KEYS, "loss_type", "scale_rewards", "importance_sampling_level", "epsilon_high", "delta", "top_k",
        "adam_beta1", "adam_beta2", "lr_scheduler_type", "max_steps", "num_train_epochs", "per_device_train_batch_size",
        "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size", "output_dir", "run_name",
        "eval_steps", "eval_strategy", "bf16", "use_cpu", "use_vllm", "vllm_gpu_memory_utilization",
        "vllm_tensor_parallel_size", "reward_weights", "chat_template_kwargs", "do_eval", "gradient_checkpointing",
        "activation_checkpointing",
    }
)  # fmt: skip
_ABOUT_LOGS = (
    "log",
    "report_to",
    "push_to_hub",
    "hub_",
    "save_",
    "disable_tqdm",
    "num_completions_to_print",
    "trackio",
)
"""Beginnings of fields that say what is shown and kept; the run's folder has all of it."""


class GRPOTrainer:
    """Takes TRL's arguments; ``runtime`` is the argument of :func:`dlrover.rl.train_grpo`, and ``keys`` are other keys
    of the recipe and of the job. Raises ValueError for a field of ``args`` that nothing here corresponds to."""

    def __init__(
        self,
        model: str | Path,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        runtime: str = "ray",
        **keys: Any,
    ) -> None:
        self.args = args or GRPOConfig(output_dir=f"{Path(model).name}-GRPO")
        self.result: rl.TrainResult | None = None
        self._model, self._data, self._eval, self._runtime = model, train_dataset, eval_dataset, runtime
        functions = list(reward_funcs) if isinstance(reward_funcs, Sequence) else [reward_funcs]
        weights = self.args.reward_weights or [1.0] * len(functions)
        self._reward = dict(zip(functions, weights, strict=True))
        self._keys = _merged(keys_of(self.args, len(train_dataset)), keys)

    def train(self) -> "rl.TrainResult":
        self.result = rl.train_grpo(
            self._model, self._data, self._reward, eval_dataset=self._eval, runtime=self._runtime, **self._keys
        )
        return self.result

    def save_model(self, output_dir: str | None = None) -> None:
        """Copy the trained model to ``output_dir``."""
        if self.result is None:
            raise RuntimeError("train() comes first")
        shutil.copytree(self.result.model, output_dir or self.args.output_dir, dirs_exist_ok=True)


def keys_of(args: GRPOConfig, rows: int) -> dict[str, Any]:
    """The recipe's keys for TRL's; ``rows`` is the number of prompts. Raises ValueError."""
    unknown = [name for name in _changed(args) if name not in _READ and not name.startswith(_ABOUT_LOGS)]
    if unknown:
        raise ValueError(f"nothing here corresponds to GRPOConfig's {', '.join(unknown)}: leave them at their defaults")
    keys: dict[str, Any] = {}
    for name, key in _KEYS.items():
        _set(keys, key, getattr(args, name))
    keys["algorithm"] |= _algorithm_of(args)
    keys |= _lengths_of(args, rows)
    keys["optimizer"] |= {
        "betas": [args.adam_beta1, args.adam_beta2],
        "schedule": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
    }
    keys["rollout"] |= {"top_k": args.top_k or None}
    _set(keys, "data.chat_template_kwargs", args.chat_template_kwargs or {})
    engine = {"precision": "bf16" if args.bf16 else "fp32", "gradient_checkpointing": bool(args.gradient_checkpointing)}
    if args.use_cpu:
        engine["device"] = "cpu"
    if args.use_vllm:
        engine |= {"rollout": "vllm", "gpu_memory_utilization": args.vllm_gpu_memory_utilization}
        engine["rollout_tensor_parallel_size"] = args.vllm_tensor_parallel_size
    keys["engine"] = engine
    return keys


def _algorithm_of(args: GRPOConfig) -> dict[str, Any]:
    """The options of the algorithm that ``_KEYS`` does not have. Raises ValueError."""
    if args.loss_type not in _LOSSES or args.scale_rewards not in _SCALES:
        raise ValueError(f"no loss_type '{args.loss_type}' with scale_rewards '{args.scale_rewards}' here")
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    options = _LOSSES[args.loss_type] | {"clip_high": high, "dual_clip": args.delta}
    if args.importance_sampling_level == "sequence":
        if args.loss_type != "grpo":
            raise ValueError(
                f"no importance_sampling_level 'sequence' with loss_type '{args.loss_type}' here: only with 'grpo'"
            )
        options["name"] = "gspo"
    if args.loss_type == "cispo":  # TRL's epsilon_high is the bound of the weight itself; there is no lower one
        if high < 1:
            raise ValueError(f"loss_type 'cispo' needs epsilon_high of at least 1, the bound of the weight, not {high}")
        options |= {"clip_low": 1.0, "clip_high": high - 1}
    if args.loss_type == "dr_grpo":
        if _SCALES[args.scale_rewards] != "none":
            raise ValueError(
                "loss_type 'dr_grpo' does not scale rewards here: set scale_rewards='none', as in its paper"
            )
        return options | {"max_tokens": args.max_completion_length}
    return options | {"normalize": _SCALES[args.scale_rewards], "std_eps": 1e-4}


def _lengths_of(args: GRPOConfig, rows: int) -> dict[str, int]:
    """Return sizes and numbers of steps. TRL counts optimizer steps; a step here has all those that use its samples."""
    updates, remainder = divmod(args.steps_per_generation, args.gradient_accumulation_steps)
    if remainder:
        raise ValueError(
            f"steps_per_generation {args.steps_per_generation} is not a multiple of gradient_accumulation_steps"
            f" {args.gradient_accumulation_steps}: here an optimizer step is on samples of one generation"
        )
    prompts, updates_of_step = args.generation_batch_size // args.num_generations, updates * args.num_iterations
    epoch = -(-rows // prompts)
    total = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * epoch) * updates_of_step
    lengths = {"prompts_per_step": prompts, "updates_per_step": updates, "steps": -(-total // updates_of_step)}
    strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
    if strategy == "steps":
        every = args.eval_steps if args.eval_steps >= 1 else args.eval_steps * total
        lengths["eval_every"] = math.ceil(every / updates_of_step)
    elif strategy == "epoch":
        lengths["eval_every"] = epoch
    return lengths


def _changed(args: GRPOConfig) -> list[str]:
    """The fields that differ from what a config has that was not told about them."""
    usual = type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu, bf16=args.bf16)
    return [
        field.name
        for field in dataclasses.fields(args)
        if field.init and getattr(args, field.name) != getattr(usual, field.name)
    ]


def _set(keys: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        keys = keys.setdefault(parent, {})
    keys[last] = value


def _merged(keys: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(keys)
    for name, value in more.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if both else value
    return merged
