"""What is written for torch's FSDP means the same here, or is refused with our word for it; so is
what a policy and an argument both say."""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from layerzero import BackwardPrefetch, MixedPrecision, OffloadPolicy, ReductionPolicy, ZeRO3, units
from layerzero.wrapping.fsdp_arguments import (
    to_backward_prefetch,
    to_offload,
    to_policy,
    to_precision,
)
from tests.harness.checks import named
from tests.harness.internals import plan_units
from tests.harness.models import Block, Mlp, Parts, TiedAcrossUnits, Transformer, TransformerBlock


def attention() -> nn.Module:
    """Has modules that a policy by size leaves whole, or passes over."""
    layers = nn.ModuleList(nn.MultiheadAttention(8, 2) for _ in range(2))
    heads = nn.ModuleDict({"a": nn.Linear(8, 40), "b": nn.Linear(8, 3)})
    return Parts(layers=layers, heads=heads, norm=nn.BatchNorm1d(8))


def _by_torch(root: nn.Module, policy: Any, ignored: set[nn.Module]) -> list[str]:
    """Names of the modules that FSDP1 would wrap, by torch's own walk."""
    names = {module: name for name, module in root.named_modules()}
    parameters = {parameter for module in ignored for parameter in module.parameters()}
    if hasattr(policy, "_run_policy"):
        chosen = list(policy._run_policy(root, ignored, {}))
    else:
        chosen = []

        def note(module: nn.Module, **_: Any) -> nn.Module:
            chosen.append(module)
            return module

        torch_wrap._recursive_wrap(root, policy, note, ignored, parameters, only_wrap_children=True)
    return sorted(names[module] for module in chosen if module is not root)


def _by_us(root: nn.Module, policy: Any, ignored: set[nn.Module]) -> list[str]:
    plans, _ = plan_units(root, to_policy(policy), ignored, ())
    return sorted(plan.fqn for plan in plans[1:])


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


_BLOCKS = functools.partial(
    transformer_auto_wrap_policy, transformer_layer_cls={TransformerBlock, Block}
)
POLICIES: dict[str, Any] = {
    "classes": ModuleWrapPolicy({Block, TransformerBlock}),
    "function of a module": CustomPolicy(_is_linear),
    "every module": always_wrap_policy,
    "layers": _BLOCKS,
    "lambda": functools.partial(lambda_auto_wrap_policy, lambda_fn=_is_linear),
    "either": functools.partial(
        torch_wrap._or_policy,
        policies=[_BLOCKS, functools.partial(lambda_auto_wrap_policy, lambda_fn=_is_linear)],
    ),
    **{
        f"at least {numel}": functools.partial(size_based_auto_wrap_policy, min_num_params=numel)
        for numel in (1, 20, 50, 90, 200, 1000, 10**9)
    },
    "leaves of ours": functools.partial(
        size_based_auto_wrap_policy,
        min_num_params=20,
        force_leaf_modules={Block},
        exclude_wrap_modules={nn.Linear},
    ),
    "untouched size": size_based_auto_wrap_policy,
}


def test_a_policy_of_torch_chooses_what_it_chooses_for_fsdp1() -> None:
    for name, policy in POLICIES.items():
        for build in (Mlp, Transformer, TiedAcrossUnits, attention):
            root = build()
            for ignored in (set(), {*next(root.children()).modules()}):
                expected = _by_torch(root, policy, ignored)
                assert _by_us(root, policy, ignored) == expected, (name, build)
    wrapped = [unit.fqn for unit in units(ZeRO3(Mlp(), auto_wrap_policy=POLICIES["lambda"]))]
    assert sorted(wrapped[1:]) == _by_torch(Mlp(), POLICIES["lambda"], set())


