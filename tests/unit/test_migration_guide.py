"""The migration guide has every option of what people come from, as it is installed."""

import dataclasses
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDE = (DOCS / "reference" / "migrating.md").read_text()
FSDP2 = (DOCS / "howto" / "from_fsdp2.md").read_text()
TRAINERS = (DOCS / "reference" / "migrating_trainers.md").read_text()


def arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "module", "args", "kwargs"}


def fields(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def section(text: str, title: str) -> str:
    """What is under the heading `title`, up to the next one of its level or above."""
    start = re.search(rf"^(#+) {re.escape(title)}$", text, re.M)
    assert start is not None, f"no section {title!r}"
    rest = text[start.end() :]
    end = re.search(rf"^#{{1,{len(start[1])}}} ", rest, re.M)
    return rest[: end.start()] if end else rest


def missing(options: set[str], text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", prose))))
    return sorted(options - named)


def test_every_option_of_fsdp1_has_its_row() -> None:
    # What is FSDP1's own affair, and no user passes.
    options = arguments(FullyShardedDataParallel) | fields(MixedPrecision)
    options |= set(ShardingStrategy.__members__)
    assert missing(options, GUIDE) == []


def test_every_option_of_fully_shard_has_its_row() -> None:
    options = arguments(fully_shard) | fields(MixedPrecisionPolicy) | fields(CPUOffloadPolicy)
    methods = {name for name in vars(FSDPModule) if not name.startswith("_")}
    assert missing(options | methods, GUIDE + FSDP2) == []


def attribute_of(framework: str, name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    pytest.importorskip(framework)
    return getattr(importlib.import_module(module), attribute)


def test_every_option_of_accelerates_plugin_has_its_row() -> None:
    plugin = attribute_of("accelerate", "accelerate.utils.FullyShardedDataParallelPlugin")
    assert missing(fields(plugin), section(TRAINERS, "accelerate and transformers")) == []


@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy"])
def test_every_option_of_lightnings_strategies_has_its_row(name: str) -> None:
    strategy = attribute_of("lightning", f"lightning.pytorch.strategies.{name}")
    assert missing(arguments(strategy), section(TRAINERS, "Lightning")) == []


def test_what_pages_call_by_its_full_name_is_there() -> None:
    """`layerzero.checkpoint.save`, say; of integrations whatever is installed."""
    # Records of decisions also name what was rejected.
    pages = [path for path in DOCS.rglob("*.md") if "decisions" not in path.parts]
    texts = "".join(path.read_text() for path in pages)
    for name in set(re.findall(r"`(layerzero(?:\.\w+)+)", texts)):
        if name.startswith("layerzero.integrations"):
            assert importlib.util.find_spec(name) is not None, name
            continue
        found: Any = importlib.import_module("layerzero")
        for part in name.split(".")[1:]:
            if not hasattr(found, part) and inspect.ismodule(found):
                importlib.import_module(f"{found.__name__}.{part}")
            assert hasattr(found, part), name
            found = getattr(found, part)
