"""Decides which module gets which tensor-parallel style: Llama's plan, the model's own, or yours.

Every plan is converted to `Styles`, a mapping from exact module names to styles. Those of modules
that peft has wrapped (LoRA, modules trained in full) go to the modules inside.

Note [LoRA over tensor-parallel ranks]
--------------------------------------
A layer with LoRA computes `base_layer(x) + lora_B(lora_A(x))`; rank r is small, and so are tensors
between A and B. B's output is placed as the base layer's, and A's input is:

- column-wise: every rank has all of x, computes all of A, and its rows of B. B sums the gradient of
  its input over ranks, so the gradient of A is whole on each.
- row-wise: every rank has columns of x, and those of A; their sum is reduced, and B is whole. If
  the sum is scattered over sequences, B computes on parts, and its gradient is summed over ranks.

What is not split is a replicated DTensor, so that adapters merge: B times A is placed as the base.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Container, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from layerzero.notices import is_first_rank
from layerzero.parallel.styles import OF_LLAMA, Arrived, InOrder, Whole, style_named

logger = logging.getLogger(__name__)

Styles = dict[str, ParallelStyle]
TensorParallelPlan = str | Mapping[str, ParallelStyle | str]

_BY_HEADS = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "colwise"),
    "self_attn.o_proj": "rowwise",
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "colwise"),
    "mlp.down_proj": "rowwise",
}
"""Projections of Llama, Qwen and Gemma."""
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_INSTEAD = (
    'pass a mapping from module names to styles as tp_plan, or "model" if it has a plan of its '
    "own, or leave out sequence_parallel"
)


def resolve_styles(model: nn.Module, plan: TensorParallelPlan, sequence_parallel: bool) -> Styles:
    """The style of every module that a plan names; rank 0 logs which plan was chosen.

    Raises:
        ValueError, TypeError: an unknown plan, or one that does not fit the model.
    """
    styles, which = _choose(model, plan, sequence_parallel)
    styles = _inside_adapters(model, styles)
    if is_first_rank():
        logger.info(
            "tensor parallelism: %s splits %s%s: styles for %d modules",
            which,
            type(model).__name__,
            ", including sequences" if sequence_parallel else "",
            len(styles),
        )
    return styles


def _choose(
    model: nn.Module, plan: TensorParallelPlan, sequence_parallel: bool
) -> tuple[Styles, str]:
    """The styles, and a description of the plan for the log."""
    if isinstance(plan, str) and "." in plan:
        plan = _imported(plan)
    if isinstance(plan, Mapping):
        return _from_mapping(model, plan, sequence_parallel), "the mapping tp_plan"
    if plan not in ("auto", "llama", "model"):
        raise ValueError(
            "tp_plan: expected 'auto', 'llama', 'model', a mapping from module names to styles or "
            f"the import path of one, got {plan!r}"
        )
    own = _own_plan(model)
    if plan == "llama":
        return _llama(model, sequence_parallel), "Llama's plan"
    # A model's own plan is usable with sequence parallelism only if it splits sequences itself.
    says_enough = not sequence_parallel or any(name == "sequence_parallel" for name in own.values())
    if own and says_enough:
        if any("experts" in pattern for pattern in own):
            _refuse_experts(model)
        styles = _expand(model, own, "the model's own plan", must_match=False)
        shared = {} if sequence_parallel else _shared_inputs(model, styles)
        return styles | shared, "the model's own plan"
    if plan == "auto":
        reason = "the model's own does not cover sequences" if own else "the model has none"
        return _llama(model, sequence_parallel), f"Llama's plan ({reason})"
    raise ValueError(
        f"tp_plan='model': {type(model).__name__} has no tensor-parallel plan (`_tp_plan` of "
        "transformers), or with sequence_parallel=True one that does not say which modules compute "
        "on parts of the sequence ('sequence_parallel'); use 'llama' or a mapping"
    )


def _refuse_experts(model: nn.Module) -> None:
    """Raise ValueError if a module of the model holds the matrices of several experts."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts" and module._parameters:
            raise ValueError(
                f"{type(model).__name__}: no tensor-parallel plan covers its experts ({name!r}, "
                f"{type(module).__name__}); use tp_size=1, where ZeRO3 shards them like all other "
                "parameters, with ep_size and a plan with ep_plan if ranks have different experts; "
                "or pass a mapping that names only modules of attention as tp_plan: every "
                "tensor-parallel rank then computes all experts"
            )


