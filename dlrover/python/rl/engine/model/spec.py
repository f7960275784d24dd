# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model without its weights: configuration, tokenizer, and the module on the meta device."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import logging as hf_logging

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.model import attention
from dlrover.python.rl.engine.model.loading import (
    CausalLM,
    FileWriter,
    SafetensorsSource,
    TensorSource,
    WeightReader,
    as_causal_lm,
    disable_dropout,
    find_model_folder,
    init_normal,
    match_names,
    write_atomically,
)
from dlrover.python.rl.engine.model.model_shape import find_class, find_class_fault
from dlrover.python.rl.engine.model.packing import Head
from dlrover.python.rl.engine.model.train_module import empty_weights

_CLASSES = {"causal": AutoModelForCausalLM, "token": AutoModelForTokenClassification}


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A model that can be built, loaded and written."""

    name: str  # folder or hub name, for messages
    folder: Path | None  # of the files; None with `weights`
    config: Any
    tokenizer: Any
    head: Head = "causal"
    weights: WeightReader | None = None  # in place of files
    head_bias: bool = True
    dtype: torch.dtype = torch.float32  # of the files; building a model overwrites its configuration's

    @classmethod
    def of(cls, model: str | Path, head: Head = "causal", head_bias: bool = True) -> "ModelSpec":
        """Read configuration and tokenizer. Raises an ``EngineError`` if there is no such model."""
        hf_logging.disable_progress_bar()  # else one bar per process and file
        folder = find_model_folder(model)
        try:
            config = AutoConfig.from_pretrained(folder)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # Code of any architecture and tokenizer may raise anything.
            why = str(error) or type(error).__name__
            if not (folder / "config.json").is_file():
                why = "the folder does not contain a causal language model with its tokenizer"
            raise EngineError(f"no model can be loaded from '{model}': {why}") from error
        if fault := find_class_fault(config, head):
            raise EngineError(f"no model can be loaded from '{model}': {fault}")
        if head == "token":
            config.num_labels = 1
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        return cls(str(model), folder, config, tokenizer, head, head_bias=head_bias, dtype=dtype)

    def empty(self) -> Any:
        """Build a module with float32 parameters on the meta device, real buffers, no dropout, and packed attention if
        possible."""
        module = self._build()
        if attention.can_pack(module):
            module.set_attn_implementation(attention.NAME)
        disable_dropout(module)
        return module.eval()

    def source_of(self, wanted: Mapping[str, tuple[str, ...]], prefix: str) -> WeightReader:
        """Return the model's files, or Transformers' loader if it renames tensors or the files are not safetensors."""
        source = self.weights
        if source is None and self.folder is not None and any(self.folder.glob("*.safetensors")):
            source = SafetensorsSource(self.folder, self.name)
        if source is not None:
            matches = match_names(wanted, source.shapes(), prefix)
            if all(name in matches or name.startswith("score.") for name in wanted):
                return source
        module, absent = self.load()
        tensors = {name: tensor for name, tensor in module.state_dict().items() if name not in absent}
        return TensorSource(tensors, name=self.name)

    def load(self, **options: Any) -> tuple[Any, set[str]]:
        """Load the module through Transformers, in float32 and host memory, whatever the format and names of its files;
        also returns the names of new weights, which are random. Raises an ``EngineError`` if the model is missing or
        lacks weights other than a new head's."""
        location = self.folder if Path(self.name).expanduser().is_dir() else self.name
        try:
            module, report = _CLASSES[self.head].from_pretrained(
                location, config=self.config, dtype=torch.float32, output_loading_info=True, **options
            )
        except Exception as error:  # as above
            if isinstance(error, SafetensorError) and self.folder is not None:
                SafetensorsSource(self.folder)  # its error names the file
            raise EngineError(f"no model can be loaded from '{self.name}': {error}") from error
        absent = {*report["missing_keys"], *map(str, report["mismatched_keys"])}
        if needed := sorted(name for name in absent if self.head == "causal" or not name.startswith("score.")):
            raise EngineError(f"the checkpoint '{self.name}' lacks {', '.join(needed)}")
        return module, absent

    def absent(self, name: str, shape: tuple[int, ...]) -> Any:
        """Return the initial value of a tensor that a source may lack: a new token head is random. None for others."""
        if self.head != "token" or not name.startswith("score."):
            return None
        if name.endswith("bias"):
            return torch.zeros(shape)
        return init_normal(name, shape, getattr(self.config.get_text_config(), "initializer_range", 0.02))

    def save(
        self, path: Path, tensors: Mapping[str, Any], dtype: torch.dtype | None = None, add: FileWriter | None = None
    ) -> None:
        """Write the model with these weights in ``dtype``, by default its files', and the tokenizer, in Hugging Face
        format, atomically, with the files that ``add`` writes into the folder."""
        dtype = dtype or self.dtype
        module = self._build()
        if self.head == "token" and not self.head_bias:
            config = copy.deepcopy(self.config)
            if config.pad_token_id is None:
                config.pad_token_id = self.tokenizer.pad_token_id
            with empty_weights():
                module = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        if self.folder is not None and (self.folder / "generation_config.json").is_file() and module.can_generate():
            module.generation_config = GenerationConfig.from_pretrained(self.folder)
        cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        write_atomically(path, module.to(dtype), self.tokenizer, cast, add)

    def _build(self) -> Any:
        try:
            with empty_weights():
                module = _CLASSES[self.head].from_config(copy.deepcopy(self.config), dtype=torch.float32)
        except ValueError as error:
            raise EngineError(f"'{self.name}' is not a model with a head of kind '{self.head}': {error}") from error
        if not self.head_bias and self.head == "token":
            module.score.bias = None
        return module


def load_causal_lm(source: str | Path, device: str = "cpu") -> CausalLM:
    """Load a model, in float32, and its tokenizer. Raises an ``EngineError`` if it is missing or lacks weights."""
    spec = ModelSpec.of(source)
    kind = "sdpa" if getattr(find_class(spec.config), "_supports_sdpa", False) else "eager"
    return as_causal_lm(spec.load(attn_implementation=kind)[0], spec.tokenizer, device)


def load_meta_causal_lm(source: str | Path) -> tuple[CausalLM, str]:
    """Return a model on the meta device, for engines whose weights another program holds, and its files' folder."""
    spec = ModelSpec.of(source)
    assert spec.folder is not None
    module = spec.empty()
    if (spec.folder / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(spec.folder)
    lm = as_causal_lm(module, spec.tokenizer, "meta")
    if not lm.eos_ids:
        raise EngineError(f"'{source}' names no end-of-sequence token: its completions would never finish")
    return lm, str(spec.folder)


def count_weight_bytes(lm: CausalLM, dtype: torch.dtype) -> int:
    return sum(tensor.numel() for _, tensor in lm.named_weights()) * dtype.itemsize


def count_cache_bytes_per_token(lm: CausalLM, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of one token, over all layers."""
    config = lm.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * int(config.num_hidden_layers) * int(heads) * get_head_width(lm) * dtype.itemsize


def get_head_width(lm: CausalLM) -> int:
    config = lm.model.config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
