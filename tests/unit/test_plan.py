"""What a plan may say, what it finds in a model, and what it says about what it does not find; its
pattern language against a slow matcher that shares no code with it."""

import random
import sys
import warnings
from datetime import timedelta
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import layerzero
from layerzero import BackwardPrefetch, MixedPrecision, OffloadPolicy, ShardingPlan
from layerzero.plan.patterns import NamePattern
from layerzero.plan.resolve import resolve
from layerzero.plan.shard import is_of_adapter
from tests.harness.models import Block
from tests.harness.plan_models import Layer, Model


def plan(*patterns: str, **fields) -> ShardingPlan:
    return ShardingPlan(apply_modules=patterns, **fields)


def test_values_are_read_as_a_file_has_them() -> None:
    read = ShardingPlan.from_dict(
        {
            "apply_modules": {
                "layers.{*}": {"param_dtype": "fp32", "cpu_offload": {"pin_memory": False}},
                "head": None,
            },
            "param_dtype": "torch.bfloat16",
            "reduce_dtype": "fp32",
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
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    assert read.cpu_offload == OffloadPolicy(params=True)
    assert read.act_ckpt.arguments == {"preserve_rng_state": False}
    assert read.defaults["backward_prefetch"] is BackwardPrefetch.BACKWARD_POST
    assert read.defaults["timeout"] == timedelta(seconds=30)
    assert read.pregather is False
    assert (read.num_forward, read.num_backward) == (1, 1)


class Mode(str, Enum):
    WRAPPED = "wrapped"


@pytest.mark.parametrize(
    "form",
    [
        "wrapped",
        ("wrapped",),
        ["wrapped", None],
        ("wrapped", {}),
        {"mode": "wrapped"},
        ("wrapped", {"use_reentrant": False, "checkpoint_impl": CheckpointImpl.NO_REENTRANT}),
        SimpleNamespace(mode=Mode.WRAPPED, cfg={}),
        SimpleNamespace(mode="wrapped", cfg=None),
        layerzero.ActivationCheckpointing(mode="wrapped"),
    ],
    ids=str,
)
def test_act_ckpt_has_many_forms(form) -> None:
    expected = layerzero.ActivationCheckpointing(mode="wrapped")
    assert ShardingPlan(act_ckpt=form).act_ckpt == expected
    assert ShardingPlan(apply_modules={"a": {"act_ckpt": form}}).apply_modules == {
        "a": {"act_ckpt": expected}
    }


def test_what_fully_shard_takes_is_taken_or_refused_with_ours_named() -> None:
    own = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "reshard_after_forward": False,
    }
    expected = {
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float32),
        "offload": OffloadPolicy(params=True, pin_memory=False),
        "reshard_after_forward": False,
    }
    assert ShardingPlan(apply_modules={"a": own}).apply_modules == {"a": expected}
    assert ShardingPlan(defaults=own).defaults == expected
    read = ShardingPlan(cpu_offload=CPUOffloadPolicy(pin_memory=False)).cpu_offload
    assert read == expected["offload"]
    for name, value, message in (
        (
            "reshard_after_forward",
            2,
            "of them zero3_size=2, outer='shard', reshard_after_forward='c",
        ),
        ("mesh", None, "pass the mesh to shard_with_plan"),
        ("shard_placement_fn", None, "parameters are split as flat elements"),
        ("ignored_params", set(), "use the plan's ignored_parameters"),
        ("optional_modules", ["a"], "use the plan's optional"),
        ("optional", True, "it is a field of the plan"),
        ("mp_policy", fsdp.MixedPrecision(), "use layerzero.MixedPrecision, or FSDP2's"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ShardingPlan(apply_modules={"a": {name: value}})
    with pytest.raises(ValueError, match="mp_policy and mixed_precision are both given"):
        ShardingPlan(defaults={"mp_policy": own["mp_policy"], "mixed_precision": None})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"aply_modules": []}, r"unknown key 'aply_modules' \(value \[\]\); near.*'apply_modules'"),
        ({"apply_modules": "layers"}, "apply_modules: expected a list of patterns, got 'layers'"),
        ({"apply_modules": [""]}, "expected a pattern, got ''; the whole model is always a unit"),
        ({"apply_modules": ["a", "a"]}, "'a' occurs twice"),
        ({"apply_modules": ["a[0]"]}, r"apply_modules: pattern 'a\[0\]': unexpected"),
        ({"apply_modules": {"a": {"param_type": "bf16"}}}, "'a': unknown option 'param_type'.*"
         "near matches: 'param_dtype'"),
        ({"apply_modules": {"a": {"timeout": 3}}}, "'a': unknown option 'timeout' .value 3.; it "
         "applies to the whole model: put it into defaults"),
        ({"apply_modules": {"a": {"process_group": 1}}}, "pass the mesh to shard_with_plan"),
        ({"apply_modules": {"a": {"param_dtype": "int8"}}}, "param_dtype: expected.*got 'int8'"),
        ({"apply_modules": {"a": 3}}, "'a': expected a mapping of options, got 3"),
        ({"reshard_after_forward": "yes"}, "reshard_after_forward: expected True.*got 'yes'"),
        ({"reshard_after_forward": 8}, "got 8; use True for shards over all ranks, or over 8 "
         "of them zero3_size=8, outer='shard', reshard_after_forward='compute_shard'"),
        ({"apply_modules": {"a": {"reshard_after_forward": 8}}}, "'a': reshard.*zero3_size=8"),
        ({"broadcast_buffers": "no"}, "broadcast_buffers: expected True or False, got 'no'"),
        ({"ep_plan": {"apply_modules": ["l.{*}"], "apply_efsdp_modules": ["l.{*}.mlp.experts"]}},
         r"ep_plan: expected a list of patterns.*write ep_plan: \['l.\{\*\}.mlp.experts'\]"),
        ({"cast_forward_inputs": 1}, "cast_forward_inputs: expected True or False, got 1"),
        ({"pregather": "on"}, "pregather: expected True or False, got 'on'"),
        ({"num_to_forward_prefetch": -1}, "num_to_forward_prefetch: expected.*got -1"),
        ({"num_to_backward_prefetch": True}, "num_to_backward_prefetch: expected.*got True"),
        ({"act_ckpt": "selective"}, r"act_ckpt: expected one of \['composable'.*got 'selective'"),
        ({"act_ckpt": {"mode": "wrapped", "pin_memory": True}}, "'wrapped' has no argument 'pin_"),
        ({"act_ckpt": ("wrapped", {"use_reentrant": True})}, "use_reentrant=True.*leave use_reen"),
        ({"act_ckpt": ["wrapped", {"checkpoint_impl": CheckpointImpl.REENTRANT}]}, "reentrant re"),
        ({"cpu_offload": {"pinned": True}}, "cpu_offload: unknown argument 'pinned'; near"),
        ({"defaults": {"auto_wrap_policy": None}}, "apply_modules is the policy"),
        ({"defaults": {"limit_all_gathers": 0}}, "at least 1 unit, got 0"),
        ({"defaults": {"mixed_precision": {"dtype": "bf16"}}}, "unknown argument 'dtype'"),
        ({"defaults": {"offload": {}, "cpu_offload": True}}, "are both given"),
        ({"param_dtype": "bf16", "defaults": {"param_dtype": "fp16"}}, "param_dtype=torch.bfloat16 "
         "and, in defaults, param_dtype=torch.float16 are both given"),
        ({"param_dtype": "bf16", "defaults": {"mixed_precision": {}}}, "are both given"),
        ({"num_to_forward_prefetch": 2, "defaults": {"forward_prefetch": 1}}, "are both given"),
        ({"num_to_backward_prefetch": 2, "defaults": {"backward_prefetch": None}}, "both given"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_plan_may_not_say_is_refused_with_the_value(fields, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ShardingPlan.from_dict(fields)


def test_a_plan_is_read_from_yaml(tmp_path) -> None:
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
    path.write_text("apply_modules: ['layers.{*}']\npregather: maybe\n")
    with pytest.raises(TypeError, match=r"plan\.yaml: pregather: expected True or False"):
        ShardingPlan.from_yaml(path)
    path.write_text("apply_modules:\n  a: {}\n  b: {}\n  a: {param_dtype: bf16}\n")
    with pytest.raises(ValueError, match=r"plan\.yaml: line 4: the key 'a' occurs twice"):
        ShardingPlan.from_yaml(path)
    path.write_text("apply_modules:\n- *.attn\n")
    with pytest.raises(ValueError, match=r"(?s)plan\.yaml: not YAML.*starts with '\*'"):
        ShardingPlan.from_yaml(path)
    path.write_text("param_dtype: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match="not YAML"):
        ShardingPlan.from_yaml(path)


@pytest.mark.parametrize("seconds", [0, 1e11, float("inf"), float("nan")])
def test_timeouts_that_no_backend_has_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout: expected"):
        ShardingPlan.from_dict({"defaults": {"timeout": seconds}})


def test_without_pyyaml_the_error_says_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"plan\.yaml: reading YAML needs PyYAML: pip install"):
        ShardingPlan.from_yaml(tmp_path / "plan.yaml")


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def table(text: str) -> dict[str, list[str]]:
    """Pattern -> [field, matched, used, ...] of the table in `explain`."""
    start = next(i for i, line in enumerate(lines(text)) if line.startswith("pattern"))
    rows = [line.split() for line in lines(text)[start + 1 :] if line]
    return {row[0]: row[1:] for row in rows if row[0] != "problem:"}


def test_explain_shows_the_units_and_what_each_pattern_matched() -> None:
    text = plan("embed", "layers.{*}", "layers.{1-2}.attn", "head").explain(Model())
    assert lines(text)[:2] == [
        "8 units of Model",
        "units prefetched along recorded orders: 1 in forward, 1 in backward",
    ]
    rows = table(text)
    block = sum(p.numel() for p in Block().parameters())
    assert rows["layers.{1-2}.attn"][:4] == ["apply_modules", "2", "2", str(2 * block)]
    whole = sum(p.numel() for p in Layer().parameters())
    assert rows["layers.{*}"][3] == str(3 * whole - 2 * block)
    assert "problem" not in text


def test_a_later_pattern_wins_and_ignored_wins_over_all() -> None:
    text = plan(
        "layers.{*}", "layers.2", "layers.0.attn", ignored_modules=["layers.0.attn"]
    ).explain(Model())
    rows = table(text)
    assert rows["layers.{*}"][1:3] == ["3", "2"]
    assert "not 'layers.2': taken by 'layers.2'" in text
    assert "not 'layers.0.attn': ignored" in text
    assert "problem: apply_modules: 'layers.0.attn' has no effect" in text


@pytest.mark.parametrize(
    ("patterns", "outermost"),
    [
        (["layers.{*}", "layers.0", "head"], ["layers.0", "layers.1", "layers.2", "head"]),
        (["layers.{*}", "layers.{*}.experts.{*}"], ["layers.0", "layers.1", "layers.2"]),
        (["layers.{*}", "layers.0", "*experts.{*}"], ["layers.0", "layers.1", "layers.2"]),
        (["layers.0", "layers.0.attn"], ["layers.0"]),
        (["re:layers.0(.attn)?"], ["layers.0"]),
        # Members take the place of a unit around a series.
        (["layers.0", "layers.0.experts.{*}"], ["layers.0.experts.0", "layers.0.experts.1"]),
    ],
)
def test_the_outermost_units_are_recomputed_but_for_one_around_a_series(
    patterns, outermost
) -> None:
    found = resolve(plan(*patterns), Model()).outermost_units()
    assert [unit.fqn for unit in found] == outermost


def test_optional_modules_are_the_outermost_that_have_units() -> None:
    text = plan(
        "layers.{*}.attn", "head", optional=["layers*", "layers.1", "re:head|embed"]
    ).explain(Model())
    rows = table(text)
    assert rows["layers*"][:3] == ["optional", "40", "1"]
    assert "'layers'; not 'layers.0', 'layers.0.attn'" in text and ": inside 'layers'" in text
    assert rows["layers.1"][:3] == ["optional", "1", "1"]
    assert rows["re:head|embed"][1:3] == ["2", "1"]
    assert "'head'; not 'embed': no unit at or under it" in text
    assert "problem" not in text


def test_optional_patterns_are_read_as_a_file_has_them() -> None:
    read = ShardingPlan.from_dict(
        {"optional": ["vision_tower", "audio.{*}"], "defaults": {"optional_mean": "participants"}}
    )
    assert read.optional == ("vision_tower", "audio.{*}")
    assert read.defaults == {"optional_mean": "participants"}
    assert ShardingPlan.from_dict({"optional": None}).optional == ()
    for fields, message in (
        ({"optional": ["a"], "pregather": True}, "pregather and optional=.'a'. are both given"),
        ({"optional": "vision"}, "optional: expected a list of patterns, got 'vision'"),
        ({"optional": ["a", "a"]}, "optional: 'a' occurs twice"),
        ({"optional": ["a{"]}, "optional: pattern 'a{': unexpected"),
        ({"optional": [""]}, "optional: expected a pattern, got ''"),
        ({"defaults": {"optional_mean": "some"}}, "expected 'all' or 'participants', got 'some'"),
        ({"defaults": {"optional_modules": ["a"]}}, "use the plan's optional"),
        ({"apply_modules": {"a": {"optional_mean": "all"}}}, "it applies to the whole model"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ShardingPlan.from_dict(fields)


def test_wildcards_cross_dots_and_expressions_match_whole_names() -> None:
    text = plan("*attn", r"re:layers\.\d+\.experts\.0", "re:head").explain(Model())
    rows = table(text)
    assert rows["*attn"][1:3] == ["3", "3"]
    assert rows[r"re:layers\.\d+\.experts\.0"][1:3] == ["3", "3"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"apply_modules": ["layer.{*}"]}, r"apply_modules: 'layer.\{\*\}' matches no module; near "
         r"matches: 'layers.\{\*\}'"),
        ({"ignored_modules": ["hed"]}, "ignored_modules: 'hed' matches no module; near.*'head'"),
        ({"ignored_parameters": ["head.wait"]}, "no parameter; near matches: 'head.weight'"),
        ({"optional": ["hed"]}, "optional: 'hed' matches no module; near matches: 'head'"),
        ({"apply_modules": ["head"], "optional": ["head", "embed"]}, "optional: 'embed' matches "
         "'embed', but no unit is at or under them"),
        ({"apply_modules": ["head"], "ignored_modules": ["head"], "optional": ["head"]},
         "optional: 'head' matches 'head', but no unit"),
        ({"apply_modules": ["layers*"], "optional": ["layers.{*}.act"]}, "matches 'layers.0.act'"),
        ({"apply_modules": ["head"], "hook_modules": {"embed": "head"}}, "hook_modules: 'embed' "
         "matches 'embed', but no unit"),
        ({"apply_modules": ["head"], "ep_plan": ["embed"]}, "ep_plan: 'embed' matches 'embed', "
         "but no unit: list them in apply_modules"),
        ({"ep_plan": ["hed"]}, "ep_plan: 'hed' matches no module; near matches: 'head'"),
        ({"apply_modules": ["layers.{*}.bank"], "hook_modules": {"layers.{*}.bank": "layer.{*}"}},
         "'layers.0.bank' would be gathered by 'layer.0', but no such module exists; near "
         "matches: 'layers.0'"),
        ({"apply_modules": ["layers.{*}.bank"], "hook_modules": {"*.bank": "layers"}},
         "by 'layers', but it has no forward"),
        ({"apply_modules": ["head"], "hook_modules": {"head": "head"}}, "the unit's own module"),
        ({"apply_modules": ["head"], "hook_modules": ["embed"]}, "'embed' matches 'embed', but "
         "gathers nothing"),
        ({"apply_modules": {"layers.{*}.bank": {"act_ckpt": "wrapped"}},
          "hook_modules": ["layers.{*}"]}, "act_ckpt on 'layers.0.bank', which has no forward"),
    ],
    ids=str,
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused(fields, message) -> None:
    read, model = ShardingPlan.from_dict(fields), Model()
    with pytest.raises(ValueError, match=message):
        read.validate(model)
    assert "problem: " in read.explain(model)


def test_all_errors_come_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)'wrong.one'.*'wrong.two'"):
        plan("wrong.one", "head", "wrong.two").validate(Model())


def freeze(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"apply_modules": ["layers.0", "layers.{*}"]},
         r"'layers\.0' has no effect \('layers\.0': taken by 'layers"),
        ({"apply_modules": ["layers.{*}.act", "head"]},
         r"'layers\.\{\*\}\.act' has no effect.*no param"),
        ({"apply_modules": ["layers*"]}, r"'layers\*' matches 'layers'.*has no forward"),
        ({"apply_modules": ["re:layers"]}, r"'re:layers' matches 'layers', but a ModuleList has "
         r"no forward.*such as 'layers.\{\*\}'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_has_no_effect_or_is_left_out_is_warned_of(fields, message) -> None:
    with pytest.warns(UserWarning, match=message):
        ShardingPlan.from_dict(fields).validate(Model())


def test_a_plan_that_fits_says_nothing() -> None:
    model = Model()
    freeze(model.head)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan("layers.{*}", ignored_modules=["head"]).validate(model)


class Stubborn(Model):
    """Its own traversals know no duplicates, as those of many older models."""

    def named_parameters(self, prefix="", recurse=True):
        return super().named_parameters(prefix, recurse)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        assert remove_duplicate
        return super().named_modules(memo, prefix)


def test_a_model_with_traversals_of_its_own_is_planned_for_like_any_other() -> None:
    fields = {"apply_modules": ["layers.{*}"], "ignored_parameters": ["head.*"]}
    ShardingPlan(**fields).validate(Stubborn())
    own, other = (ShardingPlan(**fields).explain(make()) for make in (Stubborn, Model))
    assert own.replace("Stubborn", "Model") == other


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *[(f"layers.0.{name}.weight", True) for name in (
            "lora_A", "loraA", "LoraA", "LORA_down", "LoRA", "my_lora", "qlora", "gateLora", "lora",
            "lora0", "w1_lora_B.default", "qLoRA", "adalora", "adalora_E", "AdaLoRA", "dyloraB",
            "adaln_lora", "randlora_lambda")],
        *[(f"{name}.weight", False) for name in (
            "flora", "exploration", "floral", "adapter", "l.ora", "Flora", "FLORA",
            "coloralpha", "lo_ra", "florae")],
    ],
)  # fmt: skip
def test_adapters_are_known_by_a_word_of_their_name(name: str, expected: bool) -> None:
    assert is_of_adapter(name) == expected