def test_arguments_that_a_custom_policy_gives_are_ours() -> None:
    def choose(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, Block):
            return {
                "sharding_strategy": fsdp.ShardingStrategy.SHARD_GRAD_OP,
                "mixed_precision": fsdp.MixedPrecision(param_dtype=torch.bfloat16),
                "cpu_offload": fsdp.CPUOffload(offload_params=True),
            }
        return {} if isinstance(module, nn.ModuleList) else False

    # Our functions may return them, too.
    for policy in (CustomPolicy(choose), lambda module, fqn: choose(module)):
        plans, _ = plan_units(Mlp(depth=1), to_policy(policy), (), ())
        *_, unit = plans
        half = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=False)
        assert unit.arguments == {
            "reshard_after_forward": False,
            "mixed_precision": half,
            "offload": OffloadPolicy(params=True),
        }
    hybrid = {"sharding_strategy": fsdp.ShardingStrategy.HYBRID_SHARD}
    policy = to_policy(CustomPolicy(lambda module: hybrid if isinstance(module, Block) else False))
    with pytest.raises(ValueError, match=r"blocks.0: .*HYBRID_SHARD.*unit.*outer=\"replicate\""):
        plan_units(Mlp(), policy, (), ())


def test_dtypes_and_other_choices_of_torch_are_ours() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    half = {"param_dtype": torch.float16, "reduce_dtype": torch.float32}
    of_units, of_root = to_precision(
        fsdp.MixedPrecision(**half, buffer_dtype=torch.bfloat16), model
    )
    keeps = {"keep_float32": (nn.modules.batchnorm._BatchNorm,)}
    ours = {**half, "buffer_dtype": torch.bfloat16, **keeps}
    assert of_units == MixedPrecision(**ours, cast_forward_inputs=False)
    assert of_root == MixedPrecision(**ours), "FSDP1 casts the inputs of the root"
    without_policy = to_precision(fsdp.MixedPrecision(**half), model, has_policy=False)
    assert without_policy[1] == MixedPrecision(**half)
    assert to_precision(fsdp.MixedPrecision(), nn.Linear(2, 2))[1] == MixedPrecision()
    as_fsdp2 = fsdp.MixedPrecisionPolicy(**half, output_dtype=torch.float32)
    expected = MixedPrecision(**half, output_dtype=torch.float32)
    assert to_precision(as_fsdp2, model) == (expected, expected)

    since_2_15 = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    choices = {"bias": torch.float32, "scale": torch.bfloat16, "gate": torch.float16}
    parameters = {name: nn.Parameter(torch.ones(2)) for name in ("weight", *choices)}
    by_id = {id(parameters[name]): dtype for name, dtype in choices.items()}
    object.__setattr__(since_2_15, "param_dtype_override_fn", lambda p: by_id.get(id(p)))
    ours, _ = to_precision(since_2_15, model)
    assert ours.reduce_dtype == "main"
    with pytest.raises(ValueError, match=r"returned torch\.float16 for 'gate'"):
        ours.keep_parameters("gate", parameters.pop("gate"))
    assert [name for name, p in parameters.items() if ours.keep_parameters(name, p)] == ["bias"]
    with pytest.raises(ValueError, match="keep_low_precision_grads=True has no counterpart"):
        to_precision(fsdp.MixedPrecision(keep_low_precision_grads=True), model)
    assert to_offload(fsdp.CPUOffload(offload_params=True)) == OffloadPolicy(params=True)
    assert to_offload(fsdp.CPUOffload()) == OffloadPolicy()
    assert to_offload(fsdp.OffloadPolicy()) == OffloadPolicy()
    offload = to_offload(fsdp.CPUOffloadPolicy(pin_memory=False))
    assert offload == OffloadPolicy(params=True, pin_memory=False)
    for mode in BackwardPrefetch:
        assert to_backward_prefetch(fsdp.BackwardPrefetch[mode.name]) is mode


def _ignores(build: Callable[[nn.Module], Any], name: str = "ignored_modules") -> dict[str, Any]:
    model = Mlp()
    return {"module": model, name: build(model)}


