"""Shards models of transformers, and loads them from a folder straight into shards.

Names of tensors in a folder may differ from the model's; transformers' own functions convert them.
"""

from __future__ import annotations

import functools
import os
import re
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from layerzero import FSDPModule, ZeRO3, rewrap
from layerzero.checkpoint import load
from layerzero.checkpoint.adapters import MODEL, open_source
from layerzero.integrations.engine import (
    clean_name,
    get_unit,
    optional_by_name,
    refuse_pieces,
    root_of,
)
from layerzero.integrations.shared import num_parameters, trainable_and_all
from layerzero.integrations.transformers.pretrained_saving import is_peft_model, save_pretrained

Tensors = dict[str, torch.Tensor]


def shard(module: nn.Module, **options: Any) -> ZeRO3:
    """`ZeRO3(module, **options)` with defaults from the transformers model. Collective.

    Without an `auto_wrap_policy`, units are the classes in the model's `_no_split_modules`.
    `layout` defaults to "rows", with which parameters keep their `ndim`. Without a `param_init_fn`,
    meta tensors, buffers included, are initialised as transformers would.
    `optional_modules` may list names, or patterns as in plans.
    `generate` keeps running forwards on a rank that has finished until all ranks have.
    A sharded model inside `module`, or its `.module`, that got adapters is wrapped again first.

    Raises:
        ValueError: the model has no `_no_split_modules`, is quantized or sharded by another
            library; or as `ZeRO3`.
    """
    check_model(module)
    for inner in sharded_inside(module):
        if (unit := get_unit(inner)) is not None:
            root = root_of(unit)
            if root.units[0] is unit and root.structure.changes():
                rewrap(inner)
    options.setdefault("layout", "rows")
    if options.get("auto_wrap_policy") is None:
        options["auto_wrap_policy"] = wrap_classes(module)
    if options.get("param_init_fn") is None:
        options["param_init_fn"] = initialiser(module)
    if "optional_modules" in options:
        options["optional_modules"] = optional_by_name(module, options["optional_modules"])
    model = ZeRO3(module, **options)
    make_ready(model)
    return model


_SHARDED = "_layerzero_transformers_wrapper"


def sharded_before(module: nn.Module) -> ZeRO3 | None:
    """The wrapper of this module that `shard` made or `make_ready` was given, if any."""
    return module.__dict__.get(_SHARDED)


def sharded_inside(module: nn.Module) -> list[ZeRO3]:
    """Wrappers of the sharded models in `module`, which contains them or their modules."""
    return [
        wrapper
        for part in module.modules()
        if (wrapper := part if isinstance(part, ZeRO3) else sharded_before(part)) is not None
    ]


def make_ready(model: ZeRO3) -> None:
    """Adapt methods of a sharded model that would treat shards as full parameters.

    These are `generate`, `save_pretrained`, and methods that count parameters. The module also
    stores its wrapper: sharding is permanent, and the next trainer needs it.
    """
    module = model.module
    module.__dict__.setdefault(_SHARDED, model)
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            # `generate` reads this flag, and then continues forwards that other ranks still need.
            part._is_fsdp_managed_module = True
            part.__dict__["num_parameters"] = functools.partial(num_parameters, part)
        if hasattr(type(part), "get_nb_trainable_parameters"):  # of peft
            part.__dict__["get_nb_trainable_parameters"] = functools.partial(
                trainable_and_all, part
            )
    if "name_or_path" in module.__dict__:  # peft looks there for the name of an adapter's base
        model.__dict__["name_or_path"] = module.__dict__["name_or_path"]
    if isinstance(module, PreTrainedModel) or is_peft_model(module):
        module.__dict__["save_pretrained"] = _saving(module, weakref.ref(model))


def _saving(module: Any, sharded: weakref.ref[ZeRO3]) -> Callable[..., None]:
    """A `save_pretrained` for the module that saves full tensors if no state dict is given."""
    own = functools.partial(type(module).save_pretrained, module)

    @functools.wraps(type(module).save_pretrained)
    def save(
        folder: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Tensors | None = None,
        **options: Any,
    ) -> None:
        model = sharded()
        if state_dict is None and model is not None:
            if options.get("distributed_checkpoint"):
                raise NotImplementedError("distributed_checkpoint: use layerzero.checkpoint.save")
            save_pretrained(model, folder, **options)
            return
        refuse_pieces(module, state_dict or {})
        own(folder, is_main_process=is_main_process, state_dict=state_dict, **options)

    return save


def check_model(module: nn.Module) -> None:
    """Raise ValueError for a model that is quantized, or that something else has sharded."""
    if isinstance(module, FSDPModule):
        advice = "pass it as it was before, and it is sharded here"
        raise ValueError(f"{type(module).__name__}: fully_shard has sharded it; {advice}")
    for part in module.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        name = type(part).__name__
        if getattr(part, "hf_quantizer", None) is not None or getattr(part, "is_quantized", False):
            raise ValueError(
                f"{name}: is quantized, and cannot be sharded; load it without quantization_config"
            )
        if getattr(part, "is_distributed_loading_by_transformers", False):
            raise ValueError(
                f"{name}: from_pretrained has split it already, by distributed_config or tp_plan; "
                "load it without these, or directly into shards with load_pretrained"
            )
        devices = set((getattr(part, "hf_device_map", None) or {}).values())
        if len(devices) > 1:
            raise ValueError(f"{name}: device_map put it on {devices}; load it without device_map")


