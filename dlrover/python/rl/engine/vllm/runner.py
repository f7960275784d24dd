"""vLLM's engine inside this process: started, stepped, given weights, ended."""

import gc
import os
from collections.abc import Iterator, Sequence
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

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.engine.torch.randomness import random_state_kept
from dlrover.python.rl.engine.torch.sample import Sample
from dlrover.python.rl.engine.vllm.drawing import EXTRA, Drawing
from dlrover.python.rl.engine.vllm.handing import handed
from dlrover.python.rl.engine.weights import WeightSnapshot

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives and dies with this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one knows no logits processors
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would pin this process's own threads
    "VLLM_NO_USAGE_STATS": "1",
}
"""What vLLM reads when it starts; what the user has set wins."""

_PATIENCE_S = 600.0
"""How long a worker in a process of its own may take over weights; vLLM has a deadline of its own for each step."""

_END_S = 10.0

_FAILURES = (RuntimeError, ValueError, TypeError, OSError)
"""What vLLM raises, ``TimeoutError`` and CUDA's own among them."""


class Runner:
    """One engine of vLLM, from its start to its end.

    What it has of the whole process (the group of its ranks, which is one rank) is shared by all that are alive, and
    ends with the last.

    Args:
        arguments: of vLLM's ``EngineArgs``.

    Raises:
        EngineError: it does not start; with vLLM's own words.
    """

    _alive: ClassVar[set[int]] = set()

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._ranks = int(arguments["tensor_parallel_size"])
        self._met = torch.distributed.is_initialized() and not Runner._alive
        if self._ranks == 1:  # more have processes of their own
            Runner._alive.add(id(self))
        try:
            with _process_kept():
                self.llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except BaseException as error:
            self._leave()
            if isinstance(error, _FAILURES):
                raise EngineError(f"vLLM does not start: {error}") from error
            raise

    def submit(self, name: str, sample: Sample, eos_ids: Sequence[int]) -> None:
        """Have the rest of a sample drawn, under a name that was not used before."""
        sampling, drawn = sample.sampling, len(sample.tokens)
        params = VllmSamplingParams(
            max_tokens=sampling.max_new_tokens - drawn,
            temperature=0.0,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,
            stop_token_ids=[] if sampling.ignore_eos else list(eos_ids),
            output_kind=RequestOutputKind.DELTA,
            extra_args={EXTRA: Drawing(sampling, sample.uniform[drawn:])},
        )
        self.llm.add_request(name, tokens_input(sample.past.tolist()), params)

    def step(self) -> list[tuple[str, int, float]]:
        """One step of vLLM: the name, token and log-prob of everything drawn in it.

        Raises:
            EngineError: it broke off: a worker is gone, or an operation failed; with vLLM's own words.
        """
        try:
            outputs = self.llm.step()
        except _FAILURES as error:
            raise EngineError(f"vLLM broke off: {error}") from error
        drawn = []
        for output in outputs:
            (new,) = output.outputs
            for token, told in zip(new.token_ids, new.logprobs or (), strict=True):
                drawn.append((output.request_id, int(token), float(told[token].logprob)))
        return drawn

    def abort(self, names: Sequence[str]) -> None:
        """Forget requests."""
        self.llm.abort_request(list(names))

    def take(self, weights: WeightSnapshot) -> None:
        """Load weights in place, and read them back. No request may be under way.

        Raises:
            WeightSyncError: a worker then has others, which are named; or broke off.
        """
        try:
            with nullcontext(weights) if self._ranks == 1 else handed(weights) as given:
                self.llm.collective_rpc("take_weights", _PATIENCE_S, (given,))
                faults = self.llm.collective_rpc("read_back", _PATIENCE_S, (given,))
        except _FAILURES as error:
            raise WeightSyncError(f"vLLM broke off taking the weights of version {weights.version}: {error}") from error
        self.llm.reset_prefix_cache()
        if wrong := sorted({fault for worker in faults for fault in worker}):
            raise WeightSyncError(f"vLLM did not take the weights of version {weights.version}: {'; '.join(wrong)}")

    def cache_bytes(self) -> int:
        """Bytes of the key-value cache, on the worker that has most."""
        return int(max(self.llm.collective_rpc("cache_bytes")))

    def sleep_again(self) -> None:
        """Free what is awake, and keep the weights, while some sleep; vLLM's own call would take that for sleep enough.

        Each of its blocks of memory knows by itself whether it sleeps.
        """
        self.llm.collective_rpc("sleep", _PATIENCE_S, (1,))
        self.llm.engine_core.engine_core.model_executor.sleeping_tags |= {"weights", "kv_cache"}

    def forget_copies(self) -> None:
        """Free what sleeping weights have in host memory: they come anew."""
        self.llm.collective_rpc("forget_copies", _PATIENCE_S)

    def close(self) -> None:
        """End the engine and its workers, and free what they had.

        Not by vLLM's own way, which would end every process group that there is, those of a train engine among them.
        """
        if self._ranks == 1:
            self.llm.collective_rpc("forget_layers")
        self.llm.engine_core._finalizer.detach()
        core = self.llm.engine_core.engine_core
        workers = [] if self._ranks == 1 else core.model_executor.workers
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        for worker in workers:
            worker.proc.join(_END_S)  # has ended or been killed; somebody has to take note of it
        del core, self.llm
        self._leave()

    def _leave(self) -> None:
        """Give up what this engine had of the process."""
        gc.unfreeze()  # vLLM freezes all that there is when it starts
        last = Runner._alive == {id(self)}
        Runner._alive.discard(id(self))
        if last and self._met:
            destroy_model_parallel()
        elif last:
            cleanup_dist_env_and_memory()
        gc.collect()


def check_head_width(width: int) -> None:
    """Refuse what would only fail when the first token is drawn.

    Raises:
        EngineError: vLLM's attention for CPUs takes no heads of this width.
    """
    widths = CPUAttentionBackend.get_supported_head_sizes()
    if width not in widths:
        told = ", ".join(map(str, widths))
        raise EngineError(f"vLLM's attention on a CPU takes heads of width {told}, and this model's have {width}")


@contextmanager
def _process_kept() -> Iterator[None]:
    """What vLLM changes of the process when it starts is as it was, and its environment is set for the start only.

    It writes to the environment itself, ``LD_PRELOAD`` among it, seeds all random states, and on a CPU replaces
    ``torch.set_num_threads`` by a refusal.
    """
    before = dict(os.environ)
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    os.environ.update({name: value for name, value in _ENVIRONMENT.items() if name not in before})
    try:
        with random_state_kept():
            yield
    finally:
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
