# SPDX-License-Identifier: Apache-2.0
"""The inference engine of a script."""

import dataclasses
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.data.batch import even_cuts
from dlrover.python.rl.engine.api.base import RolloutSettings, SamplingParams
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_info, engine_place, validate_engine
from dlrover.python.rl.session.engine import HandEngine
from dlrover.python.rl.session.members import InferenceMember, RequestOutput, as_outputs, as_prompts, as_sampling
from dlrover.python.rl.session.session import SlotRequest
from dlrover.python.rl.trainer.shard import Shard

ALIASES = {"hf": "torch"}
"""Other names of executors: Hugging Face models run on the engine in plain PyTorch."""


class InferenceEngine(HandEngine):
    """Generates completions.

    Args:
        model: folder or hub name of a causal language model.
        executor: ``"torch"`` (or ``"hf"``), ``"vllm"``, ``"sglang"``, an entry point of the group
            ``dlrover_rl.rollout_engines``, ``"module:Class"``, or a class with the methods of
            :class:`~dlrover.python.rl.engine.api.base.BaseRolloutEngine`.
        name: what messages call it; ``INFERENCE_1`` and so on by default.

    Raises:
        EngineError: no executor has this name; gives the nearest.
        MissingExtra: the executor's package is not installed.
    """

    _kind = "INFERENCE"

    def __init__(self, model: str | Path, executor: str | type = "torch", name: str | None = None) -> None:
        super().__init__(name)
        self.model = str(Path(model).absolute()) if Path(model).is_dir() else model  # processes have other folders
        self._executor: Any = executor
        self._registered = ALIASES.get(executor, executor) if isinstance(executor, str) else None
        if self._registered is not None:
            self._executor = engine_place(ROLLOUT_ENGINES, self._registered)
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
            settings: fields of ``RolloutSettings`` (``max_batch=64``); the backend takes or refuses all others. On
                CUDA the precision is ``"bf16"`` by default.

        Returns:
            The engine.

        Raises:
            EngineError: the backend does not know an option, or not this value; nothing was started.
            SessionError: it is built already, or the slots are not there; nothing was started.
            InvocationError: a process could not load the model; none is left.
        """
        if not self._should_build(ignore_rebuild_error):
            return self
        fields = {field.name for field in dataclasses.fields(RolloutSettings)} - {"device", "tensor_parallel_size"}
        own = {name: settings.pop(name) for name in fields & settings.keys()}
        if self._registered:
            self._check_names(self._registered, settings, fields)
        backend = {**own.pop("backend", {}), **settings}
        if self._registered and (errors := validate_engine(ROLLOUT_ENGINES, self._registered, backend, "backend")):
            raise EngineError("; ".join(map(str, errors)))
        request = SlotRequest.near(colocate_with, not_colocate_with, nodes)
        request = replace(request, group=tensor_parallel_size, groups=data_parallel_size, one_node=True)
        kind = self._start(request, InferenceMember)
        # The script computes the log-probs of training, over all of the model's ids unless it masks some itself.
        own = {"precision": "bf16" if kind == "cuda" else "fp32", "mask_unknown_ids": False, **own}
        complete = RolloutSettings(device=kind, tensor_parallel_size=tensor_parallel_size, backend=backend, **own)
        self._open(self._executor, self.model, complete)
        return self

    def _check_names(self, backend: str, settings: Mapping[str, Any], fields: Collection[str]) -> None:
        """Raise an ``EngineError`` for a name that is neither an argument, one of ``fields``, nor an option of the
        backend, where these are known."""
        options = engine_info(ROLLOUT_ENGINES, backend).options
        if options is None:
            return
        known = {field.name for field in dataclasses.fields(options)}
        names = {*known, *fields, *inspect.signature(self.build).parameters} - {"settings"}
        for name in settings.keys() - known:
            raise EngineError(f"build() has no argument '{name}'{hint(name, names)}")

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
                :class:`~dlrover.python.rl.engine.api.base.SamplingParams`.
            seed: the same seed gives the same completions of the same prompts, however many groups there are. By
                default each call draws others.
            timeout_s: for all of it; None waits, and logs the late ranks.

        Returns:
            One for each prompt, in their order.

        Raises:
            EngineError: a prompt or parameter is wrong; nothing was generated.
            InvocationError: a group failed or is late.
        """
        groups = len(self._running("generate").slots)
        rows, sampling = as_prompts(prompts), as_sampling(sampling_params)
        self._calls += 1
        seeds = (0, self._calls) if seed is None else (1, seed)
        cuts = even_cuts(len(rows), groups)
        parts = [(start, rows[start:stop]) for start, stop in pairwise(cuts)]
        refs = self._submit("engine.generate", Shard(parts), sampling, seeds)
        batches = self._session.gather(refs, timeout_s)
        return [
            output
            for (start, part), batch in zip(parts, batches, strict=True)
            if part
            for output in as_outputs(part, start, batch)
        ]
