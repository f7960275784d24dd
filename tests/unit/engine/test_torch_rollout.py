"""The PyTorch rollout engine: what it samples, what it reports about it, which weights it serves."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dlrover.python.rl.common.errors import EngineError, WeightSyncError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.base import OptimizerConfig, SamplingParams
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.torch.rollout import TorchRolloutEngine
from dlrover.python.rl.engine.torch.sampling import choose, uniforms
from dlrover.python.rl.engine.weights import WeightSnapshot, take_snapshot
from dlrover.python.rl.recipe.tiny import write_tiny_model

TEXTS = ["a", "what is the answer to this?", "37+45=", "a longer prompt than all of the others, by far", "xyz"]
EOS = 258


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "T", hidden=32, layers=2, max_positions=128)


@pytest.fixture(scope="module")
def engine(model_path):
    return TorchRolloutEngine(model_path, max_batch=8)


@pytest.fixture(scope="module")
def trainer(model_path):
    return Fsdp2TrainEngine(model_path, None)


def prompts(texts=TEXTS, first_id=0) -> Batch:
    rows = [list(text.encode()) for text in texts]
    return Batch({"prompt_id": np.arange(first_id, first_id + len(rows)), "tokens": Ragged.from_rows(rows)})


def sampling(**changes) -> SamplingParams:
    return dataclasses.replace(SamplingParams(max_new_tokens=24, temperature=1.0), **changes)


def completions(out: Batch) -> list[list[int]]:
    pairs = zip(out.ragged("tokens"), out.ragged("action_mask"), strict=True)
    return [tokens[mask].tolist() for tokens, mask in pairs]


def reference_greedy(path, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding the slow way: the whole sequence through the model for every token."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


# -- what comes back --------------------------------------------------------------------------------------------------


def test_columns_of_the_output(engine):
    out = engine.generate(prompts(), sampling(samples_per_prompt=3), (1,))
    assert len(out) == 15
    assert out["prompt_id"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert out["sample_index"].tolist() == [0, 1, 2] * 5
    assert out["version"].tolist() == [-1] * 15
    for name, dtype in (("tokens", "int64"), ("action_mask", "bool"), ("logprobs", "float32")):
        assert out.ragged(name).values.dtype == dtype
        assert np.array_equal(out.ragged(name).offsets, out.ragged("tokens").offsets)
    assert (out.ragged("logprobs").values[~out.ragged("action_mask").values] == 0).all()
    assert (out.ragged("logprobs").values[out.ragged("action_mask").values] < 0).all()


def test_row_081_output_i_belongs_to_prompt_i(engine):
    out = engine.generate(prompts(), sampling(samples_per_prompt=2), (1,))
    for row in range(len(out)):
        text = TEXTS[row // 2].encode()
        assert out.ragged("tokens")[row][: len(text)].tolist() == list(text)
        assert out.ragged("action_mask")[row].tolist().index(True) == len(text)


def test_no_prompts_give_no_rows(engine):
    out = engine.generate(prompts([]), sampling(), (1,))
    assert len(out) == 0
    assert set(out.columns) == {
        *("prompt_id", "sample_index", "tokens", "action_mask", "logprobs", "finished", "version"),
    }


def test_greedy_equals_decoding_without_a_cache(engine, model_path):
    out = engine.generate(prompts(), sampling(temperature=0.0), (0,))
    assert completions(out) == [reference_greedy(model_path, list(text.encode()), 24) for text in TEXTS]


# -- batch invariance -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_row_082_a_prompt_alone_and_in_a_ragged_batch(model_path, temperature):
    engine = TorchRolloutEngine(model_path, max_batch=64)
    params = sampling(temperature=temperature, samples_per_prompt=4, max_new_tokens=60)
    together = engine.generate(prompts(), params, (3, 5))
    alone = Batch.concat([engine.generate(prompts().rows(row, row + 1), params, (3, 5)) for row in range(len(TEXTS))])
    assert completions(together) == completions(alone)
    assert np.allclose(together.ragged("logprobs").values, alone.ragged("logprobs").values, atol=1e-5)


def test_row_082_neither_order_nor_batch_size_matter(model_path):
    params = sampling(samples_per_prompt=3)
    backwards = prompts().take([4, 2, 0, 3, 1])
    first = TorchRolloutEngine(model_path, max_batch=64).generate(prompts(), params, (9,))
    second = TorchRolloutEngine(model_path, max_batch=2).generate(backwards, params, (9,))
    where = {key: row for row, key in enumerate(zip(second["prompt_id"], second["sample_index"], strict=True))}
    keys = zip(first["prompt_id"], first["sample_index"], strict=True)
    assert completions(first) == completions(second.take([where[key] for key in keys]))


def test_seed_prompt_id_and_sample_index_each_change_the_sample(engine):
    def draw(first_id, seed):
        return completions(engine.generate(prompts(["go"], first_id), sampling(samples_per_prompt=2), seed))

    base = draw(0, (1, 2))
    assert base == draw(0, (1, 2))
    assert base[0] != base[1]
    for other in (draw(1, (1, 2)), draw(0, (1, 3)), draw(0, (12,))):
        assert base[0] != other[0]


def test_a_shorter_budget_gives_a_prefix(engine):
    long = completions(engine.generate(prompts(), sampling(max_new_tokens=20), (4,)))
    short = completions(engine.generate(prompts(), sampling(max_new_tokens=5), (4,)))
    assert short == [tokens[:5] for tokens in long]


# -- log-probs and the end of a sequence ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_row_084_logprobs_equal_the_train_engines(engine, trainer, temperature):
    out = engine.generate(prompts(), sampling(temperature=temperature, samples_per_prompt=4), (2,))
    again = trainer.evaluate(out, temperature).ragged("logprobs").values
    assert np.abs(again - out.ragged("logprobs").values).max() < 1e-4


def test_row_085_end_of_sequence_is_trained_and_nothing_follows_it(engine):
    out = engine.generate(prompts(), sampling(max_new_tokens=60, samples_per_prompt=16), (0,))
    assert 0 < out["finished"].sum() < len(out)
    for done, tokens in zip(out["finished"], completions(out), strict=True):
        assert (tokens[-1] == EOS) == done
        assert EOS not in tokens[:-1]
        assert done or len(tokens) == 60


def test_every_end_token_of_the_generation_config_ends(model_path, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    model.generation_config.eos_token_id = list(range(128))
    path = tmp_path / "many-ends"
    model.save_pretrained(path)
    Fsdp2TrainEngine(model_path, None).tokenizer.save_pretrained(path)
    out = TorchRolloutEngine(path).generate(prompts(), sampling(samples_per_prompt=8), (0,))
    for done, tokens in zip(out["finished"], completions(out), strict=True):
        assert done == (tokens[-1] < 128 or tokens[-1] == EOS)
        assert all(128 <= token != EOS for token in tokens[:-1])


def test_choose_draws_each_token_as_often_as_its_probability():
    logits = torch.tensor([2.0, 0.0, 1.0, -torch.inf, 0.5]).expand(20000, 5)
    expected = torch.softmax(logits[0] / 0.7, dim=-1)
    tokens, logprobs = choose(logits, 0.7, torch.from_numpy(uniforms((1,), 2, 3, 20000)))
    shares = torch.bincount(tokens, minlength=5) / 20000
    assert torch.allclose(shares, expected, atol=0.012)
    assert shares[3] == 0
    assert torch.allclose(logprobs.exp().float(), expected[tokens])


def test_choose_never_leaves_the_support():
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, 4)
    edges = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert choose(logits, 1.0, edges)[0].tolist() == [1, 2]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "new", "message"),
    [
        (["ok", "x" * 120], 9, "129 tokens does not fit the model's 128 positions"),
        (["ok", ""], 4, r"prompts \[1\] are empty"),
    ],
)
def test_prompts_that_cannot_be_completed_are_refused(engine, texts, new, message):
    with pytest.raises(EngineError, match=message):
        engine.generate(prompts(texts), sampling(max_new_tokens=new), (0,))


def test_a_prompt_that_just_fits_is_completed(engine):
    out = engine.generate(prompts(["x" * 120]), sampling(max_new_tokens=8, temperature=0.0), (0,))
    assert out.ragged("tokens").lengths[0] <= 128


def test_unknown_token_ids_are_refused(engine):
    batch = Batch({"prompt_id": np.array([0]), "tokens": Ragged.from_rows([[5, 259]])})
    with pytest.raises(EngineError, match="5 to 259, but the model knows 0 to 258"):
        engine.generate(batch, sampling(), (0,))


def test_broken_weights_are_an_error_not_a_sample(model_path):
    engine = TorchRolloutEngine(model_path)
    sent = Fsdp2TrainEngine(model_path, None).publish()
    nan = {name: torch.full_like(sent.tensor(name), torch.nan) for name in sent.buffers}
    engine.receive(take_snapshot(nan.items(), 0))
    with pytest.raises(EngineError, match="not numbers"):
        engine.generate(prompts(), sampling(), (0,))


# -- weights ----------------------------------------------------------------------------------------------------------


def trained(path) -> Fsdp2TrainEngine:
    trainer = Fsdp2TrainEngine(path, OptimizerConfig(lr=1e-2))
    rows = [[*b"say ", *b"something", EOS]]
    mask = [[False] * 4 + [True] * 10]
    batch = Batch({"tokens": Ragged.from_rows(rows), "action_mask": Ragged.from_rows(mask)})
    trainer.step(batch, lambda logprobs, columns: (-logprobs.sum(), {}))
    return trainer


def test_row_100_after_a_sync_it_writes_what_a_fresh_engine_on_the_saved_weights_writes(model_path, tmp_path):
    trainer, engine = trained(model_path), TorchRolloutEngine(model_path)
    before = engine.generate(prompts(), sampling(temperature=0.0), (0,))
    engine.receive(trainer.publish())
    trainer.save(tmp_path / "saved")
    after = engine.generate(prompts(), sampling(temperature=0.0), (0,))
    fresh = TorchRolloutEngine(tmp_path / "saved").generate(prompts(), sampling(temperature=0.0), (0,))
    assert completions(after) == completions(fresh) != completions(before)
    assert np.array_equal(after.ragged("logprobs").values, fresh.ragged("logprobs").values)


def test_row_103_a_renamed_parameter_is_refused_and_the_old_weights_serve(model_path):
    trainer, engine = trained(model_path), TorchRolloutEngine(model_path)
    engine.receive(Fsdp2TrainEngine(model_path, None).publish())
    before = engine.generate(prompts(), sampling(temperature=0.0), (0,))
    sent = trainer.publish()
    wrong = take_snapshot([(name.replace("embed_tokens", "embedding"), sent.tensor(name)) for name in sent.buffers], 1)
    with pytest.raises(
        WeightSyncError, match=r"'model\.embed_tokens\.weight' is missing.*embedding\.weight' is unknown"
    ):
        engine.receive(wrong)
    after = engine.generate(prompts(), sampling(temperature=0.0), (0,))
    assert completions(after) == completions(before)
    assert after["version"].tolist() == [0] * len(TEXTS)


def test_row_104_outputs_carry_the_version_and_a_torn_sync_leaves_the_old(model_path):
    trainer, engine = trained(model_path), TorchRolloutEngine(model_path)
    assert engine.version == -1
    engine.receive(trainer.publish())
    assert engine.generate(prompts(), sampling(), (0,))["version"].tolist() == [1] * len(TEXTS)
    torn = dataclasses.replace(trainer.publish(), version=2)
    torn.buffers["model.norm.weight"][3] ^= 255
    before = [tensor.clone() for _, tensor in engine._lm.named_weights()]
    with pytest.raises(WeightSyncError, match=r"'model\.norm\.weight' does not match"):
        engine.receive(torn)
    assert engine.version == 1
    assert all(torch.equal(old, new) for old, (_, new) in zip(before, engine._lm.named_weights(), strict=True))


class Interrupted(WeightSnapshot):
    """Breaks off when the third tensor is read."""

    def tensor(self, name):
        if name == list(self.buffers)[2]:
            raise MemoryError("no more room")
        return super().tensor(name)


def test_a_sync_that_breaks_off_while_it_writes_leaves_nothing_that_is_served(model_path):
    trainer, engine = trained(model_path), TorchRolloutEngine(model_path)
    engine.receive(Fsdp2TrainEngine(model_path, None).publish())
    sent = trainer.publish()
    fields = {field.name: getattr(sent, field.name) for field in dataclasses.fields(sent)}
    with pytest.raises(MemoryError):
        engine.receive(Interrupted(**fields))
    assert engine.version == -1
    engine.receive(sent)
    assert engine.version == 1


def test_older_weights_are_taken_over_only_when_the_run_has_gone_back(model_path):
    trainer, engine = trained(model_path), TorchRolloutEngine(model_path)
    engine.receive(trainer.publish())
    older = Fsdp2TrainEngine(model_path, None).publish()
    with pytest.raises(WeightSyncError, match="version 0 is older than 1"):
        engine.receive(older)
    engine.receive(older, rewind=True)
    assert engine.version == 0


def test_row_106_tied_embeddings_travel_once_and_stay_tied(model_path):
    trainer, engine = trained(model_path), TorchRolloutEngine(model_path)
    sent = trainer.publish()
    assert "lm_head.weight" not in sent.buffers
    engine.receive(sent)
    model = engine._lm.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.lm_head.weight, trainer._lm.model.lm_head.weight)


def test_a_model_in_the_home_folder_is_found(model_path, monkeypatch):
    monkeypatch.setenv("HOME", str(model_path.parent))
    assert TorchRolloutEngine(f"~/{model_path.name}").version == -1
    with pytest.raises(EngineError, match="neither a folder"):
        TorchRolloutEngine("~/absent")
