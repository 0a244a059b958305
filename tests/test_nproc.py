"""`wb run --nproc`: several processes are one run, one answer and one run in MLflow."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_ranks import spec_file
from tiny_runs import ROUTED, tiny_spec, untracked_run

from workbench.launch import EndedRankError, _exit_code, without_nproc
from workbench.track.mlflow_store import connect
from workbench.track.record import RunRecord, read_record
from workbench.track.store import Store

pytestmark = pytest.mark.ddp

STEPS, SEQ_LEN, BATCH, ACCUMULATION = 4, 32, 2, 3
PER_STEP = 2 * BATCH * ACCUMULATION * SEQ_LEN  # tokens, on two processes
# Of the bytes of the corpus none is 2 or 6 modulo 32, say: these experts get no token.
MODEL = ROUTED | {"num_experts": 32, "intermediate_size": 64, "routing_strategy": "modulo_cyclic"}
TRAINING = {"steps": STEPS, "seq_len": SEQ_LEN, "gradient_accumulation_steps": ACCUMULATION}


@dataclass(frozen=True)
class Said:
    """What a command came to."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Ran:
    """A store with two runs of two processes, and what their commands said."""

    store: Store
    plain: Said
    as_json: Said
    again: Said  # of a name that is taken

    def record(self, name: str) -> RunRecord:
        return read_record(self.store.runs / name)


def wb(folder: Path, *words: str) -> Said:
    environment = os.environ | {"WB_HOME": str(folder / "mlruns"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "workbench", *words]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    return Said(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    training = TRAINING | {"batch_size": BATCH, "global_batch_size": None}
    return spec_file(tmp_path_factory.mktemp("nproc"), "spec", model=MODEL, training=training)


@pytest.fixture(scope="module")
def ran(spec: str) -> Ran:
    folder = Path(spec).parent
    plain = wb(folder, "run", "--nproc=2", spec, "name=plain")
    as_json = wb(folder, "run", spec, "name=as_json", "--nproc", "2", "--json")
    again = wb(folder, "run", spec, "name=plain", "--json", "--nproc", "2")
    return Ran(Store(folder / "mlruns"), plain, as_json, again)


@pytest.mark.slow
def test_both_forms_of_the_number_train_on_so_many_processes(ran: Ran) -> None:
    for name, said in (("plain", ran.plain), ("as_json", ran.as_json)):
        assert said.code == 0, said.err
        assert ran.record(name).status == "FINISHED"
        assert ran.record(name).world_size == 2


@pytest.mark.slow
def test_the_answer_of_all_is_one_document(ran: Ran) -> None:
    found = json.loads(ran.as_json.out)
    assert (found["run"], found["status"], found["exit_code"]) == ("as_json", "FINISHED", 0)
    assert found["id"] == ran.record("as_json").id
    assert ran.as_json.err == ""


@pytest.mark.slow
def test_a_refusal_of_all_is_one_document(ran: Ran) -> None:
    assert (ran.again.code, ran.again.err) == (2, ""), ran.again
    assert json.loads(ran.again.out)["error"]["place"] == "name"


@pytest.mark.slow
def test_a_refused_spec_is_one_document(spec: str) -> None:
    refused = wb(Path(spec).parent, "run", spec, "training.stepz=1", "--nproc=2", "--json")
    assert (refused.code, refused.err) == (2, "")
    assert json.loads(refused.out)["error"]["place"].endswith(": training.stepz")


@pytest.mark.slow
def test_tokens_are_those_of_all_processes_and_micro_batches(ran: Ran) -> None:
    record = ran.record("plain")
    assert record.tokens_per_step == PER_STEP
    assert record.total_tokens == STEPS * PER_STEP
    with (ran.store.runs / "plain" / "metrics.csv").open() as file:
        tokens = {int(row["step"]): int(row["tokens"]) for row in csv.DictReader(file)}
    assert tokens == {step: step * PER_STEP for step in range(STEPS + 1)}
    assert record.points[-1].tokens == STEPS * PER_STEP


@pytest.mark.slow
def test_unused_experts_are_those_of_one_process_and_said_once(ran: Ran, spec: str) -> None:
    changes: dict[str, Any] = {"model": MODEL, "training": TRAINING | {"batch_size": 2 * BATCH}}
    folder = Path(spec).parent
    alone = untracked_run(tiny_spec(folder, "alone", **changes), Store(folder / "alone"))
    unused = alone.record.results.unused_experts
    assert 0 < len(unused) < 32
    for name in ("plain", "as_json"):
        assert ran.record(name).results.unused_experts == unused
    said = [line for line in ran.plain.err.splitlines() if "unused experts" in line]
    assert len(said) == 1, ran.plain.err
    assert said[0].endswith(": " + ", ".join(unused))


@pytest.mark.slow
def test_several_processes_are_one_run_in_mlflow(ran: Ran) -> None:
    target = connect(None, ran.store, ran.record("plain").spec["tracking"]["experiment"])
    experiments = [one.experiment_id for one in target.client.search_experiments()]
    found = target.client.search_runs(experiments)
    assert sorted(run.info.run_name for run in found) == ["as_json", "plain"]
    for run in found:
        assert run.info.status == "FINISHED"
        history = target.client.get_metric_history(run.info.run_id, "train/nll")
        assert sorted(point.step for point in history) == list(range(1, STEPS + 1))


@dataclass(frozen=True)
class Failure:
    """What torch tells of a process that has ended, in whole seconds."""

    exitcode: int
    timestamp: int = 5


def test_the_exit_code_is_that_of_the_first_process_that_failed() -> None:
    assert _exit_code({1: Failure(4, 7), 0: Failure(74, 8)}, as_json=False) == 4
    # Rank one had yet to end when rank zero was refused: torch has ended it.
    for as_json in (False, True):
        assert _exit_code({0: Failure(2), 1: Failure(-signal.SIGTERM)}, as_json) == 2


def test_a_process_that_was_killed_is_named_once() -> None:
    """Whatever the others made of it; rank zero has written the one document where it is left."""
    killed = Failure(-signal.SIGKILL)
    for rank, others in ((1, {0: Failure(74)}), (0, {1: Failure(74)}), (1, {})):
        with pytest.raises(EndedRankError, match=f"rank {rank}: was ended by SIGKILL") as caught:
            _exit_code({**others, rank: killed}, as_json=False)
        assert caught.value.exit_code == 137
    assert _exit_code({0: Failure(74), 1: killed}, as_json=True) == 137
    assert _exit_code({1: killed}, as_json=True) == 137, "rank zero has finished"
    assert _exit_code({0: Failure(-signal.SIGTERM), 1: killed}, as_json=True) == 137
    with pytest.raises(EndedRankError, match="rank 0"):
        _exit_code({0: killed, 1: Failure(74)}, as_json=True)


def test_processes_are_not_told_how_many_they_are() -> None:
    for form in (["--nproc", "2"], ["--nproc=2"]):
        assert without_nproc(["run", "a.yaml", *form, "--json"]) == ["run", "a.yaml", "--json"]
