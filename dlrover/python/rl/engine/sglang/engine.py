"""A rollout engine over SGLang's HTTP server: a process of its own, or one that runs already."""

import math
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.config.typed import parse
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.base import Completion, Request, RolloutSettings, SamplingParams
from dlrover.python.rl.engine.memory import DeviceMemory, Kind
from dlrover.python.rl.engine.offload import Part, Place
from dlrover.python.rl.engine.requests import as_batch
from dlrover.python.rl.engine.roster import Drawn, Key, Roster
from dlrover.python.rl.engine.sglang.server import SglangServer
from dlrover.python.rl.engine.sglang.settings import SglangOptions, launch_arguments
from dlrover.python.rl.engine.sglang.weights import differences, write_folder
from dlrover.python.rl.engine.tenancy import BROKEN_OFF, RELEASED, Tenancy, part_of
from dlrover.python.rl.engine.torch.outline import cache_bytes_per_token, outline_causal_lm, weight_bytes
from dlrover.python.rl.engine.torch.precision import DTYPES
from dlrover.python.rl.engine.torch.sample import Sample
from dlrover.python.rl.engine.weights import WeightSnapshot

_ABORT_S = 10.0
"""How long a server may take to be told that nobody waits for a request any more."""


class SglangRolloutEngine:
    """Implements :class:`~dlrover.python.rl.engine.base.RolloutEngine`.

    SGLang, as it is started here, draws by seed and position, so a sample depends neither on its batch nor on
    interruptions, beyond the rounding of its logits. What it cannot tell or draw as the port has it is refused:
    log-probs of ``sampled`` with a cut, and ``top_k`` together with ``top_p``.

    :meth:`advance` has every request draw up to ``chunk_tokens`` more; between calls the server is idle. SGLang keeps
    what it has read, so going on costs about one token's time.

    Weights reach the server as a folder in Hugging Face format, and the last one is kept: what SGLang has released is
    gone, and is read from there again.

    Args:
        model: folder or hub name.
        settings: ``backend`` takes :class:`~dlrover.python.rl.engine.sglang.settings.SglangOptions`.
        memory: accounts for the device.

    Raises:
        MissingExtra: no ``url`` is given and SGLang is not installed.
        EngineError: there is no such model or option, or the server does not come up.
        OutOfDeviceMemory: it does not fit what ``memory`` has left.
    """

    def __init__(self, model: str | Path, settings: RolloutSettings, memory: DeviceMemory | None = None) -> None:
        options, problems = parse(SglangOptions, dict(settings.backend), "backend")
        if options is None:
            raise EngineError("; ".join(map(str, problems)))
        self.version = -1
        self._lm, self._model = outline_causal_lm(model)
        self._dtype = DTYPES[settings.precision]
        self._options, self._roster = options, Roster(self._lm)
        self._folder: Path | None = None
        self._at = Tenancy(memory or DeviceMemory(settings.device), "sglang")
        ranks = settings.tensor_parallel_size
        self._at.bring("weights", part_of(weight_bytes(self._lm, self._dtype), ranks))
        with ExitStack() as owned:
            folder = tempfile.TemporaryDirectory(prefix="weights-", dir=options.exchange)
            self._exchange = Path(owned.enter_context(folder))
            self._server = owned.enter_context(closing(_connect(self._model, settings, options, self._exchange)))
            tokens = int(self._server.call("GET", "/get_server_info")["max_total_num_tokens"])
            self._at.bring("kv_cache", part_of(tokens * cache_bytes_per_token(self._lm, self._dtype), ranks))
            self._owned = owned.pop_all()
        self._threads = ThreadPoolExecutor(settings.max_batch, "sglang")

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._lm.tokenizer

    # -- drawing ------------------------------------------------------------------------------------------------------

    def generate(self, prompts: Batch, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        """Complete each prompt ``samples_per_prompt`` times; see the port for the columns."""
        self.check(prompts.ragged("tokens"), sampling)
        self._at.check_ready()
        numbers = self._roster.add_batch(prompts, sampling, seed)
        done: dict[int, Completion] = {}
        try:
            while self._roster.samples:
                done |= self._round(sampling.max_new_tokens)
        except BaseException:
            self.abort()
            raise
        return as_batch([done[number] for number in numbers])

    def check(self, tokens: Ragged, sampling: SamplingParams) -> None:
        """Refuse prompts that :meth:`generate` would refuse, and what SGLang does not give."""
        self._roster.check(tokens, sampling)
        if sampling.top_k is not None and sampling.top_p < 1.0:
            raise EngineError("sglang takes top_p of the whole distribution, not of what top_k leaves: give only one")
        if sampling.logprobs == "sampled" and (sampling.top_k is not None or sampling.top_p < 1.0):
            raise EngineError("sglang tells no log-probs of what top_k or top_p leave: ask for logprobs 'policy'")

    def add(self, requests: Sequence[Request], sampling: SamplingParams, seed: tuple[int, ...]) -> None:
        """Take in samples to draw, beside those that run already; nothing is drawn before :meth:`advance`."""
        self.check(Ragged.from_rows([], dtype="int64"), sampling)
        self._roster.add(requests, sampling, seed)

    def advance(self) -> list[Completion]:
        """Draw up to ``chunk_tokens`` more tokens of each running request; return those that have ended."""
        self._at.check_ready()
        ended = self._round(self._options.chunk_tokens)
        return [ended[number] for number in sorted(ended)]

    def abort(self, keys: Sequence[Key] | None = None) -> list[Completion]:
        """End these running requests, or all; each comes back as far as it got."""
        return [self._roster.end(number, "aborted") for number in self._roster.numbers(keys)]

    @property
    def running(self) -> int:
        """Requests taken in that have not ended."""
        return len(self._roster)

    def _round(self, most: int) -> dict[int, Completion]:
        """Have each sample drawn on by at most so many tokens; what has ended, by number.

        Raises:
            EngineError: the server refused one, took too long, or drew what is none; none has been drawn on then.
        """
        names = {number: uuid.uuid4().hex for number in self._roster.samples}
        calls: dict[int, Future[Any]] = {}
        try:
            for number, sample in self._roster.samples.items():
                body = _generate_body(names[number], sample, most, self._lm.eos_ids)
                calls[number] = self._threads.submit(self._server.call, "POST", "/generate", body)
            if wait(calls.values(), self._options.timeout_s).not_done:
                raise EngineError(f"the SGLang server has not drawn in {self._options.timeout_s} s")
            answers = {number: call.result(0.0) for number, call in calls.items()}
        except BaseException:
            self._stop(names, calls)
            raise
        drawn = [each for number, answer in answers.items() for each in _drawn(number, answer)]
        ended = self._roster.note(drawn, self.version)
        return {number: self._roster.end(number, why) for number, why in ended.items()}

    def _stop(self, names: dict[int, str], calls: dict[int, Future[Any]]) -> None:
        """Have the server draw nothing more of these."""
        for number, call in calls.items():
            answered = call.done() and not call.cancelled() and call.exception(0.0) is None
            if not answered and not call.cancel():
                with suppress(EngineError):
                    self._server.call("POST", "/abort_request", {"rid": names[number]}, _ABORT_S)

    # -- weights and memory -------------------------------------------------------------------------------------------

    def receive(self, weights: WeightSnapshot, rewind: bool = False) -> None:
        """Take over new weights; running requests go on with them.

        While the weights are not on the device their folder is all that is written, which the server reads when they
        are brought.
        """
        self._lm.check(weights, serving=-1 if rewind else self.version)
        folder = Path(tempfile.mkdtemp(prefix=f"{weights.version}-", dir=self._exchange))
        try:
            write_folder(weights, self._lm, folder)
            if self._at.place == "cuda":
                self.version, self._at.lacks = -1, BROKEN_OFF  # Holds if it breaks off: a mixture has no version.
                self._serve(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._forget_folder()
        self._folder, self.version, self._at.lacks = folder, weights.version, ""
        if self._at.place == "meta":
            self._at.place = "cpu"

    def cpu(self) -> None:
        """Free the device; the weights stay in their folder."""
        if self._at.lacks:
            self.meta()
        else:
            self._sleep("cpu")

    def meta(self) -> None:
        """Free the device and forget the weights."""
        self._sleep("meta")
        self._forget_folder()
        self.version, self._at.lacks = -1, RELEASED

    def cuda(self, part: Part = "all") -> None:
        """Bring ``part`` to the device; after :meth:`meta` there is room for weights then, and nothing in it."""
        for kind in self._at.missing(part):
            self._wake(kind)

    def place(self) -> Place:
        """Where the weights are."""
        return self._at.place

    def footprint(self) -> dict[str, int]:
        """Bytes on each device by kind, from the model's configuration and what the server tells of itself."""
        return self._at.footprint()

    def close(self) -> None:
        """End the server if it was started here, and remove what was handed to it."""
        self._roster.samples.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)  # a call that is under way ends with the server
        self._owned.close()
        self._at.leave("meta")

    def _wake(self, kind: Kind) -> None:
        before = self._at.place
        self._at.bring(kind)
        try:
            with self._at.computing():
                self._server.call("POST", "/resume_memory_occupation", {"tags": [kind]})
                if kind == "weights" and not self._at.lacks:
                    self._serve_again()
        except BaseException:
            self._at.drop(kind, before)
            raise

    def _serve_again(self) -> None:
        """Serve what was served before; where that fails, release the room that was brought for it."""
        try:
            self._serve(self._folder)
        except BaseException:
            with suppress(EngineError):
                self._server.call("POST", "/release_memory_occupation", {"tags": ["weights"]})
            raise

    def _sleep(self, place: Place) -> None:
        if there := [kind for kind in ("kv_cache", "weights") if kind not in self._at.missing("all")]:
            self._server.call("POST", "/release_memory_occupation", {"tags": there})
        self._at.leave(place)

    def _serve(self, folder: Path | None) -> None:
        """Have the server load what was handed to it, or the model as it was, and read it back.

        Raises:
            WeightSyncError: it did not, or it has other weights.
        """
        body = {"model_path": str(folder or self._model), "flush_cache": True}
        try:
            answer = self._server.call("POST", "/update_weights_from_disk", body)
        except EngineError as error:
            raise WeightSyncError(f"the SGLang server did not take the weights: {error}") from error
        if not answer["success"]:
            raise WeightSyncError(f"the SGLang server did not take the weights: {answer['message']}")
        if folder is not None and (wrong := differences(self._server, folder, self._dtype)):
            raise WeightSyncError(f"the server does not serve what it was sent: {', '.join(wrong)}")

    def _forget_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None


def _connect(model: str, settings: RolloutSettings, options: SglangOptions, exchange: Path) -> SglangServer:
    if options.url is None:
        flags = launch_arguments(model, settings, options)
        return SglangServer.start(flags, exchange, options.start_timeout_s, options.timeout_s)
    server = SglangServer(options.url, timeout_s=options.timeout_s)
    server.wait_until_up(options.start_timeout_s)
    return server


def _drawn(number: int, answer: Any) -> list[Drawn]:
    """What an answer says of a sample; it may go beyond the sample's end."""
    told = answer["meta_info"]["output_token_logprobs"]
    if not told:
        raise EngineError("the SGLang server drew nothing: it aborted a request on its own")
    return [(number, int(token), math.nan if logprob is None else float(logprob)) for logprob, token, *_ in told]


def _generate_body(name: str, sample: Sample, most: int, eos_ids: Sequence[int]) -> dict[str, Any]:
    sampling = sample.sampling
    return {
        "rid": name,
        "input_ids": sample.past.tolist(),
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": min(most, sampling.max_new_tokens - len(sample.tokens)),
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop),
            "stop_token_ids": [] if sampling.ignore_eos else list(eos_ids),
            "ignore_eos": sampling.ignore_eos,
            "sampling_seed": int(sample.uniform[0] * 2**31),  # belongs to the sample; the server mixes the position in
        },
    }
