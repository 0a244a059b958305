"""What happens to one process of several is the end of all: in step, with nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from parquet_streams import three_files
from test_ranks import RESUME, SPEC, WHOLE, Ran, ran, spec_file
from tiny_runs import sections

from workbench.core.checkpoint import checkpoints

pytestmark = [pytest.mark.ddp, pytest.mark.slow]

SIGTERM = 128 + 15


def require_same_end(straight: Ran, resumed: Ran) -> None:
    assert resumed.codes == [0, 0], resumed.said
    header = (straight.folder / "metrics.csv").read_text().partition("\n")[0].split(",")
    columns = [name for name in header if name.endswith("/nll")]
    assert len(columns) >= 2
    for column in ("grad_norm", *columns):
        assert straight.rows(column) == resumed.rows(column), column
    ends = [run.record.points[-1].order_digest for run in (straight, resumed)]
    assert ends[0] == ends[1]


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def ends(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Ran, Ran]]:
    """Runs that ended so, each with what it came to when it went on."""
    folder, parallel = tmp_path_factory.mktemp(request.param), request.param
    spec = spec_file(folder, "whole", training=WHOLE | {"parallel": parallel})
    ways: dict[str, list[Any]] = {
        "told_0": [0, "signalled", 7, "SIGTERM"],
        "told_1": [1, "signalled", 7, "SIGTERM"],
        "full_0": [0, "without_room", 9],
    }
    if parallel == "fsdp":
        ways |= {
            "full_1": [1, "without_room", 9],
            "part_0": [0, "killed_in_save", 9, "part"],
            "part_1": [1, "killed_in_save", 9, "part"],
            "name_0": [0, "killed_in_save", 9, "name"],
        }
    cases = [{"name": "straight", "processes": 2, "spec": spec}]
    cases += [{"name": n, "processes": 2, "spec": spec, "meddle": way} for n, way in ways.items()]
    ended = ran(folder, cases)
    for run in ended.values():
        left = [path.name for path in (run.folder / "checkpoints").iterdir()]
        (run.folder / "left.json").write_text(json.dumps(sorted(left)))
    again = [{"name": name, "processes": 2, "spec": spec, "options": RESUME} for name in ways]
    resumed = ran(folder, again)
    return {"straight": (ended["straight"],) * 2} | {n: (ended[n], resumed[n]) for n in ways}


def left(run: Ran) -> list[str]:
    """What was in the folder of checkpoints when the run had ended."""
    return list(json.loads((run.folder / "left.json").read_text()))


def named(ends: dict[str, tuple[Ran, Ran]], kind: str) -> list[str]:
    return [name for name in ends if name.startswith(kind)]


def test_a_signal_to_one_lets_all_save_and_end(ends: dict[str, tuple[Ran, Ran]]) -> None:
    for name in named(ends, "told"):
        ended, resumed = ends[name]
        assert ended.codes == [SIGTERM, SIGTERM], ended.said
        assert ended.document["status"] == "KILLED"
        assert "step_00000007" in left(ended)
        assert "Traceback" not in "".join(ended.said)
        assert ended.said[1] == ""
        require_same_end(ends["straight"][0], resumed)
        assert resumed.record.model_dump()["resumes"][-1]["step"] == 7


def test_a_disk_that_is_full_for_one_ends_all_with_what_was_saved_before(
    ends: dict[str, tuple[Ran, Ran]],
) -> None:
    for name in named(ends, "full"):
        ended, resumed = ends[name]
        assert ended.codes == [74, 74], ended.said
        assert left(ended) == ["step_00000005"]
        said = "".join(ended.said)
        assert "file too large" in said.lower(), said
        assert "step_00000010" in said
        assert "Traceback" not in said
        assert ended.document["status"] == "FAILED"
        require_same_end(ends["straight"][0], resumed)


def test_one_that_is_killed_in_a_save_leaves_the_checkpoint_before(
    ends: dict[str, tuple[Ran, Ran]],
) -> None:
    killed = [*named(ends, "part"), *named(ends, "name")]
    if not killed:
        pytest.skip("rank zero alone saves")
    for name in killed:
        ended, resumed = ends[name]
        rank = int(name[-1])
        assert ended.codes[rank] == -9, ended.codes
        assert ended.codes[1 - rank] == 74, (name, ended.codes, ended.said)
        assert f"rank {rank}" in ended.said[1 - rank]
        assert [one for one in left(ended) if not one.startswith(".")] == ["step_00000005"]
        require_same_end(ends["straight"][0], resumed)
        assert resumed.record.model_dump()["resumes"][-1]["step"] == 5
        folders = [path.name for path in (resumed.folder / "checkpoints").iterdir()]
        assert not [one for one in folders if one.startswith(".")], "the half one is cleared away"
        assert checkpoints(resumed.folder / "checkpoints")[-1].name == "step_00000020"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("steps", [0, 20])
def test_a_signal_to_one_that_waits_for_its_stream_lets_all_save_and_end(
    tmp_path: Path, rank: int, steps: int
) -> None:
    """The other has what it needs already, and has begun to train on it or not."""
    folder, _ = three_files(tmp_path / "stream")
    data = {"dataset": "fineweb", "stream_path": str(folder), "stream_eval_documents": 6}
    data |= {"held_out_ratio": 0.2}
    training = {"batch_size": None, "global_batch_size": 16, "steps": steps}
    schedule = {"warmup_steps": 2, "decay": "constant"}
    spec = {"name": "stream", "seed": 42, **sections(tmp_path, **SPEC | {"training": training})}
    (tmp_path / "stream.yaml").write_text(json.dumps(spec | {"data": data, "schedule": schedule}))
    case = {"processes": 2, "spec": str(tmp_path / "stream.yaml")}
    meddle = [rank, "signalled_while_waiting", 1]
    found = ran(
        tmp_path, [{"name": "straight", **case}, {"name": "told", **case, "meddle": meddle}]
    )
    told, straight = found["told"], found["straight"]
    assert straight.codes == [0, 0], straight.said
    assert told.codes == [SIGTERM, SIGTERM], told.said
    assert "Traceback" not in "".join(told.said)
    resumed = ran(tmp_path, [{"name": "told", **case, "options": RESUME}])["told"]
    require_same_end(straight, resumed)
    step = resumed.record.model_dump()["resumes"][-1]["step"]
    assert 5 < step < 20
    if steps:
        return
    # And where a run that goes on waits before its first update.
    later = {"name": "later", **case}
    ran(tmp_path, [later | {"meddle": [rank, "signalled", step + 1, "SIGTERM"]}])
    waited = ran(tmp_path, [later | {"options": RESUME, "meddle": meddle}])["later"]
    assert waited.codes == [SIGTERM, SIGTERM], waited.said
    assert waited.document["status"] == "KILLED"
    require_same_end(straight, ran(tmp_path, [later | {"options": RESUME}])["later"])


def test_a_norm_that_one_process_rounds_otherwise_parts_nobody(tmp_path: Path) -> None:
    """Processes with other numbers of threads: the weights are scaled by the norm of rank zero."""
    case = {"processes": 2, "spec": spec_file(tmp_path, "whole", training=WHOLE)}
    meddle = [1, "rounding_otherwise"]
    found = ran(
        tmp_path, [{"name": "straight", **case}, {"name": "other", **case, "meddle": meddle}]
    )
    assert max(found["straight"].rows("grad_norm")) > 1, "it is clipped"
    require_same_end(found["straight"], found["other"])


def test_a_checkpoint_that_one_process_does_not_reach_ends_all_and_harms_nothing(
    tmp_path: Path,
) -> None:
    """Machines that do not share the folder of the run."""
    case = {"processes": 2, "spec": spec_file(tmp_path, "whole", training=WHOLE)}
    told = {"name": "told", **case}
    found = ran(
        tmp_path,
        [
            {"name": "straight", **case},
            told | {"meddle": [1, "signalled", 7, "SIGTERM"]},
        ],
    )
    lost = ran(tmp_path, [told | {"options": RESUME, "meddle": [1, "without_checkpoint"]}])["told"]
    assert lost.codes == [2, 2], lost.said
    assert "there is no checkpoint here" in lost.said[0]
    assert lost.document["status"] == "FAILED"
    assert "there is no checkpoint here" in lost.document["error"]
    require_same_end(found["straight"], ran(tmp_path, [told | {"options": RESUME}])["told"])
