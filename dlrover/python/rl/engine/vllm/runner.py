"""vLLM's engine inside this process: started, stepped, given weights, ended."""

import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from vllm import SamplingParams as VllmSamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory, destroy_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from dlrover.python.rl.common.errors import WeightSyncError
from dlrover.python.rl.engine.torch.randomness import random_state_kept
from dlrover.python.rl.engine.torch.sample import Sample
from dlrover.python.rl.engine.vllm.drawing import EXTRA, Drawing
from dlrover.python.rl.engine.weights import WeightSnapshot

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives and dies with this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one knows no logits processors
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would pin this process's own threads
    "VLLM_NO_USAGE_STATS": "1",
}
"""What vLLM reads when it starts; what the user has set wins."""


class Runner:
    """One engine of vLLM, from its start to its end.

    What it has of the whole process (the group of its ranks, which is one rank) is shared by all that are alive, and
    ends with the last.

    Args:
        arguments: of vLLM's ``EngineArgs``.
    """

    _alive: ClassVar[set[int]] = set()

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._ranks = int(arguments["tensor_parallel_size"])
        self._met = torch.distributed.is_initialized() and not Runner._alive
        with _process_kept():
            self.llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        if self._ranks == 1:  # more have processes of their own
            Runner._alive.add(id(self))

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
        """One step of vLLM: the name, token and log-prob of everything drawn in it."""
        drawn = []
        for output in self.llm.step():
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
            WeightSyncError: a worker then has others, which are named.
        """
        with _handed(weights, self._ranks) as handed:
            self.llm.collective_rpc("take_weights", args=(handed,))
            faults = self.llm.collective_rpc("read_back", args=(handed,))
        self.llm.reset_prefix_cache()
        if wrong := sorted({fault for worker in faults for fault in worker}):
            raise WeightSyncError(f"vLLM did not take the weights of version {weights.version}: {'; '.join(wrong)}")

    def cache_bytes(self) -> int:
        """Bytes of the key-value cache, on all workers."""
        return int(sum(self.llm.collective_rpc("cache_bytes")))

    def close(self) -> None:
        """End the engine and its workers, and free what they had.

        Not by vLLM's own way, which would end every process group that there is, those of a train engine among them.
        """
        self.llm.collective_rpc("forget_layers")
        self.llm.engine_core._finalizer.detach()
        core = self.llm.engine_core.engine_core
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        del core, self.llm
        gc.unfreeze()  # vLLM freezes all that there is when it starts
        last = Runner._alive == {id(self)}
        Runner._alive.discard(id(self))
        if last and self._met:
            destroy_model_parallel()
        elif last:
            cleanup_dist_env_and_memory()
        gc.collect()


@contextmanager
def _process_kept() -> Iterator[None]:
    """What vLLM changes of the process when it starts is as it was, and its environment is set for the start only.

    It seeds all random states, and on a CPU it replaces ``torch.set_num_threads`` by a refusal.
    """
    added = [name for name in _ENVIRONMENT if name not in os.environ]
    threads = torch.set_num_threads
    os.environ.update({name: _ENVIRONMENT[name] for name in added})
    try:
        with random_state_kept():
            yield
    finally:
        torch.set_num_threads = threads
        for name in added:
            del os.environ[name]


@contextmanager
def _handed(weights: WeightSnapshot, ranks: int) -> Iterator[WeightSnapshot | str]:
    """The weights as workers can have them: themselves in this process, a file in shared memory for several."""
    if ranks == 1:
        yield weights
        return
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="weights-", dir=shared if shared.is_dir() else None) as folder:
        path = f"{folder}/model.safetensors"
        save_file({name: weights.tensor(name) for name in weights.buffers}, path)
        yield path
