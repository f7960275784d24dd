# SPDX-License-Identifier: Apache-2.0
"""Engines by their name in a job file, and their abilities."""

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar

from dlrover.python.rl.common.errors import ClassNotFound, ConfigError, EngineError, MissingExtra
from dlrover.python.rl.common.extensions import ExtensionPoint, load_object
from dlrover.python.rl.config.typed import parse
from dlrover.python.rl.data.batch import ColumnSpec
from dlrover.python.rl.engine.api.base import LoraSettings
from dlrover.python.rl.engine.api.settings import OptimizerConfig, ParallelSizes

T = TypeVar("T")

_ENGINES = "dlrover.python.rl.engine"

TRAIN_ENGINES = ExtensionPoint(
    "engine",
    "dlrover_rl.train_engines",
    {
        "fsdp2": f"{_ENGINES}.fsdp2.engine:Fsdp2TrainEngine",
        "deepspeed": f"{_ENGINES}.deepspeed.engine:DeepSpeedTrainEngine",
        "megatron": f"{_ENGINES}.megatron.engine:MegatronTrainEngine",
    },
)
ROLLOUT_ENGINES = ExtensionPoint(
    "engine",
    "dlrover_rl.rollout_engines",
    {
        "torch": f"{_ENGINES}.rollout_torch.engine:TorchRolloutEngine",
        "vllm": f"{_ENGINES}.vllm.engine:VllmRolloutEngine",
        "sglang": f"{_ENGINES}.sglang.engine:SglangRolloutEngine",
    },
)

_INTERFACES = {
    TRAIN_ENGINES.group: (
        ("step", "evaluate", "publish", "state_dict"),
        ("model", "optimizer", "settings", "rendezvous", "memory"),
    ),
    ROLLOUT_ENGINES.group: (("add", "advance", "receive"), ("model", "settings", "memory")),
}
"""Methods that identify an engine, and the arguments of its constructor."""


@dataclass(frozen=True)
class EngineInfo:
    """The abilities and options of an engine, declared by its class as ``info``; these are the defaults.

    An engine of this package declares it in its folder's ``__init__.py``, which is read without importing the backend.
    """

    options: type | None = None  #: dataclass of the ``backend`` options; None: the engine reads them itself
    package: str = ""  #: import name of the backend, if the core does not include it
    distribution: str = ""  #: package to install, if it has another name
    divides: tuple[str, ...] | None = None  #: sizes of parallelism that may be above 1; None: all
    adapters: bool = True  #: trains low-rank adapters
    quantizes: bool = False  #: holds the model below adapters in 4 bits
    shares_process: bool = True  #: an engine of one rank runs in a process that is a rank of another engine
    top_token_ids: bool = True  #: evaluates with ``top``, as teachers of whole distributions do
    sgd: bool = True  #: has SGD besides AdamW
    adamw_8bit: bool = False  #: has AdamW with moments in 8 bits
    bare_head: bool = True  #: trains a token head without a bias, as reward models have
    may_be_remote: bool = False  #: with the option ``url`` the backend runs elsewhere; no extra installs it
    whole_matrices: tuple[str, ...] = ()  #: options of ``backend`` that exclude tensor parallelism
    redivides: bool = True  #: resumes from the states of another number of ranks, or of another layout
    fills_device: bool = False  #: a cache without a configured size takes all that ``gpu_memory_utilization`` allows
    masks_unknown_ids: bool = False  #: supports the setting of this name, of train and rollout engines
    adds_adapters: bool = False  #: reads each weight by ``WeightSnapshot.tensor``; else weights arrive merged
    deterministic_on: tuple[str, ...] = ()  #: types of devices where repeated calls have the same results, bit for bit
    limit_option: str = ""  #: the option of ``backend`` that bounds the tokens of a sequence
    find_model_fault: Callable[[Mapping[str, Any], str], str] = lambda content, head: ""
    """Report why it does not support a model, by its ``config.json`` and head (``causal`` or ``token``), or ""."""
    columns: Mapping[str, ColumnSpec] = field(default_factory=dict)
    """Columns of a rollout engine's samples besides log-probs and versions, which a loss may name."""


