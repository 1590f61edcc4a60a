"""save_pretrained for a sharded model, without the whole model on any rank.

    shards -> stream of full tensors, unit by unit -> first rank -> places in the files

transformers' own functions decide which tensors are saved, under which names, and how ties are
handled. They are run on stand-ins without memory before any data moves.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from layerzero import ZeRO3
from layerzero.checkpoint import stream_full
from layerzero.checkpoint.adapters import (
    MODEL,
    Announcement,
    Names,
    bytes_of,
    checkpoint_group_of,
    named_buffers,
    plan_files,
    refuse_experts,
    root_state_of,
    sync_folder,
    write_durably,
)
from layerzero.config import parse_nbytes
from layerzero.integrations.engine import get_info, summoned

Tensors = dict[str, torch.Tensor]
_LINKED = "linked"


def save_pretrained(
    model: ZeRO3,
    folder: str | os.PathLike[str],
    *,
    max_file_size: str = "5GB",
    weights_from: str | os.PathLike[str] | None = None,
) -> None:
    """Write what the model's own `save_pretrained` would, for `from_pretrained`. Collective.

    Full tensors are gathered unit by unit, and the first rank writes each to its place. For
    a model with adapters (peft), only these are gathered and written. Files get their final names
    when all are complete.

    Args:
        model: a ZeRO3 module around any model, or the model in it, between steps.
        folder: created if missing; only the first rank's is used.
        max_file_size: largest size of a file of weights; a larger tensor gets a file of its own.
        weights_from: a checkpoint's folder that `layerzero.checkpoint.save` has just written from
            this model. If it has all weights under the names that `from_pretrained` expects, and
            the file system supports hard links, its files are linked instead of gathering and
            writing.

    Raises:
        CheckpointError: on all ranks: the first rank could not write; says why.
        CollectiveError: a rank died or did not take part.
        NotImplementedError: ranks have experts of different names, or adapters of another kind.
    """
    nbytes = parse_nbytes(max_file_size, "max_file_size")
    state = root_state_of(model, "save_pretrained")
    refuse_experts(state, "save_pretrained")
    wrapper = state.wrapper_ref()
    if isinstance(wrapper, ZeRO3) and model is wrapper.module:
        model = wrapper
    together = checkpoint_group_of(state, None)
    path, module = Path(folder), model.module
    writer: _FolderWriter | _AdapterWriter
    if is_peft_model(module):
        writer = _AdapterWriter(path, model)
    elif getattr(module, "_hf_peft_config_loaded", False):
        raise NotImplementedError(
            "save_pretrained: expected adapters from peft.get_peft_model, got some from "
            "add_adapter or load_adapter; layerzero.checkpoint.save saves these, too"
        )
    else:
        weights = None if weights_from is None else Path(weights_from)
        writer = _FolderWriter(path, module, FolderPlan.of(model), nbytes, weights)

    def write() -> None:
        failure: Exception | None = None
        for name, tensor in stream_full(model, only=writer.wanted):
            # The stream is consumed to its end even after a failure, because it is collective.
            if together.is_first and failure is None:
                try:
                    writer.put(name, tensor)
                except Exception as error:
                    failure = error
        if failure is not None:
            raise failure

    try:
        if together.from_first(f"preparation of {path}", writer.prepare) != _LINKED:
            together.exchange(f"the result of writing {path}", write, writer.nbytes)
        with writer.shown():
            together.from_first(f"commit of {path}", writer.commit)
    finally:
        writer.discard()


def is_peft_model(module: nn.Module) -> bool:
    """Whether it is a model of peft; does not import peft."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)


