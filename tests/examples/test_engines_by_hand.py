# SPDX-License-Identifier: Apache-2.0
"""The page, the notebook and the script of engines driven by hand run as shown, and so does RLite's tutorial."""

import json
import re
import shlex
import shutil
import subprocess
import textwrap

import pytest

import dlrover.rl as rl
from tests.support.commands import ROOT, run_python

PAGE = ROOT / "docs" / "engines-by-hand.md"
GUIDE = ROOT / "docs" / "guides" / "from-rlite.md"
FOLDER = ROOT / "examples" / "engines_by_hand"


def run(folder, script, *arguments):
    """Run a script in ``folder``; the lines it has printed."""
    return run_python(folder, script, *arguments, within_s=280).stdout.splitlines()


def python_of_the_page():
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def cells_of_the_notebook():
    notebook = json.loads((FOLDER / "tutorial.ipynb").read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def check_printed(lines):
    printed = [line for line in lines if not line.startswith("(")]  # Ray puts the process before what it prints
    assert printed[0] == "Session(2 slots, 2 free; engines: none)"
    assert re.fullmatch(r"\[\d+(, \d+)*\] (stop|length)", printed[1])
    assert printed[2:] == ["True meta cuda", "2 2", "shared memory", "1"]


def test_page_and_notebook_have_the_same_code():
    assert cells_of_the_notebook() == [block.rstrip("\n") for block in python_of_the_page()]


def test_notebook_opens_in_any_front_end():
    notebook = json.loads((FOLDER / "tutorial.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"] >= 5) == (4, True)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names)
    assert {cell["cell_type"] for cell in notebook["cells"]} == {"markdown", "code"}
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook["cells"])


@pytest.mark.ray
@pytest.mark.slow
def test_blocks_of_the_page_are_one_script(tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(python_of_the_page()), encoding="utf-8")
    check_printed(run(tmp_path, script))
    assert (tmp_path / "runs/trained/model.safetensors").is_file()
    assert (tmp_path / "runs/trained/tokenizer.json").is_file()


KERNEL = """
import asyncio, json, sys, __main__

async def _kernel(cells):
    for number, source in enumerate(cells, start=1):
        exec(compile(source, f"cell {number}", "exec"), vars(__main__))

asyncio.run(_kernel(json.loads(open(sys.argv[1], encoding="utf-8").read())))
"""


@pytest.mark.ray
@pytest.mark.slow
def test_cells_of_the_notebook_run_in_order(tmp_path):
    """Run the blocks as a kernel does: in one namespace, within an event loop that runs already."""
    cells, script = tmp_path / "cells.json", tmp_path / "kernel.py"
    cells.write_text(json.dumps(cells_of_the_notebook()), encoding="utf-8")
    script.write_text(KERNEL, encoding="utf-8")
    check_printed(run(tmp_path, script, str(cells)))


@pytest.mark.ray
@pytest.mark.slow
def test_script_runs(tmp_path):
    shutil.copy(FOLDER / "tutorial.py", tmp_path)
    lines = [line for line in run(tmp_path, tmp_path / "tutorial.py") if line.startswith("step")]
    assert [re.sub(r"[\d.]+$", "N", line) for line in lines] == ["step 1: loss N", "step 2: loss N"]


RLITE = """
    import contextlib
    import torch
    import torch.nn.functional as F
    from transformers import Qwen2ForCausalLM

    import rlite
    import rlite.nn
    from rlite import NeedParallel, RliteInferenceEngine, RliteTrainEngine
    from dlrover.python.rl.engine.model.tiny_model import write_tiny_model

    try:
        from accelerate import init_empty_weights
    except ImportError:
        init_empty_weights = rlite.nn.empty_weights

    model = write_tiny_model("tiny", hidden=128, layers=2)  # heads as wide as vLLM wants them

    class MyQwenModel(rlite.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
        def on_weights_materialized(self):
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-5)

        def train_step(self, input_ids, grad_acc_steps=1):
            # The tutorial makes one tensor of completions that differ in length: they are padded here.
            width = max(map(len, input_ids))
            labels = torch.tensor([row + [-100] * (width - len(row)) for row in input_ids], device="cuda")
            logits = self(labels.clamp(min=0)).logits[:, :-1].contiguous()
            labels = labels[:, 1:].contiguous()
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1)).mean()
            loss = loss / grad_acc_steps
            loss.backward()
            return loss.item()

        def optimizer_step(self):
            self.optimizer.step()
            self.optimizer.zero_grad()

    # 3. Initialize
    session = rlite.init(HERE)

    # 4. An actor for inference
    vllm_engine = RliteInferenceEngine(model, executor=EXECUTOR)
    vllm_engine.build()
    prompts = ["你好，世界！", "Hello, world!"] * 8
    rollouts = vllm_engine.generate(prompts)
    assert len(rollouts) == 16
    assert len({len(rollout.outputs[0].token_ids) for rollout in rollouts}) > 1, "no ragged completions to try"

    # 5. An actor for training, on the same devices
    vllm_engine.meta()
    assert vllm_engine.device() == "meta"
    with init_empty_weights():
        module = MyQwenModel.from_pretrained(model)
    fsdp2_engine = RliteTrainEngine(module, executor="fsdp2")
    fsdp2_engine.build(tensor_parallel_size=len(session.slots), colocate_with=vllm_engine)
    assert fsdp2_engine.slots == vllm_engine.slots

    # 6. The user's training logic
    input_ids = [[x.outputs[0].token_ids for x in rollouts] for _ in range(4)]
    grad_acc_steps = 4
    losses = []
    for step in range(grad_acc_steps):
        losses += fsdp2_engine.train_step(NeedParallel(input_ids[step]), grad_acc_steps)
    fsdp2_engine.optimizer_step()
    assert len(losses) == 4

    # 7. Sync
    vllm_engine.cuda("weights")
    fsdp2_engine.p2p_weight_sync(vllm_engine)
    fsdp2_engine.cpu()
    assert fsdp2_engine.footprint() == [{}] * len(session.slots)
    vllm_engine.cuda("kv_cache")
    again = vllm_engine.generate(prompts)
    assert [rollout.outputs[0].version for rollout in again] == [1] * 16

    # What the tutorial offers of engines in general holds for this one too.
    fsdp2_engine.meta()
    assert fsdp2_engine.device() == "meta"
    rlite.shutdown()
    print("the tutorial has ended")
"""


def tutorial(here, executor):
    """RLite's tutorial after the command of its guide."""
    (line,) = re.findall(r"^sed -i (.*) script.py$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    code = textwrap.dedent(RLITE).replace("HERE", here).replace("EXECUTOR", repr(executor))
    return subprocess.run(["sed", *shlex.split(line)], input=code, capture_output=True, text=True, check=True).stdout


def test_rlites_tutorial_twice_in_one_process_and_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        try:
            exec(compile(tutorial("local=True", "hf"), "tutorial", "exec"), {"__name__": "__main__"})
        finally:
            rl.shutdown()
        assert "the tutorial has ended" in capsys.readouterr().out


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("executor", ["hf", pytest.param("vllm", marks=pytest.mark.needs("vllm"))])
def test_rlites_tutorial_step_by_step(tmp_path, executor):
    script = tmp_path / "tutorial.py"
    script.write_text(tutorial("slots_per_node=2", executor), encoding="utf-8")
    assert "the tutorial has ended" in run(tmp_path, script)
