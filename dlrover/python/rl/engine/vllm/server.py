# SPDX-License-Identifier: Apache-2.0
"""vLLM's asynchronous engine, in processes that end with this one, behind calls that wait."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from vllm import SamplingParams as VllmSamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from dlrover.python.rl.common.errors import EngineDied, EngineError, WeightSyncError
from dlrover.python.rl.common.progress import note_progress
from dlrover.python.rl.engine.api.weights import WeightSnapshot
from dlrover.python.rl.engine.memory.device_memory import Kind
from dlrover.python.rl.engine.model.ranks import preserve_random_state
from dlrover.python.rl.engine.rollout.requests import RunningRequest
from dlrover.python.rl.engine.rollout.sampling import uniforms
from dlrover.python.rl.engine.vllm import VllmOptions
from dlrover.python.rl.engine.vllm.plugin import BACKEND, OWNER
from dlrover.python.rl.engine.vllm.sampling import EXTRA, plan_of
from dlrover.python.rl.engine.vllm.sharing import share_weights
from dlrover.python.rl.engine.vllm.transfer import READ_BACK_PARTS

T = TypeVar("T")

_SAMPLING = "dlrover.python.rl.engine.vllm.sampling"

_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on a CPU vLLM else has a worker in a further process, which spins
    "VLLM_NO_USAGE_STATS": "1",
}
"""Variables that vLLM reads when it starts; the user's values take precedence."""

_START_S, _LOAD_S = 3600.0, 1800.0
"""How long calls that read or compile a model count as progress."""

_BEAT_S, _CLOSE_S = 5.0, 1.0
_CAUSE_BYTES = 4096


@dataclass(frozen=True)
class NewTokens:
    """Tokens of the request ``name``, their log-probs, and the version of the weights that were served when they came.

    The last item of a request has the reason of its end, ``finish``, and ``versions``: the exact version of the weights
    for each token since the request was submitted. An item with an ``error`` is the last one, too."""

    name: str
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    version: int = -1
    versions: list[int] = field(default_factory=list)
    finish: str = ""
    error: Exception | None = None