@dataclass(frozen=True)
class FolderPlan:
    """The tensors that the model's own `save_pretrained` would write. Not collective."""

    as_is: Mapping[str, str]
    """Tensors that are written unchanged: name in the model to name in the folder."""
    groups: list[tuple[str, ...]]
    """Names of the other tensors, in groups that are converted together."""
    targets: Mapping[str, torch.Tensor]
    """The folder's tensors, on the meta device."""
    names: Mapping[str, str]
    """Name in `stream_full` to name in `as_is` or `groups`; "" for a tensor that is not saved."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.targets.values())

    @property
    def is_plain(self) -> bool:
        """Whether the folder has the model's tensors unchanged, under the model's names."""
        return not self.groups and all(
            self.as_is.get(name) == streamed for streamed, name in self.names.items()
        )

    @classmethod
    def of(cls, model: ZeRO3) -> FolderPlan:
        module: Any = model.module
        stand_ins = _stand_ins(model)
        kept: Tensors = {name: tensor for tensor, names in stand_ins for name in names}
        if isinstance(module, PreTrainedModel):
            for name in module._keys_to_ignore_on_save or ():
                kept.pop(name, None)
            kept = remove_tied_weights_from_state_dict(kept, module)
        else:
            kept = {names[0]: tensor for tensor, names in stand_ins}
        names = {
            found[0]: next((name for name in found if name in kept), "") for _, found in stand_ins
        }
        meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in kept.items()}
        targets = _in_folder(module, meta)
        source_of = {id(tensor): name for name, tensor in meta.items()}
        as_is = {
            source_of[id(tensor)]: target
            for target, tensor in targets.items()
            if id(tensor) in source_of
        }
        rest = {name: tensor for name, tensor in meta.items() if name not in as_is}
        return cls(as_is, _groups(module, rest, targets, as_is), targets, names)


def _stand_ins(model: ZeRO3) -> list[tuple[torch.Tensor, tuple[str, ...]]]:
    """A tensor of one element's memory for each in the state dict, of its full shape and dtype."""
    found = [*Names(model).parameters, *named_buffers(model)]
    stand_ins = []
    for tensor, names in found:
        info = get_info(tensor) if isinstance(tensor, nn.Parameter) else None
        shape = tensor.shape if info is None else info.shape
        one = torch.empty(1, dtype=tensor.dtype)
        stand_ins.append((one.as_strided(shape, (0,) * len(shape)), names))
    return stand_ins


def _in_folder(module: nn.Module, tensors: Tensors) -> Tensors:
    if not isinstance(module, PreTrainedModel):
        return tensors
    return cast(Tensors, revert_weight_conversion(module, tensors))


