# SPDX-License-Identifier: Apache-2.0
"""The rollout engine over SGLang's HTTP server, which is a child process or runs already."""

import math
import shutil
import tempfile
import uuid
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dlrover.python.rl.common.errors import EngineDied, EngineError, WeightSyncError
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.spans import phase
from dlrover.python.rl.data.batch import Ragged
from dlrover.python.rl.engine.api.base import Finish, Request, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.api.registry import read_options
from dlrover.python.rl.engine.api.weights import DeviceKind, WeightSnapshot
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory, Kind
from dlrover.python.rl.engine.memory.offload import BROKEN_OFF, OffloadState, SleepingEngine, divide_bytes
from dlrover.python.rl.engine.model import spec
from dlrover.python.rl.engine.model.loading import DTYPES, CausalLM
from dlrover.python.rl.engine.model.ranks import device_environment
from dlrover.python.rl.engine.rollout.requests import NewToken, RolloutEngineBase, RunningRequest, RunningRequests
from dlrover.python.rl.engine.sglang import INFO, SglangOptions, launch_arguments
from dlrover.python.rl.engine.sglang.server import RequestRefused, SglangServer

_LOG = get_logger(__name__)

WEIGHTS_FILE = "model.safetensors"

_ROWS = 2
"""Rows of each matrix, and values of each vector, that are compared."""


class ReadBack:
    """Compares the weights of a server, which computes in ``dtype`` on ``ranks`` ranks, with a folder. SGLang returns
    tensors by name for few architectures: Llama and its extensions (Mistral, Phi-3), OPT, Granite and EXAONE 4. Its
    checksums are of merged, padded and split tensors, and cannot be compared. Tensors that cannot be read are not
    compared; a warning says so once."""

    def __init__(self, server: SglangServer, lm: CausalLM, dtype: torch.dtype, ranks: int) -> None:
        self._server, self._dtype = server, dtype
        embedding = lm.model.get_input_embeddings().weight
        self._embedding = next((name for name, tensor in lm.named_weights() if tensor is embedding), "")
        # SGLang assumes heads of width `hidden_size / num_attention_heads` that no two ranks share. For other models it
        # reads these tensors from wrong rows of its merged projection.
        config = lm.model.config.get_text_config()
        heads = int(config.num_attention_heads)
        key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        is_usual = spec.get_head_width(lm) == int(config.hidden_size) // heads and key_heads % ranks == 0
        self._misread = () if is_usual else (".k_proj.", ".v_proj.")
        self._names: list[str] | None = None  # of the tensors that can be read, once that is tried

    def find_different(self, folder: Path) -> list[str]:
        """Return the names of tensors whose first rows differ from ``folder``, cast to the server's dtype."""
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            if self._names is None:
                self._names = self._find_readable(list(file.keys()))
            different = []
            for name in self._names:
                expected = file.get_slice(name)[:_ROWS].to(self._dtype).float().numpy()
                rows = self._read(name)
                if rows is None or not np.array_equal(np.asarray(rows, dtype=np.float32), expected, equal_nan=True):
                    different.append(name)
            return different

    def _find_readable(self, names: Collection[str]) -> list[str]:
        readable = []
        if self._read(self._embedding) is not None:
            candidates = [name for name in names if not any(part in name for part in self._misread)]
            readable = [name for name in candidates if self._read(name) is not None]
        if len(readable) < len(names):
            counts = len(names) - len(readable), len(names)
            _LOG.warning("SGLang cannot read back %d of this model's %d tensors: they are not verified", *counts)
        return readable

    def _read(self, name: str) -> Any:
        """Return the first rows; None if SGLang refuses."""
        try:
            return self._server.call("POST", "/get_weights_by_name", {"name": name, "truncate_size": _ROWS})
        except RequestRefused:
            return None


_ABORT_TIMEOUT_S = 10.0


