# SPDX-License-Identifier: Apache-2.0
"""Contract of every train engine: steps like a plain loop's in every layout; refusals, states, offloading alone."""

import dataclasses
import gc
import math
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen2ForTokenClassification

from dlrover.python.rl.common.errors import DLRoverRLError
from dlrover.python.rl.engine.api.settings import Layout, ParallelSizes
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from tests.support import plain_engine, train_exercise
from tests.support.plain_engine import CONFIG, EntropyLoss, apart, assert_close, make_batch, plain_model, reported
from tests.support.processes import run
from tests.support.train_cases import ENGINES, Case, is_on_host, is_slow, parameters
from tests.support.train_exercise import SAVED_AFTER, digest, five_steps, make_engine, saved, share, train, weights_of


# -- five steps -------------------------------------------------------------------------------------------------------
@pytest.mark.feature(44, 46, 47, 58, 122)
@pytest.mark.parametrize("case", parameters())
def test_five_steps_end_in_the_weights_of_the_plain_loop(case, ranks_of, expected):
    reports, weights = expected
    for rank in ranks_of(five_steps, case):
        assert_close(rank["weights"], weights)
        for step, plain in zip(rank["steps"], reports, strict=True):
            assert reported(step) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("case", parameters())
def test_each_rank_notes_progress_at_every_micro_batch(case, ranks_of):
    """Check the signs of progress without which a long call would be treated as hung."""
    for rank in ranks_of(five_steps, case):
        evaluated, trained = rank["progress"]
        assert evaluated >= 1 and trained >= SAVED_AFTER


@pytest.mark.feature(52)
@pytest.mark.parametrize("case", parameters())
def test_all_ranks_report_the_same_of_a_step(case, ranks_of):
    first, *later = (rank["steps"] for rank in ranks_of(five_steps, case))
    assert all(reports == first for reports in later)


def rows_of(ranks, column):
    """A column's rows, of one rank of each replica, in the replicas' order."""
    by_replica = {rank["replica"]: rank[column] for rank in ranks}
    return [row for replica in sorted(by_replica) for row in by_replica[replica]]


@pytest.mark.feature(47, 50, 123)
@pytest.mark.parametrize("case", parameters())
def test_logprobs_and_entropies_are_the_dense_models(case, ranks_of, model_path):
    model, batch, ranks = plain_model(model_path), make_batch(0), ranks_of(five_steps, case)
    columns = [batch.ragged(name) for name in ("tokens", "action_mask", "candidates")]
    for index, kind in enumerate(("logprobs", "entropy", "candidate_logprobs")):
        for row, tokens, mask, candidates in zip(rows_of(ranks, kind), *columns, strict=True):
            with torch.no_grad():
                wanted = plain_engine.plain_outputs(model, tokens, mask, candidates)[index].numpy()
            assert np.allclose(row[mask], wanted, atol=1e-5)
            assert not row[~mask].any()


@pytest.mark.feature(17, 55)
@pytest.mark.parametrize("case", parameters())
def test_in_host_memory_nothing_is_on_the_device(case, ranks_of):
    for rank in ranks_of(five_steps, case):
        before, empty, after = rank["footprints"]
        assert before == after and "weights" in before
        assert ("optimizer" in before) != is_on_host(case)
        assert (empty, rank["places"]) == ({}, ["cpu", "cuda"])


@pytest.mark.feature(45)
@pytest.mark.parametrize("case", parameters())
def test_copies_of_a_part_are_equal_to_the_bit(case, ranks_of):
    layout = Layout.of(case.world_size, case.sizes)
    by_part = {}
    for number, rank in enumerate(ranks_of(five_steps, case)):
        place = layout.coordinates(number)
        by_part.setdefault((place.shard, place.pipeline, place.context, place.tensor), set()).add(rank["digest"])
    assert all(len(digests) == 1 for digests in by_part.values())


@pytest.mark.parametrize("case", parameters())
def test_rank_0_publishes_all_weights(case, ranks_of, expected):
    assert ranks_of(five_steps, case)[0]["snapshot"] == sorted(expected[1])


