"""What `mlflow.pyfunc.load_model` calls: the model of the checkpoint that is referred to."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.errors import UserError
from workbench.track.mlflow_models import read_reference
from workbench.track.store import Store


class LogitsModel:
    """A model as MLflow calls it."""

    def __init__(self, checkpoint: Path) -> None:
        from workbench.core.load_model import load_model

        self.loaded = load_model(checkpoint)

    def predict(self, ids: Any, params: dict[str, Any] | None = None) -> npt.NDArray[np.float32]:
        """ids [batch, sequence] int64 -> float32 logits [batch, sequence, vocabulary]."""
        import torch

        model = self.loaded.model
        given = torch.as_tensor(np.asarray(ids, dtype=np.int64)).to(model.head_weight.device)
        with torch.no_grad():
            logits: npt.NDArray[np.float32] = model.logits(given).cpu().numpy()
        return logits


def _load_pyfunc(path: str) -> LogitsModel:
    """The model of the checkpoint that the reference in a folder names.

    Raises:
        UserError: the checkpoint is not on this machine, or is another one now.
    """
    reference = read_reference(Path(path))
    step, sha256 = reference["step"], reference["sha256"]
    places = [Path(reference["checkpoint"])]
    store = Store()
    try:  # the store may have moved, and the run with it
        folder = store.find_run(reference["run_id"]).folder
        places.append(folder / "checkpoints" / f"step_{step:08d}")
    except UserError:
        pass
    for place in places:
        manifest = place / "manifest.json"
        if not manifest.is_file():
            continue
        found = hashlib.sha256(manifest.read_bytes()).hexdigest()
        if found != sha256:
            message = "this is not the checkpoint that was logged"
            raise UserError.at(str(place), message, found, sha256)
        return LogitsModel(place)
    message = f"the weights of {reference['run']} at step {step} are not on this machine"
    allowed = f"the machine that trained it, or its store under WB_HOME ({store.home} is none)"
    raise UserError.at(str(places[0]), message, None, allowed)
