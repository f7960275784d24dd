# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine inside this process: start, steps, weights, end, and two ways to free its device."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from vllm import SamplingParams as VllmSamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory, destroy_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.engine.llm_engine import LLMEngine

from dlrover.python.rl.common.errors import EngineDied, EngineError, WeightSyncError
from dlrover.python.rl.engine.api.weights import WeightSnapshot
from dlrover.python.rl.engine.memory.device_memory import Kind
from dlrover.python.rl.engine.model.ranks import preserve_random_state
from dlrover.python.rl.engine.rollout.requests import RunningRequest
from dlrover.python.rl.engine.vllm.child import share_weights
from dlrover.python.rl.engine.vllm.worker import EXTRA, READ_BACK_PARTS, SamplingPlan

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives and ends with this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # V2 takes other logits processors
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would pin this process's own threads
    "VLLM_NO_USAGE_STATS": "1",
}
"""Variables that vLLM reads when it starts; the user's values take precedence."""

_LOAD_TIMEOUT_S = 600.0
"""Limit on a call to all workers; vLLM has its own deadline for each step."""

_JOIN_TIMEOUT_S = 10.0


@contextmanager
def _as_engine_error(failure: str, refusal: type[EngineError] = EngineError) -> Iterator[None]:
    """Raise an exception of vLLM, of any type, as ``EngineDied`` or ``refusal``, with its type and text."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        # After these a worker, a device or a collective has failed, and vLLM no longer computes.
        has_died = isinstance(error, RuntimeError | TimeoutError) and not isinstance(error, NotImplementedError)
        raise (EngineDied if has_died else refusal)(f"{failure}: {type(error).__name__}: {error}") from error


class Runner:
    """One vLLM engine, made from the fields of ``EngineArgs``; an ``EngineError`` if it does not start. Engines without
    tensor parallelism share this process's group of ranks, which ends with the last of them."""

    _alive: ClassVar[set[int]] = set()

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._ranks = int(arguments["tensor_parallel_size"])
        self._loads = 0
        self._has_foreign_group = torch.distributed.is_initialized() and not Runner._alive
        if self._ranks == 1:  # several ranks are child processes
            Runner._alive.add(id(self))
        try:
            with _preserved_process_state():
                self.llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except BaseException as error:
            self._leave_process_group()
            if isinstance(error, Exception):  # vLLM raises a plain one if a worker process fails
                raise EngineError(f"vLLM does not start: {type(error).__name__}: {error}") from error
            raise

    def submit(self, name: str, running: RunningRequest, eos_ids: Sequence[int]) -> None:
        """Queue a request's remaining tokens under a name that was not used before."""
        sampling, count = running.sampling, len(running.tokens)
        params = VllmSamplingParams(
            max_tokens=sampling.max_new_tokens - count,
            temperature=0.0,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,
            stop_token_ids=[] if sampling.ignore_eos else list(eos_ids),
            output_kind=RequestOutputKind.DELTA,
            extra_args={EXTRA: SamplingPlan(sampling, running.uniform[count:], running.known_ids)},
        )
        with _as_engine_error("vLLM refused a request"):
            self.llm.add_request(name, tokens_input(running.sequence.tolist()), params)

    def step(self) -> list[tuple[str, int, float]]:
        """Run one step; returns the request's name, token and log-prob of each new token."""
        with _as_engine_error("vLLM failed in a step"):
            outputs = self.llm.step()
        new_tokens = []
        for output in outputs:
            (new,) = output.outputs
            for token, logprobs in zip(new.token_ids, new.logprobs or (), strict=True):
                new_tokens.append((output.request_id, int(token), float(logprobs[token].logprob)))
        return new_tokens

    def abort(self, names: Sequence[str]) -> None:
        with _as_engine_error("vLLM did not abort requests"):
            self.llm.abort_request(list(names))

    def load(self, weights: WeightSnapshot) -> None:
        """Load weights in place and read them back, while no request runs. Since compared tensors go to the device
        again, the first load and one after a failure are compared in full, later ones an eighth at a time. Raises
        WeightSyncError, which names the different tensors, or EngineDied if vLLM itself has failed."""
        loads, self._loads = self._loads, 0
        part = (loads - 1) % READ_BACK_PARTS if loads else None
        with _as_engine_error(f"vLLM failed to load the weights of version {weights.version}", WeightSyncError):
            with nullcontext(weights) if self._ranks == 1 else share_weights(weights) as shared:
                self.call_workers("take_weights", shared)
                worker_faults = self.call_workers("read_back", shared, part)
            self.llm.reset_prefix_cache()
        if faults := sorted({fault for faults in worker_faults for fault in faults}):
            raise WeightSyncError(f"vLLM did not load the weights of version {weights.version}: {'; '.join(faults)}")
        self._loads = loads + 1

    def cache_bytes(self) -> int:
        """Return the bytes of the key-value cache on the worker where it is largest."""
        with _as_engine_error("vLLM does not report the size of its cache"):
            return int(max(self.call_workers("cache_bytes")))

    def sleep_again(self) -> None:
        """Free the awake part and keep the weights: while another part sleeps, ``llm.sleep()`` does nothing."""
        self.call_workers("sleep", 1)
        self.llm.engine_core.engine_core.model_executor.sleeping_tags |= {"weights", "kv_cache"}

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of ``WeightLoader``, or of vLLM's own worker, in every worker."""
        results: list[Any] = self.llm.collective_rpc(method, _LOAD_TIMEOUT_S, arguments)
        return results

    def close(self) -> None:
        """End the engine and its workers; vLLM's own shutdown would end a train engine's process groups too."""
        if self._ranks == 1:
            self.call_workers("drop_layer_records")
        self.llm.engine_core._finalizer.detach()
        core = self.llm.engine_core.engine_core
        workers = [] if self._ranks == 1 else core.model_executor.workers
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        for worker in workers:
            worker.proc.join(_JOIN_TIMEOUT_S)  # it has ended: no zombie remains
        del core, self.llm
        self._leave_process_group()

    def _leave_process_group(self) -> None:
        gc.unfreeze()  # vLLM freezes all objects when it starts
        is_last = Runner._alive == {id(self)}
        Runner._alive.discard(id(self))
        if is_last and self._has_foreign_group:
            destroy_model_parallel()
        elif is_last:
            cleanup_dist_env_and_memory()
        gc.collect()


