"""Measures one model trained by several processes, and writes `reports/scale.md`.

`make scale` runs it: minutes. Each figure is of this run of this command alone. It fails outright
where digests differ, losses part, or a dead process is not named, so a page that exists says that
none of it happened.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import psutil
import torch
from test_ranks import Ran, ran, spec_file
from tiny_runs import ROUTED

MODEL = ROUTED | {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "shared_intermediate_size": 512,
}
TRAINING = {"batch_size": None, "global_batch_size": 8, "seq_len": 128, "steps": 20}
WORLDS = (1, 2, 4)
KILLED_AT, SAVED_AT = 12, 10
MOST_APART = 1e-5


@dataclass(frozen=True)
class Row:
    """A run beside that of one process."""

    name: str
    parallel: str
    tokens_per_s: float | None  # None: too few steps after a resume to time any
    apart: float  # the largest relative difference of a step's NLL
    held_out: float  # likewise of the held-out NLL


def compared(name: str, run: Ran, one: Ran) -> Row:
    """The run's figures; it is the same run as that of one process, or this fails."""
    assert run.codes == [0] * len(run.codes), run.said
    own, whole = run.record, one.record
    assert [p.order_digest for p in own.points] == [p.order_digest for p in whole.points]
    steps, held_out = (apart(run.rows(c), one.rows(c)) for c in ("train/nll", "held_out/nll"))
    assert len(run.rows("train/nll")) == TRAINING["steps"]
    assert max(steps, held_out) < MOST_APART, (name, steps, held_out)
    speed, parallel = own.results.tokens_per_s, own.effective.execution.parallel
    assert parallel
    return Row(name, parallel, speed, steps, held_out)


