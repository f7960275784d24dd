"""The inference engine of a script."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import even_cuts
from dlrover.python.rl.engine.base import RolloutSettings, SamplingParams
from dlrover.python.rl.engine.registry import ROLLOUT, engine_place, engine_problems
from dlrover.python.rl.session.engine import HandEngine, wish_of
from dlrover.python.rl.session.outputs import RequestOutput, outputs_of
from dlrover.python.rl.session.prompts import as_prompts, as_sampling
from dlrover.python.rl.session.terms import INFERENCE_PROCESS, InferenceTerms

ALIASES = {"hf": "torch"}
"""Other names of executors: Hugging Face models run on the engine in plain PyTorch."""


class InferenceEngine(HandEngine):
    """Generates completions.

    Args:
        model: folder or hub name of a causal language model.
        executor: ``"torch"`` (or ``"hf"``), ``"vllm"``, ``"sglang"``, a name that was registered with
            :func:`dlrover.python.rl.engine.registry.register`, or a class with the methods of
            :class:`~dlrover.python.rl.engine.base.RolloutEngine`.
        name: what messages call it; ``INFERENCE_1`` and so on by default.

    Raises:
        EngineError: no executor has this name; gives the nearest.
        MissingExtra: the executor's package is not installed.
    """

    _kind = "INFERENCE"

    def __init__(self, model: str | Path, executor: str | type = "torch", name: str | None = None) -> None:
        super().__init__(name)
        self.model = model
        self._executor: Any = executor
        self._known = ALIASES.get(executor, executor) if isinstance(executor, str) else None
        if self._known is not None:
            self._executor = engine_place(ROLLOUT, self._known)
        self._calls = 0

    def build(  # noqa: PLR0913 - the options of a placement, all of them optional
        self,
        *,
        tensor_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        colocate_with: Any = None,
        not_colocate_with: Any = None,
        nodes: Sequence[str] | None = None,
        ignore_rebuild_error: bool = False,
        **settings: Any,
    ) -> "InferenceEngine":
        """Start the processes and load the model.

        Args:
            tensor_parallel_size: slots over which each copy of the model is split; they are on one node.
            data_parallel_size: model replicas, each with prompts of its own; as many as fit by default.
            colocate_with: an engine, or a list of them, whose slots to use, all of them; free ones by default.
            not_colocate_with: engines whose slots not to use.
            nodes: addresses or ids of the nodes to use.
            ignore_rebuild_error: do nothing when it is built already.
            settings: fields of :class:`~dlrover.python.rl.engine.base.RolloutSettings` (``max_batch=64``); all others
                go to the backend, which refuses those it does not know. On CUDA the precision is ``"bf16"`` by default.

        Returns:
            The engine.

        Raises:
            EngineError: the backend does not know an option, or not this value; nothing was started.
            SessionError: it is built already, or the slots are not there; nothing was started.
            InvocationError: a process could not load the model; none is left.
        """
        if not self._may_build(ignore_rebuild_error):
            return self
        _, options = divided_settings(settings)
        if self._known and (problems := engine_problems(ROLLOUT, self._known, options, "backend")):
            raise EngineError("; ".join(map(str, problems)))
        wish = wish_of(tensor_parallel_size, data_parallel_size, True, colocate_with, not_colocate_with, nodes)
        crew = self._seat(wish, INFERENCE_PROCESS, whole_groups=True)
        try:
            kind = self._session.slots[crew.seats[0][0]].kind
            chosen = rollout_settings(kind, tensor_parallel_size, settings)
            terms = [
                InferenceTerms(f"{self.name}[{rank}]", self._executor, self.model, chosen)
                for rank in range(len(crew.seats))
            ]
            self._session.gather([self._submit(rank, "engine.open", (term,)) for rank, term in enumerate(terms)])
        except BaseException:
            self.release()
            raise
        return self

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        seed: int | None = None,
        timeout_s: float | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, an even and contiguous share of them by each group.

        Args:
            prompts: texts, lists of token ids, or dicts with ``prompt`` or ``prompt_token_ids`` (what else is in them
                reaches the engine as it is, if the engine takes it). A single one is a list of one.
            sampling_params: how to draw; a dict has the fields of
                :class:`~dlrover.python.rl.engine.base.SamplingParams`.
            seed: the same seed gives the same completions of the same prompts, however many groups there are. By
                default each call draws anew.
            timeout_s: for all of it; None waits, and logs who is waited for.

        Returns:
            One for each prompt, in their order.

        Raises:
            EngineError: a prompt or parameter is wrong; nothing was generated.
            InvocationError: a group failed or is late.
        """
        groups = len(self._running("generate").seats)
        asked, sampling = as_prompts(prompts), as_sampling(sampling_params)
        self._calls += 1
        numbers = (0, self._calls) if seed is None else (1, seed)
        cuts = even_cuts(len(asked), groups)
        shares = [(rank, cuts[rank], cuts[rank + 1]) for rank in range(groups) if cuts[rank] < cuts[rank + 1]]
        refs = [
            self._submit(rank, "engine.generate", (asked[start:stop], start, sampling, numbers))
            for rank, start, stop in shares
        ]
        drawn = self._session.gather(refs, timeout_s)
        return [
            output
            for (_, start, stop), batch in zip(shares, drawn, strict=True)
            for output in outputs_of(asked[start:stop], start, batch)
        ]


def rollout_settings(kind: str, tensor_parallel_size: int, given: Mapping[str, Any]) -> RolloutSettings:
    """The settings of a rollout engine on devices of a kind; what they do not know goes to the backend."""
    own, backend = divided_settings(given)
    own = {"precision": "bf16" if kind == "cuda" else "fp32"} | own
    return RolloutSettings(device=kind, tensor_parallel_size=tensor_parallel_size, backend=backend, **own)


def divided_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those that every rollout engine has, and the options of the backend."""
    fields = {field.name for field in dataclasses.fields(RolloutSettings)} - {"device", "tensor_parallel_size"}
    own = {name: value for name, value in given.items() if name in fields}
    rest = {name: value for name, value in given.items() if name not in fields}
    return own, {**own.pop("backend", {}), **rest}
