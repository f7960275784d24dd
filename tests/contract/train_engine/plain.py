"""What every train engine is compared with: a model, batches, a loss, and five steps the plain way, a row at a time."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.base import OptimizerConfig
from dlrover.python.rl.engine.torch.loading import write_atomically
from dlrover.python.rl.recipe.tiny import byte_tokenizer

CONFIG = OptimizerConfig(lr=5e-4, warmup_steps=3, weight_decay=0.1, betas=(0.9, 0.95), max_grad_norm=0.5)
STEPS = 5
TEMPERATURE = 0.8
LENGTHS = [(3, 9), (1, 2), (7, 30), (2, 1), (4, 12), (5, 5), (1, 20), (6, 3)]

NO_GRADIENT = "k_proj.bias"
"""Attention does not change with a key's bias: its gradient is zero but for rounding, which Adam makes steps of."""


def write_model(path, vocab_size=260, **shape):
    """A Qwen2 with random weights and tied embeddings; two key-value heads."""
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(
        vocab_size=vocab_size,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes | shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # Zeros would hide an error in adding them.
                torch.nn.init.normal_(parameter, std=0.1)
    return write_atomically(path, model, tokenizer)


def make_batch(seed):
    """Rows of unequal lengths, with a hole in each long action mask, as a tool's answer leaves one."""
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(0, 256, head + tail) for head, tail in LENGTHS]
    masks = [np.arange(head + tail) >= head for head, tail in LENGTHS]
    for mask in masks:
        if len(mask) > 14:
            mask[10:13] = False
    ragged = Ragged.from_rows(tokens)
    return Batch(
        {
            "tokens": ragged,
            "action_mask": Ragged.from_rows(masks),
            "old": ragged.like(generator.normal(size=sum(map(len, tokens))) - 5),
            "weight": generator.uniform(0.5, 1.5, len(LENGTHS)).astype(np.float32) / 50,
        }
    )


class EntropyLoss:
    """Something that uses a column of each kind, and the entropy."""

    wants_entropy = True

    def __call__(self, logprobs, columns):
        """Weighted sum over the tokens."""
        terms = torch.exp(0.1 * (logprobs - columns["old"])) - logprobs - 0.3 * columns["entropy"]
        return (columns["weight"] * terms).sum(), {"entropy": (columns["weight"] * columns["entropy"]).sum()}


def plain_outputs(model, tokens, mask):
    """Log-probs and entropies ``[actions]`` of one row, over the whole vocabulary at every position."""
    ids, chosen = torch.tensor(tokens), torch.tensor(mask[1:])
    table = torch.log_softmax(model(ids[None]).logits[0, :-1] / TEMPERATURE, dim=-1)
    logprobs = table[torch.arange(len(ids) - 1), ids[1:]]
    return logprobs[chosen], -(table.exp() * table).sum(dim=-1)[chosen]


def plain_loss(model, batch):
    """The loss of a batch, a row at a time, and its metric."""
    loss = EntropyLoss()
    total, entropy = torch.zeros(()), torch.zeros(())
    rows = zip(*(batch.ragged(name) for name in ("tokens", "action_mask", "old")), batch.dense("weight"), strict=True)
    for tokens, mask, old, weight in rows:
        logprobs, entropies = plain_outputs(model, tokens, mask)
        columns = {
            "old": torch.tensor(old, dtype=torch.float32)[torch.tensor(mask)],
            "weight": torch.full((len(logprobs),), weight),
            "entropy": entropies,
        }
        value, metrics = loss(logprobs, columns)
        total, entropy = total + value, entropy + metrics["entropy"]
    return total, entropy


def plain_model(path):
    """The model as the library loads it, with its own slowest attention."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


class PlainAdamW:
    """AdamW with its formula written out (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2)."""

    def __init__(self, named):
        self.named, self.steps = named, 0
        self.first, self.second = ({name: torch.zeros_like(tensor) for name, tensor in named.items()} for _ in range(2))

    @torch.no_grad()
    def step(self, lr, scale):
        """One step at rate ``lr`` with the gradients times ``scale``."""
        self.steps += 1
        corrections = [1 - beta**self.steps for beta in CONFIG.betas]
        for name, tensor in self.named.items():
            gradient = tensor.grad * scale
            self.first[name].lerp_(gradient, 1 - CONFIG.betas[0])
            self.second[name].lerp_(gradient.square(), 1 - CONFIG.betas[1])
            decay = CONFIG.weight_decay if tensor.ndim >= 2 else 0.0
            root = (self.second[name] / corrections[1]).sqrt() + 1e-8
            tensor.sub_(lr * decay * tensor + lr * self.first[name] / corrections[0] / root)


def plain_run(path):
    """Five steps, a row at a time; what an engine should report, and the weights at the end."""
    model = plain_model(path)
    named = dict(model.named_parameters())
    optimizer, told = PlainAdamW(named), []
    for step in range(STEPS):
        model.zero_grad()
        loss, entropy = plain_loss(model, make_batch(step))
        loss.backward()
        norm = torch.sqrt(sum(tensor.grad.double().square().sum() for tensor in named.values())).item()
        lr = CONFIG.lr * min(1.0, (step + 1) / CONFIG.warmup_steps)
        told.append({"loss": loss.item(), "grad_norm": norm, "lr": lr, "entropy": entropy.item()})
        optimizer.step(lr, min(1.0, CONFIG.max_grad_norm / norm))
    return told, {name: tensor.detach().numpy() for name, tensor in named.items()}
