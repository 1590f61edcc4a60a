"""Adapters take `optional_modules` by name, and pass the modules on to `ZeRO3`."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from layerzero.plan.resolve import optional_by_name
from tests.harness.models import WIDTH, Block
from tests.harness.ranks import run_ranks
from tests.harness.regions import recorded_regions


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)


def test_names_and_patterns_stand_for_modules() -> None:
    model = _Model()
    head, blocks = model.head, list(model.blocks)
    for listed, expected in (
        (["head"], [head]),
        (("blocks.{1-2}", head), [*blocks[1:], head]),
        (["blocks*"], [model.blocks]),  # Not those inside it again.
        ({"blocks.0"}, blocks[:1]),
        (iter(["re:blocks\\.[02]"]), [blocks[0], blocks[2]]),
        ([], []),
    ):
        assert [*map(id, optional_by_name(model, listed))] == [*map(id, expected)]
    compiled = torch.compile(model.head, backend="eager")
    model.head = compiled
    assert [*optional_by_name(model, ["head"])] == [compiled]
    for listed, error, message in (
        ("head", TypeError, "expected a list of names or modules, got 'head'"),
        (head, TypeError, "got Linear"),
        (None, TypeError, "got None"),
        (["hed"], ValueError, "'hed' matches no module; near matches: 'head'"),
        ([""], ValueError, "'' matches no module"),
        (["a["], ValueError, "optional_modules: pattern 'a.': unexpected"),
    ):
        with pytest.raises(error, match=message):
            list(optional_by_name(model, listed))


def _lightning() -> None:
    from tests.integrations.trainers import rows, seeded, trainer, zero3_strategy

    by_name = {"optional_modules": ["blocks.1"], "optional_mean": "participants"}
    in_plan = {
        "apply_modules": ["blocks.{*}"],
        "optional": ["blocks.1"],
        "defaults": {"optional_mean": "participants"},
    }
    with recorded_regions() as found:
        for strategy in (zero3_strategy(**by_name), zero3_strategy(plan=in_plan)):
            trainer(strategy, max_epochs=1, limit_train_batches=1).fit(seeded(), rows())
    assert found == [({"blocks.1": "blocks.1"}, "participants")] * 2


def test_lightning() -> None:
    pytest.importorskip("lightning", reason="the extra [lightning] is not installed")
    run_ranks(1, _lightning)


def _transformers(folder: str) -> None:
    from accelerate import Accelerator

    from layerzero.integrations.accelerate import prepare
    from tests.integrations.test_transformers import (
        as_if_launched,
        build,
        sharded_trainer,
    )

    options: dict[str, Any] = {"optional_modules": ["model.layers.1"]}
    with recorded_regions() as found:
        sharded_trainer(build("llama"), folder, zero3=options).train()
        as_if_launched(True)
        prepare(Accelerator(cpu=True), build("llama"), optional_mean="participants", **options)
    layer = {"model.layers.1": "model.layers.1"}
    assert found == [(layer, "all"), (layer, "participants")]


def test_transformers_and_accelerate(tmp_path: Any) -> None:
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("accelerate")
    run_ranks(1, _transformers, str(tmp_path))


def _megatron() -> None:
    from layerzero.integrations.megatron import ZeRO3DataParallel
    from tests.integrations.test_megatron import SMALL, _ddp, _example, _on_megatrons_ranks

    def run(options: Any) -> None:
        example = _example()
        config = example.transformer_config(options)
        model = example.Float16Module(config, example.MakeModel(options, config)())
        make = functools.partial(ZeRO3DataParallel, config, _ddp(), model)
        optional = ["decoder.layers.{0-1}"]
        if options.pipeline > 1:
            with pytest.raises(NotImplementedError, match="optional_modules with 2 pipeline st"):
                make(optional_modules=optional)
            return
        with recorded_regions() as found:
            make(optional_modules=optional, optional_mean="participants")
        layers = [f"module.decoder.layers.{i}" for i in (0, 1)]
        assert found == [(dict(zip(layers, layers, strict=True)), "participants")]

    _on_megatrons_ranks([*SMALL, "--dtype", "bf16"], run)
    _on_megatrons_ranks([*SMALL, "--dtype", "bf16", "--pipeline", "2"], run)


def test_megatron() -> None:
    pytest.importorskip("megatron.core")
    run_ranks(2, _megatron)


def test_options_of_megatron() -> None:
    from layerzero.integrations.megatron.options import read_options

    read = read_options({"optional_modules": ["vision*"], "optional_mean": "participants"})
    assert read == {"optional_modules": ("vision*",), "optional_mean": "participants"}
    with pytest.raises(ValueError, match="options: optional_modules: pattern"):
        read_options({"optional_modules": ["a["]})