def slow_match(pattern: str, name: str, at: int = 0) -> bool:
    """Whether `pattern` (no regular expression) matches `name` from `at` on, by trying all."""
    if not pattern:
        return at == len(name)
    if pattern[0] == "*":
        return any(slow_match(pattern[1:], name, stop) for stop in range(at, len(name) + 1))
    if pattern[0] == "{":
        inside, rest = pattern[1:].split("}", 1)
        stop = at
        while stop < len(name) and name[stop].isdigit():
            stop += 1
        if stop == at or (at and name[at - 1].isdigit()):
            return False
        low, high = (0, 10**40) if inside == "*" else map(int, inside.split("-"))
        return low <= int(name[at:stop]) <= high and slow_match(rest, name, stop)
    if at == len(name) or (pattern[0] != "?" and pattern[0] != name[at]):
        return False
    return slow_match(pattern[1:], name, at + 1)


def random_pattern(random_: random.Random) -> str:
    low = random_.randint(0, 40)
    number = f"{{{low}-{low + random_.choice([0, 3, 30, 400])}}}"
    parts = ["a", "b", ".", "1", "*", "?", "{*}", number]
    return "".join(random_.choice(parts) for _ in range(random_.randint(0, 6)))


def random_name(random_: random.Random) -> str:
    parts = ["a", "b", ".", "0", "1", "7", "12", "30", "123"]
    return "".join(random_.choice(parts) for _ in range(random_.randint(0, 6)))


