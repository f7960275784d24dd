# SPDX-License-Identifier: Apache-2.0
"""The sizes of a language model, from its configuration alone."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import huggingface_hub
import torch

from dlrover.python.rl.common.names import hint
from dlrover.python.rl.engine.api.base import LoraSettings
from dlrover.python.rl.engine.model.chunked_head import RAW_LOGITS
from dlrover.python.rl.engine.model.train_module import empty_weights

_AUTO_CLASSES = {"causal": "AutoModelForCausalLM", "token": "AutoModelForTokenClassification"}

_DENSE = ("llama", "mistral", "qwen2", "qwen3")
"""Types of models that every engine supports, whose class need not be checked."""

_WITH_STATE = {"conv", "linear_attention", "hybrid", "hybrid_sliding"}
"""Transformers' types of layers with a state, which some models declare in no other way."""


def find_class(config: Any, head: str = "causal") -> Any:
    """Return Transformers' class for a configuration; None if it has none with this head."""
    import transformers  # on demand, as below: it takes longer than the rest of a check

    classes = getattr(transformers, _AUTO_CLASSES[head])._model_mapping
    return classes.get(type(config), None)


def find_class_fault(config: Any, head: str = "causal") -> str:
    """Report a model that Transformers cannot build with this head, such as an image model; "" for others."""
    if find_class(config, head) is not None:
        return ""
    purpose = "that generates text" if head == "causal" else "that can score tokens"
    return f"Transformers has no {_AUTO_CLASSES[head]} of type '{config.model_type}': choose a model {purpose}"


def find_state_fault(config: Any, head: str = "causal", model: Any = None) -> str:
    """Report a ``model`` (None: its class) whose layers keep more than the keys and values of tokens."""
    model = find_class(config, head) if model is None else model
    if model is None:
        return find_class_fault(config, head)
    layers = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if not getattr(model, "_is_stateful", False) and not layers & _WITH_STATE:
        return ""
    model_type = f"a model of type '{config.model_type}'"
    return f"{model_type} keeps a state, not keys and values: the rollout engine 'torch' cannot batch it; 'vllm' may"


def by_library(find: Callable[[Any, str], str]) -> Callable[[Mapping[str, Any], str], str]:
    """Call ``find`` with Transformers' configuration of a ``config.json``, except for dense models, which pass."""

    def find_fault(content: Mapping[str, Any], head: str) -> str:
        kind = content.get("model_type")
        if not content or kind in _DENSE:
            return ""
        if kind is None:
            return "its config.json has no 'model_type': choose a folder with a model in Hugging Face format"
        import transformers

        if kind not in transformers.CONFIG_MAPPING:
            return f"Transformers {transformers.__version__} has no model of type '{kind}'"
        return find(transformers.CONFIG_MAPPING[kind].from_dict(dict(content)), head)

    return find_fault


_OUTPUT = "lm_head"