def check_head_width(width: int) -> None:
    """Refuse a head width that vLLM's attention on CPUs does not support: it would fail at the first token."""
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if width not in supported:
        widths = ", ".join(map(str, supported))
        raise EngineError(f"vLLM's attention on a CPU takes heads of width {widths}, and this model's have {width}")


@contextmanager
def _preserved_process_state() -> Iterator[None]:
    """Set the environment for vLLM's start and restore the state that it changes: environment variables such as
    ``LD_PRELOAD``, all random states, and on a CPU ``torch.set_num_threads``."""
    before = dict(os.environ)
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    os.environ.update({name: value for name, value in _ENVIRONMENT.items() if name not in before})
    try:
        with preserve_random_state():
            yield
    finally:
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


class SleepingRunner:
    """Frees a GPU by vLLM's sleep mode; ``runner`` may be used while weights and cache are on the device. Level 1
    copies the weights to the host; level 2 copies nothing. An engine that has slept before keeps the last snapshot
    instead of a copy: it sleeps at level 2, and loads the snapshot when it wakes."""

    def __init__(self, start: Callable[[], Runner]) -> None:
        self.runner = start()
        self.has_weights = True  # that can wake
        self._asleep: set[Kind] = set()
        self._has_slept = False
        self._snapshot: WeightSnapshot | None = None
        self._is_loaded = True  # the device has the last weights, or vLLM wakes them

    def wake(self, kind: Kind) -> None:
        """Bring the last weights, or an empty cache, to the device; if that fails, weights and cache sleep."""
        try:
            with _as_engine_error(f"vLLM did not wake its {kind}"):
                self.runner.llm.wake_up(tags=[kind])
        except BaseException:
            self.runner.sleep_again()
            self._asleep = {"weights", "kv_cache"}
            raise
        self._asleep.discard(kind)
        if kind == "weights":
            self.runner.call_workers("release_host_memory")
        if kind == "weights" and not self._is_loaded and self._snapshot is not None:
            try:
                self.runner.load(self._snapshot)
            except BaseException:
                self.sleep(keep_weights=False)  # the device has a mixture
                raise
            self._is_loaded = True

    def sleep(self, keep_weights: bool) -> None:
        self._snapshot = self._snapshot if keep_weights else None
        # Weights that sleep already are not woken: another engine may use their memory.
        if "weights" not in self._asleep:
            self._is_loaded = keep_weights and self._snapshot is None
            self.runner.llm.sleep(level=1 if self._is_loaded else 2)
        else:
            if "kv_cache" not in self._asleep:
                self.runner.sleep_again()
            if not keep_weights:
                self._drop_host_copies()
        self._asleep = {"weights", "kv_cache"}
        self._has_slept = True
        self.has_weights = self.has_weights and keep_weights

    def load(self, weights: WeightSnapshot) -> None:
        """Load weights in place, or keep them until :meth:`wake`."""
        if "weights" in self._asleep:
            self._drop_host_copies()
        else:
            self.runner.load(weights)
        self._snapshot = weights if self._has_slept else None
        self.has_weights = True

    def _drop_host_copies(self) -> None:
        if self._is_loaded:
            self.runner.call_workers("drop_host_copies")
        self._is_loaded = False

    def close(self) -> None:
        self.runner.close()


class RestartingRunner:
    """Ends vLLM on a CPU, where it cannot sleep, and starts it again once weights and cache are both needed: with the
    last snapshot, or before the first with the weights of the model's folder."""

    def __init__(self, start: Callable[[], Runner]) -> None:
        self._start = start
        self._runner: Runner | None = start()
        self._awake: set[Kind] = {"weights", "kv_cache"}
        self.has_weights = True
        self._weights: WeightSnapshot | None = None

    @property
    def runner(self) -> Runner:
        assert self._runner is not None, "used while asleep"
        return self._runner

    def wake(self, kind: Kind) -> None:
        self._awake.add(kind)
        if self.has_weights and len(self._awake) == 2:
            try:
                self._restart(self._weights)
            except BaseException:
                self._awake = set()
                raise

    def sleep(self, keep_weights: bool) -> None:
        self._awake = set()
        if not keep_weights:
            self._weights, self.has_weights = None, False
        self.close()

    def load(self, weights: WeightSnapshot) -> None:
        if self._runner is not None:
            self._runner.load(weights)
        elif len(self._awake) == 2:
            self._restart(weights)
        self._weights, self.has_weights = weights, True

    def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _restart(self, weights: WeightSnapshot | None) -> None:
        runner = self._start()
        try:
            if weights is not None:
                runner.load(weights)
        except BaseException:
            runner.close()
            raise
        self._runner = runner
