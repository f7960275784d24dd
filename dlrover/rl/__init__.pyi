# SPDX-License-Identifier: Apache-2.0
from dlrover.python.rl.algorithm.losses.policy_gradient import PolicyGradient as PolicyGradient
from dlrover.python.rl.classic import EnvBase as EnvBase
from dlrover.python.rl.classic import Evaluator as Evaluator
from dlrover.python.rl.classic import MathDataset as MathDataset
from dlrover.python.rl.classic.trainers.grpo_trainer import GRPOTrainer as GRPOTrainer
from dlrover.python.rl.classic.trainers.onpolicy_distillation_trainer import (
    OnPolicyDistillationTrainer as OnPolicyDistillationTrainer,
)
from dlrover.python.rl.classic.trainers.sft_trainer import SFTTrainer as SFTTrainer
from dlrover.python.rl.common.errors import DLRoverRLError as DLRoverRLError
from dlrover.python.rl.common.errors import InvalidJob as InvalidJob
from dlrover.python.rl.common.errors import InvocationError as InvocationError
from dlrover.python.rl.common.errors import InvocationTimeout as InvocationTimeout
from dlrover.python.rl.common.errors import JobConflict as JobConflict
from dlrover.python.rl.common.errors import JobFailed as JobFailed
from dlrover.python.rl.common.names import RLRoleType as RLRoleType
from dlrover.python.rl.master.job import RLJob as RLJob
from dlrover.python.rl.master.job import RLJobBuilder as RLJobBuilder
from dlrover.python.rl.session.engine import InferenceEngine as InferenceEngine
from dlrover.python.rl.session.engine import TrainEngine as TrainEngine
from dlrover.python.rl.session.session import init as init
from dlrover.python.rl.session.session import shutdown as shutdown
from dlrover.python.rl.session.split import NeedParallel as NeedParallel
from dlrover.python.rl.trainer.shard import Replicate as Replicate
from dlrover.python.rl.trainer.shard import Shard as Shard
from dlrover.python.rl.trainer.trainer import BaseTrainer as BaseTrainer
from dlrover.python.rl.trainer.workload import BaseWorkload as BaseWorkload
from dlrover.python.rl.trainer.workload import trainer_invocation as trainer_invocation
from dlrover.rl import nn as nn
from dlrover.rl.result import TrainResult as TrainResult
from dlrover.rl.train import train_distill as train_distill
from dlrover.rl.train import train_dpo as train_dpo
from dlrover.rl.train import train_grpo as train_grpo
from dlrover.rl.train import train_ppo as train_ppo
from dlrover.rl.train import train_rm as train_rm
from dlrover.rl.train import train_sft as train_sft

__version__: str
