"""Read a plan from YAML; PyYAML is only needed here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def load(path: Path) -> Any:
    """What a YAML file says, read without making any object but plain data.

    Raises:
        ImportError: PyYAML is not installed.
        ValueError: not YAML, or a key twice (YAML itself would let the last one win silently).
    """
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ImportError(
            f"{path}: reading YAML needs PyYAML: pip install pyyaml, or give the plan's fields to "
            "ShardingPlan.from_dict"
        ) from error

    class UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
        """A loader that refuses a key that is there twice."""

    def construct_mapping(loader: Any, node: Any) -> dict[Any, Any]:
        # What a merge key (<<) brings may be said again.
        nodes = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [loader.construct_object(key, deep=True) for key in nodes]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                line = nodes[index].start_mark.line + 1
                raise ValueError(f"{path}: line {line}: the key {key!r} is there twice")
        loader.flatten_mapping(node)
        return dict(loader.construct_pairs(node, deep=True))

    UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, construct_mapping)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeys)
    except yaml.YAMLError as error:
        raise ValueError(
            f"{path}: not YAML: {error}; a pattern needs quotes where it starts with '*' or '{{', "
            "and where it has braces inside [...] or {...}"
        ) from None
