"""Arms of several seeds: which may be compared, what their difference is, and who wins."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from fake_arms import points_of_seed, shifts, write_arm, write_run
from fake_runs import (
    EVERY,
    STEPS,
    TOKENS_PER_STEP,
    TOTAL,
    full_effective,
    full_record,
    full_spec,
)
from scipy import stats

from workbench.compare import compare_arms
from workbench.errors import UserError

SEEDS = (1, 2, 3)
MHA: dict[str, Any] = {"model": {"attention_type": "mha"}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arms under seeds 1 to 3; `mha` is 0.02 below `gqa` under every seed, give or take."""
    home = tmp_path_factory.mktemp("arms")
    write_arm(home, "gqa", {1: 0.0, 2: 0.01, 3: -0.01})
    write_arm(home, "mha", {1: -0.020, 2: -0.011, 3: -0.029}, **MHA)
    write_arm(home, "noisy", {1: -0.02, 2: 0.03, 3: -0.03}, **MHA)
    write_arm(home, "others", {4: -0.02, 5: -0.01, 6: -0.03}, **MHA)
    write_arm(home, "partly", {3: -0.02, 4: -0.01, 5: -0.03}, **MHA)
    return home


def arm(home: Path, name: str, seeds: tuple[int, ...] = SEEDS) -> list[Path]:
    return [home / f"{name}-s{seed}" for seed in seeds]


def test_paired_seeds_name_a_winner_where_the_interval_excludes_zero(runs: Path) -> None:
    found = compare_arms({"gqa": arm(runs, "gqa"), "mha": arm(runs, "mha")}, treatment=["model"])
    (pair,) = found.pairs
    assert (found.verdict, found.at, pair.seeds.design) == ("comparable", TOTAL, "paired")
    assert pair.results is not None
    number = pair.results.numbers["held_out/nll"]
    assert number.seeds is not None
    assert number.seeds.n == (3, 3)
    assert number.difference == pytest.approx(-0.02, abs=0.004)
    assert number.seeds.interval[1] < 0
    assert (number.seeds.lower, number.seeds.higher) == (3, 0)
    assert number.winner == "b"
    assert number.p_adjusted == number.seeds.p
    assert number.documents is not None
    assert number.documents.n == 12


def test_only_the_number_that_decides_names_a_winner(runs: Path) -> None:
    arms = {"gqa": arm(runs, "gqa"), "mha": arm(runs, "mha")}
    (pair,) = compare_arms(arms, treatment=["model"]).pairs
    assert pair.deciding == ("held_out/nll",)
    assert pair.results is not None
    winners = {name for name, one in pair.results.numbers.items() if one.winner}
    assert winners == {"held_out/nll"}
    (pair,) = compare_arms(arms, treatment=["model"], primary="train_split/nll").pairs
    assert pair.results is not None
    assert {name for name, one in pair.results.numbers.items() if one.winner} == {"train_split/nll"}


def test_a_difference_within_the_seed_noise_has_no_winner(runs: Path) -> None:
    arms = {"gqa": arm(runs, "gqa"), "noisy": arm(runs, "noisy")}
    (pair,) = compare_arms(arms, treatment=["model"]).pairs
    assert pair.results is not None
    number = pair.results.numbers["held_out/nll"]
    assert number.seeds is not None
    low, high = number.seeds.interval
    assert low < 0 < high
    assert number.winner is None
    assert number.seeds.p > 0.05


def test_one_seed_each_has_documents_and_no_winner(runs: Path) -> None:
    arms = {"gqa": arm(runs, "gqa", (1,)), "mha": arm(runs, "mha", (1,))}
    (pair,) = compare_arms(arms, treatment=["model"]).pairs
    assert pair.verdict == "comparable"
    assert pair.results is not None
    number = pair.results.numbers["held_out/nll"]
    assert number.seeds is None
    assert number.no_seeds == "one seed says nothing about the spread between seeds"
    assert number.documents is not None
    assert number.documents.interval[1] < 0
    assert number.winner is None


