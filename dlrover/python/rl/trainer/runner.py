"""Running a trainer to its end, through every step that has to be done again."""

from collections.abc import Callable

from dlrover.python.rl.common.errors import InvocationError, StepAbandoned
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.trainer.steps import Attempt, Steps
from dlrover.python.rl.trainer.trainer import BaseTrainer, TrainerLink

_LOG = get_logger(__name__)

MOST_ATTEMPTS = 3
"""How often a step is done again, without a commit in between, before what it fails of is raised."""


def run_trainer(make_trainer: Callable[[], BaseTrainer], link: TrainerLink) -> None:
    """Run ``init`` and ``fit``.

    A step that cannot go on (a commit that cannot be restored, a replay that differs, an error that says that trying
    again may help) is done again from the newest commit, by a new trainer object in this process.

    Args:
        make_trainer: gives a new trainer object, with the raw handles of the members as they are then.
        link: what ties it to this place.

    Raises:
        Exception: what ``init`` or ``fit`` raised.
    """
    attempt, failures = Attempt(), 0
    while True:
        trainer = make_trainer()
        steps = trainer.bind(link, attempt)
        try:
            run_once(trainer, steps, attempt)
            return
        except StepAbandoned as abandoned:
            step, cause = abandoned.step, abandoned.cause
        except Exception as error:
            if not says_retryable(error):
                raise
            step, cause = steps.port.step, error
        failures = 1 if steps.commits else failures + 1
        if failures > MOST_ATTEMPTS or not (steps.can_go_back() or attempt.number):
            raise cause
        reason = f"{type(cause).__name__}: {cause}".partition("\n")[0]
        _LOG.warning("step %d is done again from the last commit: %s", step, reason)
        steps.port.close(StepAbandoned(step, cause))
        attempt = Attempt(attempt.number + 1, True, reason)


def run_once(trainer: BaseTrainer, steps: Steps, attempt: Attempt) -> None:
    """One trainer object, from its ``init`` to the end of its ``fit``."""
    if attempt.number:
        steps.forget()
    with steps.setup():
        trainer.init()
    trainer.fit()
    steps.finish()


def says_retryable(error: BaseException) -> bool:
    """Whether ``error``, or the user's own error inside it, says that trying again may help."""
    inside = error.original if isinstance(error, InvocationError) else None
    return any(getattr(item, "retryable", False) is True for item in (error, inside))