def _groups(
    module: nn.Module, rest: Tensors, targets: Tensors, as_is: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """Groups of tensors that can be converted independently: single tensors, or all together."""
    if not rest:
        return []
    wanted = {name: t.shape for name, t in targets.items() if name not in set(as_is.values())}
    found: dict[str, torch.Size] = {}
    try:
        for name, tensor in rest.items():
            found |= {n: t.shape for n, t in _in_folder(module, {name: tensor}).items()}
    except Exception:  # Conversions that need other tensors fail with different errors.
        found = {}
    return [(name,) for name in rest] if found == wanted else [tuple(rest)]


class _FolderWriter:
    """Runs on the first rank: creates files at full length, then writes tensors to their places."""

    def __init__(
        self, folder: Path, module: nn.Module, plan: FolderPlan, nbytes: int, weights: Path | None
    ) -> None:
        self._folder = folder
        self._weights = weights
        self._module = module
        self._plan = plan
        announced = [
            Announcement(MODEL, name, (), tensor.dtype, tuple(tensor.shape), (number, 0), False)
            for number, (name, tensor) in enumerate(plan.targets.items())
        ]
        self._files = plan_files(MODEL, announced, nbytes)
        self._places = {
            name: (file.name, entry)
            for file in self._files.files
            for name, entry in file.tensors.items()
        }
        self._group_of = {name: group for group in plan.groups for name in group}
        self._waiting: Tensors = {}
        self._temporary: Path | None = None
        self.wanted = {streamed for streamed, name in plan.names.items() if name}
        self.nbytes = plan.nbytes

    def prepare(self) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=self._folder))
        if isinstance(self._module, PreTrainedModel):
            # Writes the config, generation config and code of the model, and empty weights.
            type(self._module).save_pretrained(self._module, self._temporary, state_dict={})
            for path in self._temporary.glob("*.safetensors"):
                path.unlink()
        if self._weights is not None and self._plan.is_plain and self._link(self._weights):
            return _LINKED
        for file in self._files.files:
            write_durably(self._temporary / file.name, file.head, file.nbytes)
        if self._files.index is not None:
            write_durably(self._temporary / self._files.index_name, self._files.index)
        return ""

    def _link(self, weights: Path) -> bool:
        assert self._temporary is not None
        try:
            for path in weights.glob(f"{MODEL}*.safetensors*"):
                os.link(path, self._temporary / path.name)
        except OSError:  # Not every file system has hard links.
            return False
        return True

    @contextmanager
    def shown(self) -> Iterator[None]:
        yield

    def put(self, name: str, tensor: torch.Tensor) -> None:
        name = self._plan.names[name]
        if name in self._plan.as_is:
            self._write(self._plan.as_is[name], tensor)
        elif name in self._group_of:
            group = self._group_of[name]
            self._waiting[name] = tensor if len(group) == 1 else tensor.to("cpu", copy=True)
            if all(each in self._waiting for each in group):
                whole = {each: self._waiting.pop(each) for each in group}
                for target, value in _in_folder(self._module, whole).items():
                    self._write(target, value)

    def _write(self, target: str, tensor: torch.Tensor) -> None:
        assert self._temporary is not None
        file, entry = self._places[target]
        data = tensor.detach().to("cpu", entry.dtype).contiguous().view(-1)
        if not data.numel():
            return
        with (self._temporary / file).open("r+b") as opened:
            opened.seek(entry.begin)
            opened.write(bytes_of(data))

    def commit(self) -> None:
        """Move files to their final names, and remove other weight files of an earlier save."""
        assert self._temporary is not None
        for path in self._temporary.iterdir():
            with path.open("rb") as opened:
                os.fsync(opened.fileno())
        names = {path.name for path in self._temporary.iterdir()}
        for name in sorted(names):
            os.replace(self._temporary / name, self._folder / name)
        for path in self._folder.glob("model*.safetensors*"):
            if path.name not in names and re.fullmatch(
                r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", path.name
            ):
                path.unlink()
        sync_folder(self._folder)

    def discard(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


class _Named(torch.Tensor):
    """A stand-in, or what was computed from stand-ins."""

    of: frozenset[str]
    """Names in `stream_full` of the tensors that it stands for, or was computed from. Not `names`,
    which torch before 2.13 has for named dimensions."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = super().__torch_function__(  # type: ignore[no-untyped-call]
            func, types, args, kwargs or {}
        )
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Named)]
        for each in tree_leaves(made):
            if isinstance(each, _Named):
                each.of = frozenset().union(*(source.of for source in given))
        return made


class _AdapterWriter:
    """The same for a model of peft: its adapters, which the first rank collects in memory.

    peft takes them from a state dict: first from one of stand-ins, which tells what it reads, then
    from one in which those are full. It computes prompts with the model itself.
    """

    def __init__(self, folder: Path, model: ZeRO3) -> None:
        self._folder = folder
        module: Any = model.module
        self._module = module
        self._model = model
        self._held: Tensors = {}
        self._names: dict[str, tuple[str, ...]] = {}
        for tensor, names in _stand_ins(model):
            stand_in = tensor.as_subclass(_Named)
            stand_in.of = frozenset(names[:1])
            self._held |= dict.fromkeys(names, stand_in)
            self._names[names[0]] = names
        get_adapters: Any = importlib.import_module("peft").get_peft_model_state_dict
        with self.shown():
            adapters = [
                tensor
                for adapter in module.peft_config
                for tensor in get_adapters(module, dict(self._held), adapter).values()
                if isinstance(tensor, _Named)
            ]
        self.wanted = frozenset().union(*(tensor.of for tensor in adapters))
        self.nbytes = sum(tensor.nbytes for tensor in adapters)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the full parameters of what computes prompts. Collective if there are prompts."""
        has_prompts = self._module.active_peft_config.is_prompt_learning
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if has_prompts:
                encoder = self._module.prompt_encoder
                stack.enter_context(summoned(encoder, "save_pretrained", writeback=False))
            yield

    def prepare(self) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        return ""

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self._held |= dict.fromkeys(self._names[name], tensor.to("cpu", copy=True))

    def commit(self) -> None:
        type(self._module).save_pretrained(self._module, self._folder, state_dict=self._held)

    def discard(self) -> None:
        self._held.clear()