class Server:
    """One vLLM engine, made from the fields of ``AsyncEngineArgs`` in an environment with ``env``; an ``EngineError``
    if it does not start. Its coroutines run in a thread of this process, vLLM's computation in other processes."""

    def __init__(self, arguments: Mapping[str, Any], env: Mapping[str, str], options: VllmOptions) -> None:
        self.version, self._keeps_kv, self._samples_itself = -1, options.keep_kv, options.sampler == "vllm"
        self._causes = os.memfd_create("causes")
        self._outputs: SimpleQueue[NewTokens] = SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loads = 0
        self._llm: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        try:
            owner = {OWNER: f"{os.getpid()}:{self._causes}"}
            with _environment({**env, **owner}), preserve_random_state():
                self._llm = self._call(self._start(arguments), _START_S)
        except BaseException as error:
            cause = self._cause(error)
            self._end_loop()
            if isinstance(error, Exception) and not isinstance(error, EngineError):
                raise EngineError(f"vLLM does not start: {cause}") from error
            raise

    def _cause(self, error: BaseException) -> str:
        """Return the first error that vLLM's processes have logged; vLLM's own errors omit it."""
        first, *_ = *os.pread(self._causes, _CAUSE_BYTES, 0).decode(errors="replace").splitlines(), ""
        return first or f"{type(error).__name__}: {error}"

    async def _start(self, arguments: Mapping[str, Any]) -> AsyncLLM:
        transfer = WeightTransferConfig(backend=BACKEND)
        engine_args = AsyncEngineArgs(**arguments, weight_transfer_config=transfer)
        # In this context vLLM's default sizes of batches are those for throughput.
        config = engine_args.create_engine_config(UsageContext.LLM_CLASS)
        runner = "V2" if config.use_v2_model_runner else "V1"
        if self._samples_itself and runner == "V1":
            raise EngineError(
                "vLLM's own seeds survive an interruption in its second model runner only: leave out sampler"
            )
        config.model_config.logits_processors = [
            f"{_SAMPLING}:KnownIds" if self._samples_itself else f"{_SAMPLING}:PositionSampler{runner}"
        ]
        llm = AsyncLLM.from_vllm_config(config, disable_log_stats=engine_args.disable_log_stats)
        try:
            await llm.update_weight_version(str(self.version))
        except BaseException:
            llm.shutdown(timeout=0.0)
            raise
        return llm

    def cache_bytes(self, token_bytes: int) -> int:
        """Return the bytes of the key-value cache on each device, with ``token_bytes`` for a token there."""
        cache = self._llm.vllm_config.cache_config
        return int((cache.num_gpu_blocks or 0) * cache.block_size * token_bytes)

    def submit(self, requests: Mapping[str, RunningRequest], eos_ids: Sequence[int]) -> None:
        """Begin requests, under names that were not used before. Tokens arrive as they are generated, each with its
        log-prob."""
        submitted = [(name, each.sequence.tolist(), self._params(each, eos_ids)) for name, each in requests.items()]

        def begin() -> None:
            for name, tokens, params in submitted:
                self._tasks[name] = task = self._loop.create_task(self._follow(name, tokens, params), name=name)
                task.add_done_callback(lambda task: self._tasks.pop(task.get_name(), None))

        self._loop.call_soon_threadsafe(begin)  # once: each time wakes the other thread

    def _params(self, running: RunningRequest, eos_ids: Sequence[int]) -> VllmSamplingParams:
        sampling = running.sampling
        options: dict[str, Any] = {"temperature": 0.0, "extra_args": {EXTRA: plan_of(running)}}
        if self._samples_itself:
            seed = int(uniforms(running.seed, *running.request.key, 1)[0] * 2**53)  # to which vLLM adds the position
            cut = {"top_k": sampling.top_k or 0, "top_p": sampling.top_p}
            options = {"temperature": sampling.temperature, **cut, "seed": seed}
            options["extra_args"] = {EXTRA: {"known_ids": running.known_ids}}
        return VllmSamplingParams(
            max_tokens=sampling.max_new_tokens - len(running.tokens),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,
            stop_token_ids=[] if sampling.ignore_eos else list(eos_ids),
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,  # no other request uses it
            **options,
        )

    async def _follow(self, name: str, tokens: Sequence[int], params: VllmSamplingParams) -> None:
        try:
            salt = str(self._loads) if self._keeps_kv else None
            async for output in self._llm.generate(tokens_input(list(tokens), cache_salt=salt), params, name):
                self._outputs.put(self._read(name, output))
        except EngineDeadError as error:
            self._outputs.put(NewTokens(name, error=EngineDied(f"vLLM has ended: {self._cause(error)}")))
        except EngineDied as error:
            self._outputs.put(NewTokens(name, error=error))
        except Exception as error:  # noqa: BLE001 -- raised where tokens are taken
            cause = error.__cause__ or error  # some errors of vLLM have no text
            refusal = EngineError(f"vLLM refused a request: {type(cause).__name__}: {cause}")
            refusal.__cause__ = error
            self._outputs.put(NewTokens(name, error=refusal))

    def _read(self, name: str, output: RequestOutput) -> NewTokens:
        (new,) = output.outputs
        logprobs = new.logprobs.logprobs if new.logprobs is not None else ()  # of the sampled tokens alone
        versions = [int(span.version) for span in new.weight_versions or () for _ in range(span.start, span.end)]
        finish = new.finish_reason or ""
        if finish not in ("", "stop", "length"):  # not our abort: one of its processes ends, as on SIGTERM
            raise EngineDied(f"vLLM has ended a request: {self._cause(EngineError(finish))}")
        return NewTokens(name, new.token_ids, logprobs, self.version, versions, finish)

    def take(self) -> list[NewTokens]:
        """Wait for tokens of any request, and return all that have arrived. Raises EngineDied if vLLM has ended."""
        while True:
            try:
                items = [self._outputs.get(timeout=_BEAT_S)]
            except Empty:
                self._check_alive()
                continue
            while not self._outputs.empty():
                items.append(self._outputs.get_nowait())
            return items

    def _check_alive(self) -> None:
        if self._llm is not None and self._llm.errored:
            raise EngineDied(f"vLLM has ended: {self._cause(EngineDeadError())}")

    def abort(self, names: Sequence[str]) -> None:
        """End requests; tokens of theirs that have not been taken may still arrive."""

        async def abort() -> None:
            for name in names:
                if (task := self._tasks.get(name)) is not None:
                    task.cancel()  # which lets vLLM abort the request
            await self._llm.abort(list(names))

        self._call(self._checked("vLLM did not abort requests", abort()))

    def load(self, weights: WeightSnapshot) -> None:
        """Load weights in place while requests stand still, and read them back. Comparing copies tensors from the host
        to another device again, so there only the first load is compared in full, and each later one for an eighth of
        the tensors. Running requests continue with the new weights; their cache is computed again unless it is kept.
        After a WeightSyncError vLLM has a mixture of weights."""
        config = self._llm.vllm_config
        parallel = config.parallel_config
        # Workers on other devices than this process's cannot open memory of this one.
        is_one = parallel.world_size == parallel.data_parallel_size == 1
        with share_weights(weights, on_device=is_one) as shared:
            is_near = shared.ticket is not None or config.device_config.device_type == "cpu"
            part = None if is_near or not self._loads else (self._loads - 1) % READ_BACK_PARTS
            update = asdict(replace(shared, part=part))
            failure = f"vLLM did not load the weights of version {weights.version}"
            self._call(self._checked(failure, self._update(update, weights.version), WeightSyncError), _LOAD_S)
        os.ftruncate(self._causes, 0)  # whatever vLLM has logged so far did not end it

    async def _update(self, update: dict[str, Any], version: int) -> None:
        config = self._llm.vllm_config
        has_several = config.parallel_config.data_parallel_size > 1  # which run empty batches, too
        is_paused = bool(self._tasks) or has_several or config.kv_transfer_config is not None
        if is_paused:
            await self._llm.pause_generation(mode="keep", clear_cache=not self._keeps_kv)
        elif not self._keeps_kv:  # a pause of an idle engine would take 20 ms
            await self._llm.reset_prefix_cache(reset_running_requests=True)
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
        await self._llm.finish_weight_update(str(version))
        self.version = version
        self._loads += 1
        if is_paused:
            await self._llm.resume_generation()

    def sleep(self, level: int) -> None:
        self._call(self._checked("vLLM did not sleep", self._llm.sleep(level)))

    def wake(self, kind: Kind) -> None:
        self._call(self._checked(f"vLLM did not wake its {kind}", self._llm.wake_up([kind])), _LOAD_S)

    async def _checked(
        self, failure: str, coroutine: Coroutine[Any, Any, T], refusal: type[EngineError] = EngineError
    ) -> T:
        """Await a call of vLLM, and raise its exceptions, of any type, as ``EngineDied`` or ``refusal``."""
        try:
            return await coroutine
        except EngineDeadError as error:
            raise EngineDied(f"{failure}: it has ended: {self._cause(error)}") from error
        except Exception as error:
            raise refusal(f"{failure}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End vLLM and its processes."""

        async def close() -> None:
            tasks = [*self._tasks.values()]
            for task in tasks:
                task.cancel()
            self._llm.shutdown(timeout=0.0)
            if tasks:
                await asyncio.wait(tasks, timeout=_CLOSE_S)  # else asyncio warns of tasks that have not ended

        try:
            asyncio.run_coroutine_threadsafe(close(), self._loop).result()  # waits: vLLM ends its processes at once
        finally:
            self._llm = None
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()  # waits: for callbacks that do not wait
        self._loop.close()
        os.close(self._causes)

    def _call(self, coroutine: Coroutine[Any, Any, T], slow_s: float = 0.0) -> T:
        """Run a coroutine in vLLM's thread. For ``slow_s`` the wait counts as progress of this worker."""
        future, until_s = asyncio.run_coroutine_threadsafe(coroutine, self._loop), time.monotonic() + slow_s
        while not wait([future], timeout=_BEAT_S).done:
            self._check_alive()  # vLLM leaves calls without an answer when it ends
            if time.monotonic() < until_s:
                note_progress()
        return future.result()  # waits: no longer


def check_head_width(width: int) -> None:
    """Refuse a head width that vLLM's attention on CPUs does not support: it would fail at the first token."""
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if width not in supported:
        widths = ", ".join(map(str, supported))
        raise EngineError(f"vLLM's attention on a CPU takes heads of width {widths}, and this model's have {width}")


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Start processes of vLLM with these variables, which go before the user's, and those before the defaults; without
    the script that this process runs, which has no part there. Restores what vLLM changes in this process."""
    before, main = dict(os.environ), sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    os.environ.update({**_ENVIRONMENT, **before, **values})
    main.__spec__, main.__dict__["__file__"] = None, None
    try:
        yield
    finally:
        main.__spec__ = spec
        main.__dict__["__file__"] = file
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