@pytest.mark.parametrize(
    "case", parameters(slow=lambda case: is_slow(case) or 2 in (case.sizes.ddp_size, case.sizes.context_parallel_size))
)
def test_a_loaded_checkpoint_continues_bit_for_bit(case, ranks_of, model_path, folder):
    undisturbed = ranks_of(five_steps, case)
    (alone,) = [other for other in ENGINES[case.engine].cases if other.name == f"{case.engine}-1"] or [case]
    ranks_of(five_steps, alone)
    saved = folder / five_steps.__name__
    results = run(case.world_size, train_exercise.go_on, case, model_path, saved / case.name, saved / alone.name)
    for rank, (same, resharded) in zip(undisturbed, results, strict=True):
        assert same["digest"] == rank["digest"]
        assert same["steps"] == rank["steps"][SAVED_AFTER:]
        assert_close(resharded["weights"], rank["weights"])


# -- scores in place of log-probs, and bf16 ---------------------------------------------------------------------------
def has_several_ranks(case):
    return case.world_size > 1


@pytest.fixture(scope="module")
def critic_path(tmp_path_factory):
    return plain_engine.write_model(
        tmp_path_factory.mktemp("critic") / "T", kind=Qwen2ForTokenClassification, num_labels=1
    )


def score_and_round(rank, world_size, port, case, path, folder, critic_path):
    critic = make_engine(case, rank, port, critic_path, head="token")
    scores = critic.evaluate(share(critic, rank, 0)).ragged("scores")
    reports = [critic.step(share(critic, rank, seed), plain_engine.score_loss) for seed in range(train_exercise.STEPS)]
    rough = make_engine(case, rank, port, path, precision="bf16", gradient_checkpointing=True)
    result = {
        "replica": train_exercise.replica_of(critic, rank),
        "scores": [row.copy() for row in scores],
        "critic": (reports, weights_of(critic)),
        "rough": (train(rough, rank, range(train_exercise.STEPS)), weights_of(rough)),
    }
    rough.close()
    critic.close()
    return result


@pytest.fixture(scope="module")
def critic(critic_path):
    """The scores of the first batch's action tokens, row by row, and five steps."""
    model, batch = plain_model(critic_path, AutoModelForTokenClassification), make_batch(0)
    rows = zip(batch.ragged("tokens"), batch.ragged("action_mask"), strict=True)
    with torch.no_grad():
        scores = [plain_engine.plain_scores(model, tokens, mask).numpy() for tokens, mask in rows]
    return scores, *plain_engine.plain_steps(model, plain_engine.plain_score_loss, "scores")


@pytest.mark.feature(56)
@pytest.mark.parametrize("case", parameters(has_several_ranks))
def test_a_critics_scores_and_steps_are_the_plain_loops(case, ranks_of, critic, critic_path):
    """Check a head of one row too, which is less than the ranks that shard it."""
    ranks, (wanted, reports, weights) = ranks_of(score_and_round, case, critic_path), critic
    rows = zip(rows_of(ranks, "scores"), wanted, make_batch(0).ragged("action_mask"), strict=True)
    for row, scores, mask in rows:
        assert np.allclose(row[mask], scores, atol=1e-5)
        assert not row[~mask].any()
    for rank in ranks:
        steps, trained_weights = rank["critic"]
        assert_close(trained_weights, weights)
        for step, plain in zip(steps, reports, strict=True):
            assert reported(step) == pytest.approx(plain, rel=1e-5)


