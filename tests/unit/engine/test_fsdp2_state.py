# SPDX-License-Identifier: Apache-2.0
"""The train engine's state, the folder of a checkpoint, and memory of a device, the host standing in for it."""

import copy
import random

import numpy as np
import pytest
import torch

from dlrover.python.rl.common.errors import EngineError, OutOfDeviceMemory, WeightSyncError
from dlrover.python.rl.engine.api.base import OptimizerConfig, Rendezvous
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.memory.offload import ParkedTensors
from dlrover.python.rl.engine.model.ranks import Ranks
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from dlrover.python.rl.engine.training.backend import present, write_folder
from tests.support.fsdp2_toys import bits, logprobs, step, weights
from tests.support.processes import run
from tests.support.train_exercise import digest

CONFIG = OptimizerConfig(lr=1e-3, warmup_steps=6, weight_decay=0.1, max_grad_norm=0.5)


def trainer(path, config=CONFIG):
    return Fsdp2TrainEngine(path, config)


def test_a_state_of_another_model_is_refused_and_changes_nothing(model_path, tmp_path):
    wider = trainer(write_tiny_model(tmp_path / "wide", hidden=48, layers=1))
    engine = trainer(model_path)
    before = digest(engine)
    with pytest.raises(WeightSyncError, match=r"another model: .*layers\.1.* is missing; .* has shape"):
        engine.load_state_dict(wider.state_dict())
    state = engine.state_dict()
    state["optimizer"]["lm_hed"] = {}
    with pytest.raises(WeightSyncError, match="the optimizer's 'lm_hed' is unknown"):
        engine.load_state_dict(state)
    assert digest(engine) == before


def draw():
    return random.random(), random.gauss(0, 1), np.random.random(), np.random.normal(), float(torch.rand(()))


def test_a_checkpoint_brings_back_state_and_random_numbers(model_path, tmp_path):
    engine = trainer(model_path)
    step(engine, 0)
    for _ in range(2):  # The second one takes the first one's place.
        engine.save_checkpoint(tmp_path / "kept")
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]
    before, numbers = digest(engine), draw()
    step(engine, 1)
    engine.load_checkpoint(tmp_path / "kept")
    assert (digest(engine), engine.version) == (before, 1)
    assert draw() == numbers
    engine.meta()
    engine.load_checkpoint(tmp_path / "kept")
    assert digest(engine) == before


def test_a_killed_write_leaves_the_old_checkpoint(model_path, tmp_path):
    engine = trainer(model_path)
    step(engine, 0)
    engine.save_checkpoint(tmp_path / "kept")
    before = digest(engine)
    # Killed after it had moved the old one aside, before the new one was in its place.
    (tmp_path / "kept").rename(tmp_path / ".kept.old-0123")
    (tmp_path / ".kept.new-4567").mkdir()
    step(engine, 1)
    engine.load_checkpoint(tmp_path / "kept")
    assert digest(engine) == before
    engine.save_checkpoint(tmp_path / "kept")
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]
    engine.load_checkpoint(tmp_path / "kept")
    assert digest(engine) == before


def test_a_checkpoint_of_another_model_is_refused(model_path, tmp_path):
    engine = trainer(model_path)
    engine.save_checkpoint(tmp_path / "kept")
    wider = trainer(write_tiny_model(tmp_path / "wide", hidden=48, layers=1))
    before = digest(wider)
    with pytest.raises(EngineError, match=r"of another model: it has model/model\.embed_tokens\.weight of shape"):
        wider.load_checkpoint(tmp_path / "kept")
    with pytest.raises(EngineError, match=r"of another model: it also has optimizer/"):
        trainer(model_path, None).load_checkpoint(tmp_path / "kept")
    assert digest(wider) == before


# -- the folder -------------------------------------------------------------------------------------------------------
def write_twice(rank, world_size, port, path):
    """The second time rank 1 finds the disk full."""
    ranks = Ranks.connect(Rendezvous(rank, world_size, "127.0.0.1", port, timeout_s=60))
    results = []
    for content in ("first", "second"):

        def write(folder, content=content):
            if (rank, content) == (1, "second"):
                raise OSError(28, "No space left on device")
            (folder / str(rank)).write_text(content)

        try:
            write_folder(path, ranks, write)
        except EngineError as error:
            results.append(str(error))
        results.append(sorted((file.name, file.read_text()) for file in path.iterdir()))
    ranks.close()
    return results


