# SPDX-License-Identifier: Apache-2.0
"""A module's parameters under ZeRO: what a rank has of each, for the passes and of its float32 master."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dlrover.python.rl.engine.model.loading import bind_weights, list_aliases, list_saved_buffers, tie_parameter
from dlrover.python.rl.engine.model.ranks import Ranks, all_gather_single, sum_tensors
from dlrover.python.rl.engine.model.spec import ModelSpec
from dlrover.python.rl.engine.training.adapters import (
    QuantizedLinear,
    fresh_adapter,
    is_adapter,
    model_name,
    quantized_layers,
)


def allocate(module: Any, device: str, dtype: torch.dtype, divide: Callable[[list[Any]], object]) -> None:
    """Replace a module's parameters on the meta device by zeros; tied ones stay tied. ``divide`` is called with each
    parameter, in a list, as soon as it has memory."""
    for names in list_aliases(module):
        old = module.get_parameter(names[0])
        zeros = torch.zeros(old.shape, dtype=dtype, device=device)
        new = torch.nn.Parameter(zeros, requires_grad=old.requires_grad)
        tie_parameter(module, names, new)
        divide([new])
    module.to(device)  # only the buffers still move


def make_reader(module: Any, spec: ModelSpec) -> Callable[[str], Any]:
    """Return a function that reads a parameter or saved buffer of a module by its first name: the whole tensor on the
    host. The module's parameters are on the meta device. Raises as :func:`bind_weights`."""
    aliases, buffers, quantized = list_aliases(module), list_saved_buffers(module), quantized_layers(module)
    shapes = {names[0]: tuple(module.get_parameter(names[0]).shape) for names in aliases}
    shapes |= {name: tuple(layer.shape) for name, layer in quantized.items()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    wanted = {names[0]: tuple(map(model_name, names)) for names in aliases if not is_adapter(names[0])}
    wanted |= {name: (name,) for name in buffers}
    prefix = module.base_model_prefix
    read = bind_weights(spec.source_of(wanted, prefix), wanted, shapes, spec.absent, prefix)
    return lambda name: fresh_adapter(name, shapes[name]) if is_adapter(name) else read(name, ())


@dataclass(frozen=True, eq=False)
class ZeroParameter:
    """This rank's part of one parameter."""

    name: str  # in the module, the first one if it is tied
    parameter: Any  # the module's; empty between passes if the ranks divide it
    master: Any = None
    """``[elements]``, float32: this rank's part of the flat parameter from ``start`` on, in the optimizer's memory;
    empty if other ranks have all of it, None if it is not trained."""

    start: int = 0
    quantized: QuantizedLinear | None = None  # the layer whose frozen weight it is, which is packed

    @property
    def is_divided(self) -> bool:
        return hasattr(self.parameter, "ds_tensor")

    @property
    def local(self) -> Any:
        """Memory of the passes: a flat part, padded on the last ranks, if the ranks divide it; else the whole."""
        return self.parameter.ds_tensor if self.is_divided else self.parameter

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.ds_shape if self.is_divided else self.parameter.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored_shape if self.quantized is None else tuple(self.quantized.shape)

    @torch.no_grad()
    def write(self, whole: Any, rank: int, locate: Callable[[Any], Any]) -> None:
        """Write this rank's part of a whole tensor; ``locate`` gives the memory of a tensor."""
        local = self.local
        if self.quantized is not None:
            memory = local.new_empty(self.stored_shape)
            self.quantized.store(whole, memory)
            whole = memory
        flat = whole.reshape(-1)
        start = rank * local.numel() if self.is_divided else 0
        _copy_part(locate(local).view(-1), flat, start)
        if self.master is not None:
            _copy_part(locate(self.master), flat, self.start)

    def whole(self, dtype: torch.dtype | None, device: str, ranks: Ranks, locate: Callable[[Any], Any]) -> Any:
        """Gather the whole tensor in ``dtype``, by default float32 if it is trained, else the precision of the passes.
        A collective."""
        local = locate(self.local)
        if self.quantized is not None:
            packed = self._gather(local.to(device), ranks) if self.is_divided else local
            return self.quantized.restored(packed).to(dtype or local.dtype)
        dtype = dtype or (local.dtype if self.master is None else torch.float32)
        if self.master is None or local.dtype in (dtype, torch.float32):
            if self.is_divided or local.dtype != dtype:  # casts on the device
                local = local.to(device).to(dtype)
            return self._gather(local, ranks) if self.is_divided else local
        master = locate(self.master).to(device)  # more precise
        if self.is_divided:
            return self._gather(master.to(dtype), ranks)
        flat = torch.zeros(self.parameter.numel(), dtype=master.dtype, device=device)
        flat[self.start : self.start + master.numel()] = master
        if ranks.world_size > 1:
            sum_tensors([flat.view(torch.int32)], None)  # sums bits, since -0.0 + 0.0 is 0.0
        return flat.view(self.shape).to(dtype)

    def _gather(self, local: Any, ranks: Ranks) -> Any:
        flat = local.new_empty(local.numel() * ranks.world_size)
        all_gather_single(flat, local.contiguous())
        return flat[: self.parameter.ds_numel].view(self.stored_shape)


def _copy_part(target: Any, flat: Any, start: int) -> None:
    part = flat[start : start + target.numel()]
    target[: part.numel()].copy_(part)


def list_parameters(module: Any, zero: Any, rank: int) -> list[ZeroParameter]:
    """List all parameters of a module, with masters if DeepSpeed's optimizer ``zero`` steps them."""
    quantized, shards = quantized_layers(module), []
    for name, parameter in module.named_parameters():
        master, start = None, 0
        if zero is not None and parameter.requires_grad:
            master, start = _find_master(parameter, zero, rank)
        shards.append(ZeroParameter(name, parameter, master, start, quantized.get(name)))
    return shards


def _find_master(parameter: Any, zero: Any, rank: int) -> tuple[Any, int]:
    """Return this rank's part of the master of a flat parameter, and its start."""
    if hasattr(parameter, "ds_tensor"):
        group, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
        size = parameter.ds_tensor.numel()
        return zero.fp32_partitioned_groups_flat[group].detach().narrow(0, offset, size), size * rank
    mapping = parameter._hp_mapping
    if mapping is None:  # other ranks step it
        return zero.single_partition_of_fp32_groups[0].detach()[:0], 0
    return mapping.hp_fragment.detach(), mapping.lp_fragment_address.start
