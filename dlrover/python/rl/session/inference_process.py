"""One process of an inference engine: a rollout engine, and how a script's prompts reach it."""

from collections.abc import Sequence
from typing import Any

import torch

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.base import Part, Place, SamplingParams
from dlrover.python.rl.engine.registry import engine_class
from dlrover.python.rl.engine.sync.base import Ticket
from dlrover.python.rl.engine.weights import WeightSnapshot, WeightStamp
from dlrover.python.rl.session.hosted import Hosted
from dlrover.python.rl.session.prompts import as_batch
from dlrover.python.rl.session.routes import Route, Routes
from dlrover.python.rl.session.terms import InferenceTerms


class InferenceProcess(Hosted):
    """Holds a rollout engine. An engine that takes more of a prompt than its tokens says so by an attribute
    ``prompt_columns``."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._routes = Routes("", False, "cpu")

    def open(self, terms: InferenceTerms) -> None:
        """Load the model.

        Raises:
            EngineError: there is no such model, or the engine cannot run it like this.
            MissingExtra: the backend is not installed.
        """
        kind = terms.engine
        cls = engine_class({"it": kind}, "it") if isinstance(kind, str) else kind
        self._engine = cls(terms.model, terms.settings)
        self._routes = Routes(terms.who, False, terms.settings.device)

    def generate(self, prompts: Sequence[Any], first: int, sampling: SamplingParams, seed: tuple[int, ...]) -> Batch:
        """Complete the prompts; see :meth:`~dlrover.python.rl.engine.base.RolloutEngine.generate`."""
        takes = getattr(self._engine, "prompt_columns", ())
        batch = as_batch(prompts, first, self._engine.tokenizer, takes)
        drawn: Batch = self._engine.generate(batch, sampling, seed)
        return drawn

    # -- weights ------------------------------------------------------------------------------------------------------

    def receive(self, weights: WeightSnapshot) -> WeightStamp:
        """Take over weights, older ones too: the script knows what it does."""
        self._engine.receive(weights, rewind=True)
        if self._engine.version != weights.version:
            raise EngineError(f"the engine serves version {self._engine.version}, not {weights.version}")
        return weights.stamp

    def take(self, ticket: Ticket, route: Route) -> WeightStamp:
        """Take over the weights of a ticket."""
        return self.receive(self._routes.end(route).receive(ticket))

    # -- places -------------------------------------------------------------------------------------------------------

    def cpu(self) -> None:
        """See :class:`~dlrover.python.rl.engine.base.Offloadable`; so are the following."""
        self._engine.cpu()

    def cuda(self, part: Part) -> None:
        self._engine.cuda(part)

    def meta(self) -> None:
        self._engine.meta()

    def place(self) -> Place:
        place: Place = self._engine.place()
        return place

    def footprint(self) -> dict[str, int]:
        held: dict[str, int] = self._engine.footprint()
        return held

    def release_cache(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def close(self) -> None:
        self._routes.close()
        if self._engine is not None:
            self._engine.close()
            self._engine = None