@pytest.mark.slow
def test_a_rank_unable_to_write_leaves_the_old_folder(tmp_path):
    path = tmp_path / "kept"
    first = [("0", "first"), ("1", "first")]
    error = f"rank 1: the checkpoint '{path}' cannot be written: [Errno 28] No space left on device"
    assert run(2, write_twice, path) == [[first, error, first]] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


def test_a_folders_name_is_no_pattern(tmp_path):
    write_folder(tmp_path / "a[1]*", Ranks(), lambda folder: None)
    (tmp_path / ".a1.old-0").mkdir()
    (tmp_path / "a[1]*").rename(tmp_path / ".a[1]*.old-1")
    assert present(tmp_path / "a[1]*").name == ".a[1]*.old-1"


def test_the_last_folder_moved_away_is_the_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "kept"
    monkeypatch.setattr("shutil.rmtree", lambda *args, **kwargs: None)  # killed before it removed anything
    for content in "0123456789":
        write_folder(path, Ranks(), lambda folder, content=content: (folder / "content").write_text(content))
    path.rename(tmp_path / "gone")
    assert (present(path) / "content").read_text() == "8"


# -- accounting -------------------------------------------------------------------------------------------------------
def test_a_tensor_counts_until_nothing_refers_to_it():
    memory = DeviceMemory()
    tensor = memory.bring("actor", "weights", torch.zeros(10))
    view = tensor[2:]
    assert memory.bytes_of("actor") == {"weights": 40}
    del tensor
    assert memory.total() == 40
    del view
    assert (memory.total(), memory.bytes_of("actor"), memory.peak) == (0, {}, 40)


def test_a_storage_counts_once():
    memory = DeviceMemory()
    whole = torch.zeros(10)
    memory.hold("actor", "weights", [whole, whole[:5], whole])
    memory.hold("rollout", "weights", [whole])
    assert memory.by_owner() == {"actor": {"weights": 40}}


@pytest.mark.parametrize("words", ["CUDA Error: out of memory at cumem_allocator.cpp:62", "CUDA out of memory."])
def test_another_programs_out_of_memory_names_the_holders(words):
    memory = DeviceMemory()
    tensor = memory.bring("actor", "weights", torch.zeros(10))
    message = r"vllm ran out of memory .* 40 bytes are in use \(actor: 40 of weights\)"
    with pytest.raises(OutOfDeviceMemory, match=message), memory.computing("vllm"):
        raise EngineError("it broke off") from RuntimeError(words)
    with pytest.raises(EngineError, match="^it broke off$"), memory.computing("vllm"):
        raise EngineError("it broke off")
    assert tensor is not None


def test_a_released_tensor_counts_no_longer():
    memory = DeviceMemory(capacity=100)
    bucket = torch.zeros(80, dtype=torch.uint8)
    memory.hold("sync", "buffer", [bucket])
    memory.release(bucket[:8])
    assert (memory.total(), memory.peak) == (0, 80)
    memory.require("actor", "weights", 100)


