# SPDX-License-Identifier: Apache-2.0
"""Steps that teach nothing, or whose samples were cut off: each is logged when it begins, not in every step."""

from dataclasses import dataclass, field

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.online.batch import uniform_share

_LOG = get_logger(__name__)

_MAX_TRUNCATED = 0.5
"""A larger share of truncated completions is warned of."""


@dataclass
class StepWarnings:
    compares_samples: bool
    max_new_tokens: int
    _without_signal: int = field(default=0, init=False)
    _had_room: bool = field(default=True, init=False)
    _had_unknown_ids: bool = field(default=False, init=False)

    def note_rewards(self, step: int, rows: Batch) -> None:
        """Log steps whose rewards give no gradient: the first, and ever fewer of the later ones."""
        share = uniform_share(rows) if self.compares_samples else 0.0
        self._without_signal += share == 1.0
        if share == 1.0 and self._without_signal.bit_count() == 1:
            _LOG.warning(
                "step %d: no gradient: all rewards of a group are equal, in every group; check the reward function on"
                " samples.jsonl, raise the temperature, or take easier prompts",
                step,
            )

    def note_truncated(self, step: int, share: float) -> None:
        """Log the first step, of several in a row, most of whose completions ended by their length."""
        if share > _MAX_TRUNCATED and self._had_room:
            _LOG.warning(
                "step %d: %.0f %% of the completions were cut off: raise rollout.max_new_tokens, now %d, or see on"
                " samples.jsonl why they do not end",
                step,
                100 * share,
                self.max_new_tokens,
            )
        self._had_room = share <= _MAX_TRUNCATED

    def note_unknown_ids(self, step: int, count: int) -> None:
        """Log the first step whose completions have ids that the tokenizer does not have."""
        if count and not self._had_unknown_ids:
            self._had_unknown_ids, what = (
                True,
                f"{count} sampled ids are none of the tokenizer's, so no reward sees them",
            )
            _LOG.warning("step %d: %s: engine.mask_unknown_ids masks them in engines torch and vllm", step, what)