def _imported(path: str) -> Any:
    """The object at an import path, such as "recipes.plans.LLAMA"; what it returns if a function.

    Raises:
        ValueError: it cannot be imported.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"tp_plan={path!r} cannot be imported: {error}") from error
    return found() if callable(found) else found


def _from_mapping(
    model: nn.Module, plan: Mapping[str, ParallelStyle | str], sequence_parallel: bool
) -> Styles:
    for pattern, style in plan.items():
        if not isinstance(pattern, str) or not isinstance(style, (str, ParallelStyle)):
            raise TypeError(
                "tp_plan: expected a mapping from module names to torch ParallelStyles or "
                f"names of styles, got {pattern!r}: {style!r}"
            )
    if plan and sequence_parallel and not any(map(_splits_sequences, plan.values())):
        raise ValueError(
            "sequence_parallel=True: a mapping tp_plan must specify where sequences are split, but "
            "this one has no SequenceParallel(); add it, or leave out sequence_parallel"
        )
    return _expand(model, plan, "tp_plan", must_match=True)


def _splits_sequences(style: ParallelStyle | str) -> bool:
    name = style if isinstance(style, str) else type(style).__name__
    return name in ("sequence_parallel", "SequenceParallel")


def _expand(
    model: nn.Module, plan: Mapping[str, ParallelStyle | str], where: str, *, must_match: bool
) -> Styles:
    """Expand patterns of torch and transformers to exact names; `*` is one part of a name.

    A later pattern wins over an earlier one.

    Args:
        must_match: whether a pattern without a match is an error.
    """
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    chosen: dict[str, ParallelStyle | None] = {}
    for pattern, style in plan.items():
        names = [name for name in modules if _matches(pattern, name)]
        if not names and any(_matches(pattern, name) for name in parameters):
            raise ValueError(
                f"{where}: {pattern!r} names a parameter, but torch's styles apply to modules: "
                "pass a mapping with your own style for the module that owns it"
            )
        if not names and must_match:
            children = [name for name, _ in model.named_children()]
            raise ValueError(
                f"{where}: {pattern!r} matches no module of {type(model).__name__}, whose children "
                f"are {children}; '*' stands for one part of a dotted name"
            )
        for name in names:
            own = style_named(style, f"{where}: {pattern!r}") if isinstance(style, str) else style
            chosen[name] = own
    styles = {name: style for name, style in chosen.items() if style is not None}
    if plan and not styles:
        raise ValueError(f"{where}: none of {list(plan)} splits a module of {type(model).__name__}")
    return styles


def _matches(pattern: str, name: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _own_plan(model: nn.Module) -> dict[str, str]:
    """The plan of a transformers model (`_tp_plan`), under this model's names; empty if none."""
    for prefix, module in model.named_modules():
        # Only the instance's attribute: the class's lacks the plans of submodules, and wrappers
        # such as peft's forward attribute access to the model inside.
        plan = vars(module).get("_tp_plan")
        if plan:
            return {_join(prefix, name): style for name, style in plan.items()}
    return {}


