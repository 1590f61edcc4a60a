"""Describes a checkpoint as one JSON object. Reads only the manifest and file headers."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from layerzero.checkpoint.format.folder import (
    MANIFEST,
    committed_steps,
    leftovers,
    read_small,
    resolve,
)
from layerzero.checkpoint.format.inventory import MODEL, OPTIMIZER, split_state_name
from layerzero.checkpoint.format.manifest import Manifest
from layerzero.checkpoint.source import Location, Source, open_source
from layerzero.state_dict.dtype_names import dtype_name
from layerzero.state_dict.errors import CheckpointError


def describe(path: Path, with_tensors: bool = False) -> dict[str, Any]:
    """Describe the checkpoint or weights at `path`; for a folder of checkpoints, the latest.

    Values in the manifest (options of optimizer groups, scheduler, extra) stay encoded; `decode` of
    state_dict/json_codec.py reads them.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged. For a folder of checkpoints,
            whose other members may be intact, damage is part of the description instead.
    """
    chosen = resolve(path)
    if chosen == path:
        return {"path": str(path), "checkpoint": _describe_source(open_source(path), with_tensors)}
    try:
        latest = _describe_source(open_source(chosen), with_tensors)
    except (CheckpointError, OSError) as error:
        latest = {"path": str(chosen), "error": str(error)}
    return {"path": str(path), **_describe_root(path, chosen), "checkpoint": latest}


def _describe_root(root: Path, latest: Path) -> dict[str, Any]:
    return {
        "checkpoints": [
            {"name": path.name, "latest": path == latest, **_summary(path)}
            for path in committed_steps(root).values()
        ],
        "leftovers": [{"name": path.name, "nbytes": _nbytes(path)} for path in leftovers(root)],
    }


def _summary(folder: Path) -> dict[str, Any]:
    """Summary from the manifest; a damaged one gives an "error" entry, so that listing goes on."""
    try:
        path = folder / MANIFEST
        manifest = Manifest.from_bytes(read_small(path), path)
        return {
            "step": manifest.step,
            "nbytes": _nbytes(folder),
            "world_size": manifest.world_size,
            "written": datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).isoformat(),
        }
    except (CheckpointError, OSError) as error:
        return {"error": str(error)}


def _describe_source(source: Source, with_tensors: bool) -> dict[str, Any]:
    manifest = source.manifest
    files = sorted({p.file for places in source.tensors.values() for p in places.values()})
    sizes = {name: (source.folder / name).stat().st_size for name in files}
    found: dict[str, Any] = {
        "path": str(source.folder),
        "checksums": manifest is not None,
        "files": sizes,
        "model": _totals(source.tensors[MODEL].values()),
        "aliases": dict(source.aliases),
    }
    if manifest is not None:
        found |= {
            "step": manifest.step,
            "world_size": manifest.world_size,
            **_describe_optimizers(source, manifest),
            "scheduler": manifest.scheduler,
            "extra": manifest.extras,
            "extra_states": sorted(manifest.extra_states),
        }
    if with_tensors:
        found["tensors"] = [
            _describe_tensor(kind, name, place)
            for kind, places in source.tensors.items()
            for name, place in places.items()
        ]
    return found


def _describe_optimizers(source: Source, manifest: Manifest) -> dict[str, Any]:
    """One optimizer under "optimizer"; several by name, under "optimizers"."""
    by_name = manifest.groups_of_optimizers()
    found = {name: _describe_groups(source, manifest, groups) for name, groups in by_name.items()}
    single = found.pop("", None)
    return {"optimizer": single, **({"optimizers": found} if found else {})}


def _describe_groups(
    source: Source, manifest: Manifest, groups: list[dict[str, Any]]
) -> dict[str, Any]:
    members = {name for group in groups for name in group["params"]}
    by_key: dict[str, list[Location]] = {}
    for name, place in source.tensors[OPTIMIZER].items():
        parameter, key = split_state_name(name)
        if parameter in members:
            by_key.setdefault(key, []).append(place)
    values = (each for name, each in manifest.optimizer_values.items() if name in members)
    return {
        "groups": [
            {"num_parameters": len(group["params"]), "options": group["options"]}
            for group in groups
        ],
        "state": {key: _totals(places) for key, places in by_key.items()},
        "values": sorted({key for each in values for key in each}),
    }


def _describe_tensor(kind: str, name: str, place: Location) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": name,
        "dtype": dtype_name(place.entry.dtype, name),
        "shape": list(place.entry.shape),
        "file": place.file,
        "offset": place.entry.begin,
        "nbytes": place.entry.nbytes,
        "crc32": place.crc,
    }


def _totals(places: Iterable[Location]) -> dict[str, Any]:
    total = {"num_tensors": 0, "num_elements": 0, "nbytes": 0}
    dtypes: dict[str, dict[str, int]] = {}
    for place in places:
        own = dtypes.setdefault(dtype_name(place.entry.dtype, place.file), dict.fromkeys(total, 0))
        for each in (total, own):
            each["num_tensors"] += 1
            each["num_elements"] += place.entry.numel
            each["nbytes"] += place.entry.nbytes
    return {**total, "dtypes": dtypes}


def _nbytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