class SglangRolloutEngine(SleepingEngine, RolloutEngineBase):
    """Implements :class:`~dlrover.python.rl.engine.api.base.BaseRolloutEngine`.

    SGLang samples by seed and position here, so a sample depends neither on its batch nor on interruptions, beyond the
    rounding of its logits. ``top_k`` excludes ``top_p``, and both exclude ``logprobs="sampled"``.

    ``advance()`` generates up to ``chunk_tokens`` for every request; between calls the server is idle. SGLang caches
    the sequences, so continuing costs about one token's time. A sequence is the prompt of its next chunk, so it ends at
    SGLang's limit on prompts: 6 tokens below the model's context or the size of the cache, whichever is less.

    Weights reach the server as a folder in Hugging Face format. The engine keeps the last folder, from which SGLang
    reads released weights again. The folder's name is SGLang's ``weight_version``, which comes back with all tokens.

    Raises:
        EngineError: there is no such model or option, or the server does not start.
        OutOfDeviceMemory: weights or cache do not fit the free capacity of ``memory``.
    """

    info = INFO

    def __init__(self, model: str | Path, settings: RolloutSettings, memory: DeviceMemory | None = None) -> None:
        options = read_options(SglangOptions, settings.backend)
        self._lm, self._model = spec.load_meta_causal_lm(model)
        self._dtype = DTYPES[settings.precision]
        self._options = options
        self._folder: Path | None = None
        self._offload = OffloadState(memory or DeviceMemory(settings.device), "sglang")
        ranks = settings.tensor_parallel_size
        self._offload.bring("weights", divide_bytes(spec.count_weight_bytes(self._lm, self._dtype), ranks))
        with ExitStack() as owned:
            folder = tempfile.TemporaryDirectory(prefix="weights-", dir=options.exchange)
            self._exchange = Path(owned.enter_context(folder))
            if options.url is None:
                flags = launch_arguments(self._model, settings, options)
                server = SglangServer.start(flags, self._exchange, options.timeout_s, device_environment(settings))
            else:
                server = SglangServer(options.url, timeout_s=options.timeout_s)
            self._server = owned.enter_context(closing(server))
            server.wait_until_up(options.start_timeout_s)
            limits = self._server.call("GET", "/server_info")
            cache_bytes = int(limits["max_total_num_tokens"]) * spec.count_cache_bytes_per_token(self._lm, self._dtype)
            self._offload.bring("kv_cache", divide_bytes(cache_bytes, ranks))
            # SGLang refuses a prompt of this many tokens, but completes shorter ones beyond that length.
            self._requests = RunningRequests(self._lm, int(limits["max_req_input_len"]), self.info.columns)
            self._read_back = ReadBack(self._server, self._lm, self._dtype, ranks)
            self._owned = owned.pop_all()
        self._threads = ThreadPoolExecutor(settings.max_batch, "sglang")

    def check(self, tokens: Ragged, sampling: SamplingParams) -> None:
        super().check(tokens, sampling)
        if sampling.top_k is not None and sampling.top_p < 1.0:
            raise EngineError("sglang applies top_p to the whole distribution, not to the top_k tokens: give only one")
        if sampling.logprobs == "sampled" and (sampling.top_k is not None or sampling.top_p < 1.0):
            raise EngineError("sglang has no log-probs of a distribution cut by top_k or top_p: use logprobs 'policy'")

    def add(self, requests: Sequence[Request], sampling: SamplingParams, seed: tuple[int, ...]) -> None:
        self.check(Ragged.from_rows([], dtype="int64"), sampling)
        super().add(requests, sampling, seed)

    def _step(self, max_tokens: int | None) -> dict[int, Finish]:
        """Generate up to ``max_tokens`` or ``chunk_tokens`` for each request; an error appends no token."""
        names = {number: uuid.uuid4().hex for number in self._requests.by_number}
        count = max_tokens or self._options.chunk_tokens
        calls: dict[int, Future[Any]] = {}
        try:
            for number, running in self._requests.by_number.items():
                body = _generate_body(names[number], running, count, self._lm.eos_ids)
                calls[number] = self._threads.submit(self._server.call, "POST", "/generate", body)
            if wait(calls.values(), self._options.timeout_s).not_done:
                raise EngineError(f"the SGLang server has not generated within {self._options.timeout_s} s")
            answers = {number: call.result(0.0) for number, call in calls.items()}
        except BaseException:
            self._abort_calls(names, calls)
            raise
        new_tokens: list[NewToken] = []
        for number, answer in answers.items():  # their tokens may go beyond the request's end
            logprobs = answer["meta_info"]["output_token_logprobs"]
            if self._folder is not None and (served := answer["meta_info"]["weight_version"]) != self._folder.name:
                cause = "it was restarted, or another worker uses it too"
                raise EngineDied(f"the SGLang server has the weights '{served}', not '{self._folder.name}': {cause}")
            if not logprobs:
                raise EngineError("the SGLang server generated nothing: it aborted a request by itself")
            for logprob, token, *_ in logprobs:
                new_tokens.append((number, int(token), math.nan if logprob is None else float(logprob)))
        return self._requests.append(new_tokens, self.version)

    def _abort_calls(self, names: dict[int, str], calls: dict[int, Future[Any]]) -> None:
        for number, call in calls.items():
            is_answered = call.done() and not call.cancelled() and call.exception(0.0) is None
            if not is_answered and not call.cancel():
                with suppress(EngineError):
                    self._server.call("POST", "/abort_request", {"rid": names[number]}, _ABORT_TIMEOUT_S)

    def receive(self, weights: WeightSnapshot, rewind: bool = False) -> None:
        """Verify and load new weights; while the engine is offloaded, only write their folder."""
        self._lm.check(weights, serving=-1 if rewind else self.version)
        folder = Path(tempfile.mkdtemp(prefix=f"{weights.version}-", dir=self._exchange))
        try:
            self._lm.model.config.save_pretrained(folder)
            self._lm.tokenizer.save_pretrained(folder)
            # Nothing may refer to these tensors: merged adapters are copies, which are freed before the server loads.
            metadata = {"format": "pt"}
            save_file({name: weights.tensor(name) for name in weights.buffers}, folder / WEIGHTS_FILE, metadata)
            if self._offload.place == "cuda":
                # Remains if loading fails midway: a mixture has no version.
                self.version, self._offload.unready_reason = -1, BROKEN_OFF
                with phase("load weights"):
                    self._serve(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._remove_folder()
        self._folder, self.version, self._offload.unready_reason = folder, weights.version, ""
        if self._offload.place == "meta":
            self._offload.place = "cpu"

    def meta(self) -> None:
        super().meta()
        self._remove_folder()

    def close(self) -> None:
        self._requests.by_number.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)  # calls in progress end with the server
        self._owned.close()
        self._offload.leave("meta")

    def _wake(self, kind: Kind) -> None:
        before = self._offload.place
        self._offload.bring(kind)
        try:
            with self._offload.computing():
                self._server.call("POST", "/resume_memory_occupation", {"tags": [kind]})
                if kind == "weights" and not self._offload.unready_reason:
                    self._serve(self._folder)
        except BaseException:
            if kind == "weights":
                with suppress(EngineError):
                    self._server.call("POST", "/release_memory_occupation", {"tags": [kind]})
            self._offload.drop(kind, before)
            raise

    def _sleep(self, place: DeviceKind) -> None:
        if kinds := [kind for kind in ("kv_cache", "weights") if kind not in self._offload.missing_kinds("all")]:
            self._server.call("POST", "/release_memory_occupation", {"tags": kinds})
        self._offload.leave(place)

    def _serve(self, folder: Path | None) -> None:
        """Have the server load a folder, or the initial model. Raises WeightSyncError if it fails, or if the server has
        other weights afterwards."""
        path = folder or Path(self._model)
        body = {"model_path": str(path), "flush_cache": True, "weight_version": path.name}
        try:
            answer = self._server.call("POST", "/update_weights_from_disk", body)
            if not answer["success"]:
                raise EngineError(answer["message"])
        except EngineDied:
            raise
        except EngineError as error:
            raise WeightSyncError(f"the SGLang server did not load the weights: {error}") from error
        if folder is not None and (names := self._read_back.find_different(folder)):
            raise WeightSyncError(f"the SGLang server has other values of {', '.join(map(repr, names))}")

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None


def _generate_body(name: str, running: RunningRequest, max_tokens: int, eos_ids: Sequence[int]) -> dict[str, Any]:
    sampling = running.sampling
    return {
        "rid": name,
        "input_ids": running.sequence.tolist(),
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": min(max_tokens, sampling.max_new_tokens - len(running.tokens)),
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop),
            "stop_token_ids": [] if sampling.ignore_eos else list(eos_ids),
            "ignore_eos": sampling.ignore_eos,
            "sampling_seed": int(running.uniform[0] * 2**31),  # per sample; the server mixes in the position
        },
    }
