# SPDX-License-Identifier: Apache-2.0
"""The rollout engine on vLLM's asynchronous engine."""

import itertools
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrover.python.rl.common.errors import EngineDied, EngineError, MissingExtra
from dlrover.python.rl.common.spans import phase
from dlrover.python.rl.engine.api.base import Finish, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.api.registry import read_options
from dlrover.python.rl.engine.api.weights import DeviceKind, WeightSnapshot
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory, Kind
from dlrover.python.rl.engine.memory.offload import BROKEN_OFF, RELEASED, OffloadState, SleepingEngine, divide_bytes
from dlrover.python.rl.engine.model import spec
from dlrover.python.rl.engine.model.loading import DTYPES, CausalLM
from dlrover.python.rl.engine.model.ranks import device_environment
from dlrover.python.rl.engine.rollout.requests import NewToken, RolloutEngineBase, RunningRequest, RunningRequests
from dlrover.python.rl.engine.vllm import INFO, VllmOptions

if find_spec("vllm") is None:
    raise MissingExtra("vllm", "vllm")

if TYPE_CHECKING:
    from dlrover.python.rl.engine.vllm.server import NewTokens, Server

_LOWEST_TEMPERATURE = 0.01  # of vLLM's own sampler, which raises a lower one to it

_BLOCK = 128
"""Tokens of vLLM's largest cache block: a sequence may leave as many unused."""