@pytest.mark.feature(53)
@pytest.mark.parametrize("case", parameters(has_several_ranks))
def test_bf16_is_near_and_weights_are_float32(case, ranks_of, expected, model_path, critic_path):
    reports, weights = expected
    ranks = ranks_of(score_and_round, case, critic_path)
    for rank in ranks:
        steps, rough = rank["rough"]
        assert steps == ranks[0]["rough"][0]
        for step, plain in zip(steps, reports, strict=True):
            assert step.loss == pytest.approx(plain["loss"], rel=0.02)
            assert step.grad_norm == pytest.approx(plain["grad_norm"], rel=0.05)
        assert {tensor.dtype for tensor in rough.values()} == {np.dtype(np.float32)}
        # One step less, or two in another order, are 0.2 apart.
        assert 1e-3 < apart(rough, weights, plain_engine.start_weights(model_path)) < 0.05


# -- a rank that stalls -----------------------------------------------------------------------------------------------
PATIENCE_S = 8.0


class Stalling(EntropyLoss):
    """Sleep on one rank in the middle of a step, for much longer than the others wait."""

    def __call__(self, logprobs, columns):
        time.sleep(3 * PATIENCE_S)
        return super().__call__(logprobs, columns)


def stalled(rank, world_size, port, case, path):
    engine = make_engine(case, rank, port, path, timeout_s=PATIENCE_S)
    train(engine, rank, [0])
    began_s, message = time.monotonic(), ""
    try:
        engine.step(share(engine, rank, 1), Stalling() if rank else EntropyLoss())
    except RuntimeError as error:
        message = str(error)
    return time.monotonic() - began_s, message


@pytest.mark.slow
@pytest.mark.parametrize("case", parameters(only=lambda case: case.world_size == 2))
def test_ranks_wait_for_a_stalled_one_until_their_timeout(case, model_path):
    (waited_s, message), _ = run(2, stalled, case, model_path)
    assert "timed out" in message.lower()
    assert waited_s < 2.5 * PATIENCE_S


# -- an engine alone --------------------------------------------------------------------------------------------------
BAD = {
    "loss": lambda outputs, columns: (outputs.sum() * math.nan, {}),
    # The square root's slope at zero is infinite: a finite loss with a gradient that is not.
    "gradient": lambda outputs, columns: ((outputs - outputs.detach()).abs().sqrt().sum(), {}),
}

ALIKE = ("fsdp2", "megatron")
"""Engines whose checkpoints have the same names and shapes."""


def cases(names=tuple(ENGINES)):
    return parameters(only=lambda case: case.world_size == 1 and case.engine in names)


def refusal(act):
    try:
        act()
    except DLRoverRLError as error:
        return type(error).__name__, str(error)
    return "", ""


def live_bytes():
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in map(whole_storage, tensors)}.values())


def whole_storage(tensor):
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def memory_of(engine, rank, before):
    train(engine, rank, [0])
    reported, measured = sum(engine.footprint().values()), live_bytes() - before
    engine.meta()
    return reported, measured, live_bytes() - before


def broken(outputs, columns):
    raise ZeroDivisionError


def alone(rank, world_size, port, case, path, folder):
    def make(**changes):
        return make_engine(case, rank, port, path, **changes)

    result = {"no room": refusal(lambda: make(memory=DeviceMemory(capacity=10_000))), "met": dist.is_initialized()}
    before = live_bytes()
    first = make()
    result["memory"] = memory_of(first, rank, before)
    engine = make()
    train(engine, rank, range(2))
    result |= refused_steps(engine, rank)
    result["skipped"] = skipped_steps(make(optimizer=dataclasses.replace(CONFIG, skip_nonfinite=2)), rank)
    result |= there_and_back(engine)
    result |= other_ways(make, rank)
    engine.save(folder / "saved")
    result["weights"] = weights_of(engine)
    result |= frozen(engine, make(frozen=True))
    result |= checkpoints(engine, case, make, folder)
    if case.engine in ALIKE:
        result["elsewhere"] = elsewhere(engine, make_engine(Case("fsdp2"), rank, port, path), rank, folder)
    result["an unknown option"] = refusal(lambda: make(backend={"zero_stge": 2, "cpu_shimm": True}))
    result["sizes of other ranks"] = refusal(lambda: make(parallel=ParallelSizes(tensor_parallel_size=3)))
    engine.close()
    first.close()
    return result