def engine_info(point: ExtensionPoint, name: str) -> EngineInfo:
    """Return the declaration of the engine ``name``; the default if there is none, or it cannot be imported."""
    try:
        return _read_info(point, name)
    except (ClassNotFound, MissingExtra):
        return EngineInfo()


def _read_info(point: ExtensionPoint, name: str) -> EngineInfo:
    place = point.place(name)
    if place.startswith(f"{_ENGINES}."):
        package = importlib.import_module(place.partition(":")[0].rpartition(".")[0])
        info = getattr(package, "INFO", None)
    else:
        info = getattr(_import(place), "info", None)
    return info if isinstance(info, EngineInfo) else EngineInfo()


def _import(place: str) -> Any:
    try:
        return load_object(place)
    except ClassNotFound as error:
        if isinstance(error.__cause__, MissingExtra):
            raise error.__cause__ from None
        raise


def engine_class(point: ExtensionPoint, name: str) -> Any:
    """Import the class of an engine, or a function that makes one: a built-in name, an entry point, or
    ``package.module:Class``.

    Raises:
        EngineError: there is no such engine; gives the nearest name. From the function: it has returned something else.
        MissingExtra: its backend is not installed; names the extra.
    """
    try:
        factory = _import(point.place(name))
    except ClassNotFound as error:
        raise EngineError(str(error)) from error
    if not callable(factory):
        raise EngineError(f"{name} is a {type(factory).__name__}, not an engine")
    if inspect.isclass(factory):
        return factory

    @wraps(factory)
    def make(*arguments: Any, **options: Any) -> Any:
        engine = factory(*arguments, **options)
        if fault := _find_missing_methods(point, engine):
            raise EngineError(f"{name} returned a {type(engine).__name__}, which {fault}")
        return engine

    return make


def _find_missing_methods(point: ExtensionPoint, engine: Any) -> str:
    """Report an engine, or its class, that has no method of an engine, nor a ``__getattr__`` for it; "" for others."""
    methods, _ = _INTERFACES[point.group]
    has_one = any(hasattr(engine, name) for name in (*methods, "__getattr__"))
    return "" if has_one else f"lacks the methods {', '.join(methods)}"


def _find_fault(point: ExtensionPoint, name: str) -> str:
    """Report a class or function from outside this package that cannot make an engine; "" for others."""
    if (place := point.place(name)).startswith(f"{_ENGINES}."):
        return ""
    factory, (_, arguments) = _import(place), _INTERFACES[point.group]
    if inspect.isclass(factory) and (fault := _find_missing_methods(point, factory)):
        return f"{name} is not an engine: it {fault}"
    if not callable(factory):
        return f"{name} is a {type(factory).__name__}, not an engine"
    with suppress(ValueError):  # some C functions have no signature
        try:
            inspect.signature(factory).bind(*arguments)
        except TypeError as error:
            return f"{name} cannot be called with ({', '.join(arguments)}): {error}"
    return ""


def engine_place(point: ExtensionPoint, name: str) -> str:
    """Return ``package.module:Class`` of an engine without importing it. Raises as :func:`engine_class`."""
    try:
        info = _read_info(point, name)
    except ClassNotFound as error:
        raise EngineError(str(error)) from error
    if not info.may_be_remote and (absent := absent_package(point, name, {})):
        raise MissingExtra(info.distribution or absent, absent)
    return point.place(name)


def validate_engine(
    point: ExtensionPoint, name: str, options: Mapping[str, Any], where: str, runs_here: bool = True
) -> list[ConfigError]:
    """Validate name, extra and options (key ``{where}_options``) of an engine without importing its backend, which has
    to be installed only if the engine ``runs_here``."""
    try:
        info, fault = _read_info(point, name), _find_fault(point, name)
    except (ClassNotFound, MissingExtra) as error:
        return [ConfigError(where, str(error))]
    if fault:
        return [ConfigError(where, fault)]
    errors = [] if info.options is None else parse(info.options, dict(options), f"{where}_options")[1]
    if runs_here and (absent := absent_package(point, name, options)):
        missing = ConfigError(where, str(MissingExtra(info.distribution or absent, absent)))
        if info.may_be_remote:
            missing = ConfigError(f"{where}_options.url", f"{absent} is not installed here: set its server's URL")
        return [missing, *errors]
    return errors