class VllmRolloutEngine(SleepingEngine, RolloutEngineBase):
    """Implements :class:`~dlrover.python.rl.engine.api.base.BaseRolloutEngine`. vLLM generates in separate
    processes, also between the calls of this engine.

    Unless the option ``sampler`` is ``vllm``, tokens are sampled by the same rule and from the same random numbers as
    in the ``torch`` engine (see ``vllm/sampling.py``): a sample depends neither on its batch nor on interruptions,
    beyond the rounding of its logits. vLLM's own loader writes weights in place; before they are served they are read
    back, bit for bit.

    On a GPU ``cpu()`` and ``meta()`` put vLLM to sleep. On a CPU vLLM cannot sleep: ``cpu()`` frees nothing, ``meta()``
    ends it, and ``cuda()`` starts it again, which takes seconds. A failure of vLLM ends it too.

    Raises:
        MissingExtra: vLLM is not installed (when this module is imported).
        EngineError: there is no such model or option, or vLLM does not start with them.
        OutOfDeviceMemory: weights or cache do not fit the free capacity of ``memory``.
    """

    info = INFO

    def __init__(self, model: str | Path, settings: RolloutSettings, memory: DeviceMemory | None = None) -> None:
        self._options = options = read_options(VllmOptions, settings.backend)
        self._lm, folder = spec.load_meta_causal_lm(model)
        self._lm = self._lm.masked(settings.mask_unknown_ids)
        self._settings = settings
        self._arguments = _engine_arguments(folder, self._lm, settings, options)
        self._requests = RunningRequests(self._lm, self._arguments["max_model_len"], self.info.columns)
        self._submitted: dict[int, tuple[str, int]] = {}  # name in vLLM and tokens before, by number
        self._submissions = itertools.count()
        self._server: Server | None = None
        self._asleep: set[Kind] = set()
        self._snapshot: WeightSnapshot | None = None  # that waits until vLLM has the weights on its device
        self._offload = OffloadState(memory or DeviceMemory(settings.device), "vllm")
        dtype = DTYPES[settings.precision]
        ranks = settings.tensor_parallel_size * self._arguments["pipeline_parallel_size"]
        self._offload.bring("weights", divide_bytes(spec.count_weight_bytes(self._lm, dtype), ranks))
        with ExitStack() as undo:
            undo.callback(self.close)
            server = self._start()
            token_bytes = divide_bytes(spec.count_cache_bytes_per_token(self._lm, dtype), ranks)
            self._offload.bring("kv_cache", server.cache_bytes(token_bytes))
            undo.pop_all()

    def _start(self) -> "Server":
        """Start vLLM with the weights of the model's folder."""
        from dlrover.python.rl.engine.vllm.server import Server, check_head_width  # imports vLLM, which takes seconds

        env = {}
        if self._is_on_cpu:
            check_head_width(spec.get_head_width(self._lm))
        else:
            copies = self._arguments["pipeline_parallel_size"] * self._arguments["data_parallel_size"]
            env = device_environment(self._settings, copies)
            if self._settings.precision == "fp32":
                env.setdefault("TRITON_F32_DEFAULT", "ieee")  # vLLM's attention would compute in TF32
        with self._offload.computing():
            self._server = Server(self._arguments, env, self._options)
        return self._server

    @property
    def _is_on_cpu(self) -> bool:
        return self._settings.device == "cpu"

    def check(self, tokens: Any, sampling: SamplingParams) -> None:
        super().check(tokens, sampling)
        is_cut = sampling.top_k is not None or sampling.top_p < 1.0
        if self._options.sampler == "vllm" and 0.0 < sampling.temperature < _LOWEST_TEMPERATURE:
            raise EngineError(f"vLLM's own sampler takes temperatures from {_LOWEST_TEMPERATURE} on, and 0")
        if self._options.sampler == "vllm" and is_cut and sampling.logprobs == "policy":
            raise EngineError(
                "vLLM's own sampler gives the log-probs of the distribution that is cut to top_k and top_p: set"
                " sampling.logprobs to 'sampled', or leave out the option sampler"
            )

    def _step(self, max_tokens: int | None) -> dict[int, Finish]:
        """Submit new requests, and wait for tokens of any request."""
        server = self._server
        assert server is not None, "used while asleep"
        try:
            with self._offload.computing():
                new: dict[str, RunningRequest] = {}
                for number in sorted(self._requests.by_number.keys() - self._submitted.keys()):
                    running, name = self._requests.by_number[number], str(next(self._submissions))
                    self._submitted[number], new[name] = (name, len(running.tokens)), running
                if new:
                    server.submit(new, self._lm.eos_ids)
                numbers = {name: number for number, (name, _) in self._submitted.items()}
                items: list[NewTokens] = []
                while not items:
                    items = [item for item in server.take() if item.name in numbers]  # not of withdrawn requests
            return self._append([(numbers[item.name], item) for item in items])
        except BaseException as error:
            with suppress(EngineError):
                self._withdraw(self._requests.by_number)  # the next step generates this one's tokens again
            if isinstance(error, EngineDied):
                self._fail("cuda")
            raise

    def _append(self, items: Sequence[tuple[int, "NewTokens"]]) -> dict[int, Finish]:
        """Append new tokens. vLLM gives the exact versions of their weights once a request has ended."""
        new_tokens: list[NewToken] = []
        for number, item in items:
            if item.error is not None:
                raise item.error
            pairs = zip(item.tokens, item.logprobs, strict=True)
            new_tokens += [(number, token, logprob, {"versions": item.version}) for token, logprob in pairs]
        finished = self._requests.append(new_tokens, self.version)
        for number, item in items:
            if item.finish:
                if number not in finished:
                    raise EngineError(f"vLLM ended a request after {len(item.versions)} tokens: its own limit is lower")
                before, columns = self._submitted[number][1], self._requests.by_number[number].columns.values
                columns["versions"][before:] = item.versions[: len(columns["versions"]) - before]
        return finished

    def _withdraw(self, numbers: Collection[int]) -> None:
        """Abort requests in vLLM; they keep their tokens and can be submitted again."""
        names = [self._submitted.pop(number)[0] for number in list(numbers) if number in self._submitted]
        if names and self._server is not None:
            with suppress(EngineDied):  # it runs no requests
                self._server.abort(names)

    def receive(self, weights: WeightSnapshot, rewind: bool = False) -> None:
        """Verify and load new weights. While there are none on the device, they wait in host memory."""
        self._lm.check(weights, serving=-1 if rewind else self.version)
        if self._offload.place == "cuda":
            self._load(weights)
        else:
            self._snapshot, self._offload.place = weights, "cpu"
        self.version, self._offload.unready_reason = weights.version, ""

    def _load(self, weights: WeightSnapshot) -> None:
        """Load weights into vLLM, which is ended if that fails: it cannot repair a mixture."""
        try:
            with self._offload.computing(), phase("load weights"):
                (self._server or self._start()).load(weights)
        except BaseException:
            self._fail("cuda")
            raise

    def _fail(self, place: DeviceKind) -> None:
        """End vLLM, which has no whole weights any more, or does not answer."""
        self._end()
        if place != "cuda":
            self._offload.leave(place)
        self.version, self._offload.unready_reason = -1, BROKEN_OFF

    def _wake(self, kind: Kind) -> None:
        self._offload.bring(kind)
        try:
            with self._offload.computing():
                if self._server is None:
                    self._start()
                elif kind in self._asleep:
                    self._server.wake(kind)
            self._asleep.discard(kind)
            if kind == "weights" and (weights := self._snapshot) is not None:
                self._load(weights)
                self._snapshot = None
        except BaseException:
            self._fail("meta")
            raise

    def _sleep(self, place: DeviceKind) -> None:
        self._withdraw(self._requests.by_number)
        self._snapshot = self._snapshot if place == "cpu" else None
        is_whole = not self._offload.missing_kinds("all")
        try:
            if self._server is not None and not self._is_on_cpu and is_whole:
                self._server.sleep(1 if place == "cpu" and self._snapshot is None else 2)
                self._asleep = {"weights", "kv_cache"}
            elif place == "meta" or not self._is_on_cpu:
                self._end()  # vLLM does not release what sleeps already, nor a part
                if self._snapshot is None:
                    place, self.version, self._offload.unready_reason = "meta", -1, RELEASED
        except BaseException:
            self._fail("meta")
            raise
        self._offload.leave(place)

    def _end(self) -> None:
        server, self._server = self._server, None
        self._submitted.clear()
        self._asleep.clear()
        if server is not None:
            server.close()

    def close(self) -> None:
        self._requests.by_number.clear()
        self._end()
        self._offload.leave("meta")


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
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache,
        "enforce_eager": on_cpu or not options.compile,
        "enable_sleep_mode": not on_cpu,
        **({} if on_cpu else {"moe_backend": "triton"}),  # other backends convert the experts: no read-back
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "generation_config": "vllm",  # not the model's own: requests have sampling parameters
        "logprobs_mode": "processed_logits" if options.sampler == "positions" else "processed_logprobs",
        "disable_log_stats": True,
        **options.engine_args,
    }
