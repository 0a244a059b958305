"""Two arms of ten seeds, 10,000 logged steps each and 5,000 held-out documents, within bounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fake_runs
import numpy as np
import pytest
from fake_arms import write_run
from fake_runs import full_effective, full_record, full_spec, sha

STEPS, EVERY, DOCUMENTS, SEEDS = 10_000, 1_000, 5_000, 10

MEASURED = """
import json, resource, sys, time
from pathlib import Path
began = time.perf_counter()  # loading what it takes is part of it
from workbench.compare import compare_arms, write_arms_report
home = Path(sys.argv[1])
arms = {arm: sorted(home.glob(f"{arm}-s*")) for arm in ("gqa", "mha")}
found = compare_arms(arms, treatment=["model"], over_documents=False)
verdict = time.perf_counter() - began
assert "scipy.stats" not in sys.modules
assert found.pairs[0].results.numbers["held_out/nll"].winner == "b", found.verdict
began = time.perf_counter()
write_arms_report(compare_arms(arms, treatment=["model"]), home.parent / "reports")
report = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"verdict": verdict, "report": report, "peak": peak}))
"""


def write_large_arms(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.ceil(np.random.default_rng(0).lognormal(6, 0.8, DOCUMENTS)).astype(int)
    monkeypatch.setattr(fake_runs, "DOCUMENTS", DOCUMENTS)
    monkeypatch.setattr(fake_runs, "LENGTHS", lengths)
    overlap = fake_runs.OVERLAPS["held_out"]["overlap"]
    monkeypatch.setitem(overlap, "histogram", [2, DOCUMENTS - 2, *[0] * 10])
    for name, better in (("gqa", 0.0), ("mha", 0.02)):
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
            write_run(home / run, record, shift=luck + own - better, seed=seed)


@pytest.mark.slow
def test_ten_seeds_of_ten_thousand_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_large_arms(tmp_path / "runs", monkeypatch)
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    print(found)
    assert found["verdict"] < 2
    assert found["report"] < 15
    assert found["peak"] < 1e9
