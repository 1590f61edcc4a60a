"""OpenReg, PyTorch's example of a device from outside, made fit for several ranks.

PyTorch keeps `torch_openreg` with its tests. Its device computes on the CPU, has streams and events
that run in threads of their own, and lets nobody read its memory but its operators: what reads a
device pointer on the host dies. `parts.cpp` adds collectives, and storages that change size.
"""

import importlib.util
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import cpp_extension

TYPE = "openreg"
BACKENDS = "cpu:gloo,openreg:staged"
_NAME = "layerzero_test_openreg"


def build_parts(folder: Path) -> Path:
    """The library of parts.cpp; takes a minute."""
    source = Path(__file__).with_name("parts.cpp")
    cpp_extension.load(_NAME, [str(source)], build_directory=str(folder))
    return folder / f"{_NAME}.so"


def register(library: Path) -> None:
    """Bring in the device, a backend for it, and storages that change size, in a rank's process."""
    importlib.import_module("torch_openreg")
    parts = _load(library)

    def create(options: Any, _: object) -> dist.Backend:
        gloo = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, options.timeout
        )
        return parts.staged_backend(gloo)

    dist.Backend.register_backend("staged", create, extended_api=True, devices=[TYPE])
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> None:
        if storage.device.type == TYPE:
            parts.resize(storage, nbytes)
        else:
            resize(storage, nbytes)

    torch.UntypedStorage.resize_ = resize_


def own_device() -> str:
    """Each rank has one of OpenReg's two devices; the second rank's is not the current one."""
    return f"{TYPE}:{dist.get_rank() % 2}"


def device_group() -> dist.ProcessGroup:
    """All ranks, with a backend for each of the two devices. Collective; after `register`."""
    group = dist.new_group(timeout=timedelta(seconds=40), backend=BACKENDS)
    assert isinstance(group, dist.ProcessGroup)
    return group


def moved(value: Any, device: str) -> Any:
    """A batch, or named tensors, on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: moved(each, device) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(moved(each, device) for each in value)
    return value


def on_device(model: nn.Module) -> nn.Module:
    """The module itself, tied parameters still tied: `Module.to` makes one for each name here."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, own in module.named_parameters(recurse=False, remove_duplicate=False):
            if own not in made:
                made[own] = nn.Parameter(own.detach().to(own_device()), own.requires_grad)
            setattr(module, name, made[own])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(own_device()))
    return model


def _load(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
