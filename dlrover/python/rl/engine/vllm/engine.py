# SPDX-License-Identifier: Apache-2.0
"""The rollout engine on vLLM, which runs in this process on a CPU and in a child process on CUDA."""

import itertools
import os
from collections.abc import Collection
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from dlrover.python.rl.common.errors import EngineError, MissingExtra
from dlrover.python.rl.engine.api.base import Finish, RolloutSettings
from dlrover.python.rl.engine.api.registry import read_options
from dlrover.python.rl.engine.api.weights import DeviceKind, WeightSnapshot
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory, Kind
from dlrover.python.rl.engine.memory.offload import BROKEN_OFF, OffloadState, SleepingEngine, divide_bytes
from dlrover.python.rl.engine.model import spec
from dlrover.python.rl.engine.model.loading import DTYPES, CausalLM
from dlrover.python.rl.engine.model.ranks import device_environment
from dlrover.python.rl.engine.rollout.requests import RolloutEngineBase, RunningRequests
from dlrover.python.rl.engine.vllm import INFO, VllmOptions
from dlrover.python.rl.engine.vllm.child import ChildRunner, start_here

if find_spec("vllm") is None:
    raise MissingExtra("vllm", "vllm")

if TYPE_CHECKING:
    from dlrover.python.rl.engine.vllm.runner import RestartingRunner, SleepingRunner

    OffloadableRunner: TypeAlias = ChildRunner | RestartingRunner | SleepingRunner

_PACKAGE = "dlrover.python.rl.engine.vllm"
_BLOCK = 128
"""Tokens of vLLM's largest cache block: a sequence may leave as many unused."""


class VllmRolloutEngine(SleepingEngine, RolloutEngineBase):
    """Implements :class:`~dlrover.python.rl.engine.api.base.BaseRolloutEngine`.

    Tokens are sampled by the same rule and from the same random numbers as in the ``torch`` engine (see
    ``vllm/worker.py``): a sample depends neither on its batch nor on interruptions, beyond the rounding of its logits.
    vLLM's own loader writes weights in place; before they are served they are read back, bit for bit.

    On a GPU ``cpu()`` and ``meta()`` put vLLM to sleep (see ``SleepingRunner``). On a CPU vLLM cannot sleep: it is
    ended, and ``cuda()`` starts it again, which takes seconds.

    Raises:
        MissingExtra: vLLM is not installed (when this module is imported).
        EngineError: there is no such model or option, or vLLM does not start with them.
        OutOfDeviceMemory: weights or cache do not fit the free capacity of ``memory``.
    """

    info = INFO

    def __init__(self, model: str | Path, settings: RolloutSettings, memory: DeviceMemory | None = None) -> None:
        options = read_options(VllmOptions, settings.backend)
        self._lm, folder = spec.load_meta_causal_lm(model)
        self._lm = self._lm.masked(settings.mask_unknown_ids)
        arguments = _engine_arguments(folder, self._lm, settings, options)
        self._requests = RunningRequests(self._lm, arguments["max_model_len"], self.info.columns)
        self._names: dict[int, str] = {}
        self._submissions = itertools.count()
        self._offload = OffloadState(memory or DeviceMemory(settings.device), "vllm")
        nbytes = spec.count_weight_bytes(self._lm, DTYPES[settings.precision])
        self._offload.bring("weights", divide_bytes(nbytes, settings.tensor_parallel_size))
        with ExitStack() as undo:
            undo.callback(self._offload.leave, "meta")
            with self._offload.computing():
                self._offloadable = self._start(arguments, settings, options)
            undo.callback(self._offloadable.close)
            self._offload.bring("kv_cache", self._offloadable.runner.cache_bytes())
            undo.pop_all()

    def _start(self, arguments: dict[str, Any], settings: RolloutSettings, options: VllmOptions) -> "OffloadableRunner":
        on_cpu = settings.device == "cpu"
        has_own_process = not on_cpu if options.own_process is None else options.own_process
        if on_cpu:
            from dlrover.python.rl.engine.vllm.runner import check_head_width

            check_head_width(spec.get_head_width(self._lm))
        if has_own_process:
            env = device_environment(settings)
            if settings.precision == "fp32":
                env.setdefault("TRITON_F32_DEFAULT", "ieee")  # vLLM's attention would compute in TF32
            return ChildRunner(arguments, on_cpu, env)
        if not on_cpu:
            _check_shared_process(settings)
        return start_here(arguments, on_cpu)

    def _step(self, max_tokens: int | None) -> dict[int, Finish]:
        """Submit new requests and run one step of vLLM: a token for each scheduled sequence, or part of a prompt."""
        runner = self._offloadable.runner
        try:
            with self._offload.computing():
                for number in sorted(self._requests.by_number.keys() - self._names.keys()):
                    self._names[number] = str(next(self._submissions))
                    runner.submit(self._names[number], self._requests.by_number[number], self._lm.eos_ids)
                numbers = {name: number for number, name in self._names.items()}
                new_tokens = [(numbers[name], token, logprob) for name, token, logprob in runner.step()]
            return self._requests.append(new_tokens, self.version)
        except BaseException:
            with suppress(EngineError):
                self._withdraw(self._requests.by_number)  # the next step generates this one's tokens again
            raise

    def _withdraw(self, numbers: Collection[int]) -> None:
        """Abort requests in vLLM; they keep their tokens and can be submitted again."""
        names = [self._names.pop(number) for number in list(numbers) if number in self._names]
        if names:
            self._offloadable.runner.abort(names)

    def receive(self, weights: WeightSnapshot, rewind: bool = False) -> None:
        """Verify and load new weights; while the old ones are offloaded, they wait in host memory."""
        self._lm.check(weights, serving=-1 if rewind else self.version)
        self._withdraw(self._requests.by_number)
        # Remains if loading fails midway: a mixture has no version.
        self.version, self._offload.unready_reason = -1, BROKEN_OFF
        with self._offload.computing():
            self._offloadable.load(weights)
        if self._offload.place == "meta":
            self._offload.place = "cpu"
        self.version, self._offload.unready_reason = weights.version, ""

    def close(self) -> None:
        self._requests.by_number.clear()
        self._names.clear()
        self._offloadable.close()
        self._offload.leave("meta")

    def _wake(self, kind: Kind) -> None:
        self._offload.bring(kind)
        try:
            with self._offload.computing():
                self._offloadable.wake(kind)
        except BaseException:
            has_weights = self._offloadable.has_weights
            self._offload.leave("cpu" if has_weights else "meta")
            if not has_weights:
                self.version, self._offload.unready_reason = -1, self._offload.unready_reason or BROKEN_OFF
            raise

    def _sleep(self, place: DeviceKind) -> None:
        self._withdraw(self._requests.by_number)
        self._offloadable.sleep(keep_weights=place == "cpu")
        self._offload.leave(place)


