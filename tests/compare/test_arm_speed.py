"""Two arms of ten seeds, 10,000 logged steps each and 5,000 held-out documents, within bounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import fake_runs
import numpy as np
import pytest
from fake_arms import write_run
from fake_runs import full_effective, full_record, full_spec, sha

from workbench.track.store import Store

STEPS, EVERY, DOCUMENTS, SEEDS = 10_000, 1_000, 5_000, 10
ARMS = {"gqa": 0.0, "mha": 0.02}  # by how much it is better


def write_large_arms(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.ceil(np.random.default_rng(0).lognormal(6, 0.8, DOCUMENTS)).astype(int)
    monkeypatch.setattr(fake_runs, "DOCUMENTS", DOCUMENTS)
    monkeypatch.setattr(fake_runs, "LENGTHS", lengths)
    overlap = fake_runs.OVERLAPS["held_out"]["overlap"]
    monkeypatch.setitem(overlap, "histogram", [2, DOCUMENTS - 2, *[0] * 10])
    for name, better in ARMS.items():
        for seed in range(SEEDS):
            run = f"{name}-s{seed}"
            spec = full_spec(
                seed=seed,
                name=run,
                model={"attention_type": name},
                training={"steps": STEPS},
                evaluation={"eval_steps": EVERY},
                telemetry={"log_steps": 1},
            )
            points = [
                {**point, "order_digest": sha(f"{seed} {point['tokens']}")}
                for point in fake_runs.points(STEPS, every=EVERY)
            ]
            record = full_record(run, spec=spec, points=points, effective=full_effective(STEPS))
            luck = 0.01 * float(np.random.default_rng(seed).standard_normal())
            own = 0.002 * float(np.random.default_rng([seed, len(name), better > 0]).normal())
            noise = 100 * len(ARMS) * seed + list(ARMS).index(name)  # of single documents
            write_run(home / run, record, shift=luck + own - better, seed=noise)


def work_of(process: int) -> float:
    """Processor seconds of a process so far, of all its threads: what others take of the machine
    is no part of it."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_ten_seeds_of_ten_thousand_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as it is typed, from an interpreter that has loaded nothing: the verdict is taken
    where its line comes out of the pipe, before the report is there; the end where the report's
    place is said. Telling MLflow is no part of either. Both are processor seconds."""
    store = Store(tmp_path / "mlruns")
    write_large_arms(store.runs, monkeypatch)
    arms = [f"--arm={one}={','.join(f'{one}-s{seed}' for seed in range(SEEDS))}" for one in ARMS]
    command = [sys.executable, "-m", "workbench", "compare", *arms, "--treatment", "model"]
    environment = {**os.environ, "WB_HOME": str(store.home)}
    began = time.perf_counter()
    clock: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        said: dict[str, float] = {}
        for line in process.stdout:
            for words in ("mha is better than gqa", "Over 5,000 documents", "report: "):
                if words in line:
                    said[words] = work_of(process.pid)
                    clock[words] = time.perf_counter() - began
                    reports = list(store.reports.glob("*/report.md"))
                    assert len(reports) == (words != "mha is better than gqa")
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    print(said, clock, f"{usage.ru_maxrss / 1e6:.2f} GB")
    assert process.returncode == 0
    verdict, _, report = said.values()
    assert verdict < 2
    assert report < 15
    assert usage.ru_maxrss * 1024 < 1e9
    (results,) = store.reports.glob("*/results.json")
    number = json.loads(results.read_text())["results"]["held_out/nll"]
    low, high = number["documents"]["interval"]
    assert high - low > 1e-6  # something was drawn