@pytest.mark.parametrize(
    ("a", "b", "treatment", "verdict", "outcome", "words"),
    [
        (("gqa", SEEDS), ("others", (4, 5, 6)), "model", "flagged", "differs", "no seed in common"),
        (("gqa", SEEDS), ("partly", (3, 4, 5)), "model", "refused", "differs", "overlap in part"),
        (("gqa", SEEDS), ("mha", (1, 2)), "model", "refused", "differs", "unequal numbers"),
        (("gqa", (1,)), ("mha", (2,)), "model", "refused", "differs", "one seed each"),
        (("mha", SEEDS), ("others", (4, 5, 6)), "seed", "comparable", "studied", "what is studied"),
        (("mha", SEEDS), ("partly", (3, 4, 5)), "seed", "refused", "differs", "overlap in part"),
    ],
)
def test_seed_sets(
    runs: Path, a: Any, b: Any, treatment: str, verdict: str, outcome: str, words: str
) -> None:
    arms = {"a": arm(runs, *a), "b": arm(runs, *b)}
    found = compare_arms(arms, treatment=[treatment])
    (pair,) = found.pairs
    ruling = pair.judgement.ruling("seeds")
    assert (found.verdict, ruling.outcome) == (verdict, outcome)
    assert words in pair.seeds.why
    assert found.exit_code() == (3 if verdict == "refused" else 0)
    assert [one.rule for one in pair.judgement.rules if one.counted] == (
        ["seeds"] if outcome == "differs" else []
    )
    assert (pair.results is None) == (verdict == "refused")


def test_a_rerun_is_no_further_seed(runs: Path, tmp_path: Path) -> None:
    record = full_record("again", spec=full_spec(seed=1, **MHA), points=points_of_seed(1))
    again = write_run(tmp_path / "again", record, shift=-0.0201, seed=1)
    twice = [*arm(runs, "mha", (1, 2)), again]
    found = compare_arms({"gqa": arm(runs, "gqa"), "mha": twice}, treatment=["model"])
    assert found.verdict == "refused"
    assert found.pairs[0].seeds.why.startswith("seed 1 stands twice in one arm")
    with pytest.raises(UserError, match="this is the same run twice, in gqa and gqa"):
        compare_arms({"gqa": [*arm(runs, "gqa"), runs / "gqa-s1"], "mha": arm(runs, "mha")})
    with pytest.raises(UserError, match="this is the same run twice, in gqa and mha"):
        compare_arms({"gqa": arm(runs, "gqa"), "mha": [runs / "gqa-s1"]})


def test_a_planned_seed_left_out_refuses(runs: Path) -> None:
    arms = {"gqa": arm(runs, "gqa", (1, 2)), "mha": arm(runs, "mha", (1, 2))}
    assert compare_arms(arms, treatment=["model"]).verdict == "comparable"
    found = compare_arms(arms, treatment=["model"], planned={"mha": [1, 2, 3]})
    assert found.verdict == "refused"
    assert found.pairs[0].seeds.why == "planned seed 3 is left out"


def test_an_allowance_turns_the_seeds_into_a_flag(runs: Path) -> None:
    arms = {"a": arm(runs, "gqa"), "b": arm(runs, "mha", (1, 2))}
    found = compare_arms(arms, treatment=["model"], allow={"seeds": "one crashed"})
    assert found.verdict == "flagged"
    (pair,) = found.pairs
    assert pair.judgement.ruling("seeds").allowed == "one crashed"
    assert pair.results is not None
    number = pair.results.numbers["held_out/nll"]
    assert number.seeds is not None
    assert (number.seeds.design, number.seeds.n) == ("unpaired", (3, 2))


@pytest.mark.parametrize(
    ("changes", "rule", "leaf"),
    [
        ({"optimizer": {"lr": 0.5}}, "optimizer", "optimizer.lr"),
        ({"model": {"attention_type": "gqa"}}, "model", "model.attention_type"),
        ({"evaluation": {"sets": ["held_out"]}}, "evaluation", "evaluation.sets"),
    ],
)
def test_the_odd_run_of_an_arm_is_named(
    runs: Path, tmp_path: Path, changes: dict[str, Any], rule: str, leaf: str
) -> None:
    record = full_record(
        "odd", spec=full_spec(**{**MHA, **changes}, seed=2), points=points_of_seed(2)
    )
    odd = write_run(tmp_path / "odd", record)
    mixed = [runs / "mha-s1", odd, runs / "mha-s3"]
    found = compare_arms({"gqa": arm(runs, "gqa"), "mha": mixed}, treatment=["model"])
    assert found.verdict == "refused"
    ruling = found.pairs[0].judgement.ruling(rule)
    assert ruling.effects["nll"] == "refuse"
    (counted,) = [one for one in ruling.counted if one.path == leaf]
    assert counted.runs is not None
    assert counted.runs[1] == "odd"
    assert counted.runs[0] in ("mha-s1", "mha-s3")
    assert [
        one.rule for one in found.pairs[0].judgement.rules if one.over(["nll"]) == "refused"
    ] == [rule]


