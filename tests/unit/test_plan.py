"""What a plan may say, what it finds in a model, and what it says about what it does not find."""

import sys
import warnings
from datetime import timedelta
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import layerzero
from layerzero import BackwardPrefetch, MixedPrecision, OffloadPolicy, ShardingPlan
from layerzero.plan.options import engine_arguments
from layerzero.plan.patterns import parse_pattern
from layerzero.plan.resolve import Resolved
from tests.harness.plan_models import Model


def test_values_are_read_as_a_file_has_them() -> None:
    read = ShardingPlan.from_dict(
        {
            "apply_modules": {
                "layers.{*}": {"param_dtype": "fp32", "cpu_offload": {"pin_memory": False}},
                "head": None,
            },
            "param_dtype": "torch.bfloat16",
            "reduce_dtype": "fp32",
            "cast_forward_inputs": False,
            "cpu_offload": True,
            "act_ckpt": ["wrapped", {"preserve_rng_state": False}],
            "defaults": {"backward_prefetch": "backward_post", "timeout": 30, "outer": "shard"},
            "ignored_modules": ["embed"],
            "pregather": None,
        }
    )
    assert read.apply_modules["layers.{*}"]["param_dtype"] is torch.float32
    offload = read.apply_modules["layers.{*}"]["cpu_offload"]
    assert offload == OffloadPolicy(params=True, pin_memory=False)
    assert read.apply_modules["head"] == {}
    assert read.mixed_precision == MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    assert read.cpu_offload == OffloadPolicy(params=True)
    assert engine_arguments(read.options)["offload"] == read.cpu_offload
    assert read.act_ckpt.arguments == {"preserve_rng_state": False}
    assert read.defaults["backward_prefetch"] is BackwardPrefetch.BACKWARD_POST
    assert read.defaults["timeout"] == timedelta(seconds=30)
    assert read.pregather is False
    assert (read.num_forward, read.num_backward) == (1, 1)


def test_act_ckpt_has_the_forms_of_finetuning_scheduler() -> None:
    expected = layerzero.ActivationCheckpointing(mode="wrapped")
    mode = Enum("Mode", {"WRAPPED": "wrapped"}, type=str)
    in_config = SimpleNamespace(mode=mode.WRAPPED, cfg={})
    for form in ("wrapped", ("wrapped",), ["wrapped", None], in_config, expected):
        assert ShardingPlan(act_ckpt=form).act_ckpt == expected
        module_plan = ShardingPlan(apply_modules={"a": {"act_ckpt": form}})
        assert module_plan.apply_modules == {"a": {"act_ckpt": expected}}


