"""`wb eval`: a run's checkpoint on further text and tasks; what was recorded never changes."""

from __future__ import annotations

import errno
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tiny_runs import tiny_spec, untracked_run

from workbench import evaluate_run as module
from workbench.cli import _guarded
from workbench.core.data import atomic
from workbench.core.data.loading import load_data
from workbench.core.downstream import read_task, score_task
from workbench.core.load_model import load_model
from workbench.core.loss_settings import LossSettings
from workbench.errors import StoreError, UserError
from workbench.evaluate_run import EvalOutcome, evaluate_run
from workbench.run import RunOutcome
from workbench.spec.run import RunSpec
from workbench.track import additions
from workbench.track.events import MemoryTracker
from workbench.track.record import Addition, read_record, write_record
from workbench.track.store import Store, lock_run, read_entry, release_run

ITEMS = [
    {"context": "the old cat", "choices": ["sees", "likes a river", "dog"], "answer": 0},
    {"context": "a small dog", "choices": ["and", "tree"], "answer": "tree"},
    {"context": "not", "choices": ["the", "a"], "answer": 1},
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunOutcome:
    folder = tmp_path_factory.mktemp("finished")
    spec = tiny_spec(folder, checkpoint={"save_steps": 2}, evaluation={"stride": 8})
    return untracked_run(spec, Store(folder / "mlruns"))


class World:
    """A store with a copy of the run, and a tracker that remembers."""

    def __init__(self, folder: Path, finished: RunOutcome) -> None:
        self.here = folder
        self.store = Store(folder / "mlruns")
        self.run = self.store.runs / "tiny"
        shutil.copytree(finished.folder, self.run)
        self.tracker = MemoryTracker()

    def eval(
        self, sets: dict[str, Path] | None = None, *tasks: Path, **options: Any
    ) -> EvalOutcome:
        return evaluate_run(read_entry(self.run), self.store, sets or {}, tasks, **options)

    def text(self, name: str, *documents: str) -> Path:
        path = self.here / name
        path.write_text("\n\n".join(documents) + "\n")
        return path

    def task(self, name: str = "cats.jsonl", items: Any = None) -> Path:
        path = self.here / name
        path.write_text("".join(json.dumps(item) + "\n" for item in items or ITEMS))
        return path

    def files(self) -> dict[str, bytes]:
        found = [p for p in self.run.rglob("*") if p.is_file() and p.name != ".lock"]
        return {str(p.relative_to(self.run)): p.read_bytes() for p in found}


@pytest.fixture
def world(tmp_path: Path, finished: RunOutcome, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(tmp_path, finished)
    monkeypatch.setattr(module, "tracker_for", lambda spec, store: world.tracker)
    return world


def held_out_texts(finished: RunOutcome) -> list[str]:
    spec = load_model(finished.folder).spec
    home = finished.folder.parents[1]
    data = load_data(spec, home, seed=spec.seed)
    return [data.tokenizer.decode(ids) for ids in data.evaluation_sets["held_out"].documents]


def test_the_runs_own_documents_score_as_in_the_run(world: World, finished: RunOutcome) -> None:
    """From a text file, in another order: the same set, the same numbers to the bit."""
    texts = held_out_texts(finished)
    before = world.files()
    outcome = world.eval({"again": world.text("again.txt", *texts[::-1], texts[0])})
    (added,) = outcome.added
    record = read_record(world.run)
    own, final = record.effective.evaluation["held_out"], finished.record.results.final
    assert added.name == "held_out.again"
    assert added.sha256 == own.sha256
    assert added.facts == own.model_dump(mode="json", exclude={"passed"})
    for number in ("nll", "perplexity", "bits_per_byte"):
        assert added.values[f"held_out.again/{number}"] == final[f"held_out/{number}"]
    assert (added.step, added.tokens) == (4, 512)
    # Nothing that was there has changed.
    assert record.results.additions == [added]
    record.results.additions = []
    assert record == read_record(finished.folder)
    after = world.files()
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"run_config.json"}
    assert set(after) - set(before) == {added.scores}
    scores = pq.read_table(world.run / str(added.scores)).to_pydict()
    own_scores = pq.read_table(world.run / "evaluations/step_00000004.parquet").to_pandas()
    own_scores = own_scores[own_scores["set"] == "held_out"]
    assert set(scores["set"]) == {"held_out.again"}
    assert scores["nll_sum"] == own_scores["nll_sum"].tolist()
    assert scores["document"] == own_scores["document"].tolist()


def test_a_set_is_named_by_what_is_shown_about_it(world: World, finished: RunOutcome) -> None:
    """New text is held out, training text is not; where training text is gone, nobody knows."""
    fresh = "seventeen brown foxes jumped over nine lazy hedgehogs while it rained in the morning"
    corpus = Path(finished.record.spec["data"]["text_file"])
    trained = [text for text in corpus.read_text().split("\n\n") if len(text.split()) > 30]
    held_out = set(held_out_texts(finished))
    trained = [text for text in trained if text.strip() not in held_out][:3]
    assert len(trained) == 3
    outcome = world.eval(
        {"new": world.text("new.txt", fresh), "old": world.text("old.txt", *trained)}
    )
    assert [one.name for one in outcome.added] == ["held_out.new", "contaminated.old"]
    assert [one.facts["status"] for one in outcome.added] == ["held_out", "contaminated"]
    moved = corpus.rename(corpus.with_name("moved.txt"))
    try:
        (added,) = world.eval({"later": world.text("later.txt", fresh + " again")}).added
        assert added.name == "unproven.later"
        reason = added.facts["overlap"]["not_applicable"]
        assert "the training text cannot be read any more: data.text_file: no such file" in reason
        corpus.write_text(moved.read_text() + "\n\none more document of the text")
        (added,) = world.eval({"latest": world.text("latest.txt", fresh + " and again")}).added
        assert added.name == "unproven.latest"
        assert "there is another text now" in added.facts["overlap"]["not_applicable"]
    finally:
        moved.replace(corpus)


def test_a_task_joins_the_record_with_every_item(world: World) -> None:
    path = world.task()
    outcome = world.eval({}, path)
    (added,) = outcome.added
    loaded = load_model(world.run)
    data = load_data(loaded.spec, world.store.home, seed=42)
    score = score_task(loaded.model, read_task(path), data.tokenizer, 32, LossSettings())
    assert added.values == score.values()
    assert set(added.values) == {
        f"downstream/cats/{n}"
        for n in ("acc", "acc_norm", "acc_stderr", "acc_norm_stderr", "items")
    }
    assert added.sha256 == read_task(path).sha256
    assert (added.facts["items"], added.facts["truncated"]) == (3, 0)
    rows = pq.read_table(world.run / str(added.scores)).to_pylist()
    assert [row["item"] for row in rows] == [item.sha256 for item in read_task(path).items]


def test_the_same_again_changes_nothing(world: World) -> None:
    text, task = world.text("more.txt", "a cat", "a river and a tree"), world.task()
    first = world.eval({"more": text}, task)
    before = world.files()
    world.tracker.records.clear()
    copy = world.here / "copy.txt"
    copy.symlink_to(text)  # the same content by another path
    again = world.eval({"more": copy}, task)
    assert not again.added
    assert again.already == first.added
    assert world.files() == before
    assert not world.tracker.records, "nothing to tell"


def test_one_name_is_one_content(world: World) -> None:
    world.eval({"more": world.text("more.txt", "a cat", "a river")}, world.task())
    before = world.files()
    with pytest.raises(UserError, match=r"another content since .*got 'held_out\.more'") as caught:
        world.eval({"more": world.text("other.txt", "a cat", "a dog")})
    assert caught.value.exit_code == 2
    with pytest.raises(UserError, match="another content since"):
        world.eval({}, world.task(items=ITEMS[:2]))
    with pytest.raises(UserError, match="the same name twice"):
        world.eval({"a b": world.here / "more.txt", "a-b": world.here / "more.txt"})
    assert world.files() == before
    world.eval({"more": world.here / "more.txt"}, step=2)
    steps = [(a.name, a.step) for a in read_record(world.run).results.additions]
    assert steps == [("held_out.more", 4), ("downstream/cats", 4), ("held_out.more", 2)]


def test_a_set_of_the_run_itself_keeps_its_name(world: World) -> None:
    record = read_record(world.run)
    facts = record.effective.evaluation["held_out"]
    record.effective.evaluation["contaminated.more"] = facts
    write_record(record, world.run)
    with pytest.raises(UserError, match=r"the run itself evaluates contaminated\.more"):
        world.eval({"more": world.text("more.txt", "a cat", "a river")})


@pytest.mark.parametrize("name", ["none.txt", "none.jsonl"])
def test_a_file_that_cannot_be_read_leaves_the_run_alone(world: World, name: str) -> None:
    """Even when something else of the call could be scored."""
    before = world.files()
    sets, tasks = {"good": world.text("good.txt", "a cat")}, [world.task()]
    if name == "none.txt":
        sets["bad"] = world.here / name
    else:
        tasks.append(world.here / name)
    with pytest.raises(UserError, match=r"--set bad: no such file|none\.jsonl: cannot be read"):
        world.eval(sets, *tasks)
    assert world.files() == before


def test_a_run_that_goes_on_is_refused_and_one_that_died_is_not(world: World) -> None:
    record = read_record(world.run)
    record.status = "RUNNING"
    write_record(record, world.run)
    text = world.text("more.txt", "a cat", "a river")
    assert lock_run(world.run)
    try:
        with pytest.raises(UserError, match="this run is still going"):
            world.eval({"more": text})
    finally:
        release_run(world.run)
    assert world.eval({"more": text}).added
    assert read_record(world.run).status == "RUNNING", "what was recorded stays"
    assert read_entry(world.run).status == "KILLED"


def test_a_run_that_never_trained_or_lost_its_checkpoints_says_so(world: World) -> None:
    shutil.rmtree(world.run / "checkpoints")
    with pytest.raises(UserError, match="there is no checkpoint here"):
        world.eval({}, world.task())
    (world.run / "run_config.json").write_text("{")
    with pytest.raises(UserError, match="no readable record"):
        world.eval({}, world.task())


def test_a_checkpoint_or_tokenizer_of_another_run_is_refused(world: World) -> None:
    good = read_record(world.run)
    record = good.model_copy(deep=True)
    record.spec["seed"] = 43
    write_record(record, world.run)
    with pytest.raises(UserError, match="of another spec than the run's record"):
        world.eval({}, world.task())
    record = good.model_copy(deep=True)
    record.effective.tokenizer.sha256 = "0" * 64
    write_record(record, world.run)
    with pytest.raises(UserError, match="'bytes' is not the one the run was trained with"):
        world.eval({}, world.task())
    record.effective.tokenizer.sha256 = None
    write_record(record, world.run)
    with pytest.raises(UserError, match="its tokenizer is not known"):
        world.eval({}, world.task())


def test_a_full_disk_leaves_the_record_as_it_was(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = world.files()

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic, "write_synced", full)
    with pytest.raises(StoreError, match=r"downstream\.cats\.parquet: .*no space left"):
        world.eval({}, world.task())
    assert world.files() == before
    monkeypatch.undo()
    assert lock_run(world.run), "the lock was given back"
    release_run(world.run)


def test_the_tracker_is_reached_where_it_is_now(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded address lacks its credentials."""
    asked = []

    def tracker_for(spec: RunSpec, store: Store) -> MemoryTracker:
        asked.append(spec.tracking.uri)
        return world.tracker

    monkeypatch.setattr(module, "tracker_for", tracker_for)
    world.eval({}, world.task())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@localhost:1")
    world.eval({}, world.task("dogs.jsonl"))
    assert asked == [None, "http://user:secret@localhost:1"]
    assert world.tracker.finished
    assert b"secret" not in b"".join(world.files().values())


def made_up(name: str, sha256: str = "a" * 64, step: int = 4) -> tuple[Addition, Any]:
    added = Addition(
        name=name,
        step=step,
        tokens=512,
        when="2026-01-02T03:04:05+00:00",
        source="made up",
        sha256=sha256,
        checkpoint_sha256="c" * 64,
        values={f"{name}/nll": math.inf},
    )
    return added, lambda file: None


def test_what_others_add_meanwhile_stays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two evaluations at once: each has read the record before the other wrote."""
    additions.add_to_record(world.run, [made_up("unproven.a")])
    additions.add_to_record(world.run, [made_up("unproven.b"), made_up("unproven.a")])
    record = read_record(world.run)
    assert [one.name for one in record.results.additions] == ["unproven.a", "unproven.b"]
    assert record.results.additions[0].values["unproven.a/nll"] == math.inf
    with pytest.raises(UserError, match="another content"):
        additions.add_to_record(world.run, [made_up("held_out.a", "b" * 64)])
    monkeypatch.setattr(additions, "_LOCK_SECONDS", 0.1)
    code = "import sys, time; from pathlib import Path; from workbench.track.store import lock_run;"
    code += "print(lock_run(Path(sys.argv[1])), flush=True); time.sleep(60)"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(world.run)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        with pytest.raises(UserError, match="another process has this run"):
            additions.add_to_record(world.run, [made_up("unproven.c")])
    finally:
        other.kill()
        other.communicate()
    assert len(read_record(world.run).results.additions) == 2


# -- the command


@pytest.fixture
def home(world: World, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WB_HOME", str(world.store.home))
    return world.here


def test_the_command_adds_and_shows(
    home: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    text, task = world.text("more.txt", "a cat", "a river"), world.task()
    arguments = ["eval", "tiny", "--set", f"more={text}", "--task", str(task), "--device", "cpu"]
    assert _guarded(arguments) == 0
    out, err = capsys.readouterr()
    assert "added: held_out.more  (2 documents" in out
    assert "scoring downstream/cats at step 4: 3 items" in err
    assert _guarded([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in document["already"]] == ["held_out.more", "downstream/cats"]
    assert (document["run"], document["step"], document["added"]) == ("tiny", 4, [])
    assert _guarded(["show", "tiny"]) == 0
    page = capsys.readouterr().out
    assert "held_out.more/nll" in page
    assert "step 4)" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny"], "nothing to score is named"),
        (["tiny", "--set", "x"], "a set needs a name with a letter or digit, and a path"),
        (["tiny", "--set", "-=x"], "a set needs a name"),
        (["tiny", "--set", "x="], "a set needs a name"),
        (["tiny", "--set", "x=a", "--set", "x=b"], "the same name twice"),
        (["tiny", "--task", "no.jsonl"], "cannot be read"),
        (["tiny", "--task", "no.jsonl", "--step", "3"], "no checkpoint of this step"),
        (["tiny", "--task", "no.jsonl", "--device", "tpu"], "no such kind of device"),
        (["other", "--task", "no.jsonl"], "there is no such run"),
    ],
)
def test_a_wrong_call_is_one_clear_error(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert _guarded(["eval", *arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    assert message in json.loads(out)["error"]["message"]
    assert "Traceback" not in err
