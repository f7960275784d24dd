# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters through peft: ``W' = W + B A alpha / rank`` (Hu et al., arXiv:2106.09685, equation 3)."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dlrover.python.rl.common.errors import EngineError, MissingExtra, WeightSyncError
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.engine.api.base import LoraSettings
from dlrover.python.rl.engine.api.weights import DOWN, UP, add_adapter
from dlrover.python.rl.engine.model.loading import FileWriter, init_normal, list_aliases
from dlrover.python.rl.engine.model.train_module import empty_weights

ADAPTER = "adapter"
"""The folder of the adapters, inside the merged model's."""

_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.", ".lora_B.default."


def add_adapters(module: Any, settings: LoraSettings) -> None:
    """Add adapters to the target layers of a module on the meta device; only they and a new head of one score are
    trained then.

    Raises:
        MissingExtra: peft is not installed.
        EngineError: the module has no layer of these names.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtra("peft", "lora") from error
    targets = _targets(module, settings)
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, lora_dropout=0.0)
    lost = [name for names in list_aliases(module) if len(names) > 1 for name in names if _ends_in(name, targets)]
    if lost:
        raise EngineError(f"no adapters can be added to '{lost[0]}': it has the weight of another layer")
    try:
        with empty_weights():
            inject_adapter_in_model(config, module)
    except ValueError as error:
        raise EngineError(f"no adapters can be added: {error}") from error
    head = getattr(module, "score", None)
    if isinstance(head, torch.nn.Linear):  # new: it is trained whole, unless it has adapters itself
        head.requires_grad_(True)


def _targets(module: Any, settings: LoraSettings) -> list[str]:
    layers = {name: part for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)}
    if isinstance(settings.targets, str):
        outputs = module.get_output_embeddings(), getattr(module, "score", None)
        return [name for name, part in layers.items() if part not in outputs]
    for target in settings.targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            near = hint(target, {name.rpartition(".")[2] for name in layers})
            raise EngineError(f"no adapters can be added to '{target}': no linear layer has this name{near}")
    return list(settings.targets)


def _ends_in(name: str, targets: Collection[str]) -> bool:
    return any(f".{name}".endswith(f".{target}.weight") for target in targets)


@contextmanager
def silenced(module: Any) -> Iterator[None]:
    """Inside, the module computes as without its adapters: to the bit, since each adds its output times 0."""
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
    """A parameter's name in the model without adapters."""
    return name.replace(_BASE, ".")


def fresh_adapter(name: str, shape: tuple[int, ...]) -> Any:
    """A new adapter: ``A`` random, ``B`` zero, so the outputs do not change. None for other parameters."""
    if _UP in name:
        return torch.zeros(shape)
    return init_normal(name, shape, 1 / math.sqrt(3 * shape[-1])) if _DOWN in name else None


def is_adapter(name: str) -> bool:
    return _DOWN in name or _UP in name


def adapter_name(name: str) -> str:
    """An adapter's name in weight sync."""
    return model_name(name.replace(_DOWN, ".").replace(_UP, ".")) + (DOWN if _DOWN in name else UP)


def describe_adapters(settings: LoraSettings, model: str) -> dict[str, Any]:
    """What a state says of its adapters; ``model``: the fingerprint of that which they are added to."""
    return {**asdict(settings), "targets": settings.sorted_targets, "model": model}


def check_adapters(
    own: Mapping[str, Any] | None, state: Mapping[str, Any], model: str, names: Callable[[], Collection[str]]
) -> None:
    """Raise WeightSyncError if a state is of adapters that mean other weights: of other settings, or of another model
    than that at ``model``. ``names``: of the weights that the engine trains, which say whether a list of targets has
    the same layers as ``all-linear``."""
    was = state.get("lora")
    if was is None or was == own:  # states of earlier versions do not say it
        return
    if own is None:
        raise WeightSyncError(f"the state is of adapters, lora {dict(was)}, and the engine trains the whole model")
    other = [key for key in own if own[key] != was.get(key) and key != "model"]
    is_one_a_list = isinstance(own["targets"], str) != isinstance(was.get("targets"), str)
    if is_one_a_list and set(names()) == set(state["model"]):
        other.remove("targets")
    faults = [f"lora.{key} is {own[key]}, not {was.get(key)}" for key in other]
    if own["model"] and was.get("model") and own["model"] != was["model"]:
        faults.append(f"they were trained on other weights than those of the model '{model}'")
    if faults:
        raise WeightSyncError(f"the state is of other adapters: {'; '.join(faults)}")


def merge(name: str, names: Collection[str], whole: Callable[[str], Any], settings: LoraSettings) -> Any:
    """The whole tensor of a parameter with its adapter, if any, added. A collective.

    Args:
        name: in the module.
        names: of all parameters of the module.
        whole: gives the whole tensor of each.
    """
    base, pair = whole(name), [name.replace(_BASE, kind) for kind in (_DOWN, _UP)]
    if _BASE not in name or not all(part in names for part in pair):
        return base
    down, up = map(whole, pair)
    return add_adapter(base, down, up, settings.scale, base.device, torch.float32)


def take_adapters(
    tensors: Mapping[str, Any], settings: LoraSettings | None, base: str
) -> tuple[Mapping[str, Any], FileWriter | None]:
    """Split ``tensors``, by names in weight sync: the weights, and a function that writes the adapters, if any, to
    the folder of a saved model, in PEFT's format, for ``PeftModel.from_pretrained`` on the model at ``base``."""
    adapters = {name: tensor for name, tensor in tensors.items() if name.endswith((DOWN, UP))}
    if settings is None or not adapters:
        return tensors, None
    weights = {name: tensor for name, tensor in tensors.items() if name not in adapters}
    return weights, partial(_write_adapters, weights, adapters, settings, base)


def _write_adapters(
    weights: Mapping[str, Any], adapters: Mapping[str, Any], settings: LoraSettings, base: str, folder: Path
) -> None:
    from peft import LoraConfig

    whole = {name: weights[name] for name in weights if name.startswith("score.")}  # a head is trained beside them
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