def test_random_patterns_match_what_a_slow_matcher_matches() -> None:
    random_ = random.Random(0)
    num_patterns = num_matches = num_refused = 0
    for _ in range(1000):
        text = random_pattern(random_)
        try:
            pattern = NamePattern.parse(text)
        except ValueError as error:
            assert "whole run of digits" in str(error)
            num_refused += 1
            continue
        num_patterns += 1
        for _ in range(12):
            name = random_name(random_)
            expected = slow_match(text, name)
            assert (pattern.match(name) is not None) == expected, (text, name)
            num_matches += expected
    # The sweep says something only if it meets enough of each.
    assert num_patterns > 500 and num_matches > 125 and num_refused > 25


def test_every_range_matches_its_numbers_and_no_others() -> None:
    random_ = random.Random(1)
    for _ in range(100):
        low = random_.choice([0, 1, 9, 10, 99, 100, random_.randint(0, 2000)])
        high = low + random_.choice([0, 1, 9, 10, 90, 900, random_.randint(0, 3000)])
        pattern = NamePattern.parse(f"layers.{{{low}-{high}}}.mlp")
        for number in {0, 1, low - 1, low, low + 1, high - 1, high, high + 1, *range(0, 5000, 37)}:
            if number >= 0:
                matches = pattern.match(f"layers.{number}.mlp") is not None
                assert matches == (low <= number <= high), (low, high, number)


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
    parsed = NamePattern.parse(pattern)
    assert [name for name in matching if parsed.match(name) is None] == []
    assert [name for name in others if parsed.match(name) is not None] == []


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers.[0-3]", r"unexpected '\[' at 7; .*\{0-4\} a number in a range"),
        ("layers.{0,2}", r"unexpected '\{' at 7"),
        ("layers.{4-0}", r"\{4-0\} is empty; write \{0-4\}"),
        ("layers.{0-10000}", r"\{0-10000\} has more than 10000 numbers; write \{\*\}"),
        ("layers.1{*}", r"'\{\*\}' at 8 is next to a digit"),
        ("{*}{0-4}", r"'\{0-4\}' at 3 is next to a digit or another number"),
        ("re:(", "not a regular expression: missing \\)"),
        (7, "pattern: expected a string, got 7"),
    ],
    ids=str,
)
def test_what_is_no_pattern_is_refused(pattern: str, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        NamePattern.parse(pattern)


@pytest.mark.parametrize(
    ("owner", "template", "name", "filled"),
    [
        ("layers.{*}.experts", "layers.{*}.mlp", "layers.12.experts", "layers.12.mlp"),
        ("layers.{0-3}.experts.{*}", "layers.{*}", "layers.2.experts.9", "layers.2"),
        ("*.experts", "*", "a.b.experts", "a.b"),
        ("bank", "head", "bank", "head"),
        (r"re:(\w+)\.(?P<i>\d+)\.bank", r"\1.\g<i>", "layers.3.bank", "layers.3"),
    ],
)
def test_wildcards_of_a_template_are_filled_in_order(owner, template, name, filled) -> None:
    pattern = NamePattern.parse(owner)
    match = pattern.match(name)
    assert match is not None
    assert NamePattern.parse(template).fill(match, pattern) == filled


def test_a_template_with_more_wildcards_than_its_owner_is_refused() -> None:
    pattern = NamePattern.parse("layers.{*}.experts")
    with pytest.raises(ValueError, match=r"'layers.\{\*\}.\?' has more wildcards than 'layers"):
        NamePattern.parse("layers.{*}.?").fill(pattern.match("layers.1.experts"), pattern)
    regex = NamePattern.parse(r"re:layers\.(\d+)")
    with pytest.raises(ValueError, match="refers to a group"):
        NamePattern.parse(r"layers.\2").fill(regex.match("layers.1"), regex)
