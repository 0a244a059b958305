"""What a data section names and no run can have yet is refused by the spec."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from workbench.spec.run import RunSpec


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (
            {
                "dataset": "tokens",
                "tokens_path": "t",
                "held_out": [{"name": "wiki", "path": "w.txt"}],
            },
            "data.held_out",
        ),
    ],
)
def test_what_is_not_built_is_refused_and_never_ignored(data: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError, match=f"{place}.*not built yet"):
        RunSpec.model_validate({"name": "a", "data": data})
