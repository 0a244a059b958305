"""What `wb bench` measured on this machine, kept in the store for the expected time of a plan.

One file for each machine, device, torch and precision, with the last result of every step that was
measured there. Nothing depends on it: it can be deleted at any time. Torch is not imported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from workbench.errors import storing
from workbench.spec.run import RunSpec
from workbench.track.provenance import cpu_name
from workbench.track.record import write_json
from workbench.track.store import Store

FORMAT = 1
# Results kept in a file: the newest.
MOST_KEPT = 20
# Sections with settings that a step's time may depend on; of these two, only what is named.
_SECTIONS = ("model", "tokenizer", "training", "optimizer", "telemetry")
_NAMED = {"optimizer": ("name", "muon_scope", "muon_ns_steps"), "telemetry": ("moe",)}

Device = Literal["cpu", "cuda", "mps"]


@dataclass(frozen=True)
class Measured:
    """One kept result: of which spec and when, on what, and how fast its step was.

    `step` are the settings of the step, by dotted field. `flops_per_token` are those of its model.
    """

    spec: str
    date: str
    device: str
    device_type: str
    torch: str
    threads: int
    tokens_per_s: float
    flops_per_token: int
    step: dict[str, Any]

    def differs(self, spec: RunSpec) -> list[str]:
        """The settings of the step in which `spec` differs."""
        other = step_settings(spec)
        names = {**self.step, **other}
        return [name for name in names if self.step.get(name) != other.get(name)]


def keep_bench(spec: RunSpec, result: dict[str, Any], store: Store) -> Path:
    """Keeps a result of `bench.bench`, in place of an earlier one of the same step.

    Raises:
        StoreError: the store cannot be written.
    """
    where = {name: result.get(name) for name in ("device", "device_type", "torch", "threads")}
    where |= {"cpu": cpu_name(), "precision": spec.training.precision}
    key = hashlib.sha256(json.dumps(where, sort_keys=True).encode()).hexdigest()[:16]
    path = _folder(store) / f"{key}.json"
    step = step_settings(spec)
    entry = {
        "spec": spec.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        **{name: result.get(name) for name in ("tokens_per_s", "flops_per_token")},
    }
    earlier = [one for one in _read(path).get("results", []) if one.get("step") != step]
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    document = {"format": FORMAT, **where, "results": [*earlier, entry][-MOST_KEPT:]}
    write_json(path, document)
    return path


def find_bench(spec: RunSpec, device: Device, store: Store) -> Measured | None:
    """The result that tells most of `spec` on this machine, in its precision and on `device`.

    That of the very step, where there is one, else the newest; None where there is none.
    """
    found = sorted(_measured(spec.training.precision, device, store), key=lambda one: one.date)
    same = [one for one in found if not one.differs(spec)]
    best = same or found
    return best[-1] if best else None


def step_settings(spec: RunSpec) -> dict[str, Any]:
    """The settings that a step's time may depend on, by dotted field."""
    document = spec.model_dump(mode="json", include=set(_SECTIONS))
    training = document["training"]
    # Where the run ends, and a batch that is given for all processes, are nothing of a step.
    for name in ("steps", "stop_at_step", "global_batch_size"):
        del training[name]
    training["batch_size"] = spec.micro_batch_size
    return {
        f"{section}.{name}": document[section][name]
        for section in _SECTIONS
        for name in _NAMED.get(section, document[section])
    }


def torch_version() -> str:
    """The version of the installed torch, `none` where there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"


def _measured(precision: str, device: Device, store: Store) -> Iterator[Measured]:
    kinds = {"cpu": ("cpu",), "cuda": ("cuda", "hip"), "mps": ("mps",)}[device]
    folder = _folder(store)
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        document = _read(path)
        if document.get("cpu") != cpu_name() or document.get("torch") != torch_version():
            continue
        if document.get("precision") != precision or document.get("device_type") not in kinds:
            continue
        where = {name: document[name] for name in ("device", "device_type", "torch", "threads")}
        for entry in document["results"]:
            if entry["tokens_per_s"] and entry["flops_per_token"]:
                yield Measured(**where, **entry)


def _read(path: Path) -> dict[str, Any]:
    """A file of results; empty where there is none that can be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    readable = isinstance(document, dict) and document.get("format") == FORMAT
    return document if readable else {}


def _folder(store: Store) -> Path:
    return store.cache / "bench"
