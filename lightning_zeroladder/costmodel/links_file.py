"""``links.json``: what `zeroladder bench` measured, on disk. Loads neither torch nor DeepSpeed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_zeroladder.costmodel.links import Links, Machine, Overlap, Sample, Where
from lightning_zeroladder.costmodel.traffic import Collective

__all__ = ["SCHEMA", "links_from_json", "links_to_json", "read_links", "write_links"]

SCHEMA = 1
_KIND = "zeroladder links"
_NOT_POSITIVE = ("nbytes", "median_s", "collective_s", "product_s", "product_during_s", "both_s")


def links_to_json(links: Links) -> dict[str, Any]:
    """Return links as what JSON can carry; bandwidths stand beside what they follow from, for people to read."""
    samples = [
        {
            **asdict(sample),
            "algorithm_bytes_per_s": sample.algorithm_bytes_per_s,
            "bus_bytes_per_s": sample.bus_bytes_per_s,
        }
        for sample in links.samples
    ]
    overlaps = [
        {**asdict(overlap), "slow_down": overlap.slow_down, "hidden": overlap.hidden} for overlap in links.overlaps
    ]
    return {
        "kind": _KIND,
        "schema": SCHEMA,
        "machine": asdict(links.machine),
        "samples": samples,
        "overlaps": overlaps,
    }


def links_from_json(data: Any, name: str = "links") -> Links:
    """Inverse of `links_to_json`.

    Args:
        data: What JSON carried.
        name: What messages call it.

    Raises:
        ValueError: If it is something else, of another version, or has numbers that no links have.
    """
    if not isinstance(data, dict) or data.get("kind") != _KIND:
        raise ValueError(f"{name} was not written by zeroladder bench: run zeroladder bench --output links.json.")
    if data.get("schema") != SCHEMA:
        raise ValueError(
            f"{name} has schema {data.get('schema')!r}, expected {SCHEMA}: measure again with this version, "
            "zeroladder bench --output links.json."
        )
    try:
        links = Links(
            Machine(**data["machine"]),
            tuple(_sample(item) for item in data["samples"]),
            tuple(_overlap(item) for item in data["overlaps"]),
        )
        _check(links)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        missing = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{name} is damaged: {missing}. Measure again with zeroladder bench.") from error
    return links


def _sample(item: Mapping[str, Any]) -> Sample:
    fields = {name: item[name] for name in Sample.__dataclass_fields__}
    return Sample(**{**fields, "collective": Collective(item["collective"]), "where": Where(item["where"])})


def _overlap(item: Mapping[str, Any]) -> Overlap:
    return Overlap(**{**{name: item[name] for name in Overlap.__dataclass_fields__}, "where": Where(item["where"])})


def _check(links: Links) -> None:
    if not links.samples:
        raise ValueError("it has no samples")
    if links.machine.nodes < 1 or links.machine.per_node < 1:
        raise ValueError(f"nodes={links.machine.nodes}, per_node={links.machine.per_node}: both must be at least 1")
    for item in (*links.samples, *links.overlaps):
        for field in _NOT_POSITIVE:
            value = getattr(item, field, 1)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field}={value!r} must be above 0")
    for sample in links.samples:
        if sample.ranks < 2:
            raise ValueError(f"ranks={sample.ranks} must be at least 2")


def read_links(path: Path) -> Links:
    """Read ``links.json``.

    Raises:
        OSError: If there is no such file.
        ValueError: If it is not one, or one of another version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path}: write it with zeroladder bench --output {path}.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error}): write it with zeroladder bench --output {path}.") from None
    return links_from_json(data, str(path))


def write_links(path: Path, links: Links) -> None:
    """Write ``links.json``, whole or not at all.

    Raises:
        OSError: If it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, because os.replace is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(links_to_json(links), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
