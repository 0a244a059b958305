"""Where a run came from: the code, the libraries, the machine and the command, without secrets."""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from workbench.track.record import CodeFacts, HardwareFacts, NotApplicable, write_text

if TYPE_CHECKING:
    import torch

PACKAGE = Path(__file__).resolve().parents[1]

_VERSIONS = ("torch", "numpy", "tiktoken", "liger-kernel", "triton", "mlflow", "pydantic")
_SETTINGS = (
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "GLIBC_TUNABLES",
    "HIP_VISIBLE_DEVICES",
    "LD_PRELOAD",
    "MALLOC_CONF",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_COMPILE_DISABLE",
)
_GIT_SECONDS = 20.0
_MOST_DIFF = 4_000_000  # characters that are kept of it

_WORDS = r"(?:token|secret|passw(?:or)?d|passwd|pwd|api[_-]?key|access[_-]?key|credentials?|auth)"
_HIDDEN = "***"
_SECRETS = (
    # To the last @ before a path: clients take a password that holds one.
    (re.compile(r"(?<=://)[^/?#\s'\"]+@"), _HIDDEN + "@"),
    (
        re.compile(rf"(?i)\b(\w*{_WORDS}\s*[=:]\s*)(?:'[^']*'|\"[^\"]*\"|[^\s&'\"]+)"),
        rf"\1{_HIDDEN}",
    ),
    (re.compile(rf"(?i)(--?[\w-]*{_WORDS}\s+)(?!-)\S+"), rf"\1{_HIDDEN}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), rf"\1 {_HIDDEN}"),
    (re.compile(r"\b(?:hf_|gh[opsu]_|github_pat_|sk-|dapi|xox[abp]-|AKIA)[\w-]{12,}"), _HIDDEN),
)
_SECRET_NAME = re.compile(
    r"(?i)(?:^|_)(?:token|secret|pass|password|passwd|api_?key|access_?key|credentials?)(?:_|$)"
)


def redact(text: str) -> str:
    """The text without credentials: in addresses, after words that name one, of known shapes,
    and any value that the environment holds under a name of that kind."""
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET_NAME.search(name):
            text = text.replace(value, _HIDDEN)
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def code_facts() -> CodeFacts:
    """The hash and version of the package's own sources, and its commit where it is a checkout."""
    commit, diff = _git_state()
    return CodeFacts(
        package_sha256=package_hash(),
        version=_version("workbench") or "0+unknown",
        forced_resume="none",
        resumed_with="none",
        forked_from="none",
        git_commit=commit,
        git_dirty=None if diff is None else bool(diff),
        git_diff_sha256=hashlib.sha256(diff).hexdigest() if diff else None,
    )


def write_source_diff(folder: Path, package: Path = PACKAGE) -> Path | None:
    """Keeps what differs from the commit in a run's folder, without secrets; None: nothing does.

    Raises:
        StoreError: it cannot be written; nothing is left behind.
    """
    _, diff = _git_state(package)
    if not diff:
        return None
    text = redact(diff.decode("utf-8", "backslashreplace"))
    if len(text) > _MOST_DIFF:
        text = f"{text[:_MOST_DIFF]}\n... cut: {len(text):,} characters in all\n"
    path = folder / f"source-{hashlib.sha256(diff).hexdigest()[:8]}.diff"
    write_text(path, text)
    return path


def package_hash(root: Path = PACKAGE) -> str:
    """SHA-256 over the path, length and content of every source file below `root`, by path."""
    digest = hashlib.sha256()
    for path in _sources(root):
        content = path.read_bytes()
        name = path.relative_to(root).as_posix()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def hardware_facts(device: torch.device) -> HardwareFacts:
    """The device that a run computes on, and the libraries that do its arithmetic."""
    import torch

    libraries: dict[str, str] = {}
    driver: str | NotApplicable | None
    kind, name = device.type, ""
    if device.type == "cuda":
        kind = "hip" if torch.version.hip else "cuda"
        name = torch.cuda.get_device_name(device)
        driver = _gpu_driver()
        libraries[kind] = str(torch.version.hip or torch.version.cuda)
        cudnn: Any = torch.backends.cudnn
        if cudnn.is_available():
            libraries["cudnn"] = str(cudnn.version())
        for package in ("triton", "liger-kernel"):
            if version := _version(package):
                libraries[package] = version
    elif device.type == "mps":
        name, driver = cpu_name(), platform.mac_ver()[0] or None
    else:
        name, driver = cpu_name(), NotApplicable(not_applicable="a CPU has no driver")
        libraries["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        libraries |= _math_libraries(torch.__config__.show())
    return HardwareFacts(
        device_type=kind,
        device_name=name,
        device_count=1,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        driver=driver,
        libraries=libraries,
    )


def provenance(command: Sequence[str] | None = None) -> dict[str, Any]:
    """What else may explain a run one day: machine, versions, command. Not compared."""
    return {
        "command": redact(shlex.join(sys.argv if command is None else command)),
        "host": socket.gethostname(),
        "user": _user(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in _VERSIONS if (version := _version(name))},
        "cpu": {
            "name": cpu_name(),
            "cores": psutil.cpu_count(logical=False),
            "logical_cores": os.cpu_count(),
            "usable_cores": _usable_cores(),
            "instruction_sets": instruction_sets(),
        },
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpu_names(),
        "environment": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
    }


def cpu_name() -> str:
    """The model of the CPU; with its family and model numbers where the name has no number."""
    facts = _cpuinfo()
    name = facts.get("model name") or facts.get("Hardware") or platform.processor()
    if name and not re.search(r"\d", name) and "cpu family" in facts:
        name += f" (family {facts['cpu family']}, model {facts.get('model', '?')})"
    return name or platform.machine() or "unknown"


def instruction_sets() -> list[str]:
    """Those of AMX, AVX-512, AVX2, NEON and SVE that the CPU has; empty where it does not say."""
    facts = _cpuinfo()
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    wanted = re.compile(r"amx_\w+|avx512\w*|avx_vnni|avx2?|f16c|fma|asimd\w*|sve\w*|bf16")
    return sorted({flag for flag in flags if wanted.fullmatch(flag)})


def _cpuinfo(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """The first processor's entries."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _math_libraries(config: str) -> dict[str, str]:
    """The versions of the libraries that torch's own description of its build names."""
    patterns = {
        "mkl": r"Math Kernel Library Version ([\w.-]+)",
        "onednn": r"MKL-DNN v([\d.]+)|oneDNN v([\d.]+)",
        "openmp": r"OpenMP (\d+)",
    }
    found = {name: re.search(pattern, config) for name, pattern in patterns.items()}
    return {
        name: next(group for group in match.groups() if group)
        for name, match in found.items()
        if match
    }


def _gpu_driver() -> str | None:
    for path, pattern in (
        ("/proc/driver/nvidia/version", r"Kernel Module\D*([\d.]+)"),
        ("/sys/module/amdgpu/version", r"(\S+)"),
    ):
        try:
            match = re.search(pattern, Path(path).read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        if match:
            return match.group(1)
    return None


def _gpu_names() -> list[str]:
    """The GPUs that torch sees; nothing where torch has not been imported anyway."""
    loaded = sys.modules.get("torch")
    if loaded is None or not loaded.cuda.is_available():
        return []
    return [loaded.cuda.get_device_name(i) for i in range(loaded.cuda.device_count())]


def _usable_cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return None  # a container whose user has no name


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _sources(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())


def _git_state(package: Path = PACKAGE) -> tuple[str | None, bytes | None]:
    """The commit of the package's checkout and what differs from it.

    Returns:
        (None, None) where the package is not a tracked part of a repository: one that happens to
        be installed below somebody's repository says nothing about the code that runs.
    """
    try:
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(package, "rev-parse", "HEAD").decode().strip()
        prefixes = ("--src-prefix=a/", "--dst-prefix=b/")
        diff = _git(package, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-color", *prefixes)
        listing = ("ls-files", "--others", "--exclude-standard", "-z", "--", "*.py")
        for name in sorted(_git(package, *listing).split(b"\0")):
            if name:
                content = (package / os.fsdecode(name)).read_bytes()
                diff += b"\nuntracked %s %d\n" % (name, len(content)) + content
    except (OSError, subprocess.SubprocessError):
        return None, None
    return commit, diff


def _git(folder: Path, *arguments: str) -> bytes:
    # Inside a git hook these variables point at another repository.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment["GIT_OPTIONAL_LOCKS"] = "0"
    command: Sequence[str] = ("git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments)
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=_GIT_SECONDS,
        check=True,
    )
    return done.stdout
