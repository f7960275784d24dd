# SPDX-License-Identifier: Apache-2.0
"""Weights in Hugging Face format: read as float32, whole or in parts; written atomically."""

import importlib
import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.hub import hub_fault
from dlrover.python.rl.common.private_files import share_file
from dlrover.python.rl.engine.api.weights import WeightSnapshot, verify_snapshot

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions of the forward and backward pass."""

Ranges: TypeAlias = tuple[slice, ...]
"""One slice for each dimension."""

FileWriter: TypeAlias = Callable[[Path], None]
"""Writes files into a folder."""

_SAMPLED = 1024
"""Numbers of each tensor that a fingerprint covers."""


class TensorSource:
    """Tensors in memory, of the model ``name``; a value may be a function without arguments that makes the tensor."""

    def __init__(
        self, tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]] | None = None, name: str = ""
    ) -> None:
        self._tensors, self._shapes, self.name = tensors, shapes, name

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes or {name: tuple(self.read(name, ()).shape) for name in self._tensors}

    def read(self, name: str, ranges: Ranges) -> Any:
        tensor = self._tensors[name]
        return (tensor if isinstance(tensor, torch.Tensor) else tensor())[ranges]


class SafetensorsSource:
    """The ``*.safetensors`` files of a folder. Only the requested part ``ranges`` of a tensor is read, to the host, in
    its stored precision. Raises an EngineError if a file is missing or incomplete."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.name = name or str(folder)
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise EngineError(f"'{folder}' lacks {', '.join(absent)}")
        self._file_of: dict[str, Any] = {}
        for path in (folder / name for name in names):
            try:
                file = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise EngineError(f"'{path}' is not a complete safetensors file: {error}") from error
            self._file_of |= dict.fromkeys(file.keys(), file)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}

    def read(self, name: str, ranges: Ranges) -> Any:
        file = self._file_of[name]
        return file.get_slice(name)[ranges] if ranges else file.get_tensor(name)


WeightReader: TypeAlias = TensorSource | SafetensorsSource


def fingerprint_files(folder: Path | None) -> str:
    """Hash the names, shapes and first numbers of all tensors of a model's files to 16 hex digits, however the files
    divide them; empty without safetensors files."""
    if folder is None or not any(folder.glob("*.safetensors")):
        return ""
    source, whole = SafetensorsSource(folder), blake2b(digest_size=8)
    for name, shape in sorted(source.shapes().items()):
        first = tuple(slice(0, 1) for _ in shape[:-1]) + tuple(slice(0, _SAMPLED) for _ in shape[-1:])
        part = source.read(name, first).reshape(-1)
        whole.update(f"{name}|{shape}|{part.dtype}|{zlib.crc32(part.view(torch.uint8).numpy().data)}\n".encode())
    return whole.hexdigest()


def match_names(
    wanted: Mapping[str, tuple[str, ...]],
    available: Mapping[str, Any],
    prefix: str = "",
    rename: Callable[[str], str] | None = None,
) -> dict[str, str]:
    """Map the first name of a tensor in a module to its name in a source, without tensors that the source lacks.

    Args:
        wanted: all names of each tensor in the module, by the first: the source may have any of a tied one's.
        available: the names in the source.
        prefix: of the base model's names in the module, which sources of the bare model lack.
        rename: turns the module's names into the source's.
    """
    matches = {}
    for first, names in wanted.items():
        candidates = [rename(name) for name in names] if rename else list(names)
        if prefix:
            candidates += [name.removeprefix(f"{prefix}.") for name in candidates if name.startswith(f"{prefix}.")]
            candidates += [f"{prefix}.{name}" for name in candidates]
        match = next((name for name in candidates if name in available), None)
        if match is not None:
            matches[first] = match
    return matches


