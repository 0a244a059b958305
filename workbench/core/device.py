"""Which device trains, and what has to be set up there before the first tensor."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Literal, get_args

import torch

from workbench.errors import UserError

DeviceName = Literal["auto", "cpu", "cuda", "mps"]


def device_named(text: str) -> DeviceName:
    """The name of a kind of device.

    Raises:
        UserError: there is no such kind.
    """
    for name in get_args(DeviceName):
        if text == name:
            known: DeviceName = name
            return known
    allowed = ", ".join(get_args(DeviceName))
    raise UserError.at("--device", "there is no such kind of device", text, allowed)


def choose_device(name: DeviceName) -> torch.device:
    """The device asked for; `auto` takes CUDA (ROCm included), then MPS, then the CPU.

    Raises:
        UserError: the device asked for is not there.
    """
    available = ["cpu"]
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    if name == "auto":
        return torch.device(available[0])
    if name not in available:
        message = "this machine has no such device, or this torch was built without it"
        raise UserError.at("training.device", message, name, ", ".join(("auto", *available)))
    return torch.device(name)


def device_kind(device: torch.device) -> str:
    """`cpu`, `cuda`, `hip` (ROCm, which torch drives under the name cuda) or `mps`."""
    return "hip" if device.type == "cuda" and torch.version.hip else device.type


def make_deterministic(wanted: bool, device: torch.device) -> None:
    """Asks torch for kernels that give the same bits for the same input, or lets it choose."""
    if wanted and device.type == "cuda":
        # cuBLAS is only deterministic with a fixed workspace (CUDA documentation, "Results
        # reproducibility"); read when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    # Filling fresh memory costs a pass over it and hides nothing: no code here reads it unwritten.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def require_compiler(device: torch.device) -> None:
    """Checks that `compile: true` can work, before anything is built.

    Raises:
        UserError: the C++ compiler or the Python headers that torch.compile needs are missing.
    """
    if os.environ.get("TORCH_COMPILE_DISABLE", "0") == "1":
        # torch.compile would return its argument unchanged, and the record would call it compiled.
        message = "TORCH_COMPILE_DISABLE=1 in the environment turns compilation off"
        raise UserError.at("training.compile", message, True, "false, or unset it")
    if device.type != "cpu":
        return
    place, allowed = "training.compile", "false, or install what is missing"
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "c++", "clang++")):
        raise UserError.at(place, "torch.compile needs a C++ compiler, none found", True, allowed)
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        message = "torch.compile needs the Python headers (Python.h), not found"
        raise UserError.at(place, message, True, allowed)
