# SPDX-License-Identifier: Apache-2.0
"""Reasons why an engine cannot have a model, from properties of its class in Transformers; nothing is loaded."""

from collections.abc import Callable, Mapping
from typing import Any

_AUTO_CLASSES = {"causal": "AutoModelForCausalLM", "token": "AutoModelForTokenClassification"}

_DENSE = ("llama", "mistral", "qwen2", "qwen3")
"""Types of models that every engine can have, which need no look at their class."""

_WITH_STATE = {"conv", "linear_attention", "hybrid", "hybrid_sliding"}
"""Types of layers, as Transformers calls them, that not all models with a state declare otherwise."""


def find_class(config: Any, head: str = "causal") -> Any:
    """The class of a model with this configuration of Transformers; None if the library has none with this head."""
    import transformers  # on demand, as below: it takes longer than all the rest of a check

    classes = getattr(transformers, _AUTO_CLASSES[head])._model_mapping
    return classes.get(type(config), None)


def find_class_fault(config: Any, head: str = "causal") -> str:
    """Report a model that Transformers cannot build with this head, such as one of images; "" for others."""
    if find_class(config, head) is not None:
        return ""
    purpose = "that generates text" if head == "causal" else "that can score tokens"
    return f"Transformers has no {_AUTO_CLASSES[head]} of type '{config.model_type}': choose a model {purpose}"


def find_state_fault(config: Any, head: str = "causal", model: Any = None) -> str:
    """Report a ``model`` whose layers keep more than the keys and values of tokens; None: by its class."""
    model = find_class(config, head) if model is None else model
    if model is None:
        return find_class_fault(config, head)
    layers = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if not getattr(model, "_is_stateful", False) and not layers & _WITH_STATE:
        return ""
    model_type = f"a model of type '{config.model_type}'"
    return f"{model_type} keeps a state, not keys and values: the rollout engine 'torch' cannot batch it; 'vllm' may"


def by_library(find: Callable[[Any, str], str]) -> Callable[[Mapping[str, Any], str], str]:
    """Give ``find`` what Transformers makes of a ``config.json``, but for dense models, which need no such look."""

    def find_fault(content: Mapping[str, Any], head: str) -> str:
        kind = content.get("model_type")
        if not content or kind in _DENSE:
            return ""
        if kind is None:
            return "its config.json has no 'model_type': choose a folder of a model in Hugging Face format"
        import transformers

        if kind not in transformers.CONFIG_MAPPING:
            return f"Transformers {transformers.__version__} has no model of type '{kind}'"
        return find(transformers.CONFIG_MAPPING[kind].from_dict(dict(content)), head)

    return find_fault
