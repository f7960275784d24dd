# SPDX-License-Identifier: Apache-2.0
"""vLLM's side of ``benchmarks.rollout``: run by the interpreter that has vLLM, with nothing of this project in it.

Reads lines of JSON ``[prompts, lengths]``, draws, and answers with the number of tokens drawn for each. Answers begin
with ``#``, since vLLM writes to the standard output too.
"""

import json
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    """Serve until the input ends."""
    model, at_a_time, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    engine = LLM(model, dtype=dtype, max_num_seqs=at_a_time, max_model_len=512, seed=0, enable_prefix_caching=False)
    print("# ready", flush=True)
    for line in sys.stdin:
        prompts, lengths = json.loads(line)
        sampling = [SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True) for length in lengths]
        out = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        print("#", json.dumps([len(item.outputs[0].token_ids) for item in out]), flush=True)


if __name__ == "__main__":
    main()