def wrap_classes(module: nn.Module) -> set[type[nn.Module]]:
    """Classes that `_no_split_modules` names; transformers lists classes of layers there."""
    names = {
        name
        for part in module.modules()
        if isinstance(part, PreTrainedModel)
        for name in getattr(part, "_no_split_modules", None) or ()
    }
    found = {type(part) for part in module.modules() if type(part).__name__ in names}
    if not found:
        raise ValueError(
            f"{type(module).__name__}: expected _no_split_modules to list the classes of its "
            f"layers, got {sorted(names)}, which match no module; pass "
            "auto_wrap_policy={LayerClass}, in zero3={...} of a trainer"
        )
    return found


def initialiser(module: nn.Module, loaded: Collection[str] = ()) -> Callable[[nn.Module], None]:
    """A `param_init_fn` that initialises modules as the transformers model around them would.

    Args:
        loaded: names of tensors that a load brings. Modules that have no others become zeros:
            nothing is drawn for them, and ranks with different seeds do not differ in them.
    """
    owners: dict[int, PreTrainedModel] = {}
    for part in module.modules():  # outermost first, so that the innermost model decides
        if isinstance(part, PreTrainedModel):
            owners |= {id(inner): part for inner in part.modules()}
    parameters = module.named_parameters(remove_duplicate=False)
    named = (*parameters, *module.named_buffers(remove_duplicate=False))
    brought = {id(tensor) for name, tensor in named if name in loaded}
    # Modules, not ids: one that is added later must not be taken for one of these.
    zeros = weakref.WeakSet[nn.Module]()
    for part in module.modules():
        own = {*map(id, _own_tensors(part))}
        if own and own <= brought:
            zeros.add(part)

    @torch.no_grad()
    def initialise(part: nn.Module) -> None:
        owner, reset = owners.get(id(part)), getattr(part, "reset_parameters", None)
        if part in zeros:
            for tensor in _own_tensors(part):
                tensor.zero_()
        elif owner is not None:
            owner._init_weights(part)
        elif reset is not None:
            reset()
        else:
            raise ValueError(f"{type(part).__name__} has no reset_parameters: pass param_init_fn")

    return initialise


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    own = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in own if tensor is not None]


def load_pretrained(
    model_class: Any,
    folder: str | os.PathLike[str],
    *,
    config: Any = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    **options: Any,
) -> ZeRO3:
    """Like `model_class.from_pretrained(folder)`, straight into shards. Collective.

    The model is built on the meta device. Every rank reads its own shards from the files, and holds
    at most one full unit in addition.

    Args:
        model_class: a transformers model class, or an Auto class such as `AutoModelForCausalLM`.
        folder: a folder as `save_pretrained` writes it, on a file system that all ranks share.
        config: configuration of the model; None: the folder's.
        dtype: dtype of the main weights; None: the config's.
        strict: False: tensors missing in the folder, such as a new head, are initialised, with a
            warning.
        options: arguments of `ZeRO3`; see `shard`.

    Returns:
        The model in eval mode, as from `from_pretrained`.

    Raises:
        ValueError: there is no such folder, or the model cannot be sharded.
        NotImplementedError: the model merges or splits tensors of the folder on loading.
        CheckpointError: the folder's tensors do not fit the model, or are damaged.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(
            f"{folder}: expected a folder; download a model with huggingface_hub.snapshot_download"
        )
    if config is None:
        config = getattr(model_class, "config_class", None) or AutoConfig
        config = config.from_pretrained(path)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{folder}: its weights are quantized, and cannot be sharded")
    build = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.device("meta"):
        module = build(config, **({} if dtype is None else {"dtype": dtype}))
    module.name_or_path = str(folder)
    if module.can_generate() and (path / "generation_config.json").exists():
        module.generation_config = GenerationConfig.from_pretrained(path)
    if options.get("param_init_fn") is None:
        source, rename = open_source(path, with_optimizer=False), _names_in_model(module)
        loaded = (source if rename is None else source.renamed(rename)).tensors[MODEL]
        options["param_init_fn"] = initialiser(module, loaded)
    model = shard(module, **options)
    load_weights(model, path, strict=strict)
    model.eval()
    return model


def load_weights(model: ZeRO3, folder: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Load a folder of `save_pretrained` into a sharded model. Collective.

    Raises as `load_pretrained`.
    """
    load(folder, model, strict=strict, rename=_names_in_model(model.module))


def _names_in_model(module: nn.Module) -> Callable[[str], str | None] | None:
    """From names in a folder to names in the model, None for tensors to ignore; None instead of a
    function if the module is not a PreTrainedModel."""
    if not isinstance(module, PreTrainedModel):
        return None
    conversions = get_model_conversion_mapping(module)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    known = dict.fromkeys((clean_name(name) for name in module.state_dict()), True)
    ignored = [re.compile(each) for each in module._keys_to_ignore_on_load_unexpected or ()]

    def rename(name: str) -> str | None:
        found, converter = rename_source_key(
            name, renamings, converters, module.base_model_prefix, known
        )
        if converter is not None:
            raise NotImplementedError(
                f"{name!r} becomes part of {found!r}: {type(module).__name__} merges or splits "
                "tensors of this folder. Load it with from_pretrained and shard the model, or "
                "convert the folder once with save_pretrained(..., save_original_format=False)"
            )
        if found not in known and any(pattern.search(found) for pattern in ignored):
            return None
        return cast(str, found)

    return rename
