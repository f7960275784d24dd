# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters through peft: ``W' = W + B A alpha / rank`` (Hu et al., arXiv:2106.09685, equation 3), and frozen
matrices below them in 4 bits through bitsandbytes."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

from dlrover.python.rl.common.errors import EngineError, MissingExtra, WeightSyncError
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.engine.api.base import LoraSettings
from dlrover.python.rl.engine.api.registry import require_bitsandbytes
from dlrover.python.rl.engine.api.weights import DOWN, UP
from dlrover.python.rl.engine.model.loading import init_normal, layers_of, list_aliases
from dlrover.python.rl.engine.model.train_module import empty_weights

ADAPTER = "adapter"
"""The adapters' folder inside the merged model's."""

_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.", ".lora_B.default."


def add_adapters(module: Any, settings: LoraSettings) -> None:
    """Add adapters to the target layers of a module on the meta device, and train only them and a new score head.
    Raises MissingExtra without peft, and an ``EngineError`` if no layer has a target's name."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtra("peft", "lora") from error
    targets = _find_targets(module, settings)
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, lora_dropout=0.0)
    ends = tuple(f".{target}.weight" for target in targets)
    for name in (name for names in list_aliases(module) if len(names) > 1 for name in names):
        if f".{name}".endswith(ends):
            raise EngineError(f"no adapters can be added to '{name}': it shares another layer's weight")
    try:
        with empty_weights():
            inject_adapter_in_model(config, module)
    except ValueError as error:
        raise EngineError(f"no adapters can be added: {error}") from error
    head = getattr(module, "score", None)
    if isinstance(head, torch.nn.Linear):  # new, so it is trained whole unless it has an adapter
        head.requires_grad_(True)


def _find_targets(module: Any, settings: LoraSettings) -> list[str]:
    layers = {name: part for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)}
    if isinstance(settings.targets, str):
        outputs = module.get_output_embeddings(), getattr(module, "score", None)
        return [name for name, part in layers.items() if part not in outputs]
    for target in settings.targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            near = hint(target, {name.rpartition(".")[2] for name in layers})
            raise EngineError(f"no adapters can be added to '{target}': no linear layer has this name{near}")
    return list(settings.targets)


@contextmanager
def silenced(module: Any) -> Iterator[None]:
    """Let the module compute as without its adapters, to the bit, since each adds its output times 0."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    scales = [dict(layer.scaling) for layer in layers]
    for layer, scale in zip(layers, scales, strict=True):
        layer.scaling.update(dict.fromkeys(scale, 0.0))
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling.update(scale)