def absent_package(point: ExtensionPoint, name: str, options: Mapping[str, Any]) -> str:
    """Return the import name of an engine's backend if it is not installed here, else ""."""
    package = engine_info(point, name).package
    is_remote = "url" in options  # a server that has the package itself
    return package if package and importlib.util.find_spec(package) is None and not is_remote else ""


def require_peft() -> None:
    """Raise MissingExtra unless peft is installed."""
    if importlib.util.find_spec("peft") is None:
        raise MissingExtra("peft", "lora")


def require_bitsandbytes() -> None:
    """Raise MissingExtra unless bitsandbytes is installed, in a version that multiplies by packed weights as stored."""
    try:
        major, minor = map(int, importlib.metadata.version("bitsandbytes").split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        major, minor = 0, 0
    if (major, minor) < (0, 50):
        raise MissingExtra("bitsandbytes>=0.50", "bitsandbytes")


def find_train_errors(
    name: str,
    info: EngineInfo,
    sizes: ParallelSizes,
    lora: LoraSettings | None,
    bare_head: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """List the settings that a train engine does not support."""
    above = {key: size for key, size in asdict(sizes).items() if size > 1}
    errors = [
        f"{key} is {size}, but {name} supports only 1"
        for key, size in above.items()
        if info.divides is not None and key not in info.divides
    ]
    errors += [
        f"{key} needs tensor_parallel_size 1, not {sizes.tensor_parallel_size}"
        for key in info.whole_matrices
        if options.get(key) and sizes.tensor_parallel_size > 1
    ]
    if bare_head and not info.bare_head:
        errors.append(f"{name} gives a score head a bias, which a reward model must not have: use fsdp2 or deepspeed")
    if lora is not None and not info.adapters:
        errors.append(f"{name} trains only whole models: adapters need fsdp2 or deepspeed")
    elif lora is not None and sizes.tensor_parallel_size > 1:
        errors.append(f"adapters cannot be split: tensor_parallel_size must be 1, not {sizes.tensor_parallel_size}")
    if lora is not None and lora.quantize_base is not None and not info.quantizes:
        errors.append(f"{name} cannot quantize the model: lora.quantize_base needs fsdp2 or deepspeed")
    return errors


def find_optimizer_errors(
    name: str, info: EngineInfo, config: OptimizerConfig, tensor_parallel_size: int = 1
) -> list[str]:
    """List the settings of an optimizer that a train engine does not support."""
    if not {"adamw": True, "sgd": info.sgd, "adamw_8bit": info.adamw_8bit}[config.name]:
        return [f"{name} does not support {config.name}: use adamw, or fsdp2"]
    if config.name == "adamw_8bit" and tensor_parallel_size > 1 and info.redivides:  # rows, but not their parts
        return [f"adamw_8bit needs tensor_parallel_size 1, not {tensor_parallel_size}"]
    return []


def find_rollout_errors(name: str, info: EngineInfo, tensor_parallel_size: int) -> list[str]:
    """List the settings that a rollout engine does not support."""
    if info.divides is None or tensor_parallel_size == 1:
        return []
    return [f"tensor_parallel_size is {tensor_parallel_size}, but the {name} rollout engine runs on one device"]


def raise_engine_errors(errors: list[str]) -> None:
    if errors:
        raise EngineError("; ".join(errors))


def read_options(kind: type[T], options: Mapping[str, Any], where: str = "backend") -> T:
    """Parse a mapping into a dataclass. Raises an ``EngineError`` that lists every fault, with keys below ``where``."""
    parsed, errors = parse(kind, dict(options), where)
    if parsed is None:
        raise EngineError("; ".join(map(str, errors)))
    return parsed
