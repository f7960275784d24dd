"""What can be wrong between the parts of a job: its roles, data, algorithm, reward function, engines and model."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from dlrover.python.rl.algorithm.base import Algorithm
from dlrover.python.rl.algorithm.dapo import DAPO
from dlrover.python.rl.algorithm.dpo import DPO
from dlrover.python.rl.algorithm.reward_model import RewardModel
from dlrover.python.rl.algorithm.sft import SFT
from dlrover.python.rl.common.errors import EngineError, EnvironmentFailed, InvalidJob, Problem, VerifierError
from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.data.problems import check_prompts, load_prompts
from dlrover.python.rl.engine.abilities import optimizer_faults, rollout_faults, train_faults
from dlrover.python.rl.engine.base import OptimizerConfig
from dlrover.python.rl.engine.layout import Layout, ParallelSizes
from dlrover.python.rl.engine.registry import ROLLOUT, TRAIN, engine_problems
from dlrover.python.rl.environment.functions import find_environment
from dlrover.python.rl.environment.lookup import load_function
from dlrover.python.rl.recipe.config import EngineConfig, PolicyConfig, RewardConfig, RolloutConfig

_OF_ENGINES = frozenset({"entropy", "candidate_logprobs"})
"""What train engines make for a loss that wants it."""

_RECIPES = {"values": "ppo", "teacher_logprobs": "distill", "candidates": "distill"}
"""Where algorithms that need these find them."""


def judge_problems(reward: RewardConfig, env_path: str | None) -> list[Problem]:
    """Whether there is somebody to judge samples, and nobody besides."""
    if env_path is None:
        return reward_problems(reward.function)
    return [] if reward.model is None else [Problem("config.reward.model", "is not asked: rollout.env_path judges")]


def reward_problems(function: str | Mapping[str, float], where: str = "config.reward") -> list[Problem]:
    """Whether the reward function can be imported, or each of several."""
    found = []
    for name in [function] if isinstance(function, str) else function:
        try:
            load_function(name)
        except VerifierError as error:
            found.append(Problem(f"{where}.function", str(error)))
    return found if function else [Problem(f"{where}.function", "names no function")]


def environment_problems(rollout: RolloutConfig) -> list[Problem]:
    """Whether the environment can be loaded, and takes its options."""
    if rollout.env_path is None:
        return [Problem("config.rollout.env_options", "there is no env_path")] if rollout.env_options else []
    try:
        find_environment(rollout.env_path, rollout.env_options)
    except EnvironmentFailed as error:
        return [Problem("config.rollout.env_path", str(error))]
    return []


def train_engine_problems(
    engine: EngineConfig, members: int, bare_head: bool = False, role: str = "actor"
) -> list[Problem]:
    """Whether there is such an engine, that can do what is asked of it, and whether its sizes divide the members of a
    role that trains."""
    problems = engine_problems(TRAIN, engine.train, engine.train_options, "config.engine.train")
    sizes = engine.parallel or ParallelSizes()
    faults = train_faults(engine.train, sizes, engine.lora is not None, bare_head)
    problems += [Problem("config.engine", fault) for fault in faults]
    try:
        Layout.of(members, sizes)
    except EngineError as error:
        problems.append(Problem("config.engine.parallel", f"{error}: they are members of the {role}"))
    return problems


def optimizer_problems(engine: EngineConfig, optimizer: OptimizerConfig) -> list[Problem]:
    """Whether the train engine has the optimizer that is asked for."""
    return [Problem("config.optimizer.name", fault) for fault in optimizer_faults(engine.train, optimizer)]


def rollout_engine_problems(engine: EngineConfig) -> list[Problem]:
    """Whether there is such an engine, that can do what is asked of it."""
    problems = engine_problems(ROLLOUT, engine.rollout, engine.rollout_options, "config.engine.rollout")
    split = rollout_faults(engine.rollout, engine.rollout_tensor_parallel_size)
    return [*problems, *(Problem("config.engine.rollout_tensor_parallel_size", fault) for fault in split)]


def role_problems(trainer: str, cfg: PolicyConfig, roles: Mapping[RLRoleType, int]) -> list[Problem]:
    """Roles that a trainer of this name lacks, or that have more members than there are rows to share."""
    needed = [RLRoleType.ROLLOUT, *([RLRoleType.REWARD] if cfg.rollout.env_path is None else [])]
    problems = [problem for role in needed for problem in role_is_there(trainer, role, roles)]
    held_out, drawn = _held_out_rows(cfg), cfg.prompts_per_step * cfg.rollout.samples_per_prompt
    shared = {
        RLRoleType.ROLLOUT: (min(cfg.prompts_per_step, held_out), "prompts"),
        RLRoleType.REWARD: (min(drawn, held_out), "answers"),
        RLRoleType.REFERENCE: (drawn, "samples"),
        RLRoleType.ACTOR: (drawn, "samples"),
        RLRoleType.CRITIC: (drawn, "samples"),
    }
    replica = dict.fromkeys(
        (RLRoleType.ACTOR, RLRoleType.CRITIC), (cfg.engine.parallel or ParallelSizes()).replica_size
    )
    for role, (rows, what) in shared.items():
        if roles.get(role, 1) > rows * replica.get(role, 1):
            name = role.lower()
            problems.append(Problem(f"workload.{name}.num", f"{roles[role]} {name} members cannot share {rows} {what}"))
    return problems


def role_is_there(trainer: str, role: RLRoleType, roles: Mapping[RLRoleType, int]) -> list[Problem]:
    """Whether a job has a role that a trainer of this name cannot do without."""
    return [] if role in roles else [Problem("workload", f"the role '{role.lower()}' is required by {trainer}")]


def algorithm_problems(
    make: Callable[[], Algorithm], given: frozenset[str], cfg: PolicyConfig, roles: Mapping[RLRoleType, int]
) -> list[Problem]:
    """Whether there is such an algorithm, that learns from samples, and can be given what it needs.

    Args:
        make: makes it.
        given: the columns that a trainer has.
        cfg: how samples are drawn.
        roles: and their members.
    """
    try:
        algorithm = make()
    except InvalidJob as error:
        return [Problem(f"config.{item.where}", item.what) for item in error.problems]
    if isinstance(algorithm, SFT | DPO | RewardModel):
        return [Problem("config.algorithm.name", "it learns from examples, not from samples as this trainer does")]
    try:
        algorithm.check_group_size(cfg.rollout.samples_per_prompt)
    except ValueError as error:
        return [Problem("config.rollout.samples_per_prompt", str(error))]
    longest = cfg.rollout.max_new_tokens * (cfg.rollout.max_turns if cfg.rollout.env_path else 1)
    if isinstance(algorithm, DAPO) and not algorithm.shapes(longest):
        what = f"completions have {longest} tokens at most, so none gets to where over-long shaping begins"
        return [Problem("config.algorithm.max_tokens", what)]
    absent = algorithm.needs.annotate - given | algorithm.needs.loss - given - _OF_ENGINES
    if absent:
        where = {_RECIPES[name] for name in absent if name in _RECIPES}
        more = f"; the trainer of recipe.{where.pop()} has it" if len(where) == 1 else ""
        what = f"it needs {', '.join(sorted(absent))}, which this trainer does not have{more}"
        return [Problem("config.algorithm", what)]
    if "ref_logprobs" in algorithm.needs.all and RLRoleType.REFERENCE not in roles:
        return [Problem("workload", "config.algorithm.kl_coef is above 0, which needs the role 'reference'")]
    return []


def filtering_problems(cfg: PolicyConfig) -> list[Problem]:
    """A group of one sample is always all alike."""
    if cfg.rollout.dynamic_filtering == "off" or cfg.rollout.samples_per_prompt > 1:
        return []
    what = "compares the samples of a prompt: rollout.samples_per_prompt has to be at least 2"
    return [Problem("config.rollout.dynamic_filtering", what)]


def _held_out_rows(cfg: PolicyConfig) -> int:
    path, keys = cfg.data.eval, cfg.data.keys
    if path is None or check_prompts(path, keys):
        return cfg.data.eval_rows
    return min(cfg.data.eval_rows, len(load_prompts(path, keys)))


def template_problems(cfg: PolicyConfig) -> list[Problem]:
    """Conversations need a chat template; whether a model on the hub has one is seen when it is loaded."""
    folder, keys = Path(cfg.model).expanduser(), cfg.data.keys
    if not cfg.model or not (folder / "config.json").is_file() or _has_chat_template(folder):
        return []
    for path in (cfg.data.train, cfg.data.eval):
        for row in load_prompts(path, keys) if path and not check_prompts(path, keys) else ():
            if not isinstance(row.prompt, str):
                what = f"the tokenizer in {cfg.model} has no chat template, which the 'messages' of"
                return [Problem("config.model", f"{what} {path}:{row.line} need")]
    return []


def _has_chat_template(folder: Path) -> bool:
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    if any((folder / name).exists() for name in files):
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))