def test_a_difference_of_all_runs_names_no_run(runs: Path, tmp_path: Path) -> None:
    other = write_arm(tmp_path, "lr", {1: 0.0, 2: 0.0, 3: 0.0}, optimizer={"lr": 0.5}, **MHA)
    found = compare_arms({"gqa": arm(runs, "gqa"), "lr": other}, treatment=["model"])
    (leaf,) = found.pairs[0].judgement.ruling("optimizer").counted
    assert leaf.runs is None
    assert found.verdict == "refused"


def test_runs_of_one_seed_must_have_consumed_one_order(runs: Path, tmp_path: Path) -> None:
    other = write_arm(tmp_path, "order", {1: 0.0, 2: 0.0}, **MHA)
    record = full_record("o3", spec=full_spec(seed=3, **MHA), points=points_of_seed(99))
    other.append(write_run(tmp_path / "o3", record))
    found = compare_arms({"gqa": arm(runs, "gqa"), "order": other}, treatment=["model"])
    (leaf,) = found.pairs[0].judgement.ruling("data").counted
    assert (leaf.path, leaf.runs) == ("effective.data.order_digest", ("gqa-s3", "o3"))
    assert found.verdict == "refused"


def test_runs_of_one_seed_must_have_read_as_much_text(runs: Path, tmp_path: Path) -> None:
    """The bytes of other seeds differ with their order; those of one order cannot."""
    other = write_arm(tmp_path, "text", {1: 0.0, 2: 0.0}, **MHA)
    more = [{**point, "bytes": point["bytes"] + point["step"]} for point in points_of_seed(3)]
    record = full_record("t3", spec=full_spec(seed=3, **MHA), points=more)
    other.append(write_run(tmp_path / "t3", record))
    found = compare_arms({"gqa": arm(runs, "gqa"), "text": other}, treatment=["model"])
    (leaf,) = found.pairs[0].judgement.ruling("budget").counted
    assert (leaf.path, leaf.runs) == ("effective.budget.bytes", ("gqa-s3", "t3"))
    assert found.verdict == "refused"


def test_several_arms_are_adjusted_so_that_text_and_picture_agree(
    runs: Path, tmp_path: Path
) -> None:
    arms = {
        "gqa": arm(runs, "gqa"),
        "mha": arm(runs, "mha"),
        "noisy": arm(runs, "noisy"),
        "third": write_arm(tmp_path, "third", shifts(SEEDS, -0.0002, 1e-4), **MHA),
    }
    found = compare_arms(arms, treatment=["model"], baseline="gqa")
    assert [pair.names for pair in found.pairs] == [
        ("gqa", "mha"),
        ("gqa", "noisy"),
        ("gqa", "third"),
    ]
    two = compare_arms({"gqa": arms["gqa"], "mha": arms["mha"]}, treatment=["model"])
    assert two.pairs[0].results is not None
    alone = two.pairs[0].results.numbers["held_out/nll"]
    assert found.pairs[0].results is not None
    among = found.pairs[0].results.numbers["held_out/nll"]
    assert among.seeds is not None
    assert alone.seeds is not None
    assert among.seeds.level == pytest.approx(1 - 0.05 / 3)
    assert among.seeds.interval[0] < alone.seeds.interval[0]
    assert among.p_adjusted == pytest.approx(3 * alone.seeds.p)
    for pair in found.pairs:
        assert pair.results is not None
        for number in pair.results.numbers.values():
            if number.winner:
                assert number.seeds is not None
                assert number.p_adjusted is not None
                assert number.seeds.excludes_zero
                assert number.p_adjusted < 0.05


