# SPDX-License-Identifier: Apache-2.0
"""The engines that ``benchmarks.device`` measures, and the library that they are measured against."""

import gc
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dlrover.python.rl.algorithm.registry import make_algorithm
from dlrover.python.rl.algorithm.sft import SFT
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.state_tree import dump_in_place
from dlrover.python.rl.engine.api.base import (
    LoraSettings,
    OptimizerConfig,
    RolloutSettings,
    SamplingParams,
    TrainSettings,
)
from dlrover.python.rl.engine.api.settings import ParallelSizes
from dlrover.python.rl.engine.fsdp2.engine import Fsdp2TrainEngine
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.model.loading import DTYPES, write_atomically
from dlrover.python.rl.engine.model.model_shape import ModelShape
from dlrover.python.rl.engine.model.tiny_model import make_byte_tokenizer
from dlrover.python.rl.engine.rollout_torch.engine import TorchRolloutEngine
from dlrover.python.rl.engine.weight_sync.base import SyncSettings, Ticket, WeightTransport
from dlrover.python.rl.engine.weight_sync.cuda_ipc import CudaIpcTransport
from dlrover.python.rl.engine.weight_sync.pull import PullTransport
from dlrover.python.rl.engine.weight_sync.transports import make_transport
from dlrover.python.rl.recipe.base.config import EngineConfig
from dlrover.python.rl.recipe.base.engine_workload import train_settings
from dlrover.python.rl.recipe.memory.arithmetic import ModelUse, bytes_of
from dlrover.python.rl.runtime.checkpoint.state_file import write_state


@dataclass(frozen=True)
class Shape:
    """A model, and the work that is done with it."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    rows: int
    """Numbers of sequences that are generated side by side, and of sequences of an optimizer step."""

    prompt: int
    new_tokens: int

    @property
    def tokens(self) -> int:
        """New tokens of a step."""
        return self.rows * self.new_tokens

    @property
    def length(self) -> int:
        """Tokens of each sequence."""
        return self.prompt + self.new_tokens

    def write(self, folder: Path) -> int:
        """Write a Qwen2 with random weights of this shape; returns its number of parameters."""
        tokenizer = make_byte_tokenizer()
        config = Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
        write_atomically(folder, model, tokenizer)
        return sum(parameter.numel() for parameter in model.parameters())

    def flops(self, parameters: int) -> float:
        """Count an optimizer step's operations without recomputation: 6 for each parameter and token (the embedding
        counts as the head), and causal attention's 6 for each layer, channel, and token that another one reads."""
        attention = 6 * self.layers * self.hidden * self.length
        return float((6 * parameters + attention) * self.rows * self.length)


QWEN_HALF_BILLION = Shape(896, 4864, 24, 14, 2, 151_936, rows=64, prompt=128, new_tokens=128)
SMALL = Shape(64, 192, 2, 4, 2, 512, rows=8, prompt=16, new_tokens=16)