def _engine_arguments(model: str, lm: CausalLM, settings: RolloutSettings, options: VllmOptions) -> dict[str, Any]:
    on_cpu = settings.device == "cpu"
    longest = options.max_model_len or lm.max_positions
    cache = options.kv_cache_bytes
    if cache is None and on_cpu and longest is not None:
        token_bytes = spec.count_cache_bytes_per_token(lm, DTYPES[settings.precision])
        cache = settings.max_batch * (longest + _BLOCK) * token_bytes
    return {
        "model": model,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[settings.precision],
        "max_model_len": longest,
        "max_num_seqs": settings.max_batch,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else "mp",  # never Ray's actors
        "async_scheduling": False,  # the sampler needs the number of generated tokens
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache,
        "enforce_eager": on_cpu or not options.compile,
        "enable_sleep_mode": not on_cpu,
        **({} if on_cpu else {"moe_backend": "triton"}),  # other backends convert the experts: no read-back
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "generation_config": "vllm",  # not the model's own: requests have sampling parameters
        "logprobs_mode": "processed_logits",
        "logits_processors": [f"{_PACKAGE}.worker:PositionSampler"],
        "worker_extension_cls": f"{_PACKAGE}.worker.WeightLoader",
        "disable_log_stats": True,
        **options.engine_args,
    }


def _check_shared_process(settings: RolloutSettings) -> None:
    """Refuse settings that vLLM would ignore on CUDA in this process, whose devices and environment it shares."""
    first = settings.devices[0] if settings.devices else torch.device(settings.device).index or 0
    if first != 0 or settings.tensor_parallel_size > 1:
        raise EngineError(
            f"with own_process false vLLM uses the first visible device only, not device {first} of"
            f" {settings.tensor_parallel_size}: leave own_process out"
        )
    if settings.precision == "fp32" and "TRITON_F32_DEFAULT" not in os.environ:
        raise EngineError(
            "vLLM's attention computes float32 in TF32 in this process: leave own_process out, use bf16, or set"
            " TRITON_F32_DEFAULT=ieee in the environment, for all Triton kernels of this process"
        )
