"""Reads a plan from YAML. Only this file needs PyYAML."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

_DEEPEST = 64
"""Lists and mappings inside each other."""


def load(path: Path) -> Any:
    """The content of a YAML file as plain data; no other objects are constructed.

    Raises:
        ImportError: PyYAML is not installed.
        ValueError: not YAML, or a duplicate key (PyYAML would silently take the last one).
    """
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ImportError(
            f"{path}: reading YAML needs PyYAML: pip install pyyaml, or pass the plan's fields to "
            "ShardingPlan.from_dict"
        ) from error

    class UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
        """A loader that raises for duplicate keys."""

        def fetch_flow_collection_start(self, token_class: Any) -> None:
            # PyYAML's time grows with the square of the depth.
            if self.flow_level == _DEEPEST:
                raise RecursionError
            super().fetch_flow_collection_start(token_class)

    def construct_mapping(loader: Any, node: Any) -> dict[Any, Any]:
        # Keys that a merge key (<<) brings in may be overridden, so they do not count.
        nodes = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [loader.construct_object(key, deep=True) for key in nodes]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                line = nodes[index].start_mark.line + 1
                raise ValueError(f"{path}: line {line}: the key {key!r} occurs twice")
        loader.flatten_mapping(node)
        return dict(loader.construct_pairs(node, deep=True))

    UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, construct_mapping)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeys)
    except yaml.YAMLError as error:
        raise ValueError(
            f"{path}: not YAML: {error}; put quotes around a pattern that starts with '*' or '{{', "
            "or has braces inside [...] or {...}"
        ) from None
    except RecursionError:
        raise ValueError(f"{path}: lists or mappings are nested too deeply for a plan") from None