def _shared_inputs(model: nn.Module, styles: Styles) -> Styles:
    """Styles of Llama's plan to add to a model's own plan.

    The projections q, k and v, and gate and up, then sum the gradient of their shared input once:
    4 all-reduces for each layer instead of 7.
    """
    added: Styles = {}
    for prefix, decoder in _decoders(model):
        for name, module in decoder.named_modules(prefix=prefix):
            is_shared = name.rsplit(".", 1)[-1] in ("self_attn", "mlp") and name not in styles
            inside = {_holder_of(module, inner) for inner, _ in module.named_parameters()}
            if is_shared and all(_join(name, holder) in styles for holder in inside):
                added[name] = _of_llama("shared_input")
    return added


def _llama(model: nn.Module, sequence_parallel: bool) -> Styles:
    """Megatron's splits: attention by heads, MLPs column-wise then row-wise, embeddings by symbols.

    With sequence parallelism, norms and residual sums between them are computed on parts of the
    sequence, from the input of the first layer to the last norm.
    """
    names: dict[str, str] = {}
    for prefix, decoder in _decoders(model):
        inside = _decoder_styles(prefix, decoder, sequence_parallel)
        names |= {_join(prefix, name): style for name, style in inside.items()}
    if not names:
        _refuse_experts(model)
        raise ValueError(
            f"Llama's tensor-parallel plan does not fit {type(model).__name__}: it has no module "
            f"with `layers` that all have {list(_BY_HEADS)}; {_INSTEAD}"
        )
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] == "lm_head" and isinstance(module, nn.Linear):
            names[name] = "colwise_gather_output"
    return {name: _of_llama(style) for name, style in names.items()}


def _of_llama(name: str) -> ParallelStyle:
    style = OF_LLAMA[name]() if name in OF_LLAMA else style_named(name, "Llama's plan")
    assert style is not None, "each of these does something"
    return style


def _decoders(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers) > 0 and all(map(_is_layer, layers)):
            yield prefix, module


def _is_layer(layer: nn.Module) -> bool:
    return {name for name, _ in layer.named_modules()}.issuperset(_BY_HEADS)


def _decoder_styles(prefix: str, decoder: nn.Module, sequence_parallel: bool) -> dict[str, str]:
    """Names of styles, keyed by names relative to the decoder."""
    styles: dict[str, str] = {}
    layers = decoder.layers
    assert isinstance(layers, nn.ModuleList), "checked in _decoders"
    if isinstance(getattr(decoder, "embed_tokens", None), nn.Embedding):
        styles["embed_tokens"] = "rowwise_split_input"
    for index, layer in enumerate(layers):
        inside = _layer_styles(layer, sequence_parallel)
        # Norms of whole sequences have whole gradients, without a style.
        known = {*inside} if sequence_parallel else {*inside, *_NORMS}
        _check_known(_join(prefix, f"layers.{index}"), layer, known)
        styles |= {f"layers.{index}.{inner}": style for inner, style in inside.items()}
    if sequence_parallel:
        if not isinstance(getattr(decoder, "norm", None), nn.Module):
            raise ValueError(
                f"sequence_parallel=True: {prefix or type(decoder).__name__} has no module `norm` "
                "after its layers, where Llama's plan gathers sequences; pass a mapping as tp_plan"
            )
        styles |= {"layers.0": "split_sequence", "norm": "norm_that_gathers"}
    return styles


def _layer_styles(layer: nn.Module, sequence_parallel: bool) -> dict[str, str]:
    """Names of styles of one layer, keyed by names relative to it."""
    inside = dict(layer.named_modules())
    styles, around = _BY_HEADS, "shared_input"
    if not _spans_heads(inside):  # Else the norm is one that no style covers.
        norms = ("self_attn.q_norm", "self_attn.k_norm")
        styles = styles | dict.fromkeys(norms, "replicated_with_grad_allreduce")
    if sequence_parallel:
        around = "shared_input_of_parts"
        rows = [name for name, style in styles.items() if style == "rowwise"]
        styles = styles | dict.fromkeys(rows, "rowwise_to_parts")
        styles |= dict.fromkeys(_NORMS, "sequence_parallel")
    styles = styles | dict.fromkeys(("self_attn", "mlp"), around)
    return {name: style for name, style in styles.items() if name in inside}


