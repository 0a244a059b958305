"""What is asked of a device is had or refused."""

import pytest
import torch

from workbench.core.device import device_kind, require_compiler
from workbench.core.train import synchronize
from workbench.errors import UserError


def test_compile_is_refused_where_the_environment_turns_it_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with pytest.raises(UserError, match="TORCH_COMPILE_DISABLE"):
        require_compiler(torch.device("cpu"))


def test_compile_is_refused_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    with pytest.raises(UserError, match="needs a C\\+\\+ compiler"):
        require_compiler(torch.device("cpu"))


def test_rocm_is_recorded_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch drives it as `cuda`: only its version tells."""
    monkeypatch.setattr(torch.version, "hip", None)
    assert [device_kind(torch.device(name)) for name in ("cuda", "cpu", "mps")] == [
        "cuda",
        "cpu",
        "mps",
    ]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert [device_kind(torch.device(name)) for name in ("cuda", "cpu", "mps")] == [
        "hip",
        "cpu",
        "mps",
    ]


@pytest.mark.parametrize("kind", ["cuda", "mps", "cpu"])
def test_a_clock_waits_for_the_device_that_works(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append(device.type))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waits.append("mps"))
    synchronize(torch.device(kind))
    assert waits == ([] if kind == "cpu" else [kind])