def bind_weights(
    source: WeightReader,
    wanted: Mapping[str, tuple[str, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    absent: Callable[[str, tuple[int, ...]], Any],
    prefix: str = "",
    rename: Callable[[str], str] | None = None,
) -> Callable[[str, Ranges], Any]:
    """Return a function that reads a tensor by its first name in a module and ``ranges`` (empty: all).

    ``shapes`` are of the whole tensors, by first name; ``absent(name, shape)`` makes a tensor that the source may lack,
    and returns None for others; the rest is for :func:`match_names`. Raises an EngineError if the source lacks tensors,
    or has them in other shapes."""
    available = source.shapes()
    matches = match_names(wanted, available, prefix, rename)
    initial = {name: absent(name, shapes[name]) for name in wanted if name not in matches}
    faults = [name for name, tensor in initial.items() if tensor is None]
    faults += [
        f"{name} of shape {shapes[name]} (it has {tuple(available[at])})"
        for name, at in matches.items()
        if tuple(available[at]) != shapes[name]
    ]
    if faults:
        name = f" '{source.name}'" if source.name else ""
        raise EngineError(f"the checkpoint{name} lacks {', '.join(sorted(faults))}")

    def read(name: str, ranges: Ranges) -> Any:
        return initial[name][ranges] if name in initial else source.read(matches[name], ranges)

    return read


def list_saved_tensors(module: Any) -> dict[str, Any]:
    """Return the parameters and saved buffers of a module; tied tensors once, under their first name."""
    first_names: dict[int, str] = {}
    tensors = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in tensors.items() if first_names.setdefault(id(tensor), name) == name}


def list_saved_buffers(module: Any) -> dict[str, Any]:
    saved = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}


def list_aliases(module: Any) -> list[tuple[str, ...]]:
    """Return the names of each parameter of a module; a tied one has several."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in aliases.values()]


def tie_parameter(module: Any, names: Sequence[str], parameter: Any) -> None:
    for name in names:
        owner, _, last = name.rpartition(".")
        module.get_submodule(owner).register_parameter(last, parameter)


def layers_of(module: Any) -> list[Any]:
    """Return the layers that a Hugging Face model declares as indivisible."""
    units: Sequence[Any] = (
        getattr(module, "non_split_modules", None) or getattr(module, "_no_split_modules", None) or ()
    )
    names = {unit if isinstance(unit, str) else unit.__name__ for unit in units}
    return [part for part in module.modules() if type(part).__name__ in names and part is not module]


def init_normal(name: str, shape: tuple[int, ...], std: float) -> Any:
    """Draw normal numbers, the same in every process: the name is their seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * std


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, eq=False)
class CausalLM:
    """A Hugging Face model, its tokenizer and its limits."""

    model: Any  # float32, dropout off
    tokenizer: Any
    eos_ids: tuple[int, ...]  # of the tokenizer and the generation config
    pad_id: int
    vocab_size: int  # rows of the input embedding
    max_positions: int | None  # None: the model names no limit
    known_ids: int | None = None  # ids from this one on are never sampled; None: no limit

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        return iter(list_saved_tensors(self.model).items())

    def masked(self, is_masked: bool) -> "CausalLM":
        """Return the model without the ids that its tokenizer lacks, if these are to be masked."""
        return replace(self, known_ids=find_known_ids(self.tokenizer, self.vocab_size, is_masked))

    def check(self, snapshot: WeightSnapshot, serving: int) -> None:
        verify_snapshot(snapshot, {name: tuple(tensor.shape) for name, tensor in self.named_weights()}, serving)

    def check_tokens(self, tokens: Any, longest: int) -> None:
        """Raise an ``EngineError`` if flat ids are not in the vocabulary, or ``longest`` exceeds the positions."""
        check_positions(longest, self.max_positions)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise EngineError(
                f"token ids from {tokens.min()} to {tokens.max()}, but the model has 0 to {self.vocab_size - 1}"
            )


def check_positions(longest: int, positions: int | None) -> None:
    """Raise an ``EngineError`` if a sequence of ``longest`` tokens has more than the model's ``positions``."""
    if positions is not None and longest > positions:
        raise EngineError(f"a sequence of {longest} tokens does not fit the model's {positions} positions")


def as_causal_lm(model: Any, tokenizer: Any, device: str = "cpu") -> CausalLM:
    """Prepare a float32 Hugging Face model and its tokenizer for engines; disables dropout."""
    disable_dropout(model)
    model.eval().to(device)
    ends = merge_eos_ids(tokenizer, getattr(model.generation_config, "eos_token_id", None))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(ends), 0)
    return CausalLM(model, tokenizer, ends, pad, *find_limits(model))