def apart(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def specs(folder: Path) -> dict[str, str]:
    """The file of the spec for each way to train."""
    changes: dict[str, Any] = {"model": MODEL, "evaluation": {"eval_steps": 10}}
    changes["checkpoint"] = {"save_steps": 5, "save_total_limit": 9}
    return {
        parallel: spec_file(folder, parallel, training=TRAINING | {"parallel": parallel}, **changes)
        for parallel in ("ddp", "fsdp")
    }


def measure(folder: Path) -> list[str]:
    """The sections of the page."""
    files = specs(folder)
    cases: list[dict[str, Any]] = []
    for parallel, file in files.items():
        cases += [
            {"name": f"{parallel}_{n}", "processes": n, "spec": file}
            for n in WORLDS
            if n > 1 or parallel == "ddp"
        ]
        cases += [
            {
                "name": f"{parallel}_dying_{rank}",
                "processes": 2,
                "spec": file,
                "kill": [rank, KILLED_AT],
            }
            for rank in (0, 1)
        ]
    begun = ran(folder, cases)
    resumes = []
    for parallel, file in files.items():
        resumes += [
            {
                "name": f"{parallel}_on_{n}",
                "run": f"{parallel}_dying_{rank}",
                "processes": n,
                "spec": file,
                "options": ["--resume"],
            }
            for rank, n in ((0, 2), (1, 4))
        ]
    resumed = ran(folder, resumes)
    one = begun["ddp_1"]
    return [
        *scaling(begun, one),
        *deaths(begun),
        *resuming(begun, resumed, one),
    ]


def scaling(begun: dict[str, Ran], one: Ran) -> list[str]:
    """Speed and equality by number of processes."""
    rows = [compared(n, run, one) for n, run in begun.items() if "dying" not in n]
    speeds = [row.tokens_per_s for row in rows if row.tokens_per_s]
    assert len(speeds) == len(rows)
    timed = one.record.effective.interval
    assert timed
    lines = [
        "## The same run on 1, 2 and 4 processes",
        "",
        "One spec with `training.global_batch_size`, on one thread for each process; speed over "
        f"steps {timed.first_step} to {timed.last_step}. `Apart` is the largest relative "
        "difference to one process, over all steps (train) and evaluations (held out); digests of "
        "the token order are equal in all rows.",
        "",
        "| trained as | tokens/s | to one process | train NLL apart | held-out NLL apart |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row, speed in zip(rows, speeds, strict=True):
        lines.append(
            f"| {row.parallel} | {speed:,.0f} | {speed / speeds[0]:.2f} | "
            f"{row.apart:.1e} | {row.held_out:.1e} |"
        )
    sizes = {n: checkpoint_bytes(begun[n]) for n in ("ddp_1", "fsdp_2")}
    return [
        *lines,
        "",
        f"More processes than the {os.cpu_count()} cores here share them: those rows show what is "
        "computed, not what a larger machine gains. FSDP gathers every block twice a step, which "
        "over gloo costs more than the small model itself; it is for models that do not fit. "
        f"A checkpoint: {sizes['ddp_1'] / 1e6:.1f} MB, of FSDP {sizes['fsdp_2'] / 1e6:.1f} MB.",
        "",
    ]


def checkpoint_bytes(run: Ran) -> int:
    """Of the checkpoint in the middle of the run."""
    folder = run.folder / "checkpoints" / f"step_{SAVED_AT:08d}"
    return sum(path.stat().st_size for path in folder.iterdir())


def deaths(begun: dict[str, Ran]) -> list[str]:
    """What a process that dies costs."""
    lines = [
        "## A process that dies",
        "",
        f"Of two processes one is ended by SIGKILL after step {KILLED_AT}; checkpoints are saved "
        "every 5 steps.",
        "",
        "| trained as | killed | the other ends after | and says | steps to train again |",
        "| --- | --- | --- | --- | --- |",
    ]
    for parallel in ("ddp", "fsdp"):
        for rank in (0, 1):
            run = begun[f"{parallel}_dying_{rank}"]
            other = 1 - rank
            assert run.codes[rank] == -9, run.codes
            assert run.codes[other] == 74, (run.codes, run.said)
            said = next(s for s in run.said[other].splitlines() if f"error: rank {rank}" in s)
            assert run.after_kill is not None
            words = said.partition("error: ")[2].replace("|", "/")[:90]
            lines.append(
                f"| {parallel} | rank {rank} | {run.after_kill:.1f} s | {words} | "
                f"{KILLED_AT - SAVED_AT} |"
            )
    return [*lines, ""]


def resuming(begun: dict[str, Ran], resumed: dict[str, Ran], one: Ran) -> list[str]:
    """Resumes of those runs, on as many processes and on another number."""
    lines = [
        "## Going on with them",
        "",
        "| trained as | goes on as | flagged in the record | train NLL apart | against |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, run in resumed.items():
        parallel, _, n = name.partition("_on_")
        same = n == "2"
        row = compared(name, run, begun[f"{parallel}_2"] if same else one)
        if same:
            assert row.apart == 0, name
        changes = run.record.model_dump()["resumes"][-1]["changes"]
        flagged = [c["path"] for c in changes if c["effect"] == "flag"]
        assert bool(flagged) != same, changes
        lines.append(
            f"| {parallel}, 2 processes | {row.parallel} | {', '.join(flagged) or 'nothing'} | "
            f"{row.apart:.1e}{' (the same bits)' if same else ''} | "
            f"{'the unbroken run' if same else 'one process'} |"
        )
    return [*lines, ""]


def page(sections: list[str], seconds: float) -> str:
    """The report as markdown."""
    memory = psutil.virtual_memory().total / 1e9
    head = [
        "# Several processes",
        "",
        "Generated by `make scale`; do not edit. It writes no page where a run differs.",
        "",
        f"Made in {seconds:.0f} s on {platform.machine()} with {os.cpu_count()} cores and "
        f"{memory:.0f} GB, Python {platform.python_version()}, torch {torch.__version__} (gloo), "
        f"load average {os.getloadavg()[1]:.1f} over five minutes: speeds depend on what else ran. "
        f"The model has 4 layers of width {MODEL['hidden_size']} and 4 experts; an update takes "
        f"{TRAINING['global_batch_size']} sequences of {TRAINING['seq_len']} tokens.",
        "",
    ]
    return "\n".join([*head, *sections]).rstrip() + "\n"


def main() -> int:
    """Measures everything, then writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    out = Path(__file__).parents[1] / "reports" / "scale.md"
    parser.add_argument("--out", type=Path, default=out)
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        sections = measure(Path(folder))
    asked.out.write_text(page(sections, time.monotonic() - began))
    print(json.dumps({"wrote": str(asked.out)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