def refused_steps(engine, rank):
    before = digest(engine)
    result = {name: refusal(lambda loss=loss: engine.step(share(engine, rank, 2), loss)) for name, loss in BAD.items()}
    with pytest.raises(ZeroDivisionError):
        engine.step(share(engine, rank, 2), broken)
    return {**result, "before": before, "after": digest(engine)}


def skipped_steps(engine, rank):
    """Take as many updates as are skipped, one that is not, and again: the second time across a saved state."""
    before, results = weights_of(engine), []
    for _ in range(2):
        results += [engine.step(share(engine, rank, 2), loss) for loss in BAD.values()]
        engine.load_state_dict(saved(engine.state_dict()))
        kind, _ = refusal(lambda: engine.step(share(engine, rank, 2), BAD["loss"]))
        assert kind == "NonFiniteUpdate"
        same = all(np.array_equal(before[name], now) for name, now in weights_of(engine).items())
        results.append((same, engine.version))
        (good,) = train(engine, rank, [0])
        assert not good.skipped
        before = weights_of(engine)
    engine.close()
    return results


def there_and_back(engine):
    def step():
        return engine.step(make_batch(2), EntropyLoss(), plain_engine.TEMPERATURE), digest(engine)

    state = saved(engine.state_dict())
    result = {"on": step()}
    engine.meta()
    result["released"], result["a call after meta"] = (engine.place(), engine.footprint()), refusal(engine.publish)
    engine.load_state_dict(state)
    return {**result, "again": step()}


def other_ways(make, rank):
    """Return two steps and their weights for each way to run, and whether a state is loaded while in host memory."""
    ways = {"plain": {}, "recomputed": {"gradient_checkpointing": True}, "bf16": {"precision": "bf16"}}
    steps = {}
    for name, changes in ways.items():
        engine = make(**changes)
        reports = train(engine, rank, range(2))
        weights, state = weights_of(engine), saved(engine.state_dict())
        on = train(engine, rank, [2]), digest(engine)
        engine.cpu()
        engine.load_state_dict(state)
        engine.cuda()
        again = train(engine, rank, [2]), digest(engine)
        steps[name] = reports, weights, on == again
        engine.meta()
    return {"steps": steps}


def frozen(engine, follower):
    published = engine.publish()
    follower.receive(published)
    return {
        "frozen": (follower.version, follower.publish().stamp == published.stamp, sorted(follower.footprint())),
        "a step of a frozen engine": refusal(lambda: follower.step(make_batch(0), EntropyLoss())),
        "a state of another kind": refusal(lambda: follower.load_state_dict(engine.state_dict())),
    }


def checkpoints(engine, case, make, folder):
    engine.save_checkpoint(folder / "checkpoint")
    result = {
        "a folder in a file": refusal(lambda: engine.save_checkpoint(folder / "saved" / "config.json" / "checkpoint")),
        "no checkpoint": refusal(lambda: engine.load_checkpoint(folder / "nothing")),
    }
    if case.engine == "deepspeed":
        other = make(backend={"zero_stage": 1 + case.backend["zero_stage"] % 3})
        result["stage"] = refusal(lambda: other.load_checkpoint(folder / "checkpoint"))
    return result


def elsewhere(engine, other, rank, folder):
    other.load_checkpoint(folder / "checkpoint")
    for each in (engine, other):
        train(each, rank, [3])
    return other.version, weights_of(engine), weights_of(other)


every_case = pytest.mark.parametrize("case", cases())


@pytest.fixture
def result(case, ranks_of):
    return ranks_of(alone, case)[0]


REFUSALS = {
    "loss": ("NonFiniteUpdate", "the loss is nan"),
    "gradient": ("NonFiniteUpdate", "the gradient norm is nan (first in: model.embed"),
    "no room": ("OutOfDeviceMemory", "10,000 bytes are in use"),
    "a call after meta": ("EngineError", "load_state_dict"),
    "a step of a frozen engine": ("EngineError", "a frozen engine (no optimizer) cannot take a step"),
    "a state of another kind": ("EngineError",),
    "a folder in a file": ("EngineError", "cannot be written: "),
    "no checkpoint": ("EngineError", "no checkpoint at "),
    "sizes of other ranks": ("EngineError", "tensor_parallel_size", "3"),
}


