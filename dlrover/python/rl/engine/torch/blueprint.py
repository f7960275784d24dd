"""A Hugging Face model described, not built: its module without weights, its tokenizer, and where its weights are."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
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
from dlrover.python.rl.engine.module import empty_weights
from dlrover.python.rl.engine.torch import attention
from dlrover.python.rl.engine.torch.loading import disable_dropout, is_hub_name, write_atomically
from dlrover.python.rl.engine.torch.packing import Head
from dlrover.python.rl.engine.torch.sources import SafetensorsSource, Source, TensorSource, drawn, place_names

_CLASSES = {"causal": AutoModelForCausalLM, "token": AutoModelForTokenClassification}
_WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True, eq=False)
class Blueprint:
    """What is needed to build, load and write a model. Made by :meth:`of`.

    Attributes:
        name: folder or hub name, for messages.
        folder: where the files are; None when ``source`` has been given in place of files.
        config: the model's configuration.
        tokenizer: its tokenizer.
        head: what its outputs are.
        weights: in place of files.
        head_bias: whether a token head has a bias.
    """

    name: str
    folder: Path | None
    config: Any
    tokenizer: Any
    head: Head = "causal"
    weights: Source | None = None
    head_bias: bool = True

    @classmethod
    def of(cls, model: str | Path, head: Head = "causal", head_bias: bool = True) -> "Blueprint":
        """Read configuration and tokenizer of a folder or hub name.

        Raises:
            EngineError: there is no such model.
        """
        hf_logging.disable_progress_bar()  # one bar per process and file drowns the run's own
        folder = model_folder(model)
        try:
            config = AutoConfig.from_pretrained(folder)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            why = "the folder does not hold a causal language model with its tokenizer"
            raise EngineError(f"no model can be loaded from '{model}': {why}") from error
        if head == "token":
            config.num_labels = 1
        return cls(str(model), folder, config, tokenizer, head, head_bias=head_bias)

    def empty(self) -> Any:
        """A new module in evaluation mode: parameters on the meta device in float32, real buffers, no dropout.

        Its attention keeps packed documents apart where it can (:func:`attention.can_pack`).

        Raises:
            EngineError: the configuration is of no model with this head.
        """
        try:
            with empty_weights():
                module = _CLASSES[self.head].from_config(self.config, dtype=torch.float32)
        except ValueError as error:
            raise EngineError(f"'{self.name}' is no model with a head of kind '{self.head}': {error}") from error
        if not self.head_bias and self.head == "token":
            module.score.bias = None
        if attention.can_pack(module):
            module.set_attn_implementation(attention.NAME)
        disable_dropout(module)
        return module.eval()

    @property
    def source(self) -> Source:
        """The model's weights, read tensor by tensor."""
        if self.weights is not None:
            return self.weights
        assert self.folder is not None
        if not list(self.folder.glob("*.safetensors")):
            return self.library_source()
        return SafetensorsSource(self.folder)

    def source_of(self, wanted: Mapping[str, tuple[str, ...]], prefix: str) -> Source:
        """The files, or the library where it names tensors in another way than they do.

        Args:
            wanted: a tensor's first name in the module, and all its names.
            prefix: what the module puts before the names of its base model.
        """
        source = self.source
        found = place_names(wanted, source.shapes(), prefix)
        lacking = [name for name in wanted if name not in found and not name.startswith("score.")]
        return self.library_source() if lacking else source

    def reader(
        self, wanted: Mapping[str, tuple[str, ...]], shapes: Mapping[str, tuple[int, ...]], prefix: str
    ) -> Callable[[str], Any]:
        """Gives each of a module's tensors, whole and on the host, by its first name.

        Args:
            wanted: a tensor's first name in the module, and all its names.
            shapes: first name to shape.
            prefix: what the module puts before the names of its base model.

        Raises:
            EngineError: the weights lack tensors, or have them in other shapes.
        """
        source = self.source_of(wanted, prefix)
        there = source.shapes()
        found = place_names(wanted, there, prefix)
        faults = [name for name in wanted if name not in found and self.absent(name, shapes[name]) is None]
        faults += [
            f"{name} of shape {shapes[name]} (it has {tuple(there[at])})"
            for name, at in found.items()
            if tuple(there[at]) != shapes[name]
        ]
        if faults:
            raise EngineError(f"the checkpoint '{self.name}' lacks {', '.join(sorted(faults))}")

        def read(name: str) -> Any:
            if name not in found:
                return self.absent(name, shapes[name])
            return source.read(found[name], (slice(None),) * len(shapes[name]))

        return read

    def library_source(self) -> Source:
        """The weights as the library loads them, in host memory: for files of older formats and other names.

        Raises:
            EngineError: they cannot be loaded, or some are not there.
        """
        where = self.folder if Path(self.name).is_dir() else self.name
        try:
            module, report = _CLASSES[self.head].from_pretrained(
                where, config=self.config, dtype=torch.float32, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise EngineError(f"no model can be loaded from '{self.name}': {error}") from error
        # The library fills these with random numbers and goes on.
        absent = {*report["missing_keys"], *map(str, report["mismatched_keys"])}
        if needed := sorted(name for name in absent if self.head == "causal" or not name.startswith("score.")):
            raise EngineError(f"the checkpoint '{self.name}' lacks {', '.join(needed)}")
        return TensorSource({name: tensor for name, tensor in module.state_dict().items() if name not in absent})

    def absent(self, name: str, shape: tuple[int, ...]) -> Any:
        """What a tensor that a source need not have starts from: a new token head is drawn. None for others."""
        if self.head != "token" or not name.startswith("score."):
            return None
        if name.endswith("bias"):
            return torch.zeros(shape)
        return drawn(name, shape, getattr(self.config.get_text_config(), "initializer_range", 0.02))

    def save(self, path: Path, tensors: dict[str, Any]) -> None:
        """Write the model with these weights, and the tokenizer, in Hugging Face format, whole or not at all."""
        module = self._classifier() if self.head == "token" and not self.head_bias else self.empty()
        if self.folder is not None and (self.folder / "generation_config.json").is_file() and module.can_generate():
            module.generation_config = GenerationConfig.from_pretrained(self.folder)
        write_atomically(path, module, self.tokenizer, tensors)

    def _classifier(self) -> Any:
        """What scores a sequence by its last token, which it finds by the padding after it."""
        config = copy.deepcopy(self.config)
        if config.pad_token_id is None:
            config.pad_token_id = self.tokenizer.pad_token_id
        with empty_weights():
            return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)


def tokenizer_of(model: str | Path) -> Any:
    """The tokenizer of a model, which is not loaded.

    Raises:
        EngineError: there is no such model, or it has none.
    """
    try:
        return AutoTokenizer.from_pretrained(model_folder(model))
    except (OSError, ValueError) as error:
        raise EngineError(f"no tokenizer can be loaded from '{model}'") from error


def model_folder(model: str | Path) -> Path:
    """The folder with a model's files; those of a hub name are fetched where they are not there yet.

    Raises:
        EngineError: there is no such model.
    """
    text = str(Path(model).expanduser()) if str(model).startswith("~") else str(model)
    if Path(text).is_dir():
        return Path(text)
    nowhere = f"no model at '{text}': it is neither a folder nor reachable on the hub"
    if isinstance(model, Path) or not is_hub_name(text):
        raise EngineError(nowhere)
    try:
        return Path(snapshot_download(text, allow_patterns=list(_WANTED)))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise EngineError(nowhere) from error