def merge_eos_ids(tokenizer: Any, configured: int | list[int] | None) -> tuple[int, ...]:
    """Return the ids that end a sequence: the tokenizer's, then the ones ``configured`` in a generation config."""
    ids: list[int] = []
    for value in (tokenizer.eos_token_id, configured):
        if value is not None:
            ids += value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(ids))


def read_eos_ids(model: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """Read the ids that end a sequence from a model's files: from ``generation_config.json``, else ``config.json``, as
    Transformers does."""
    folder = find_model_folder(model)
    files = (folder / name for name in ("generation_config.json", "config.json"))
    content: Any = next((json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()), {})
    return merge_eos_ids(tokenizer, content.get("eos_token_id"))


def find_limits(model: Any) -> tuple[int, int | None]:
    """Return the rows of the input embedding, and the maximum tokens of a sequence or None."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return model.get_input_embeddings().num_embeddings, longest


def count_known_ids(tokenizer: Any) -> int:
    """Return one more than a tokenizer's highest id; ``len(tokenizer)`` is less if it skips ids."""
    return 1 + max(tokenizer.get_vocab().values())


def find_known_ids(tokenizer: Any, rows: int, is_masked: bool) -> int | None:
    """Return :func:`count_known_ids` if a model's embedding has more ``rows``, to be masked, else None. Such rows pad
    the embedding to a round size, as in Qwen's models; their ids have no text."""
    count = count_known_ids(tokenizer) if is_masked else rows
    return count if count < rows else None


def find_model_folder(model: str | Path) -> Path:
    """Return the folder with a model's files, downloaded if ``model`` is a hub name, or raise an ``EngineError``."""
    text = str(Path(model).expanduser()) if str(model).startswith("~") else str(model)
    if Path(text).is_dir():
        return Path(text)
    message = f"no model at '{text}': it is not a folder"
    if isinstance(model, Path) or _HUB_NAME.fullmatch(text) is None:
        raise EngineError(message)
    wanted = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(huggingface_hub.snapshot_download(text, allow_patterns=wanted))
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors
        raise EngineError(f"{message}, and {hub_fault('model', text) or error}") from error


def load_tokenizer(model: str | Path) -> Any:
    folder = find_model_folder(model)
    try:
        return load_auto("AutoTokenizer", folder)
    except Exception as error:  # A tokenizer's code may raise anything.
        raise EngineError(f"no tokenizer can be loaded from '{model}': {error or type(error).__name__}") from error


def load_auto(kind: str, folder: Path) -> Any:
    """Load with a class of Transformers, imported on demand: that is slow, and only processes with a model need it."""
    return getattr(importlib.import_module("transformers"), kind).from_pretrained(folder)


_RANDOM = re.compile("drop|jitter")


def disable_dropout(model: Any) -> None:
    """Set dropout and other random rates to 0, in modules and in the configurations that they read: log-probs in
    training must equal the sampler's."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for holder in filter(None, (module, getattr(module, "config", None))):
            rates = {name for name, value in vars(holder).items() if isinstance(value, float) and _RANDOM.search(name)}
            vars(holder).update(dict.fromkeys(rates, 0.0))


def prepare_training(module: Any, trained: bool, recompute: bool, reentrant: bool = False) -> None:
    """Freeze a module that is not trained; let a trained one recompute activations, if configured. Dropout has to be
    off: Transformers recomputes in training mode only."""
    if not trained:
        module.requires_grad_(False)
    elif recompute:
        module.train()
        enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
        enable({"use_reentrant": reentrant})


def write_atomically(
    path: Path, model: Any, tokenizer: Any, tensors: Mapping[str, Any] | None = None, add: FileWriter | None = None
) -> Path:
    """Write model and tokenizer, if any, and the files that ``add`` writes to the folder ``path``. A reader sees the
    old folder or the new one, never a part; for an instant neither, since a folder cannot be replaced in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = (path.with_name(f".{path.name}.{kind}-{uuid.uuid4().hex}") for kind in ("new", "old"))
    try:
        new.mkdir()
        if model is not None:
            model.save_pretrained(new, state_dict=tensors)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
        if add is not None:
            add(new)
        for file in filter(Path.is_file, new.rglob("*")):
            share_file(file)  # safetensors writes for the owner alone
            sync_to_disk(file)
        if path.exists():
            path.rename(old)
        new.rename(path)
        sync_to_disk(path.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return path


def sync_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
