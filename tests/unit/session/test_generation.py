# SPDX-License-Identifier: Apache-2.0
"""Prompts and sampling parameters as scripts write them, and the outputs they get."""

import numpy as np
import pytest

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.api.base import SamplingParams
from dlrover.python.rl.session.members import as_batch, as_outputs, as_prompts, as_sampling
from dlrover.python.rl.session.split import NeedParallel


def tokenizer(text, add_special_tokens=True):
    return {"input_ids": list(text.encode())}


# -- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.feature(83)
def test_sampling_is_given_as_parameters_or_a_dict():
    assert as_sampling(None) == SamplingParams()
    assert as_sampling(SamplingParams(top_k=3)) == SamplingParams(top_k=3)
    given = {"temperature": 0.0, "max_tokens": 7, "n": 2, "stop": "end", "top_k": -1}
    assert as_sampling(given) == SamplingParams(
        temperature=0.0, max_new_tokens=7, samples_per_prompt=2, stop=("end",), top_k=None
    )


@pytest.mark.feature(83)
def test_an_unknown_key_is_refused_naming_the_nearest():
    with pytest.raises(EngineError, match="no parameter 'temprature'; did you mean 'temperature'"):
        as_sampling({"temprature": 1.0})
    with pytest.raises(EngineError, match="'max_new_tokens' is given twice, also as 'max_tokens'"):
        as_sampling({"max_new_tokens": 1, "max_tokens": 2})
    with pytest.raises(EngineError, match="top_p"):
        as_sampling({"top_p": 1.5})
    with pytest.raises(EngineError, match="not list"):
        as_sampling([1])


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_a_single_prompt_is_a_list_of_one():
    assert as_prompts("text") == ["text"]
    assert as_prompts([1, 2, 3]) == [[1, 2, 3]]
    assert as_prompts({"prompt": "text"}) == [{"prompt": "text"}]
    assert as_prompts(["a", [1, 2]]) == ["a", [1, 2]]
    assert as_prompts(NeedParallel(["a", "b"])) == ["a", "b"]
    assert as_prompts([]) == []


def test_what_is_no_prompt_is_refused_by_number():
    with pytest.raises(EngineError, match="prompt 1 is float"):
        as_prompts(["a", 0.5])
    with pytest.raises(EngineError, match="prompt 0 is a dict: it needs either"):
        as_prompts([{"text": "a"}])


def test_texts_and_tokens_become_a_batch():
    batch = as_batch(["ab", [7, 8, 9], {"prompt_token_ids": np.array([5])}], 4, tokenizer, ())
    assert batch.dense("prompt_id").tolist() == [4, 5, 6]
    assert [row.tolist() for row in batch.ragged("tokens")] == [[97, 98], [7, 8, 9], [5]]
    assert list(batch.columns) == ["prompt_id", "tokens"]


@pytest.mark.feature(43)
def test_what_else_is_in_a_dict_reaches_an_engine_that_takes_it():
    image = object()
    prompts = [{"prompt": "see", "multi_modal_data": {"image": image}}, "no image"]
    batch = as_batch(prompts, 0, tokenizer, ("prompt", "multi_modal_data"))
    assert batch.objects("multi_modal_data")[0]["image"] is image
    assert batch.objects("multi_modal_data")[1] is None
    assert batch.objects("prompt") == ["see", "no image"]
    with pytest.raises(EngineError, match="prompt 0 has 'multi_modal_data', which the engine does not accept"):
        as_batch(prompts, 0, tokenizer, ())


# -- outputs ----------------------------------------------------------------------------------------------------------


def test_outputs_read_as_those_of_vllm():
    drawn = Batch(
        {
            "prompt_id": np.array([3, 3, 4]),
            "sample_index": np.array([0, 1, 0]),
            "tokens": Ragged.from_rows([[1, 2, 10], [1, 2, 11, 12], [3, 13]]),
            "action_mask": Ragged.from_rows([[0, 0, 1], [0, 0, 1, 1], [0, 1]], dtype=np.bool_),
            "logprobs": Ragged.from_rows([[0, 0, -0.5], [0, 0, -1, -2], [0, -3]], dtype=np.float32),
            "finished": np.array([True, False, True]),
            "version": np.array([7, 7, 7]),
            "completion": ["x", "yz", "w"],
        }
    )
    first, second = as_outputs(["one", [3]], 3, drawn)
    assert (first.request_id, first.prompt, first.prompt_token_ids) == ("3", "one", [1, 2])
    assert [sample.token_ids for sample in first.outputs] == [[10], [11, 12]]
    assert [sample.index for sample in first.outputs] == [0, 1]
    assert [sample.finish_reason for sample in first.outputs] == ["stop", "length"]
    assert first.outputs[1].text == "yz"
    assert first.outputs[1].logprobs[1][12].logprob == -2.0
    assert first.outputs[1].cumulative_logprob == -3.0
    assert second.outputs[0].version == 7
    assert second.prompt_token_ids == [3]
