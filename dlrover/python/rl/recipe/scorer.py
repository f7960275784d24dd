"""ACTOR of a reward model: a model that gives a sequence one number."""

from typing import ClassVar

from dlrover.python.rl.engine.torch.packing import Head
from dlrover.python.rl.recipe.actor import ActorWorkload


class ScorerWorkload(ActorWorkload):
    """ACTOR: holds a reward model in training, whose score of a sequence is that of its last token.

    It is saved as what ``AutoModelForSequenceClassification`` loads. Its head has no bias: pairs say nothing of it, and
    rounding errors alone would move it.
    """

    head: ClassVar[Head] = "token"
    head_bias: ClassVar[bool] = False
