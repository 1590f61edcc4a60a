"""What the YAML of options for Megatron's models may say beside what a plan's may (test_plan.py),
and what it says of mistakes."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from layerzero import MixedPrecision, OffloadPolicy
from layerzero.integrations.megatron.setup import OPTIONS, for_module, read_options
from layerzero.plan.options import ZERO3_OPTIONS
from tests.harness.models import WIDTH, Block, Parts


class DeepBlock(Block):
    """A layer of another class."""


def chunk() -> nn.Module:
    embedding, vision_model = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    layers = nn.ModuleList([Block(), DeepBlock(), Block()])
    return Parts(embedding=embedding, layers=layers, vision_model=vision_model)


def test_a_file_becomes_arguments_of_zero3(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    path = tmp_path / "zero3.yaml"
    given = {
        "zero3_size": 2,
        "param_dtype": "bf16",
        "offload": {"grads": True},
        "optional_modules": ["vision*"],
    }
    path.write_text(yaml.safe_dump(given))
    assert read_options(path) == {
        "zero3_size": 2,
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16),
        "offload": OffloadPolicy(grads=True),
        "optional_modules": ("vision*",),
    }
    path.write_text("# nothing said\n")
    assert read_options(path) == {}
    path.write_text("- zero3_size\n")
    with pytest.raises(TypeError, match=r"zero3\.yaml: expected a mapping of options, got \["):
        read_options(path)


def test_layers_and_what_is_ignored_are_found_by_class_or_name() -> None:
    for layers, expected in (
        (["Block"], ["layers.0", "layers.1", "layers.2"]),
        ("DeepBlock", ["layers.1"]),
        (f"{__name__}.DeepBlock", ["layers.1"]),
        (["layers.{1-2}", "embedding"], ["embedding", "layers.1", "layers.2"]),
        (["layers*"], ["layers.0", "layers.1", "layers.2"]),  # Not the list, which has no calls.
    ):
        ignored = {"ignored_modules": ["vision*"], "ignored_parameters": ["layers.{*}.*.bias"]}
        options = read_options({"transformer_layers": layers, **ignored})
        # As Megatron's Float16Module: names inside begin with "module.".
        for model, prefix in ((chunk(), ""), (Parts(module=chunk()), "module.")):
            inside, found = model.get_submodule(prefix.rstrip(".")), for_module(options, model)
            policy = found["auto_wrap_policy"]
            units = [n for n, each in model.named_modules() if n and policy(each, n)]
            assert [n for n in units if n.count(".") < 2 + len(prefix) // 7] == [
                prefix + name for name in expected
            ]
            assert found["ignored_modules"] == [inside.vision_model]
            biases = [p for name, p in inside.layers.named_parameters() if name.endswith("bias")]
            assert [*map(id, found["ignored_parameters"])] == [*map(id, biases)] != []


def test_a_name_that_matches_nothing_is_a_warning_with_near_ones() -> None:
    options = read_options({"transformer_layers": ["Blok"], "ignored_modules": ["vision_modle"]})
    with pytest.warns(UserWarning) as caught:
        for_module(options, chunk())
    texts = [str(each.message) for each in caught]
    assert re.match(r"transformer_layers: 'Blok' matches nothing .*near matches: 'Block'", texts[0])
    assert re.match(r"ignored_modules: 'vision_modle' .*near matches: 'vision_model'", texts[1])


def test_a_mistake_is_named_with_file_and_key() -> None:
    for given, kind, message in (
        ({"transformer_layer": []}, ValueError, "near matches: 'transformer_layers'"),
        ({"ignored_modules": {"a": 1}}, TypeError, "ignored_modules: expected a list of patterns"),
        ({"optional_modules": ["a["]}, ValueError, "optional_modules: pattern"),
        ({"process_group": 0}, ValueError, "it is Megatron's data-parallel group; use zero3_size"),
        ({"autocast_output": True}, ValueError, "write output_dtype: fp32"),
    ):
        with pytest.raises(kind, match=f"^options: .*{message}"):
            read_options(given)


def test_every_argument_of_zero3_can_be_said_or_is_refused_with_a_reason() -> None:
    for name in set(ZERO3_OPTIONS) - set(OPTIONS):
        with pytest.raises(ValueError, match=f"options: {name}=None cannot be an option: "):
            read_options({name: None})
