"""A job over processes that somebody else has started (``torchrun``, ``accelerate launch``), without Ray.

::

    rank 0                                        rank 1, 2, ...
    trainer -> port -> links ------ calls ------> worker: ACTOR[1], ROLLOUT[1], ...
                '----> worker: ACTOR[0], ...  <-- results, when they are asked for

Each process has one member of each role and carries out its calls one after the other, in the order in which the
trainer makes them: members that meet in collectives therefore meet. The trainer is in rank 0, and nowhere else. No
process is replaced: when one ends, all do, and the same command goes on from the newest commit.
"""
