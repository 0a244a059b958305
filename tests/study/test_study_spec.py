"""Study files: what they resolve to, and every mistake named with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_studies import ARMS, arms_with, write_study

from workbench import commands
from workbench.answers import Answer
from workbench.cli import _guarded
from workbench.errors import RefusedError, UserError
from workbench.spec.checklist import tag_of
from workbench.spec.load import load_spec
from workbench.study.check import check_study
from workbench.study.spec import load_study
from workbench.track.store import Store

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "mlruns")


def faults(folder: Path, **changes: Any) -> list[str]:
    """What is said of a study with these changes."""
    with pytest.raises(UserError) as caught:
        load_study(write_study(folder, **changes))
    return [str(fault) for fault in caught.value.faults]


def check_faults(folder: Path, **changes: Any) -> list[str]:
    """What the check of a study with these changes says; loading it says nothing."""
    study = load_study(write_study(folder, **changes))
    with pytest.raises(UserError) as caught:
        check_study(study, Store(folder / "mlruns")).require()
    return [str(fault) for fault in caught.value.faults]


def test_a_study_where_a_run_is_meant_and_the_reverse_name_the_command(tmp_path: Path) -> None:
    study = write_study(tmp_path, "two words").rename(tmp_path / "two words.yaml")
    with pytest.raises(UserError, match=r"this is a study .*: wb study run '.*two words\.yaml' t"):
        load_spec(study)
    with pytest.raises(
        UserError, match=r"one run: wb run .*base\.yaml trains it; allowed: a study"
    ):
        load_study(tmp_path / "base.yaml")
    for command in (["run", str(study)], ["study", "run", str(tmp_path / "base.yaml")]):
        assert _guarded(command) == 2


def test_a_study_is_the_specs_of_its_arms_under_every_seed(tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path))
    assert [run.name for run in study.runs] == [
        "small-routed-s1",
        "small-routed-s2",
        "small-dense-s1",
        "small-dense-s2",
    ]
    assert [(run.arm, run.seed, run.spec.seed) for run in study.runs][1:3] == [
        ("routed", 2, 2),
        ("dense", 1, 1),
    ]
    by_hand = json.loads((tmp_path / "base.yaml").read_text()) | ARMS["dense"]
    (tmp_path / "hand.yaml").write_text(json.dumps(by_hand))
    spec = load_spec(tmp_path / "hand.yaml", ["seed=2"])
    free = {"name", "tracking"}
    assert study.runs[3].spec.model_dump(exclude=free) == spec.model_dump(exclude=free)


def test_an_arm_may_unset_what_the_base_has_and_an_empty_arm_is_the_base(tmp_path: Path) -> None:
    base = {**json.loads(write_base(tmp_path).read_text()), **ARMS["routed"]}
    (tmp_path / "base.yaml").write_text(json.dumps(base))
    dense = {"mlp_type": "dense", "shared_intermediate_size": None, "intermediate_size": 96}
    path = tmp_path / "unset.study.yaml"
    arms = {"routed": None, "dense": {"model": dense}}
    document = {"base": "base.yaml", "treatment": "model", "seeds": [1], "arms": arms}
    path.write_text(json.dumps(document))
    study = load_study(path)
    assert study.spec.treatment == ["model"]
    assert study.arm_specs["dense"].model.shared_intermediate_size is None
    assert study.arm_specs["routed"].model.shared_intermediate_size == 64


def write_base(folder: Path) -> Path:
    write_study(folder)
    return folder / "base.yaml"


def test_runs_are_tagged_with_their_study_and_the_tag_is_compared_by_no_rule(
    tmp_path: Path,
) -> None:
    run = load_study(write_study(tmp_path)).runs[0]
    assert run.spec.tracking.tags == {"workbench.study": "small", "workbench.arm": "routed"}
    assert tag_of("tracking.tags").kind == "free"


@pytest.mark.parametrize(
    ("changes", "place", "said"),
    [
        ({"arms": {"routed": ARMS["routed"]}}, "arms", "one arm answers no question"),
        ({"arms": {}}, "arms", "there are no arms"),
        ({"seeds": [1, 2, 1]}, "seeds", "the seed 1 is given twice"),
        ({"seeds": []}, "seeds", "there are none"),
        ({"seeds": ["1"]}, "seeds[0]", "valid integer"),
        ({"treatment": []}, "treatment", "at least 1 item"),
        ({"treatment": None}, "treatment", "is needed and not given"),
        ({"base": None}, "base", "is needed and not given"),
        ({"sedes": [1]}, "sedes", "Did you mean 'seeds'?"),
        ({"primary": {"metrc": "x"}}, "primary.metrc", "Did you mean 'metric'?"),
        ({"primary": {"step": 2, "tokens": 256}}, "primary", "named twice"),
        ({"decision": {"confidence": 95}}, "decision.confidence", "< 1"),
        ({"arms": ARMS | {"a b": {}}}, "arms.a b", "cannot be the name of an arm"),
        ({"arms": arms_with("dense", seed=3)}, "arms.dense.seed", "the study sets the seed"),
        ({"arms": arms_with("dense", name="x")}, "arms.dense.name", "the study sets the name"),
        ({"baseline": "dens"}, "baseline", "Did you mean 'dense'?"),
        (
            {"contrasts": [{"arm": "dens", "against": "routed"}]},
            "contrasts[0].arm",
            "Did you mean 'dense'?",
        ),
        (
            {"contrasts": [{"arm": "dense", "against": "dense"}]},
            "contrasts[0]",
            "an arm against itself",
        ),
        (
            {"contrasts": [{"arm": "routed", "against": "dense"}]},
            "contrasts[0]",
            "this is the baseline's comparison",
        ),
        ({"contrasts": [{"arm": "dense"}]}, "contrasts[0].against", "is needed and not given"),
        ({"contrasts": ["dense"]}, "contrasts[0]", "valid dictionary"),
        ({"arms": [1]}, "arms", "valid dictionary"),
        ({"arms": {"a": 3, "b": {}}}, "arms.a", "valid dictionary"),
        (
            {"arms": arms_with("dense", training={"stepz": 3})},
            "(arm dense): training.stepz",
            "Did you mean 'steps'?",
        ),
        (
            {"arms": arms_with("dense", trainng={"steps": 3})},
            "(arm dense): trainng",
            "Did you mean 'training'?",
        ),
        (
            {"arms": arms_with("routed", training={"steps": "3"})},
            "(arm routed): training.steps",
            "valid integer",
        ),
    ],
)
def test_each_mistake_is_one_clear_message(
    changes: dict[str, Any], place: str, said: str, tmp_path: Path
) -> None:
    told = faults(tmp_path, **changes)
    found = [fault for fault in told if said in fault]
    assert len(found) == 1, told
    assert place in found[0]
    if place not in ("treatment", "base") or changes[place] is not None:
        assert str(tmp_path / "small.study.yaml") in found[0]


def test_all_mistakes_are_told_at_once_with_file_and_line(tmp_path: Path) -> None:
    arms = arms_with("dense", training={"stepz": 3}, seed=2)
    told = faults(tmp_path, seeds=[1, 1], sedes=1, arms=arms, primary={"metrik": "x"})
    text = "\n".join(told)
    for part in ("stepz", "seed 1 is given twice", "sedes", "metrik", "the study sets the seed"):
        assert part in text
    assert len(told) == 5
    lines = (tmp_path / "small.study.yaml").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "stepz" in text)
    assert any(f"small.study.yaml:{line} (arm dense)" in fault for fault in told)


def test_a_base_that_is_not_there_is_named(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, base="bass.yaml")
    assert "small.study.yaml:2: base" in fault
    assert "Did you mean 'base.yaml'?" in fault


def test_arms_that_come_to_the_same_spec(tmp_path: Path) -> None:
    arms = ARMS | {"again": {"model": {**ARMS["dense"]["model"], "qk_norm": True}}}
    (fault,) = check_faults(tmp_path, arms=arms)
    assert "arms.again" in fault
    assert "the arms dense and again come to the same spec" in fault


def test_a_metric_that_no_run_logs(tmp_path: Path) -> None:
    (fault,) = check_faults(tmp_path, primary={"metric": "heldout/nll"})
    assert "primary.metric: no run logs this metric. Did you mean 'held_out/nll'?" in fault
    assert "train_split/nll" in fault.partition("allowed:")[2]


def test_a_metric_that_one_arm_does_not_log(tmp_path: Path) -> None:
    arms = arms_with("dense", evaluation={"eval_steps": 2, "sets": ["train_split"]})
    (fault,) = check_faults(tmp_path, arms=arms)
    assert "no run of the arm dense logs this metric" in fault


@pytest.mark.parametrize(
    ("point", "field"), [({"step": 3}, "step"), ({"tokens": 200}, "tokens"), ({"step": 6}, "step")]
)
def test_a_point_where_an_arm_is_not_evaluated(
    point: dict[str, int], field: str, tmp_path: Path
) -> None:
    told = check_faults(tmp_path, primary=point)
    assert [
        f"primary.{field}: the arm {arm} is not evaluated there" in text
        for arm, text in zip(ARMS, told, strict=True)
    ] == [True, True]
    assert "allowed: " + ("2, 4" if field == "step" else "256, 512") in told[0]


def test_a_step_is_no_common_point_of_other_batches(tmp_path: Path) -> None:
    training = {"steps": 8, "batch_size": 2, "seq_len": 32}
    told = check_faults(tmp_path, arms=arms_with("dense", training=training), primary={"step": 4})
    assert "the arms take 64, 128 tokens a step" in told[0]


def test_a_treatment_that_names_nothing(tmp_path: Path) -> None:
    (fault,) = check_faults(tmp_path, treatment=["modle"])
    assert "small.study.yaml:3: treatment: a run spec has no such field" in fault
    assert "Did you mean 'model'?" in fault


def test_arms_that_differ_in_more_than_the_treatment_are_refused(
    tmp_path: Path, store: Store
) -> None:
    arms = arms_with("dense", optimizer={"lr": 1e-3}, training={"z_loss": 1e-4})
    study = load_study(write_study(tmp_path, arms=arms))
    found = check_study(study, store)
    assert found.verdict == "refused"
    with pytest.raises(RefusedError) as caught:
        found.require()
    text = str(caught.value)
    assert "optimizer.lr: arms differ in more than the treatment (model)" in text
    assert "0.003 in routed; 0.001 in dense (rule optimizer)" in text
    assert "training.z_loss" in text
    declared = load_study(write_study(tmp_path, arms=arms, treatment=["model", "rule:optimizer"]))
    assert check_study(declared, store).verdict != "refused"


def test_a_difference_that_only_flags_a_pair_of_runs_refuses_a_plan(
    tmp_path: Path, store: Store
) -> None:
    """A plan is made before any run: there is no reason to begin with arms that are unlike."""
    arms = arms_with(
        "dense", training={"steps": 4, "batch_size": 4, "seq_len": 32, "loss_block_vocab": 64}
    )
    found = check_study(load_study(write_study(tmp_path, arms=arms)), store)
    assert found.pairs[0].check.verdict == "flagged"
    assert found.verdict == "refused"


def test_other_parameter_counts_flag_and_do_not_refuse(tmp_path: Path, store: Store) -> None:
    wide = {**ARMS["dense"]["model"], "intermediate_size": 97}
    study = load_study(write_study(tmp_path, arms=ARMS | {"wide": {"model": wide}}))
    found = check_study(study, store)
    assert found.verdict == "flagged"
    assert len(found.pairs) == 3
    assert not found.refused


def test_the_command_prints_one_document_and_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WB_HOME", str(tmp_path / "mlruns"))
    path = write_study(tmp_path, primary={"step": 2})
    answer = commands.call(["study", "check", str(path), "--json"])
    assert isinstance(answer, Answer)
    assert answer.exit_code == 0
    document: Any = answer.content
    assert document["verdict"] == "comparable"
    assert document["primary"] == {"metric": "held_out/nll", "tokens": 256}
    assert document["runs"][0] == "small-routed-s1"
    text = commands.call(["study", "check", str(path)])
    assert isinstance(text, Answer)
    assert "2 arms x 2 seeds = 4 runs" in str(text.content)

    path = write_study(tmp_path, arms=arms_with("dense", optimizer={"lr": 1.0}))
    answer = commands.call(["study", "check", str(path), "--json"])
    assert isinstance(answer, Answer)
    assert answer.exit_code == 3
    assert not (tmp_path / "mlruns" / "studies").exists()


@pytest.mark.parametrize(
    "name", [pytest.param("100m_matched", marks=pytest.mark.slow), "quick_matched"]
)
def test_the_matched_studies_hold(name: str, tmp_path: Path) -> None:
    """Six arms; all but the learned routers have the very same count of parameters."""
    study = load_study(ROOT / "experiments" / f"{name}.study.yaml")
    assert len(study.runs) == 12
    assert study.spec.seeds == [42, 43]
    pairs = [(pair.arm, pair.against) for pair in study.spec.contrasts]
    assert ("gqa-routed", "gqa-dense") in pairs
    found = check_study(study, Store(tmp_path))
    assert not found.refused
    totals = found.parameters
    matched = {total for arm, total in totals.items() if not arm.endswith("learned")}
    assert len(matched) == 1
    model = study.arm_specs["mha-dense"].model
    router = model.num_hidden_layers * 4 * model.hidden_size
    assert {total for arm, total in totals.items() if arm.endswith("learned")} == {
        next(iter(matched)) + router  # type: ignore[operator]
    }
