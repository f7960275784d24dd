# SPDX-License-Identifier: Apache-2.0
"""verl's options: the defaults and checks of its ``ppo_megatron_trainer``, and which options the example takes."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo import utils
from verl.utils import config as verl_config

TAKEN = re.compile(
    r"""trainer\.(total_(training_steps|epochs)|critic_warmup|rollout_data_dir|default_local_dir|device|n_gpus_per_node)
    |trainer\.save_freq # a commit of every step stands for it
    |data\.(?!val_|apply_chat_template_kwargs|continuous_token|reward_fn_key|return_raw_input_ids).*
    |reward\.(custom_reward_function|reward_manager)\..* |algorithm\.(?!filter_groups|rollout_correction).*
    |(critic|actor_rollout_ref\.(actor|ref|model))\.(?!strategy|(.*\.)?(lora|mtp|profiler|qat|(virtual_)?pipeline
        |engine\.|model_engine|router_replay|grad_offload|dist_checkpointing_prefix|freeze_vision_tower|nccl_timeout
        |forward_max_token)).*
    |actor_rollout_ref\.rollout\.(name|n|seed|temperature|top_k|top_p|(prompt|response)_length|log_prob\w*|tensor_model\w*)""",
    re.VERBOSE,
)


def complete(config: Any, devices: str) -> Any:
    """All options with their defaults. Raises ValueError for options that the example would ignore, and verl's errors.
    An option that is not taken may repeat the value that it has without it."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        whole = compose("ppo_megatron_trainer")
    options, taken = dict(flatten(OmegaConf.to_container(config, resolve=True))), OmegaConf.create()
    for name in filter(TAKEN.fullmatch, options):
        OmegaConf.update(taken, name, options[name])
    whole.merge_with(OmegaConf.to_container(taken))
    whole.trainer.device = "cpu" if devices == "CPU" else "cuda"
    values = dict(flatten(OmegaConf.to_container(whole, resolve=True)))
    ignored = [name for name in options if not TAKEN.fullmatch(name) and options[name] != values.get(name, name)]
    if ignored:
        raise ValueError(f"without a counterpart here: {', '.join(ignored)}")
    verl_config.validate_config(whole, utils.need_reference_policy(whole), utils.need_critic(whole))
    return OmegaConf.to_container(whole, resolve=True)


def flatten(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