def test_a_contrast_belongs_to_the_family_of_comparisons(runs: Path, tmp_path: Path) -> None:
    third = write_arm(tmp_path, "third", {1: 0.003, 2: 0.012, 3: -0.008}, **MHA)
    arms = {"gqa": arm(runs, "gqa"), "mha": arm(runs, "mha"), "third": third}
    found = compare_arms(arms, treatment=["model"], contrasts=[("third", "mha")])
    assert [pair.names for pair in found.pairs] == [
        ("gqa", "mha"),
        ("gqa", "third"),
        ("third", "mha"),
    ]
    assert [pair.names for pair in found.contrasts] == [("third", "mha")]
    numbers = [pair.results.numbers["held_out/nll"] for pair in found.pairs if pair.results]
    contrast = numbers[2]
    assert contrast.difference == pytest.approx(numbers[0].difference - numbers[1].difference)
    alone = compare_arms(
        {"third": third, "mha": arms["mha"]}, treatment=["model"], level=1 - 0.05 / 3
    )
    assert alone.pairs[0].results is not None
    test = alone.pairs[0].results.numbers["held_out/nll"].seeds
    assert test is not None
    assert contrast.seeds is not None
    assert contrast.seeds.interval == pytest.approx(test.interval)
    p = [number.seeds.p for number in numbers if number.seeds]
    assert len(p) == 3
    adjusted = [number.p_adjusted for number in numbers]
    smallest = p.index(min(p))
    assert adjusted[smallest] == pytest.approx(3 * p[smallest])
    without = compare_arms(arms, treatment=["model"])
    assert without.key != found.key
    planned = compare_arms(arms, treatment=["model"], family=3)
    wider = [pair.results.numbers["held_out/nll"] for pair in planned.pairs if pair.results]
    assert [n.seeds.interval for n in wider if n.seeds] == [
        n.seeds.interval for n in numbers[:2] if n.seeds
    ]
    with pytest.raises(UserError, match="there is no such arm"):
        compare_arms(arms, treatment=["model"], contrasts=[("third", "fourth")])


def test_the_document_for_machines(runs: Path) -> None:
    arms = {"gqa": arm(runs, "gqa"), "mha": arm(runs, "mha")}
    found = json.loads(
        json.dumps(compare_arms(arms, treatment=["model"]).to_json(), allow_nan=False)
    )
    assert found["verdict"] == "comparable"
    assert found["arms"]["mha"]["seeds"] == [1, 2, 3]
    number = found["results"]["held_out/nll"]
    assert number["seeds"]["n"] == 3
    assert len(number["seeds"]["interval"]) == len(number["documents"]["interval"]) == 2
    assert 0 < number["seeds"]["p"] < 0.05
    assert number["winner"] == "b"
    assert "why" not in number
    assert number["b"] - number["a"] == pytest.approx(number["difference"])
    more = compare_arms({**arms, "noisy": arm(runs, "noisy")}, treatment=["model"]).to_json()
    assert [pair["b"] for pair in more["pairs"]] == ["mha", "noisy"]


def test_unusual_groups_are_mistakes_with_a_message(runs: Path) -> None:
    one = {"gqa": arm(runs, "gqa")}
    with pytest.raises(UserError, match="one arm is compared with nothing"):
        compare_arms(one)
    with pytest.raises(UserError, match="there are no runs in it"):
        compare_arms({**one, "mha": []})
    both = {**one, "mha": arm(runs, "mha")}
    with pytest.raises(UserError, match="there is no such arm"):
        compare_arms(both, baseline="dense")
    with pytest.raises(UserError, match="all runs must have been evaluated there"):
        compare_arms(both, at=7)


def test_a_run_that_diverged_leaves_no_difference(runs: Path, tmp_path: Path) -> None:
    bad = write_arm(tmp_path, "bad", {3: math.nan}, **MHA)
    arms = {"gqa": arm(runs, "gqa"), "mha": [*arm(runs, "mha", (1, 2)), *bad]}
    found = compare_arms(arms, treatment=["model"])
    assert found.verdict == "refused"
    leaves = found.pairs[0].judgement.ruling("evaluation").counted
    assert {leaf.path.rpartition(".")[2] for leaf in leaves} == {"finite_nll"}
    assert {leaf.runs for leaf in leaves} == {("mha-s1", "bad-s3")}


