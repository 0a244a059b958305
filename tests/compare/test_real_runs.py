"""Real tiny runs, each another one in one way: the verdict, the rule that names it, the exit code.

Every run is made when a test first asks for it, and once.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_spec, untracked_run, write_corpus

from workbench import cli
from workbench.compare import (
    Comparison,
    PlannedRun,
    Side,
    check,
    compare_runs,
    render_check,
)
from workbench.foresee import foresee
from workbench.run import recorded
from workbench.spec.checklist import CLAIMS
from workbench.spec.run import RunSpec, document_hash, spec_hash
from workbench.track.provenance import code_facts
from workbench.track.record import read_record
from workbench.track.store import Store

STEPS, PER_STEP = 16, 4 * 32
END = STEPS * PER_STEP

# What a run changes in the base. Sixteen steps, so that throughput is measured.
CHANGES: dict[str, dict[str, Any]] = {
    "base": {},
    "again": {},
    "seed": {"seed": 43},
    "lr": {"optimizer": {"lr": 1e-3}},
    "dense": {"model": {"mlp_type": "dense"}},
    "bf16": {"training": {"precision": "bf16"}},
    "split": {"training": {"batch_size": 2, "gradient_accumulation_steps": 2}},
    "short_windows": {"training": {"batch_size": 8, "seq_len": 16}},
    "longer": {"training": {"steps": 2 * STEPS}},
    "often": {"evaluation": {"eval_steps": 4}},
    "eval_documents": {"evaluation": {"eval_documents": 3}},
    "held_out_only": {"evaluation": {"sets": ["held_out"]}},
    "stride": {"evaluation": {"stride": 8}},
    "whole_stride": {"evaluation": {"stride": 32}},
    "short_stride": {"training": {"batch_size": 8, "seq_len": 16}, "evaluation": {"stride": 8}},
    "telemetry": {"telemetry": {"log_steps": 2}},
    "order": {"data": {"order": "sequential"}},
    "ratio": {"data": {"held_out_ratio": 0.4}},
    "ranks": {"tokenizer": {"name": "file"}},
    "link": {"data": {"text_file": "link.txt"}},
    "copy": {"data": {"text_file": "copy.txt"}},
    "other_text": {"data": {"text_file": "other.txt"}},
    "random": {"data": {"dataset": "random"}, "evaluation": {"eval_documents": 2}},
    "more_random": {"data": {"dataset": "random"}, "evaluation": {"eval_documents": 2}},
}


class Runs:
    """A store whose runs are trained when they are first asked for."""

    def __init__(self, home: Path) -> None:
        self.home, self.store = home, Store(home / "mlruns")
        self._planned: dict[str, PlannedRun] = {}
        self.code = code_facts()  # once: somebody may be at work on the sources
        corpus = write_corpus(home / "corpus.txt")
        (home / "link.txt").symlink_to(corpus)
        (home / "copy.txt").write_bytes(corpus.read_bytes())
        (home / "other.txt").write_text(corpus.read_text().replace("river", "brook", 1))
        single = [bytes([byte]) for byte in range(256)]
        ranks = [*single, b" t", b"he", b" the", b"ee"]
        lines = [b"%s %d\n" % (base64.b64encode(one), rank) for rank, one in enumerate(ranks)]
        (home / "ranks.tiktoken").write_bytes(b"".join(lines))

    def __call__(self, name: str) -> Path:
        folder = self.store.path_of(name)
        if folder.exists():
            return folder
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("workbench.run.code_facts", lambda: self.code)
            return untracked_run(self.spec(name), self.store).folder

    def spec(self, name: str) -> RunSpec:
        changes = {key: value for key, value in CHANGES[name].items() if key != "seed"}
        base: dict[str, dict[str, Any]] = {
            "model": {"num_hidden_layers": 1},
            "training": {"steps": STEPS},
            "evaluation": {"eval_steps": 8},
        }
        if text := changes.get("data", {}).get("text_file"):
            changes = changes | {"data": {"text_file": str(self.home / text)}}
        if changes.get("data", {}).get("dataset") == "random":
            unset = ("text_file", "text_unit", "held_out_ratio", "order")
            changes = changes | {"data": {"dataset": "random", **dict.fromkeys(unset)}}
        if name == "ranks":
            changes = {"tokenizer": {"name": "file", "path": str(self.home / "ranks.tiktoken")}}
        laid = {key: base.get(key, {}) | changes.get(key, {}) for key in base | changes}
        return tiny_spec(self.home, name, CHANGES[name].get("seed", 42), **laid)

    def planned(self, name: str) -> PlannedRun:
        """The spec of a run, as it is judged before it trains."""
        if name not in self._planned:
            spec = self.spec(name)
            self._planned[name] = PlannedRun(spec, f"{name}.yaml", foresee(spec, self.store))
        return self._planned[name]

    def side(self, name: str) -> Side:
        record = read_record(self(name))
        return Side(name, self(name), record, record.status)

    def compare(self, b: str, a: str = "base", **options: Any) -> Comparison:
        return compare_runs(self(a), self(b), **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("real"))


def refusing(comparison: Comparison, claim: str = "nll") -> list[str]:
    """The rules that refuse a claim."""
    rules = comparison.to_json()["rules"]
    return [rule["rule"] for rule in rules if rule["effects"][claim] == "refuse"]


def flagging(comparison: Comparison, claim: str = "nll") -> list[str]:
    rules = comparison.to_json()["rules"]
    return [rule["rule"] for rule in rules if rule["effects"][claim] == "flag"]


def test_two_runs_of_one_spec_are_comparable_for_everything_and_equal(runs: Runs) -> None:
    comparison = runs.compare("again", claims=CLAIMS)
    assert comparison.verdict == "comparable"
    numbers = comparison.to_json()["results"]
    for name in ("held_out/nll", "train_split/nll", "held_out/bits_per_byte", "train/nll"):
        assert numbers[name]["difference"] == 0
        assert numbers[name]["winner"] is None
    assert numbers["tokens_per_s"]["difference"] is not None


def test_another_context_policy_is_another_measurement(runs: Runs) -> None:
    """A stride gives the same documents another NLL; the policy is compared, not its spelling."""
    finals = {name: read_record(runs(name)).results.final for name in ("base", "stride")}
    assert finals["stride"]["held_out/nll"] != finals["base"]["held_out/nll"]
    facts = read_record(runs("stride")).effective.evaluation["held_out"]
    assert facts.context == "starts with the end-of-document id; windows of 32, stride 8"
    assert refusing(runs.compare("stride"), "bpb") == ["evaluation"]
    assert runs.compare("whole_stride").verdict == "comparable"
    # Studying the window does not excuse a stride as well.
    treatment = ["training.seq_len", "training.batch_size"]
    assert "evaluation" not in refusing(runs.compare("short_windows", treatment=treatment))
    assert "evaluation" in refusing(runs.compare("short_stride", treatment=treatment))


# run -> the rules that refuse nll, and those that flag it, undeclared
FOUND: dict[str, tuple[list[str], list[str]]] = {
    "seed": (["seeds"], []),
    "lr": (["optimizer"], []),
    "dense": ([], ["model"]),
    "bf16": (["precision"], []),
    "split": ([], ["execution"]),
    "short_windows": (["optimizer"], ["execution"]),
    "stride": (["evaluation"], []),
    "longer": (["budget"], []),
    "often": ([], []),
    "eval_documents": (["evaluation"], []),
    "held_out_only": (["evaluation"], []),
    "telemetry": ([], []),
    "order": (["data"], []),
    "ratio": (["data", "evaluation"], []),
    "ranks": (["tokenizer"], ["parameters"]),
    "link": ([], []),
    "copy": ([], []),
    "other_text": (["data", "evaluation"], []),
    "random": (["data", "evaluation"], []),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_rule_of_the_difference_and_no_other(runs: Runs, name: str) -> None:
    comparison = runs.compare(name)
    refuse, flag = FOUND[name]
    assert (refusing(comparison), flagging(comparison)) == (refuse, flag)
    back = compare_runs(runs(name), runs("base"))
    assert back.judgement.claims == comparison.judgement.claims
    exits = (3, 3) if refuse else (0, 1) if flag else (0, 0)
    assert (comparison.exit_code(), comparison.exit_code(strict=True)) == exits
    assert (comparison.results is None) == bool(refuse)


@pytest.mark.parametrize("name", FOUND)
def test_a_check_says_beforehand_what_a_comparison_says_afterwards(runs: Runs, name: str) -> None:
    """Of two specs, of a run and a spec, of two runs: the same rules, at the same point."""
    comparison = runs.compare(name)
    counted = {leaf.path for leaf in comparison.judgement.with_outcome("differs", "missing")}
    sides = {
        "spec, spec": (runs.planned("base"), runs.planned(name)),
        "run, spec": (runs.side("base"), runs.planned(name)),
        "spec, run": (runs.planned("base"), runs.side(name)),
        "run, run": (runs.side("base"), runs.side(name)),
    }
    for what, (a, b) in sides.items():
        found = check(a, b)
        assert found.at == comparison.at, what
        assert found.judgement.claims == comparison.judgement.claims, what
        said = {leaf.path for leaf in found.judgement.with_outcome("differs", "missing")}
        assert said == counted, what
        assert found.exit_code(strict=True) == comparison.exit_code(strict=True)
        unknown = found.judgement.with_outcome("not yet known")
        assert bool(unknown) == (what != "run, run")
        assert all(leaf.path.startswith("effective.") for leaf in unknown)


def test_a_check_agrees_on_treatments_and_allowances(runs: Runs) -> None:
    for name, options in (
        ("lr", {"treatment": ["optimizer.lr"]}),
        ("bf16", {"allow": {"precision": "known"}}),
        ("longer", {"treatment": ["training.steps"], "claims": ["throughput", "nll"]}),
        ("ranks", {"treatment": ["tokenizer"], "claims": ["bpb"]}),
        ("dense", {"treatment": ["model"], "claims": list(CLAIMS)}),
    ):
        comparison = runs.compare(name, **options)
        for a in (runs.planned("base"), runs.side("base")):
            found = check(a, runs.planned(name), **options)
            assert found.judgement.claims == comparison.judgement.claims, name
            assert found.verdict == comparison.verdict


def test_a_run_of_too_few_steps_has_no_throughput_beforehand_either(runs: Runs) -> None:
    CHANGES["short"] = {"training": {"steps": 12}}
    found = check(runs.planned("short"), runs.planned("short"), claims=["throughput"])
    assert found.verdict == "refused"
    assert [leaf.path for leaf in found.judgement.with_outcome("missing")] == [
        "effective.interval.first_step",
        "effective.interval.last_step",
    ]


def test_specs_that_never_meet_are_refused_by_the_budget(runs: Runs) -> None:
    CHANGES["odd"] = {"training": {"batch_size": 5}, "evaluation": {"eval_steps": 0}}
    found = check(runs.side("base"), runs.planned("odd"), treatment=["training.batch_size"])
    assert found.at is None
    assert "at a common evaluation point: there is none" in render_check(found)


# run -> a treatment that declares all of its difference
DECLARED: dict[str, list[str]] = {
    "seed": ["seed", "rule:seeds"],
    "lr": ["optimizer.lr", "optimizer", "rule:optimizer"],
    "bf16": ["training.precision", "training", "rule:precision"],
    "split": ["training.batch_size", "rule:execution"],
    "longer": ["training.steps", "training", "rule:budget"],
    "order": ["data.order", "data", "rule:data"],
    "eval_documents": ["evaluation.eval_documents", "evaluation", "rule:evaluation"],
    "held_out_only": ["evaluation.sets", "evaluation", "rule:evaluation"],
}
PAIRS = [(name, treatment) for name, declared in DECLARED.items() for treatment in declared]


@pytest.mark.parametrize(("name", "treatment"), PAIRS)
def test_a_declared_treatment_is_studied(runs: Runs, name: str, treatment: str) -> None:
    both = [treatment]
    if (name, treatment) == ("split", "training.batch_size"):
        both.append("training.gradient_accumulation_steps")
    comparison = runs.compare(name, treatment=both)
    assert comparison.verdict == "comparable", comparison.to_json()["rules"]
    assert comparison.judgement.with_outcome("studied")
    assert not comparison.judgement.inferred


# run -> a treatment that does not declare it
UNDECLARED = [
    ("seed", "model"),
    ("lr", "schedule"),
    ("bf16", "rule:execution"),
    ("order", "seed"),
    ("eval_documents", "data"),
    ("longer", "schedule"),
    ("ratio", "data"),
    ("other_text", "data"),
]


@pytest.mark.parametrize(("name", "treatment"), UNDECLARED)
def test_another_treatment_excuses_nothing(runs: Runs, name: str, treatment: str) -> None:
    assert runs.compare(name, treatment=[treatment]).verdict == "refused"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("seed", "seeds"),
        ("lr", "optimizer"),
        ("bf16", "precision"),
        ("order", "data"),
        ("eval_documents", "evaluation"),
        ("longer", "budget"),
        ("ranks", "tokenizer"),
    ],
)
def test_an_allowance_flags(runs: Runs, name: str, rule: str) -> None:
    comparison = runs.compare(name, allow={rule: "known"})
    assert comparison.verdict == "flagged"
    assert comparison.exit_code(strict=True) == 1
    assert comparison.results is not None
    other = "seeds" if rule != "seeds" else "optimizer"
    assert runs.compare(name, allow={other: "not it"}).verdict == "refused"


@pytest.mark.parametrize(
    ("name", "rule", "claim"),
    [
        ("telemetry", "telemetry", "throughput"),
        ("split", "execution", "throughput"),
        ("split", "execution", "memory"),
        ("longer", "interval", "throughput"),
        ("bf16", "precision", "memory"),
    ],
)
def test_claims_of_speed_and_memory(runs: Runs, name: str, rule: str, claim: str) -> None:
    refused = runs.compare(name, claims=[claim])
    assert refused.verdict == "refused"
    assert refusing(refused, claim) == [rule]
    assert runs.compare(name, claims=[claim], allow={rule: "known"}).verdict == "flagged"
    assert runs.compare(name, claims=[claim], treatment=[f"rule:{rule}"]).verdict == "comparable"


def test_other_tokenizers_have_bits_per_byte_in_common(runs: Runs) -> None:
    comparison = runs.compare("ranks", claims=["bpb"], treatment=["tokenizer"])
    assert comparison.at is not None
    assert refusing(comparison, "nll") == ["tokenizer"]
    assert comparison.verdict == "flagged"  # by the parameters of a larger vocabulary
    numbers = comparison.to_json()["results"]
    assert numbers["held_out/bits_per_byte"]["difference"] is not None
    assert numbers["held_out/bits_per_byte"]["documents"]["n"] > 2
    assert numbers["held_out/nll"]["difference"] is None


def test_what_a_tokenizer_brings_follows_it(runs: Runs) -> None:
    leaves = {leaf.path for leaf in runs.compare("ranks").judgement.with_outcome("differs")}
    assert leaves == {"effective.tokenizer.sha256", "effective.parameters.total"}


def test_runs_meet_where_both_were_evaluated(runs: Runs) -> None:
    comparison = runs.compare("often")
    assert comparison.at == END
    assert comparison.only == ([], [4 * PER_STEP, 12 * PER_STEP])
    early = runs.compare("often", at=8 * PER_STEP)
    assert early.at == 8 * PER_STEP
    assert early.verdict == "comparable"
    longer = runs.compare("longer", treatment=["training.steps"])
    assert longer.at == END


def test_random_ids_have_no_bits_per_byte(runs: Runs) -> None:
    """Nor any number that is a result: they are a smoke test, whatever is allowed."""
    refused = runs.compare("random", "more_random", claims=["bpb", "nll"])
    assert (refused.verdict, refused.results) == ("refused", None)
    (rule,) = [one for one in refused.to_json()["rules"] if one["effects"]["nll"] == "refuse"]
    assert "a smoke test, whose numbers say nothing of any text" in rule["why"]
    assert rule["remedy"] == "train on text: data.dataset=sample or text"
    comparison = runs.compare("random", "more_random", claims=["bpb"], allow={"evaluation": "why"})
    numbers = comparison.to_json()["results"]
    for name in ("unproven/bits_per_byte", "unproven/nll", "train_split/nll"):
        assert [numbers[name][key] for key in ("a", "b", "difference")] == [None] * 3


# -- the command


def wb(
    runs: Runs, capsys: Any, monkeypatch: Any, *arguments: str, command: str = "compare"
) -> tuple[int, dict[str, Any]]:
    """`wb compare --json` in this process, or another command: exit code and document."""
    monkeypatch.setenv("WB_HOME", str(runs.store.home))
    monkeypatch.setattr("workbench.compare.report.draw", lambda *_: {})
    code = cli._guarded([command, *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "code", "verdict"),
    [
        (["base", "again"], 0, "comparable"),
        (["base", "dense"], 0, "flagged"),
        (["base", "dense", "--strict"], 1, "flagged"),
        (["base", "lr"], 3, "refused"),
        (["base", "lr", "--strict"], 3, "refused"),
        (["base", "lr", "--treatment", "optimizer.lr", "--strict"], 0, "comparable"),
        (["base", "lr", "--allow", "optimizer=a first look"], 0, "flagged"),
        (["base", "telemetry", "--claim", "throughput", "--claim", "nll"], 3, "refused"),
        (["base", "telemetry", "--claim", "memory"], 0, "flagged"),
        (["base", "again", "--at", str(8 * PER_STEP)], 0, "comparable"),
    ],
)
def test_exit_codes(
    runs: Runs, capsys: Any, monkeypatch: Any, options: list[str], code: int, verdict: str
) -> None:
    for name in options[:2]:
        runs(name)
    found, document = wb(runs, capsys, monkeypatch, *options)
    assert (found, document["verdict"]) == (code, verdict)
    assert (document["results"] is None) == (verdict == "refused" and "--claim" not in options)


@pytest.mark.parametrize(
    ("a", "b", "code"),
    [
        ("base", "again.yaml", 0),
        ("base.yaml", "again", 0),
        ("base", "lr.yaml", 3),
        ("seed.yaml", "base.yaml", 3),
        ("base", "lr", 3),
        ("base", "dense.yaml", 0),
    ],
)
def test_check_takes_specs_and_run_names(
    runs: Runs, capsys: Any, monkeypatch: Any, tmp_path: Path, a: str, b: str, code: int
) -> None:
    given = []
    for name in (a, b):
        run = name.removesuffix(".yaml")
        if name == run:
            runs(run)
            given.append(run)
        else:
            document = json.dumps(runs.spec(run).model_dump(mode="json"))
            (tmp_path / name).write_text(document)
            given.append(str(tmp_path / name))
    found, document = wb(runs, capsys, monkeypatch, *given, command="check")
    assert (found, document["results"], document["report"]) == (code, None, None)
    assert document["at"] == END
    assert ("not_yet_known" in document) == any(name.endswith(".yaml") for name in (a, b))


def test_check_names_what_is_neither_a_spec_nor_a_run(
    runs: Runs, capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    runs("base")
    code, document = wb(runs, capsys, monkeypatch, "base", "bsae", command="check")
    assert code == 2
    assert "no such file, and there is no such run" in document["error"]["message"]
    missing = str(tmp_path / "none.yaml")
    assert wb(runs, capsys, monkeypatch, missing, "base", command="check")[0] == 2


@pytest.mark.parametrize(
    ("options", "place"),
    [
        (["--at", "5"], "--at"),
        (["--at", "0"], "--at"),
        (["--treatment", "rule:nothing"], "--treatment"),
        (["--treatment", "notes"], "--treatment"),
        (["--claim", "speed"], "--claim"),
        (["--allow", "seeds"], "--allow"),
        (["--allow", "seed=x"], "--allow"),
    ],
)
def test_wrong_options(
    runs: Runs, capsys: Any, monkeypatch: Any, options: list[str], place: str
) -> None:
    runs("base"), runs("again")
    code, document = wb(runs, capsys, monkeypatch, "base", "again", *options)
    assert code == 2
    assert document["error"]["place"] == place
    assert document["error"]["allowed"]


def test_a_damaged_run_is_exit_2_with_its_file(runs: Runs, capsys: Any, monkeypatch: Any) -> None:
    CHANGES["damaged"] = {}
    path = runs("damaged") / "metrics.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    code, document = wb(runs, capsys, monkeypatch, "base", "damaged")
    assert code == 2
    assert document["error"]["place"] == f"{path}: step {STEPS}"
    assert document["error"]["allowed"]


# -- the record


def test_the_hash_in_a_record_can_be_checked_there(runs: Runs, tmp_path: Path) -> None:
    record = read_record(runs("base"))
    assert document_hash(record.spec) == record.spec_sha256
    secret = tiny_spec(tmp_path, tracking={"uri": "http://me:secret-word@localhost:1"})
    document = json.loads(json.dumps(recorded(secret)))
    assert "secret-word" not in json.dumps(document)
    assert document_hash(document) == spec_hash(secret)
    assert os.environ.get("MLFLOW_TRACKING_URI") is None
