"""Trains several tiny runs at once, each a process of its own with its feeder: a program for tests.

    python many_runs.py FOLDER URI NUMBER STEPS

They are forked from one process that has loaded torch and computed nothing: to load it for each of
them would take longer than the runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
os.environ["OMP_NUM_THREADS"] = "1"

from tiny_runs import DENSE, tiny_spec

from workbench import run as runner
from workbench.spec.run import RunSpec
from workbench.track.store import Store


def specs(folder: Path, uri: str, number: int, steps: int) -> list[RunSpec]:
    """Half of them routed, half dense; a seed for each pair."""
    found = []
    for index in range(number):
        name = "routed" if index % 2 == 0 else "dense"
        model = {} if name == "routed" else {**DENSE, "mlp_type": "dense"}
        spec = tiny_spec(
            folder,
            f"{name}-{index // 2}",
            seed=index // 2,
            model=model,
            training={"steps": steps},
            evaluation={"eval_steps": steps // 4},
            checkpoint={"save_minutes": 0},
            tracking={"uri": uri, "experiment": "many"},
        )
        found.append(spec)
    return found


def main(arguments: list[str]) -> int:
    """Trains them; 0 when all have finished."""
    folder, uri, number, steps = arguments
    store = Store(Path(folder) / "mlruns")
    children = []
    for spec in specs(Path(folder), uri, int(number), int(steps)):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = runner.run(spec, store, ["run", "tiny.yaml"], quiet=True).exit_code
            finally:
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