def model_name(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace(_BASE, ".")


def fresh_adapter(name: str, shape: tuple[int, ...]) -> Any:
    """Make a new adapter: ``A`` random, ``B`` zero, so the outputs do not change. None for other parameters."""
    if _UP in name:
        return torch.zeros(shape)
    return init_normal(name, shape, 1 / math.sqrt(3 * shape[-1])) if _DOWN in name else None


def is_adapter(name: str) -> bool:
    return _DOWN in name or _UP in name


def synced_name(name: str) -> str:
    """Return an adapter's name in weight sync."""
    return model_name(name.replace(_DOWN, ".").replace(_UP, ".")) + (DOWN if _DOWN in name else UP)


def check_adapters(
    own: Mapping[str, Any] | None, state: Mapping[str, Any], model: str, names: Callable[[], Collection[str]]
) -> None:
    """Raise WeightSyncError if a state has adapters of other settings, or of another model than the one at ``model``.

    ``own`` is the entry ``lora`` of this engine's states. ``names()`` gives the weights that it trains: they show
    whether a list of targets names the same layers as ``all-linear``."""
    stored = state.get("lora")
    if stored is None or stored == own:  # states of earlier versions lack it
        return
    if own is None:
        raise WeightSyncError(f"the state is of adapters, lora {dict(stored)}, but the engine trains the whole model")
    differing = [key for key in own if own[key] != stored.get(key) and key != "model"]
    is_one_a_list = isinstance(own["targets"], str) != isinstance(stored.get("targets"), str)
    if is_one_a_list and set(names()) == set(state["model"]):
        differing.remove("targets")
    faults = [f"lora.{key} is {own[key]}, not {stored.get(key)}" for key in differing]
    if own["model"] and stored.get("model") and own["model"] != stored["model"]:
        faults.append(f"they were not trained on the weights of the model '{model}'")
    if faults:
        raise WeightSyncError(f"the state is of other adapters: {'; '.join(faults)}")


def find_pair(name: str, names: Collection[str]) -> tuple[str, str] | None:
    """Return the names of a parameter's adapter, ``A`` and ``B``, among the ``names`` of all parameters, or None."""
    down, up = name.replace(_BASE, _DOWN), name.replace(_BASE, _UP)
    return (down, up) if _BASE in name and down in names and up in names else None


def write_adapters(
    weights: Mapping[str, Any], adapters: Mapping[str, Any], settings: LoraSettings, base: str, folder: Path
) -> None:
    """Write adapters, by names in weight sync, into the folder of a saved model with these ``weights``: in PEFT's
    format, for ``PeftModel.from_pretrained`` on the model at ``base``."""
    from peft import LoraConfig

    whole = {name: weights[name] for name in weights if name.startswith("score.")}  # the head is trained too
    named, layers = {f"base_model.model.{name}": tensor for name, tensor in whole.items()}, set[str]()
    for name, tensor in adapters.items():
        layer, _, kind = name.rpartition(".weight.")
        if f"{layer}.weight" not in whole:
            layers.add(layer)
            named[f"base_model.model.{layer}.{kind}.weight"] = tensor
    ends = {layer.rpartition(".")[2] for layer in layers} if settings.targets == "all-linear" else settings.targets
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=sorted(end for end in ends if any(f".{layer}".endswith(f".{end}") for layer in layers)),
        modules_to_save=["score"] if whole else None,
        task_type="TOKEN_CLS" if "score.bias" in whole else "SEQ_CLS" if whole else "CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    config.save_pretrained(folder / ADAPTER)
    save_file(named, folder / ADAPTER / "adapter_model.safetensors")


BLOCK = 64
"""Numbers that share a float32 scale."""

_PACKED = BLOCK // 2  # bytes


class QuantizedLinear(torch.nn.Linear):
    """A frozen linear layer in 4-bit NormalFloat (Dettmers et al., arXiv:2305.14314, section 3). Its bias and the
    scales are not quantized.

    ::

        weight      a row of equal size for each of the ``parts``, which ranks divide; its bytes are stored as numbers
                    of the passes' precision, which FSDP and ZeRO gather unchanged
        a row       its share of the blocks, 32 bytes each | their scales, 4 bytes each
    """

    def __init__(self, plain: torch.nn.Linear, precision: torch.dtype, parts: int = 1) -> None:
        """Take the place of ``plain``. ``weight`` is on the meta device, until :meth:`store` fills it."""
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        self.bias, self.shape = plain.bias, plain.weight.shape
        blocks = -(-plain.weight.numel() // (parts * BLOCK))
        self.numbers = blocks * BLOCK  # of a part; the last parts may have fewer
        row = torch.empty(parts, blocks * (_PACKED + 4) // precision.itemsize, dtype=precision, device="meta")
        self.weight = torch.nn.Parameter(row, requires_grad=False)

    def rows_of(self, part: int) -> slice:
        """Return the rows of the whole weight that contain a part's numbers."""
        start, stop = self._span(part)
        return slice(start // self.in_features, -(-stop // self.in_features))

    def _span(self, part: int) -> tuple[int, int]:
        count = self.shape.numel()
        return min(part * self.numbers, count), min((part + 1) * self.numbers, count)

    @torch.no_grad()
    def store(self, rows: Any, memory: Any, part: int = 0) -> None:
        """Quantize a part, given its :meth:`rows_of`, into its row of ``weight``. The same weight, precision and kind
        of device give the same bits for any number of parts."""
        from bitsandbytes.functional import quantize_4bit

        start, stop = (bound - self.rows_of(part).start * self.in_features for bound in self._span(part))
        packed, scales = _views(memory.zero_())
        if start == stop:
            return
        numbers = rows.to(memory.device, memory.dtype).flatten()[start:stop].contiguous()
        quantized, state = quantize_4bit(numbers, blocksize=BLOCK, quant_type="nf4")
        packed[: len(quantized)].copy_(quantized.flatten())
        scales[: len(state.absmax)].copy_(state.absmax)

    def restored(self, weight: Any) -> Any:
        """Return the matrix that the layer computes with, from all parts of its ``weight``."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        packed, scales = _views(weight)
        # Rows of one block each: the kernel for AVX-512 gives wrong values where a row ends within a block.
        blocks = torch.Size((len(scales), BLOCK))
        state = QuantState(scales, blocks, blocksize=BLOCK, quant_type="nf4", dtype=weight.dtype)
        return dequantize_4bit(packed.unsqueeze(1), state).flatten()[: self.shape.numel()].view(self.shape)

    def forward(self, input: Any) -> Any:
        return _Product.apply(input, self.weight, self.bias, self)


def _views(weight: Any) -> tuple[Any, Any]:
    """Return the packed numbers and the scales of all parts, each in one row, as views if there is one part."""
    content = weight.detach().view(torch.uint8)
    cut = content.shape[-1] // (_PACKED + 4) * _PACKED
    return content[..., :cut].reshape(-1), content[..., cut:].reshape(-1).view(torch.float32)


class _Product(torch.autograd.Function):
    """``input @ weight.T + bias`` with a weight that each pass restores."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any, layer: QuantizedLinear) -> Any:  # type: ignore[override]
        ctx.save_for_backward(weight)
        ctx.layer = layer
        return functional.linear(input, layer.restored(weight), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return gradient @ ctx.layer.restored(weight), None, None, None


def quantize_linear_layers(module: Any, precision: torch.dtype, parts: int = 1) -> None:
    """Replace the linear layers in the decoder layers of a module on the meta device, for ``parts`` ranks to divide.
    Raises as :func:`require_bitsandbytes`, and an ``EngineError`` if the module does not name its layers."""
    require_bitsandbytes()
    if not (layers := layers_of(module)):
        raise EngineError(f"{type(module).__name__} does not name its layers: they cannot be quantized")
    for owner in (part for layer in layers for part in layer.modules()):
        for name, part in owner.named_children():
            if type(part) is torch.nn.Linear:
                setattr(owner, name, QuantizedLinear(part, precision, parts))


def quantized_layers(module: Any) -> dict[str, QuantizedLinear]:
    """Return the quantized layers of a module by the names of their weights."""
    parts = module.named_modules()
    return {f"{name}.weight": part for name, part in parts if isinstance(part, QuantizedLinear)}
