"""Places as a report names them: seen from the project, wherever the project is moved to.

The project is the folder that holds the store; the reports lie beside it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def seen_from(project: Path, path: Path | str) -> str:
    """A path relative to the project, which may have been moved since the path was written; of a
    file elsewhere only its name."""
    place = Path(path)
    if not place.is_absolute():
        return str(path)
    if place.is_relative_to(project):
        return str(place.relative_to(project))
    ends = (Path(*place.parts[first:]) for first in range(1, len(place.parts)))
    return next((str(end) for end in ends if (project / end).is_file()), place.name)


def portable(value: Any, project: Path) -> Any:
    """A document with the project's own folder taken out of every text, messages included."""
    if isinstance(value, dict):
        return {key: portable(one, project) for key, one in value.items()}
    if isinstance(value, list):
        return [portable(one, project) for one in value]
    if isinstance(value, str):
        # /project-2 is another folder than /project.
        inside = re.sub(rf"{re.escape(str(project))}/", "", value)
        return re.sub(rf"{re.escape(str(project))}(?![\w.-])", ".", inside)
    return value