def test_machines_that_differ_within_an_arm_are_flagged(runs: Path, tmp_path: Path) -> None:
    effective = full_effective()
    effective["hardware"]["device_name"] = "A100"
    record = full_record(
        "elsewhere", spec=full_spec(seed=3, **MHA), points=points_of_seed(3), effective=effective
    )
    third = write_run(tmp_path / "elsewhere", record, shift=-0.03)
    arms = {"gqa": arm(runs, "gqa"), "mha": [*arm(runs, "mha", (1, 2)), third]}
    found = compare_arms(arms, treatment=["model"], claims=["nll", "throughput"])
    assert found.claims == {
        "nll": "flagged",
        "bpb": "flagged",
        "throughput": "refused",
        "memory": "refused",
    }
    results = found.pairs[0].results
    assert results is not None
    assert results.numbers["tokens_per_s"].blank == "refused: hardware"
    assert results.numbers["held_out/nll"].seeds is not None


def scored(folder: Path, step: int) -> dict[str, tuple[float, float]]:
    """Document -> summed NLL and scored tokens of the held-out set, out of the file itself."""
    from pyarrow import parquet

    with parquet.ParquetFile(folder / "evaluations" / f"step_{step:08d}.parquet") as file:
        rows = file.read().to_pylist()
    held_out = [row for row in rows if row["set"] == "held_out"]
    return {row["document"]: (row["nll_sum"], row["tokens"]) for row in held_out}


@pytest.mark.parametrize("step", [STEPS, EVERY])
def test_at_a_point_every_number_is_that_of_the_point(tmp_path: Path, step: int) -> None:
    """Means and test over seeds out of `metrics.csv`, and the interval over documents out of the
    scores, by hand: of every document the mean over the seeds of each arm, its difference, and of
    these the ratio of sums with the HC3 standard error."""
    for name, seed, shift in (("a", 1, 0.0), ("a", 2, 0.01), ("b", 1, -0.02), ("b", 2, 0.005)):
        noise = 10 * seed + (name == "b")  # so that documents differ by arm and by seed
        write_arm(tmp_path, name, {seed: shift}, noise=noise, **(MHA if name == "b" else {}))
    arms = {name: arm(tmp_path, name, (1, 2)) for name in ("a", "b")}
    at = step * TOKENS_PER_STEP
    (pair,) = compare_arms(arms, treatment=["model"], at=at).pairs
    assert pair.results is not None
    number = pair.results.numbers["held_out/nll"]
    values = []
    for folders in arms.values():
        rows = [list(csv.DictReader((one / "metrics.csv").open())) for one in folders]
        values.append(
            [float(r["held_out/nll"]) for run in rows for r in run if r["step"] == f"{step}"]
        )
    assert [list(number.a), list(number.b)] == values
    assert number.seeds is not None
    paired = [b - a for a, b in zip(*values, strict=True)]
    half = 12.7062 * abs(paired[0] - paired[1]) / 2  # t(0.975, 1); s / sqrt(2) of two is |d| / 2
    mean = sum(paired) / 2
    assert number.seeds.interval == pytest.approx((mean - half, mean + half), rel=1e-5)
    assert pair.results.series["held_out/nll"].tokens[-1] == at

    runs = {name: [scored(one, step) for one in folders] for name, folders in arms.items()}
    documents = sorted(runs["a"][0])
    tokens = [runs["a"][0][one][1] for one in documents]
    change = [
        sum(run[one][0] for run in runs["b"]) / 2 - sum(run[one][0] for run in runs["a"]) / 2
        for one in documents
    ]
    whole, ratio = sum(tokens), sum(change) / sum(tokens)
    rest = [(d - ratio * n) / (1 - n / whole) for d, n in zip(change, tokens, strict=True)]
    error = math.sqrt(sum(one**2 for one in rest)) / whole
    freedom = whole**2 / sum(n**2 for n in tokens) - 1
    half = float(stats.t.ppf(0.975, freedom)) * error
    assert number.documents is not None
    assert number.documents.interval == pytest.approx((ratio - half, ratio + half), rel=1e-9)
    assert ratio == pytest.approx(number.difference)