_GRAD_OP = fsdp.ShardingStrategy.SHARD_GRAD_OP
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("sharding_strategy.*reshard_after_forward=False", {"sharding_strategy": _GRAD_OP}),
    ("sharding_strategy.*zero3_size", {"sharding_strategy": "FULL_SHARD"}),
    ("cpu_offload.*use offload", {"cpu_offload": fsdp.CPUOffload(True)}),
    ("argument mesh .*use process_group", {"mesh": None}),
    ("ignored_states.*ignored_modules and ignored_parameters", {"ignored_states": []}),
    ("did you mean mixed_precision", {"mixed_precison": None}),
    ("expected one of .*'zero3_size'", {"nothing_of_the_kind": 1}),
    ("timeout: expected a datetime.timedelta or None, got 600", {"timeout": 600}),
    ("timeout: expected a positive", {"timeout": timedelta(0)}),
    ("timeout: expected a positive", {"timeout": timedelta.max}),
    ("expected an nn.Module, got Tensor", {"module": torch.ones(1)}),
    ("forward_prefetch: expected a bool or a depth.*got -1", {"forward_prefetch": -1}),
    ("limit_all_gathers: expected at least 1 unit, got 0", {"limit_all_gathers": 0}),
    ("limit_all_gathers: expected bool, int", {"limit_all_gathers": 2.5}),
    ("limit_all_gathers: expected a size such.*parsecs", {"limit_all_gathers": "2 parsecs"}),
    ("gradient_reduction: expected 'mean' or 'sum', got 'avg'", {"gradient_reduction": "avg"}),
    ("param_init_fn: expected a function.*got 42", {"param_init_fn": 42}),
    ("device: 'cudda' is not a device of torch", {"device": "cudda"}),
    ("device: expected a torch.device.*got True", {"device": True}),
    ("go to mps: (.*accelerator with streams|torch finds no such)", {"device": "mps"}),
    ("go to meta: .*accelerator with streams", {"device": "meta"}),
    ("go to cuda:99: torch finds no such device", {"device": "cuda:99"}),
    ("ignored_modules: expected modules, got str", {"ignored_modules": ["head"]}),
    ("ignored_modules: expected an iterable", _ignores(lambda model: model.head)),
    ("ignored_modules: contains a Mlp that is the wrapped", _ignores(lambda model: [model])),
    ("parameters, got Linear", _ignores(lambda model: [model.head], "ignored_parameters")),
    ("auto_wrap_policy: expected a set.*got 'Block'$", {"auto_wrap_policy": "Block"}),
    ("auto_wrap_policy: expected a set", {"auto_wrap_policy": nn.ReLU()}),
    ("takes 1 positional argument", {"auto_wrap_policy": lambda module: True}),
    ("missing.*transformer_layer_cls", {"auto_wrap_policy": transformer_auto_wrap_policy}),
    ("zero3_size: expected an int", {"zero3_size": True}),
    ("expected True.*got 2 .*migrating.md", {"reshard_after_forward": 2}),
    (
        "blocks.0: reshard_after_forward: expected.*'no'",
        {"reshard_after_forward": lambda module, fqn: "no" if fqn else True},
    ),
    (r"process_group: expected a ProcessGroup.*got \[0, 1\]", {"process_group": [0, 1]}),
]


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_wrong_argument_gets_one_clear_line_before_anything_is_changed() -> None:
    for pattern, given in REFUSED:
        arguments = {"module": Mlp(), "auto_wrap_policy": {Block}, **given}
        model = arguments["module"] if isinstance(arguments["module"], nn.Module) else Mlp()
        before = dict(model.named_parameters())
        with named(pattern), pytest.raises((TypeError, ValueError), match=pattern) as error:
            ZeRO3(**arguments)
        assert "\n" not in str(error.value)
        assert all(now is before[name] for name, now in model.named_parameters())
        assert isinstance(ZeRO3(model), ZeRO3), "and the module can be wrapped still"


def test_a_bad_policy_is_refused_when_it_is_made() -> None:
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "separate_groups: expected True or", {"separate_groups": 1}),
        (TypeError, "in_flight: expected a size such as", {"in_flight": 2}),
        (ValueError, "in_flight: expected a size such as", {"in_flight": "much"}),
    ]
    for kind, pattern, options in bad:
        with pytest.raises(kind, match=f"ReductionPolicy.{pattern}"):
            ReductionPolicy(**options)
