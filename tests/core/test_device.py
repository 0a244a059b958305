"""What is asked of a device is had or refused."""

import pytest
import torch

from workbench.core.device import require_compiler
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