def test_what_fully_shard_takes_is_taken() -> None:
    own = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "reshard_after_forward": False,
    }
    expected = {
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload": OffloadPolicy(params=True, pin_memory=False),
        "reshard_after_forward": False,
    }
    assert ShardingPlan(apply_modules={"a": own}).apply_modules == {"a": expected}
    assert ShardingPlan(defaults=own).defaults == expected
    read = ShardingPlan(cpu_offload=CPUOffloadPolicy(pin_memory=False)).cpu_offload
    assert read == expected["offload"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"aply_modules": []}, r"unknown key 'aply_modules' \(value \[\]\); near.*'apply_modules'"),
        ({"apply_modules": "layers"}, "apply_modules: expected a list of patterns, got 'layers'"),
        ({"apply_modules": {"a": {"param_type": "bf16"}}}, "'a': unknown option 'param_type'.*"
         "near matches: 'param_dtype'"),
        ({"apply_modules": {"a": {"param_dtype": "int8"}}}, "param_dtype: expected.*got 'int8'"),
        ({"apply_modules": {"a": {"mp_policy": fsdp.MixedPrecision()}}}, "'a': mixed_precision: "
         "expected a MixedPrecision, FSDP2's MixedPrecisionPolicy"),
        ({"apply_modules": {"a": 3}}, "'a': expected a mapping of options, got 3"),
        ({"reshard_after_forward": "yes"}, "reshard_after_forward: expected True.*got 'yes'"),
        ({"apply_modules": {"a": {"reshard_after_forward": 8}}}, "'a': reshard.*got 8 "),
        ({"cast_forward_inputs": 1}, "cast_forward_inputs: expected True or False, got 1"),
        ({"optional": ["a"], "pregather": True}, "pregather and optional=.'a'. are both given"),
        ({"num_to_forward_prefetch": -1}, "num_to_forward_prefetch: expected.*got -1"),
        ({"act_ckpt": "selective"}, r"act_ckpt: expected one of \['composable'.*got 'selective'"),
        ({"cpu_offload": {"pinned": True}}, "cpu_offload: .*unexpected keyword argument 'pinned'"),
        ({"defaults": {"auto_wrap_policy": None}}, "defaults: unknown option 'auto_wrap_policy'"),
        ({"defaults": {"mixed_precision": {"dtype": "bf16"}}}, "mixed_precision: .*'dtype'"),
        ({"defaults": {"timeout": 1e11}}, "defaults: timeout: expected a positive timedelta of at"),
        ({"apply_modules": ["layers.[0-3]"]}, r"unexpected '\[' at 7; .*\{0-4\} a number in a r"),
        ({"apply_modules": ["layers.{4-0}"]}, r"unexpected '\{4-0\}' at 7"),
        ({"apply_modules": ["re:("]}, "not a regular expression: missing \\)"),
        ({"apply_modules": [7]}, "pattern: expected a string, got 7"),
        ({"apply_modules": ["layer.{*}"]}, r"apply_modules: 'layer.\{\*\}' matches no module; near "
         r"matches: 'layers.\{\*\}'"),
        ({"ignored_modules": ["hed"]}, "ignored_modules: 'hed' matches no module; near.*'head'"),
        ({"ignored_parameters": ["head.wait"]}, "no parameter; near matches: 'head.weight'"),
        ({"apply_modules": ["head"], "ep_plan": ["embed"]}, "ep_plan: 'embed' matches 'embed', "
         "but no unit: list them in apply_modules"),
        ({"apply_modules": ["head"], "hook_modules": ["embed"]}, "'embed' gathers nothing"),
        ({"apply_modules": ["layers.{*}"], "hook_modules": ["layers"]}, "'layers' gathers nothing"),
        ({"apply_modules": ["wrong.one", "head", "wrong.two"]}, r"(?s)'wrong.one'.*'wrong.two'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_plan_may_not_say_or_does_not_fit_is_refused_with_the_value(fields, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ShardingPlan.from_dict(fields).validate(Model())


def test_a_plan_is_read_from_yaml(tmp_path, monkeypatch) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "plan.yaml"
    path.write_text(
        "apply_modules:\n"
        "  layers.{*}: {reshard_after_forward: false}\n"
        "  '*.attn':\n"
        "param_dtype: bf16\n"
    )
    assert ShardingPlan.from_yaml(path) == ShardingPlan(
        apply_modules={"layers.{*}": {"reshard_after_forward": False}, "*.attn": {}},
        param_dtype=torch.bfloat16,
    )
    for text, error, message in (
        ("pregather: maybe", TypeError, r"plan\.yaml: pregather: expected True or False"),
        ("apply_modules:\n- *.attn\n", ValueError, r"(?s)plan\.yaml: not YAML.*starts with '\*'"),
        ("param_dtype: !!python/object/apply:os.getcwd []\n", ValueError, "not YAML"),
    ):
        path.write_text(text)
        with pytest.raises(error, match=message):
            ShardingPlan.from_yaml(path)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"plan\.yaml: reading YAML needs PyYAML: pip install"):
        ShardingPlan.from_yaml(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"apply_modules": ["layers.0", "layers.{*}"]},
         r"'layers\.0' does not apply to 'layers\.0': later patterns match the same"),
        ({"apply_modules": ["layers.{*}.act", "head"]},
         r"'layers\.\{\*\}\.act' does not apply to .*no param"),
        ({"apply_modules": ["head"], "ignored_modules": ["head"]}, "'head': ignored"),
    ],
    ids=str,
)  # fmt: skip
def test_what_has_no_effect_or_is_left_out_is_warned_of(fields, message) -> None:
    with pytest.warns(UserWarning, match=message):
        ShardingPlan.from_dict(fields).validate(Model())


class Stubborn(Model):
    """Its own traversals know no duplicates, as those of many older models."""

    def named_parameters(self, prefix="", recurse=True):
        return super().named_parameters(prefix, recurse)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        assert remove_duplicate
        return super().named_modules(memo, prefix)


def test_a_model_with_traversals_of_its_own_is_planned_for_like_any_other() -> None:
    plan = ShardingPlan(
        apply_modules=["layers.{*}", "*attn", r"re:layers\.\d+\.experts\.0", "layers.2"],
        ignored_modules=["layers.0.attn"],
        ignored_parameters=["head.*"],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.validate(Stubborn())
    for model in (Stubborn(), Model()):
        found = Resolved(plan, model)
        assert [(unit.fqn, unit.pattern) for unit in found.units] == [
            ("layers.0", "layers.{*}"),
            ("layers.0.experts.0", r"re:layers\.\d+\.experts\.0"),
            ("layers.1", "layers.{*}"),
            ("layers.1.attn", "*attn"),
            ("layers.1.experts.0", r"re:layers\.\d+\.experts\.0"),
            ("layers.2", "layers.2"),
            ("layers.2.attn", "*attn"),
            ("layers.2.experts.0", r"re:layers\.\d+\.experts\.0"),
        ]
        assert [*map(id, found.ignored_parameters)] == [*map(id, model.head.parameters())]


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("layers.{*}", ["layers.0", "layers.12"], ["layers", "layers.x", "layers.1.a", "layers."]),
        ("layers.{0-4}", ["layers.0", "layers.4"], ["layers.5", "layers.12", "layers.40"]),
        ("block{08-11}", ["block8", "block08", "block11"], ["block7", "block12", "block"]),
        ("*.norm", ["a.norm", "a.b.norm", ".norm"], ["norm", "a.norm.b", "a.norms"]),
        ("l?yer", ["layer", "l.yer"], ["lyer", "laayer"]),
        ("re:(encoder|decoder)\\.[0-9]+", ["encoder.3"], ["encoder.3.mlp", "my.encoder.3"]),
        ("a+b.c", ["a+b.c"], ["aab.c", "a+bxc"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pattern_matches_whole_names(pattern: str, matching: list[str], others: list[str]):
    parsed = parse_pattern(pattern)
    assert [name for name in matching if parsed.fullmatch(name) is None] == []
    assert [name for name in others if parsed.fullmatch(name) is not None] == []