class Bench:
    """A train engine and a rollout engine that share a device.

    Args:
        model: its folder.
        device: a torch device.
        precision: of the passes.
        backend: options of the train engine.
    """

    def __init__(self, model: Path, shape: Shape, device: str, precision: Any, backend: dict[str, Any]) -> None:
        self.model, self.shape, self.on_gpu = model, shape, torch.device(device).type == "cuda"
        self.memory, self.precision = DeviceMemory(device), precision
        self.settle()  # CUDA itself starts here
        began_s = time.perf_counter()
        self.train = Fsdp2TrainEngine(
            model, OptimizerConfig(lr=1e-5), TrainSettings(device, precision, backend=backend), memory=self.memory
        )
        train_s = time.perf_counter() - began_s
        self.rollout = TorchRolloutEngine(model, RolloutSettings(device, precision, shape.rows), self.memory)
        self.made_seconds = {"train engine": train_s, "rollout engine": time.perf_counter() - began_s - train_s}
        settings = SyncSettings(device=device, dtype=DTYPES[precision])
        self._through_host = PullTransport(settings), PullTransport(settings)
        self._on_device = CudaIpcTransport(settings), CudaIpcTransport(settings)

    # -- measuring ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def timed(self, call: Callable[[], Any]) -> float:
        """Seconds of a call, the device's work included."""
        self.settle()
        began_s = time.perf_counter()
        call()
        self.settle()
        return time.perf_counter() - began_s

    def held(self) -> dict[str, int]:
        """Bytes on the device now: those accounted for, and on a GPU torch's."""
        footprint = {"train": sum(self.train.footprint().values()), "rollout": sum(self.rollout.footprint().values())}
        if self.on_gpu:
            self.settle()
            footprint["allocated"] = torch.cuda.memory_allocated()
            footprint["reserved"] = torch.cuda.memory_reserved()
        return footprint

    def peak(self, call: Callable[[], Any]) -> int:
        """Bytes that a call allocates on the device beyond those before it, at most; 0 without a GPU."""
        if not self.on_gpu:
            call()
            return 0
        self.settle()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.settle()
        return torch.cuda.max_memory_allocated() - before

    # -- the work -----------------------------------------------------------------------------------------------------

    def sequences(self) -> list[Any]:
        """Token ids of a step."""
        generator, shape = np.random.default_rng(0), self.shape
        return [generator.integers(0, shape.vocabulary, shape.length) for _ in range(shape.rows)]

    def sft_step(self, engine: Fsdp2TrainEngine | None = None) -> None:
        """An optimizer step on all tokens but the first of each sequence."""
        shape = self.shape
        masks = [np.arange(shape.length) > 0] * shape.rows
        weights = SFT().annotate(Batch({"action_tokens": np.full(shape.rows, shape.length - 1)}))["weight"]
        tokens = Ragged.from_rows(self.sequences(), dtype=np.int64)
        masks = Ragged.from_rows(masks, dtype=np.bool_)
        (engine or self.train).step(Batch({"tokens": tokens, "action_mask": masks, "weight": weights}), SFT().loss)

    def grpo_update(self) -> None:
        """An optimizer step on the new tokens."""
        shape = self.shape
        tokens = Ragged.from_rows(self.sequences(), dtype=np.int64)
        chosen = [np.arange(shape.length) >= shape.prompt] * shape.rows
        batch = Batch(
            {
                "tokens": tokens,
                "action_mask": Ragged.from_rows(chosen, dtype=np.bool_),
                "old_logprobs": tokens.like(np.full(len(tokens.values), -12.0, dtype=np.float32)),
                "advantage": np.resize(np.array([1.0, -1.0], dtype=np.float32), shape.rows),
                "weight": np.full(shape.rows, 1 / shape.tokens, dtype=np.float32),
            }
        )
        self.train.step(batch, make_algorithm("grpo", {}).loss)

    def layout(
        self,
        tokens: int,
        recompute: bool = False,
        optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5),  # noqa: B008 - frozen
        lora: LoraSettings | None = None,
        **options: Any,
    ) -> tuple[float, int]:
        """Bytes of an engine and its steps: those that ``check`` computes, and the most that are allocated.

        Args:
            tokens: of a pass.
            recompute: its activations.
            options: of the engine.
        """
        engine = EngineConfig(
            device=self.memory.device,
            precision=self.precision,
            max_tokens_per_microbatch=tokens,
            gradient_checkpointing=recompute,
            train_options=options,
        )
        shape = ModelShape.of(AutoConfig.from_pretrained(self.model))
        planned = bytes_of(shape, ModelUse("trained", "", optimizer=optimizer, lora=lora), engine).peak
        settings = replace(train_settings(engine, self.memory.device, ParallelSizes()), lora=lora)

        def make_and_step() -> None:
            trained = Fsdp2TrainEngine(self.model, optimizer, settings)
            for _ in range(2):
                self.sft_step(trained)
            trained.close()

        peak = self.peak(make_and_step)
        gc.collect()
        self.memory.release_cache()
        return planned, peak

    def sync(self) -> None:
        """The train engine's weights to the rollout engine in its precision, verified, as between two processes."""
        self._sync(self.train, *self._through_host)

    def sync_on_device(self) -> None:
        """Sync weights that stay on the device, as in one process."""
        self._sync(self.train, *self._on_device)

    def drop_kept_weights(self) -> None:
        """Return the weights that :meth:`sync_on_device` leaves on the device."""
        self._on_device[0].close()

    def _sync(self, train: Fsdp2TrainEngine, sender: WeightTransport, receiver: WeightTransport) -> Ticket:
        ticket = sender.offer(train)
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(sender.send, ticket, train)
            self.rollout.receive(receiver.receive(ticket), rewind=True)
            sent.result()
        return ticket

    def adapter_syncs(self, rounds: int, way: str = "pull") -> dict[str, Any]:
        """Adapters of rank 16 from an engine of their own: seconds of the first sync, which has the model, too, and of
        later ones; the bytes that leave the sender."""
        settings = TrainSettings(self.memory.device, self.precision, lora=LoraSettings(rank=16))
        train = Fsdp2TrainEngine(self.model, OptimizerConfig(lr=1e-5), settings, memory=self.memory)
        sync_settings = SyncSettings(device=self.memory.device, dtype=DTYPES[self.precision])
        sender, receiver = (make_transport(way, {}, sync_settings) for _ in "ab")
        tickets: list[Ticket] = []

        def sync() -> None:
            train.version += 1
            tickets.append(self._sync(train, sender, receiver))

        seconds, before = [], self.on_gpu and torch.cuda.memory_allocated()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(rounds + 1):
            seconds.append(self.timed(sync))
        sent = [ticket for ticket in (tickets[-1].base, tickets[-1]) if ticket is not None]
        model, adapters = (sum(entry.nbytes for entry in ticket.table.entries) for ticket in sent)
        peak = torch.cuda.max_memory_allocated() - before if self.on_gpu else 0
        for each in (sender, receiver, train):
            each.close()
        return {
            "first_seconds": seconds[0],
            "seconds": median(seconds[1:]),
            "model_bytes": model,
            "adapter_bytes": adapters,
            "peak_bytes": peak,
        }

    def draw(self) -> None:
        """Complete the prompts."""
        rows = [row[: self.shape.prompt] for row in self.sequences()]
        prompts = Batch({"prompt_id": np.arange(len(rows)), "tokens": Ragged.from_rows(rows, dtype=np.int64)})
        self.rollout.generate(prompts, SamplingParams(self.shape.new_tokens, ignore_eos=True), (0,))

    def grpo_step(self) -> None:
        """Sync, draw, update."""
        self.sync_on_device()
        self.draw()
        self.grpo_update()

    def grpo_step_in_turns(self) -> None:
        """Run the step with each engine leaving the device for the other one."""
        self.train.cpu()
        self.rollout.cpu()
        self.sync()
        self.rollout.cuda()
        self.draw()
        self.rollout.cpu()
        self.train.cuda()
        self.grpo_update()

    def first_calls(self) -> dict[str, float]:
        """Seconds of what is slower the first time: kernels are compiled, pages locked, graphs recorded."""
        calls = {"sync": self.sync, "completions": self.draw, "update": self.grpo_update}
        return {**self.made_seconds, **{name: self.timed(call) for name, call in calls.items()}}

    # -- what it is measured against ----------------------------------------------------------------------------------

    def copy(self) -> tuple[float, int]:
        """Seconds of a plain copy of the weights on the device, and their bytes."""
        weights = self.train.named_weights(DTYPES[self.precision])
        named = [tensor.detach().to(self.memory.device, copy=True) for _, tensor in weights]
        other = [torch.empty_like(tensor) for tensor in named]
        seconds = [self.timed(lambda: [to.copy_(of) for to, of in zip(other, named, strict=True)]) for _ in range(5)]
        return median(seconds), sum(tensor.nbytes for tensor in named)

    def product_flops(self) -> float:
        """FLOP a second of a large matrix product."""
        size = 8192 if self.on_gpu else 512
        one, two = (torch.randn((size, size), device=self.memory.device, dtype=DTYPES[self.precision]) for _ in "ab")
        seconds = [self.timed(lambda: one @ two) for _ in range(8)]
        return 2 * size**3 / median(seconds)

    # -- commits ------------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, folder: Path) -> Iterator[dict[str, float]]:
        """A thread writes the train engine's state, as a commit does; afterwards how much."""
        rates: dict[str, float] = {}
        state, file = dump_in_place(self.train.state_dict()), folder / "state"
        recycled = file if file.exists() else None

        def write() -> None:
            rates["bytes"] = write_state(file, {}, state, durable=False, recycled=recycled).nbytes

        thread = threading.Thread(target=write, name="state")
        thread.start()
        try:
            yield rates
        finally:
            thread.join()


class Transformers:
    """``generate`` of the library with its default attention and cache."""

    def __init__(self, model: Path, bench: Bench) -> None:
        dtype = DTYPES[bench.precision]
        self._bench = bench
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(bench.memory.device)
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def draw(self) -> None:
        """See :meth:`Bench.draw`."""
        rows = np.stack(self._bench.sequences())[:, : self._bench.shape.prompt]
        prompts = torch.from_numpy(rows).to(self._model.device)
        self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=self._bench.shape.new_tokens,
            pad_token_id=0,
        )


def memory_folder() -> Path:
    """A new folder in memory, where commits are; elsewhere if there is none."""
    parent = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="dlrover-rl-device-", dir=parent if parent.is_dir() else None))
