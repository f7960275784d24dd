# SPDX-License-Identifier: Apache-2.0
"""Modules and engines that scripts of the tests drive by hand."""

import os
import time
from functools import partialmethod
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from transformers import Qwen2ForCausalLM

import dlrover.rl as rl
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.model.train_module import TrainModule


class Watched(TrainModule):
    """Shows its gradients, and steps with ``optimizer``."""

    def gradients_now(self):
        """Whole ones: what each rank has of them, put together."""
        gradients = [(name, parameter.grad) for name, parameter in self.named_parameters()]
        whole = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in gradients}
        return {name: gradient.clone() for name, gradient in whole.items()}

    def optimizer_step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


class TwoLayers(Watched):
    """A module of no library: ``tanh(x W1) W2``, with a buffer that is saved and one that is not."""

    def __init__(self, width=8):
        super().__init__()
        self.first = torch.nn.Linear(4, width)
        self.second = torch.nn.Linear(width, 1, bias=False)
        self.dropout = torch.nn.Dropout(0.5)
        self.register_buffer("steps_seen", torch.zeros(()))
        self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)

    def materialization_source(self):
        return dict(start(self.first.out_features))

    def on_weights_materialized(self):
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        self.made = getattr(self, "made", 0) + 1

    def forward(self, x):
        return self.second(self.dropout(torch.tanh(self.first(x)))) * self.scale

    def mean_square(self, x):
        return self.squares(x).mean()

    def squares(self, x):
        return self(torch.as_tensor(x, dtype=torch.float32, device=self.device)).square()

    def train_step(self, x, divide_by=1):
        self.eval()
        loss = (self.squares(x).sum() if self.gradients == "sum" else self.mean_square(x)) / divide_by
        loss.backward()
        return loss.item()

    def facts(self, *seen):
        optimizer = getattr(self, "optimizer", None)
        counted = sum(p.numel() for g in optimizer.param_groups for p in g["params"]) if optimizer else None
        state = {"training": self.training, "device": str(self.device), "scale": self.scale.item(), "pid": os.getpid()}
        return {"seen": list(seen), "hooks": getattr(self, "made", 0), "optimized": counted, **state}

    def rows(self, values):
        return list(values)

    def fail(self, message):
        raise ValueError(message)

    def die(self, rank_file=None):
        os._exit(17)

    def fail_or_wait(self, seconds):
        if not seconds[0]:
            raise ValueError("no luck")
        time.sleep(seconds[0])

    def noisy(self, x):
        return self(torch.as_tensor(x, dtype=torch.float32)).squeeze(-1).tolist()

    def wait(self, seconds):
        time.sleep(seconds)


def empty(cls, *args):
    """A module without weights."""
    with rl.nn.empty_weights():
        return cls(*args)


class Heavy(TwoLayers):
    """It has a buffer that is much larger than what is said about it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ballast", torch.arange(16384.0))


class Silent(TwoLayers):
    """Two layers without an optimizer: a reference."""

    def on_weights_materialized(self):
        pass


class Summing(TwoLayers):
    """The ranks' losses add up."""

    gradients = "sum"


def start(width=8):
    """Some weights, the same each time."""
    draw = torch.Generator().manual_seed(3)
    shapes = {"first.weight": (width, 4), "first.bias": (width,), "second.weight": (1, width)}
    weights = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    return {**weights, "steps_seen": torch.tensor(5.0)}


class Policy(Watched, Qwen2ForCausalLM):
    """RLite's tutorial module."""

    def on_weights_materialized(self):
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_step(self, rows, grad_acc_steps=1):
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, padding_value=-100)
        tokens = padded.to(self.device)
        logits = self(input_ids=tokens.clamp(min=0)).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / grad_acc_steps
        loss.backward()
        return loss.item()

    @torch.no_grad()
    def logprobs(self, rows):
        """Return the log-probs of each row's tokens after the first."""
        results = []
        for row in rows:
            tokens = torch.tensor([row], device=self.device)
            logprobs = self(input_ids=tokens).logits[:, :-1].log_softmax(dim=-1)
            results.append(logprobs.gather(2, tokens[:, 1:, None])[0, :, 0].tolist())
        return results

    def optimizers(self):
        return [name for name, value in vars(self).items() if isinstance(value, torch.optim.Optimizer)]


class Reference(Policy):
    """It computes log-probs, and holds no optimizer."""

    def on_weights_materialized(self):
        pass


class Long(Policy):
    """Takes sequences that may be divided: the labels come beside them, and the losses add up."""

    gradients = "sum"

    def train_step(self, ids, labels, of):
        ids, labels = (torch.as_tensor(rows, device=self.device) for rows in (ids, labels))
        loss = functional.cross_entropy(self(ids).logits.flatten(0, 1), labels.flatten(), reduction=self.gradients)
        loss = loss / of if self.gradients == "sum" else loss
        loss.backward()
        return loss.item()


class EvenLong(Long):
    """Likewise; each rank's loss is the mean over its part."""

    gradients = "mean"


class Unlucky(TwoLayers):
    """Has methods with the names of the verbs of engines and processes."""

    def send(self, *values):
        return ["send", *values]

    take = open = offer = receive = publish = place = call = users_method = in_training = send


class EchoEngine:
    """A rollout engine without a model: completes a prompt with its own tokens, and notes what reached it."""

    prompt_columns = ("prompt", "multi_modal_data")

    def __init__(self, model, settings, memory=None):
        self.version, self.model, self.settings, self._place = -1, model, settings, "cuda"

    def tokenizer(self, text, add_special_tokens=True):
        return {"input_ids": list(text.encode())}

    def generate(self, prompts, sampling, seed):
        if pause := self.settings.backend.get("pause_s"):
            Path(self.settings.backend["began"]).touch()
            time.sleep(pause)
        rows = [list(row) for row in prompts.ragged("tokens")]
        ids, count = prompts.dense("prompt_id"), sampling.samples_per_prompt
        images = prompts.objects("multi_modal_data") if "multi_modal_data" in prompts else [None] * len(rows)
        texts = [f"{image!r} {self.settings.tensor_parallel_size} {seed}" for image in images]
        both = [row + row for row in rows for _ in range(count)]
        masks = [np.arange(len(row)) >= len(row) // 2 for row in both]
        of_tokens = {
            "tokens": Ragged.from_rows(both, dtype=np.int64),
            "action_mask": Ragged.from_rows(masks, dtype=np.bool_),
            "logprobs": Ragged.from_rows([np.zeros(len(row)) for row in both], dtype=np.float32),
        }
        numbers = {"prompt_id": np.repeat(ids, count), "sample_index": np.tile(np.arange(count), len(rows))}
        ends = {"finished": np.ones(len(both), dtype=np.bool_), "version": np.full(len(both), self.version)}
        return Batch({**numbers, **of_tokens, **ends, "completion": [text for text in texts for _ in range(count)]})

    def receive(self, weights, rewind=False):
        self.version = weights.version

    def move(self, place):
        self._place = place

    cpu, meta = partialmethod(move, "cpu"), partialmethod(move, "meta")

    def cuda(self, part="all"):
        self.move("cuda")

    def place(self):
        return self._place

    def footprint(self):
        return {}

    def close(self):
        pass
