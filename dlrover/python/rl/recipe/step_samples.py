"""What a step has drawn: the samples that it trains on, and those that it does not."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.algorithm.advantages import varied_groups
from dlrover.python.rl.algorithm.samples import Samples
from dlrover.python.rl.data.balance import partition
from dlrover.python.rl.data.batch import Batch, even_cuts
from dlrover.python.rl.recipe.whole_samples import whole_samples
from dlrover.python.rl.trainer.port import Pending
from dlrover.python.rl.trainer.shard import Shard


@dataclass(frozen=True)
class Drawn:
    """Samples and what is known of them, groups in the order they were asked for, redrawn ones at the end.

    Attributes:
        rollouts: pending batches, which the trainer never sees.
        rows: which of their rows are trained on, in order.
        scored: what the trainer knows of these rows; ``attempt`` counts the draws of a group from 0.
        groups: how many there are.
        total: rows of ``rollouts``.
        filtered: ``scored`` of the rows that are not trained on, since the rewards of their group are all alike.
    """

    rollouts: Pending
    rows: tuple[int, ...]
    scored: Batch
    groups: int
    total: int
    filtered: tuple[Batch, ...] = ()

    @classmethod
    def of(cls, rollouts: Pending, scored: Batch, order: npt.NDArray[np.int64], groups: int) -> "Drawn":
        """All rows of ``rollouts``, in this order; ``scored`` is in theirs."""
        rows = order.tolist()
        return cls(rollouts, tuple(rows), scored.take(rows), groups, len(rows))

    @property
    def samples(self) -> Shard:
        """The rows that are trained on, divided over whoever is given them: not more members than there are rows."""
        return Shard(self.rollouts, rows=self.rows)

    def in_order(self, ranks: int) -> Shard:
        """The same for ranks that all have to take part: where filtering has left fewer rows, some get none."""
        rows = range(len(self.rows))
        cuts = even_cuts(len(rows), ranks)
        return self.samples_of([rows[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)])

    def divided(self, ranks: int, update: npt.NDArray[np.int64]) -> list[tuple[int, ...]]:
        """Which of the rows that are trained on each rank gets, so that all have about as many tokens in each update;
        of fewer rows than ranks some get none.

        Args:
            ranks: how many.
            update: ``[rows]``, the optimizer step that each row is in.
        """
        tokens, parts = self.scored.dense("token_count"), [list[int]() for _ in range(ranks)]
        for number in np.unique(update):
            rows = np.flatnonzero(update == number)
            for part, group in zip(parts, partition(tokens[rows].tolist(), ranks).groups, strict=True):
                part += rows[list(group)].tolist()
        return [tuple(part) for part in parts]

    def samples_of(self, parts: Sequence[Sequence[int]]) -> Shard:
        """The samples, divided so."""
        return Shard(self.rollouts, rows=[[self.rows[row] for row in part] for part in parts])

    @classmethod
    def joined(cls, parts: Sequence["Drawn"]) -> "Drawn":
        """All of them, one after the other."""
        starts = np.cumsum([0, *(part.total for part in parts)]).tolist()
        return cls(
            Pending([ref for part in parts for ref in part.rollouts]),
            tuple(start + row for start, part in zip(starts, parts, strict=False) for row in part.rows),
            Batch.concat([part.scored for part in parts]),
            sum(part.groups for part in parts),
            starts[-1],
            tuple(rows for part in parts for rows in part.filtered),
        )

    def without_alike(self, rewards: npt.NDArray[np.float64]) -> "Drawn":
        """Without the groups whose samples' rewards are all alike.

        Args:
            rewards: ``[rows]``, which add up to those of their samples; NaN where a sample is not trained on.
        """
        ids, samples = self.scored.dense("prompt_id"), Samples.of(self.scored.with_columns(reward=rewards))
        kept = varied_groups(samples.prompt_id, samples.reward, samples.counted)[samples.of_row]
        stay, go = np.flatnonzero(kept).tolist(), np.flatnonzero(~kept).tolist()
        if not go:
            return self
        return replace(
            self,
            rows=tuple(self.rows[row] for row in stay),
            scored=self.scored.take(stay),
            groups=len(np.unique(ids[kept])),
            filtered=(*self.filtered, self.scored.take(go)),
        )

    @property
    def everything(self) -> Batch:
        """What is known of all samples that were drawn, those that are not trained on at the end."""
        return Batch.concat([self.scored, *self.filtered])

    @property
    def figures(self) -> dict[str, float]:
        """How many groups were filtered out, and how stale the others are, where there is something to say."""
        figures = {}
        if self.filtered:
            figures["filtered_groups"] = float(sum(len(np.unique(rows.dense("prompt_id"))) for rows in self.filtered))
        if "staleness" in self.scored and len(self.scored):
            stale = whole_samples(self.scored).dense("staleness")
            figures |= {"staleness": float(stale.mean()), "staleness_max": float(stale.max())}
        return figures