def _spans_heads(modules: Mapping[str, nn.Module]) -> bool:
    """Whether the norm of q is as wide as q (Olmo2); else, it is as wide as one head."""
    norm, projection = modules.get("self_attn.q_norm"), modules["self_attn.q_proj"]
    return len(getattr(norm, "weight", ())) == len(getattr(projection, "weight", ()))


def _check_known(where: str, layer: nn.Module, known: Container[str]) -> None:
    """Raise ValueError for a parameter that no style covers.

    Its gradient would silently cover only this rank's part.
    """
    for name, _ in layer.named_parameters():
        if _holder_of(layer, name) not in known:
            raise ValueError(
                f"{where}: Llama's tensor-parallel plan does not cover the parameter {name!r}; "
                f"{_INSTEAD}"
            )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _inside_adapters(
    model: nn.Module, styles: dict[str, ParallelStyle]
) -> dict[str, ParallelStyle]:
    """The styles, with those of modules that peft has wrapped on the modules inside.

    Raises:
        ValueError: an adapter other than LoRA of a linear layer, or a style that does not fit it.
    """
    found: Styles = {}
    for name, style in styles.items():
        children = dict(model.get_submodule(name).named_children())
        if "base_layer" in children:
            found |= dict(_of_lora(name, model.get_submodule(name), style))
        elif "original_module" in children:  # peft's modules_to_save
            copies = children["modules_to_save"].named_children()
            names = ["original_module", *(f"modules_to_save.{copy}" for copy, _ in copies)]
            found |= {f"{name}.{inner}": style for inner in names}
        else:
            found[name] = style
    return found


def _holder_of(module: nn.Module, parameter: str) -> str:
    """The name of the module that has a parameter, or that peft has wrapped and has it inside."""
    name = ""
    for part in parameter.split(".")[:-1]:
        module = module.get_submodule(part)
        name = f"{name}.{part}" if name else part
        if hasattr(module, "base_layer") or hasattr(module, "modules_to_save"):
            break
    return name


def _of_lora(
    name: str, layer: nn.Module, style: ParallelStyle
) -> Iterator[tuple[str, ParallelStyle]]:
    others = [
        inner
        for inner, _ in layer.named_parameters()
        if inner.split(".")[0] not in ("base_layer", "lora_A", "lora_B")
    ]
    parts = style.styles if isinstance(style, InOrder) else (style,)
    split = [part for part in parts if isinstance(part, (ColwiseParallel, RowwiseParallel))]
    if others or getattr(layer, "lora_variant", None) or not hasattr(layer, "lora_A"):
        raise ValueError(
            f"{name}: tensor parallelism splits LoRA of linear layers, without variants such as "
            f"DoRA; got {type(layer).__module__}.{type(layer).__name__}"
            f"{f' with {others[0]!r}' if others else ''}; leave the module out of target_modules, "
            "pass a tp_plan that leaves it whole, or use tp_size=1"
        )
    if not split or not split[0].use_local_output:
        raise ValueError(
            f"{name}: a layer with LoRA needs the style ColwiseParallel or RowwiseParallel, "
            f"without use_local_output=False; got {type(style).__name__}"
        )
    yield f"{name}.base_layer", style
    (given,), (wanted,) = split[0].input_layouts, split[0].output_layouts
    for adapter, _ in layer.get_submodule("lora_A").named_children():
        first, second = f"{name}.lora_A.{adapter}", f"{name}.lora_B.{adapter}"
        if isinstance(split[0], ColwiseParallel):
            yield first, Whole(given)
            yield second, InOrder(ColwiseParallel(output_layouts=wanted), Arrived())
        else:
            yield first, style
            if isinstance(wanted, Shard):
                yield second, SequenceParallel(sequence_dim=wanted.dim, use_local_output=True)
            else:
                yield second, Whole(wanted)
