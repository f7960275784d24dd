"""A train engine on plain PyTorch: one process, or data-parallel ranks that each hold the whole model."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrover.python.rl.common.errors import EngineError, NonFiniteUpdate, WeightSyncError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.base import OptimizerConfig, StepResult, TokenLoss
from dlrover.python.rl.engine.torch.distributed import ALONE, RankGroup
from dlrover.python.rl.engine.torch.loading import CausalLM, load_causal_lm, write_atomically
from dlrover.python.rl.engine.torch.microbatch import action_logprobs, check_actions, micro_batches
from dlrover.python.rl.engine.weights import WeightSnapshot, misfits, take_snapshot

_LOSS, _TOKENS, _BAD = "\0loss", "\0tokens", "\0bad "  # names that no metric of a user's loss has


class TorchTrainEngine:
    """Implements :class:`~dlrover.python.rl.engine.base.TrainEngine`.

    A step sums the loss's gradients over micro-batches and ranks, so the result depends neither on the token budget
    nor on the number of ranks (up to float32 rounding). Every rank calls :meth:`step` with its own shard.

    Args:
        model: folder or hub name of a causal language model, or one that is loaded, which becomes the engine's own.
        optimizer: how to train it; None makes a frozen engine, which only evaluates.
        device: a torch device.
        max_tokens_per_microbatch: most tokens, padding included, of one forward pass.
        gradient_checkpointing: recompute activations in the backward pass to save memory.
        group: the data-parallel ranks; the engine does not close it.

    Raises:
        EngineError: there is no such model.
    """

    def __init__(
        self,
        model: str | Path | CausalLM,
        optimizer: OptimizerConfig | None,
        *,
        device: str = "cpu",
        max_tokens_per_microbatch: int = 16384,
        gradient_checkpointing: bool = False,
        group: RankGroup | None = None,
    ) -> None:
        self.version = 0
        self._lm = model if isinstance(model, CausalLM) else load_causal_lm(model, device)
        self._device, self._token_budget, self._group = device, max_tokens_per_microbatch, group or ALONE
        self._config = optimizer
        self._optimizer = _adamw(self._lm.model, optimizer) if optimizer else None
        if optimizer is None:
            self._lm.model.requires_grad_(False)
        elif gradient_checkpointing:
            # Transformers recomputes in training mode only; dropout is off, so nothing else changes with the mode.
            trained = self._lm.model.train()
            enable = getattr(trained, "activation_checkpointing_enable", None) or trained.gradient_checkpointing_enable
            enable({"use_reentrant": False})

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._lm.tokenizer

    # -- evaluating ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Batch:
        """Return ``logprobs``: ragged float32 ``[rows, seq]``, 0 outside the action mask, rows in the batch's order.

        Raises:
            EngineError: tokens, lengths or the action mask do not fit the model.
        """
        self._check(batch)
        tokens = batch.ragged("tokens")
        out = np.zeros(len(tokens.values), dtype=np.float32)
        for micro in micro_batches(batch, self._token_budget, self._lm.pad_id, self._device):
            out[micro.flat] = action_logprobs(self._lm.model, micro, temperature).cpu().numpy()
        return Batch({"logprobs": tokens.like(out)})

    def _check(self, batch: Batch) -> None:
        tokens = batch.ragged("tokens")
        check_actions(batch)
        self._lm.check_tokens(tokens.values, int(tokens.lengths.max(initial=0)))

    # -- training -----------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, loss: TokenLoss, temperature: float = 1.0) -> StepResult:
        """One optimizer step on the whole ``batch``, and on those of the other ranks.

        Args:
            batch: this rank's rows; numeric columns reach the loss as ``[action tokens]``: ragged ones at their action
                tokens, dense ones spread over their row's.
            loss: called once per micro-batch.
            temperature: of the log-probs handed to the loss; the one the batch was sampled at.

        Raises:
            EngineError: the engine is frozen, or no rank has an action token.
            NonFiniteUpdate: the loss or the gradient norm is not finite. The weights, the optimizer and the version are
                then what they were, on every rank.
        """
        config, optimizer = self._config, self._optimizer
        if config is None or optimizer is None:
            raise EngineError("a frozen engine (no optimizer) cannot take a step")
        self._check(batch)
        for parameter in self._parameters():  # zeros, not None: a rank without action tokens takes part in the sums
            parameter.grad = torch.zeros_like(parameter)
        try:
            totals = self._group.sum_scalars(self._accumulate(batch, loss, temperature))
            value, norm = self._reduce(totals)
            if config.max_grad_norm is not None:
                # After the reduction the gradients are the global ones, so every rank scales by the same factor.
                torch.nn.utils.clip_grads_with_norm_(self._parameters(), config.max_grad_norm, torch.tensor(norm))
            lr = _learning_rate(config, self.version)
            for settings in optimizer.param_groups:
                settings["lr"] = lr
            optimizer.step()
        finally:
            optimizer.zero_grad()
        self.version += 1
        return StepResult(value, norm, lr, totals)

    def _accumulate(self, batch: Batch, loss: TokenLoss, temperature: float) -> dict[str, float]:
        """Add this rank's gradients to the parameters; return its summed loss, token count and metrics."""
        totals = {_LOSS: 0.0, _TOKENS: 0.0}
        for micro in micro_batches(batch, self._token_budget, self._lm.pad_id, self._device):
            logprobs = action_logprobs(self._lm.model, micro, temperature)
            columns = micro.columns(batch, self._device)
            value, metrics = loss(logprobs, columns)
            if not math.isfinite(_number(value)):
                totals.setdefault(f"{_BAD}{_first_bad({'log-probs': logprobs, **columns})}", 1.0)
            value.backward()
            for name, amount in {_LOSS: value, _TOKENS: len(micro.flat), **metrics}.items():
                totals[name] = totals.get(name, 0.0) + _number(amount)
        return totals

    def _reduce(self, totals: dict[str, float]) -> tuple[float, float]:
        """Sum the gradients over ranks; take loss and token count out of ``totals``; return loss and gradient norm."""
        value, tokens = totals.pop(_LOSS), totals.pop(_TOKENS)
        if not tokens:
            raise EngineError("no row of the batch has an action token: there is nothing to learn from")
        bad = [name.removeprefix(_BAD) for name in totals if name.startswith(_BAD)]
        if not math.isfinite(value):
            raise self._refusal(f"the loss is {value}", bad[0] if bad else "the sum over the micro-batches")
        gradients = [parameter.grad for parameter in self._parameters()]
        self._group.sum_tensors(gradients)
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            named = {name: parameter.grad for name, parameter in self._lm.model.named_parameters()}
            raise self._refusal(f"the gradient norm is {norm}", _first_bad(named))
        return value, norm

    def _refusal(self, what: str, where: str) -> NonFiniteUpdate:
        kept = f"the update of version {self.version} is refused and the weights are as they were"
        return NonFiniteUpdate(f"{what} (first in: {where}): {kept}")

    def _parameters(self) -> list[Any]:
        return [parameter for parameter in self._lm.model.parameters() if parameter.requires_grad]

    # -- weights ------------------------------------------------------------------------------------------------------

    def publish(self) -> WeightSnapshot:
        """A copy of the current weights, stamped with the version and fingerprinted; tied tensors once."""
        return take_snapshot(self._lm.named_weights(), self.version)

    def receive(self, weights: WeightSnapshot) -> None:
        """Take over another engine's weights and version, as a reference that follows its actor does.

        Raises:
            EngineError: this engine trains; its weights change by its own steps only.
            WeightSyncError: the weights do not fit, are corrupt or older; nothing was changed.
        """
        if self._optimizer is not None:
            raise EngineError("an engine with an optimizer does not take over weights: only a frozen one does")
        self._lm.check(weights, self.version)
        self._lm.write(weights)
        self.version = weights.version

    def save(self, path: Path) -> None:
        """Write model (float32) and tokenizer in Hugging Face format, whole or not at all; rank 0 writes."""
        if self._group.rank == 0:
            write_atomically(Path(path), self._lm.model, self.tokenizer)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What later steps depend on, bit for bit: ``version``, ``model`` (tied tensors once) and ``optimizer``.

        ``optimizer`` holds AdamW's moments by parameter name, nothing before the first step; None in a frozen engine.
        Rates and decays are not in it: they follow from the configuration and the version. The tensors are the live
        ones: copy or write them before the next step. On every rank it is the same.
        """
        return {
            "version": self.version,
            "model": {name: tensor.detach() for name, tensor in self._lm.named_weights()},
            "optimizer": None if self._optimizer is None else self._moments(self._optimizer),
        }

    def _moments(self, optimizer: Any) -> dict[str, dict[str, Any]]:
        named = dict(self._lm.model.named_parameters())
        return {name: dict(optimizer.state[tensor]) for name, tensor in named.items() if tensor in optimizer.state}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what :meth:`state_dict` returned; the tensors are copied.

        Raises:
            WeightSyncError: the state is of another model; nothing was changed.
            EngineError: exactly one of state and engine has an optimizer; nothing was changed.
        """
        moments, optimizer = state["optimizer"], self._optimizer
        if (moments is None) != (optimizer is None):
            raise EngineError("the state of a trained engine does not fit a frozen one, nor the other way round")
        own, parameters = dict(self._lm.named_weights()), dict(self._lm.model.named_parameters())
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        faults = misfits(shapes, {name: tuple(tensor.shape) for name, tensor in state["model"].items()})
        faults += [f"the optimizer's '{name}' is unknown" for name in moments or {} if name not in parameters]
        if faults:
            raise WeightSyncError("the state is of another model: " + "; ".join(faults))
        for name, tensor in own.items():
            tensor.copy_(state["model"][name])
        if optimizer is not None:
            optimizer.state.clear()
            for name, kept in moments.items():
                # AdamW counts its steps on the host, whatever the device of the moments.
                where = {key: "cpu" if key == "step" else self._device for key in kept}
                optimizer.state[parameters[name]] = {
                    key: value.detach().to(where[key], copy=True) for key, value in kept.items()
                }
        self.version = int(state["version"])


def _adamw(model: Any, config: OptimizerConfig) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, betas=config.betas)


def _first_bad(tensors: Mapping[str, Any]) -> str:
    """The name of the first tensor that holds a NaN or an infinity."""
    bad = (name for name, tensor in tensors.items() if tensor is not None and not bool(tensor.isfinite().all()))
    return next(bad, "a sum of finite numbers")


def _number(amount: Any) -> float:
    return float(amount.detach() if isinstance(amount, torch.Tensor) else amount)


def _learning_rate(config: OptimizerConfig, steps_taken: int) -> float:
    """The rate of the next step: rises linearly to the peak over the warm-up."""
    if steps_taken >= config.warmup_steps:
        return config.lr
    return config.lr * (steps_taken + 1) / config.warmup_steps