@pytest.mark.feature(51)
@pytest.mark.parametrize("refused", REFUSALS)
@every_case
def test_impossible_requests_are_refused(case, result, refused):
    (wanted, *words), (kind, message) = REFUSALS[refused], result[refused]
    assert kind == wanted
    assert all(word in message for word in words)


@every_case
def test_refused_updates_and_failed_writes_change_nothing(case, result, folder):
    assert result["before"] == result["after"]
    assert result["on"][0].grad_norm < math.inf
    files = (folder / alone.__name__ / case.name).iterdir()
    assert not [file for file in files if file.name.startswith(".")], "files of failed writes are removed"
    assert not result["met"], "an engine that does not fit leaves its ranks, and another one can be made"


@every_case
def test_nonfinite_updates_are_skipped_up_to_a_limit(case, result):
    *first, one, another, end = result["skipped"]
    first, start = first[:-1], first[-1]
    for step in (*first, one, another):
        assert (step.skipped, math.isnan(step.loss), math.isnan(step.grad_norm)) == (True, True, True)
        assert step.lr > 0
    assert (start, end) == ((True, 0), (True, 1))


@pytest.mark.feature(20)
@every_case
def test_a_released_engine_continues_from_its_state_bit_for_bit(case, result):
    assert result["released"] == ("meta", {})
    assert result["again"] == result["on"]


@every_case
def test_the_saved_model_is_in_hugging_face_format(case, result, folder):
    weights = result["weights"]
    model = AutoModelForCausalLM.from_pretrained(folder / alone.__name__ / case.name / "saved", dtype=torch.float32)
    loaded = dict(model.named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(np.array_equal(tensor.detach().numpy(), weights[name]) for name, tensor in loaded.items())


@pytest.mark.feature(107)
@every_case
def test_a_frozen_engine_takes_weights_and_has_no_optimizer(case, result):
    assert result["frozen"] == (3, True, ["weights"])


@pytest.mark.feature(54)
@every_case
def test_recomputed_activations_give_the_same_steps(case, result):
    (reports, weights, _), (again, recomputed_weights, _) = (result["steps"][way] for way in ("plain", "recomputed"))
    assert reports == again
    assert all(np.array_equal(weights[name], recomputed_weights[name]) for name in weights)


@pytest.mark.feature(20)
@every_case
def test_the_footprint_is_the_bytes_held_and_meta_frees_them(case, result):
    reported, measured, left = result["memory"]
    assert abs(measured - reported) < 0.05 * reported
    assert left < 0.05 * reported


@every_case
def test_a_state_can_be_loaded_in_host_memory(case, result):
    assert all(same for *_, same in result["steps"].values())


@pytest.mark.parametrize("case", cases(("deepspeed",)))
def test_a_checkpoint_of_another_stage_is_refused_with_both(case, result):
    kind, message = result["stage"]
    stage = case.backend["zero_stage"]
    assert kind == "EngineError"
    assert f"is of layout [1, 1, 1, 1, 1, {stage}]" in message
    assert f"not [1, 1, 1, 1, 1, {1 + stage % 3}]" in message


@pytest.mark.parametrize("case", cases(ALIKE))
def test_fsdp2_continues_from_the_checkpoint(case, result):
    version, own, fsdp2_weights = result["elsewhere"]
    assert version == 4
    assert_close(fsdp2_weights, own)


@every_case
def test_an_unknown_option_is_refused_with_the_nearest(case, result):
    kind, message = result["an unknown option"]
    assert kind in ("EngineError", "InvalidJob")
    assert "zero_stge" in message
    if case.backend:
        assert f"did you mean '{next(iter(case.backend))}'?" in message