_POSITIONS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a language model."""

    parameters: int
    layers: int
    layer: int  # parameters of the largest layer
    tensor: int  # parameters of the largest tensor
    hidden: int
    queries: int  # width of all heads of a token
    keys: int
    intermediate: int  # width of all MLPs that a token passes through in a layer
    vocabulary: int
    adaptable: Mapping[str, int] = field(default_factory=dict)
    """Parameters of an adapter of rank 1, over all layers, by the last part of the layers' names."""

    matrices: int = 0  # parameters of the linear layers' matrices, without the output layer's
    output: str = "lm_head"  # the output layer; empty if it has the embedding's weight
    head: int = 0  # parameters of a new score head
    raw_logits: bool = False  # the output layer's outputs are the logits, and may be computed in chunks

    def trained_parameters(self, lora: LoraSettings) -> int:
        """Count the parameters of the adapters and of a new score head, which is trained whole unless it has one."""
        names = [name.rpartition(".")[2] for name in self.targets_of(lora)]
        sizes = {**self.adaptable, **({self.output: self.head + 1} if self.head else {})}
        whole = 0 if self.output in names else self.head
        return lora.rank * sum(sizes.get(name, 0) for name in names) + whole

    def targets_of(self, lora: LoraSettings) -> list[str]:
        """List the names of the layers that get adapters, sorted."""
        return sorted(self.adaptable) if isinstance(lora.targets, str) else sorted(set(lora.targets))

    def find_target_errors(self, lora: LoraSettings) -> list[str]:
        """Report the targets that are not linear layers of the model."""
        layers = [*self.adaptable, *([self.output] if self.output else [])]
        names = [] if isinstance(lora.targets, str) else [name.rpartition(".")[2] for name in lora.targets]
        return [
            "the output layer shares the embedding's weight, so it cannot have an adapter"
            if name == _OUTPUT and not self.output
            else f"no linear layer is named '{name}'{hint(name, layers)}"
            for name in names
            if name not in layers
        ]

    @property
    def outside(self) -> int:
        """Parameters outside the layers."""
        return max(self.parameters - self.layers * self.layer, 0)

    def with_score_head(self) -> "ModelShape":
        """Return the sizes with a score head in place of a separate output layer."""
        layer = self.vocabulary * self.hidden
        own = layer if self.outside >= 2 * layer else 0
        parameters = self.parameters - own + self.hidden
        return replace(self, parameters=parameters, vocabulary=1, output="score", head=self.hidden)

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """Measure the model of a Transformers configuration, built without weights."""
        from transformers import AutoModelForCausalLM

        with empty_weights():
            module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        text = config.get_text_config()
        heads, layers = int(text.num_attention_heads), int(text.num_hidden_layers)
        width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        lists = [part for part in module.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == layers]
        experts = int(getattr(text, "num_experts_per_tok", None) or 0)
        inner = experts * int(getattr(text, "moe_intermediate_size", None) or text.intermediate_size)
        adaptable, matrices = Counter[str](), 0
        for name, part in module.named_modules():
            if isinstance(part, torch.nn.Linear) and part is not getattr(module, _OUTPUT, None):
                adaptable[name.rpartition(".")[2]] += sum(part.weight.shape)
                matrices += part.weight.numel()
        return cls(
            sum(parameter.numel() for parameter in module.parameters()),
            layers,
            max(sum(parameter.numel() for parameter in layer.parameters()) for part in lists for layer in part),
            max(parameter.numel() for parameter in module.parameters()),
            int(text.hidden_size),
            heads * width,
            int(getattr(text, "num_key_value_heads", None) or heads) * width,
            inner or int(text.intermediate_size),
            int(text.vocab_size),
            dict(adaptable),
            matrices,
            "" if getattr(config, "tie_word_embeddings", False) else _OUTPUT,
            raw_logits=text.model_type in RAW_LOGITS,
        )


def shape_of(model: str, fallback: str | None = None) -> ModelShape | None:
    """Return the sizes of a model in a folder or in this node's cache of the hub, or of ``fallback``, a ``config.json``
    or its folder; None if none is found, or it is not a language model."""
    file = find_config_file(model) or (find_config_file(fallback) if fallback else None)
    return None if file is None else _read_shape(file, file.stat().st_mtime_ns)


def find_config_file(model: str) -> Path | None:
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    try:
        cached = huggingface_hub.try_to_load_from_cache(model, "config.json")
    except ValueError:  # not a hub name
        return None
    return Path(cached) if isinstance(cached, str) else None


def read_config(model: str, fallback: str | None = None) -> Mapping[str, Any]:
    """Read the ``config.json`` that :func:`shape_of` uses; empty if there is none."""
    file = find_config_file(model) or (find_config_file(fallback) if fallback else None)
    content = None
    with suppress(OSError, ValueError):
        content = json.loads(file.read_text(encoding="utf-8")) if file else None
    return content if isinstance(content, dict) else {}


def count_positions(config: Mapping[str, Any]) -> int | None:
    """Return the maximum tokens of a sequence by a model's ``config.json``; None if it does not say."""
    parts = [part for part in (config.get("text_config"), config) if isinstance(part, Mapping)]
    count = next((part[key] for part in parts for key in _POSITIONS if isinstance(part.get(key), int)), None)
    ropes = [part.get(key) or {} for part in parts for key in ("rope_scaling", "rope_parameters")]
    scaled = [rope.get("original_max_position_embeddings", 0) * (rope.get("factor") or 0) for rope in ropes]
    return count and max(count, *map(int, scaled))


@cache
def _read_shape(file: Path, _written_ns: int) -> ModelShape | None:
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(file)
        return None if find_class(config) is None else ModelShape.of(config)  # its error would import all models
    except Exception:  # noqa: BLE001 - code of any architecture may raise anything; the engine says what is wrong
        return None