# -- tensors on the way ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", ["zeros", "copy_"])
def test_a_failed_move_to_the_host_can_be_undone_and_repeated(monkeypatch, step):
    parked = ParkedTensors("actor", DeviceMemory())
    tensors = [torch.full((10,), float(number)) for number in range(3)]
    wanted = [tensor.clone() for tensor in tensors]
    parked.hold("weights", tensors)
    owner = torch if step == "zeros" else torch.Tensor
    real, calls = getattr(owner, step), []

    def scarce(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("no page-locked memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, step, scarce)
    with pytest.raises(RuntimeError, match="page-locked"):
        parked.to_host()
    monkeypatch.undo()
    assert not parked.on_device
    assert [parked.locate(tensor).tolist() for tensor in tensors] == [each.tolist() for each in wanted]
    parked.to_device()
    assert [tensor.tolist() for tensor in tensors] == [each.tolist() for each in wanted]
    parked.to_host()
    assert parked.memory.total() == 0
    parked.to_device()
    assert [tensor.tolist() for tensor in tensors] == [each.tolist() for each in wanted]


# -- an engine --------------------------------------------------------------------------------------------------------
def test_gradients_count_in_the_peak_and_are_freed(model_path):
    memory = DeviceMemory()
    engine = Fsdp2TrainEngine(model_path, CONFIG, memory=memory)
    before = memory.total()
    step(engine)
    count = sum(tensor.numel() for tensor in weights(engine).values())
    assert memory.peak >= before + 4 * count
    assert memory.total() == before


def test_an_engine_too_large_stays_in_host_memory(model_path):
    memory = DeviceMemory()
    actor, reference = (Fsdp2TrainEngine(model_path, config, memory=memory) for config in (CONFIG, None))
    actor.cpu()
    memory.capacity = memory.total() + 1000
    with pytest.raises(OutOfDeviceMemory, match=r"trained .*T asks for .* \(frozen .*T: [\d,]+ of weights"):
        actor.cuda()
    assert (actor.place(), actor.footprint()) == ("cpu", {})
    reference.cpu()
    memory.capacity = 10**9
    actor.cuda()
    assert step(actor).loss


def test_a_call_on_an_offloaded_engine_names_the_way_back(model_path):
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    before = bits(engine)
    engine.cpu()
    for call in (lambda: step(engine), lambda: logprobs(engine), lambda: engine.save_checkpoint("x")):
        with pytest.raises(EngineError, match=r"in host memory: call cuda\(\) first"):
            call()
    with pytest.raises(EngineError, match="no key-value cache"):
        engine.cuda("kv_cache")
    # Weights can be had from there all the same.
    assert bits(engine) == before
    assert engine.publish().stamp.version == 0
    engine.load_state_dict(engine.state_dict())
    engine.cuda()
    assert bits(engine) == before


@pytest.mark.feature(20)
def test_a_call_after_meta_is_refused_until_weights_arrive(model_path):
    actor, reference = Fsdp2TrainEngine(model_path, CONFIG), Fsdp2TrainEngine(model_path, None)
    step(actor)
    expected, published, live = logprobs(actor), actor.publish(), actor.state_dict()
    state = copy.deepcopy(live)
    for engine in (actor, reference):
        engine.meta()
        assert (engine.place(), engine.footprint()) == ("meta", {})
        with pytest.raises(EngineError, match=r"released by meta\(\)"):
            engine.cpu()
        engine.cuda()
        with pytest.raises(EngineError, match=r"needs weights, which meta\(\) released: .* brings new ones"):
            logprobs(engine)
    with pytest.raises(EngineError, match="the state's tensors were released with their engine"):
        actor.load_state_dict(live)
    actor.load_state_dict(state)
    reference.receive(published)
    for engine in (actor, reference):
        assert engine.place() == "cuda"
        assert np.array_equal(logprobs(engine), expected)


@pytest.mark.parametrize("call", ["evaluate", "step", "cuda"])
def test_a_device_full_in_a_call_names_the_holders(model_path, monkeypatch, call):
    engine = Fsdp2TrainEngine(model_path, CONFIG)
    before = bits(engine)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    if call == "cuda":
        engine.cpu()
        monkeypatch.setattr(torch.UntypedStorage, "resize_", full)
    else:
        monkeypatch.setattr(torch.nn.functional, "embedding", full)
    message = r"trained .*T ran out of memory while computing on cpu: .* bytes are in use"
    with pytest.raises(OutOfDeviceMemory, match=message):
        {"evaluate": lambda: logprobs(engine), "step": lambda: step(engine), "cuda": engine.cuda}[call]()
    monkeypatch.undo()
    assert engine.place() == ("cpu" if call == "cuda" else "cuda")
    assert bits(engine) == before


def test_two_engines_of_a_model_are_told_apart(model_path):
    memory = DeviceMemory()
    engines = [Fsdp2TrainEngine(model_path, None, memory=memory) for _ in range(2)]
    assert len(memory.by_owner()) == 2
    assert engines[0].footprint() == engines[1].footprint()
