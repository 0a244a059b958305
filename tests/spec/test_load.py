"""Spec files: what is read, what is refused, and how errors speak."""

from pathlib import Path

import pytest

from workbench.errors import UserError
from workbench.spec.load import load_spec
from workbench.spec.run import RunSpec, spec_hash


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def faults(folder: Path, text: str, overrides: list[str] | None = None) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_spec(write(folder, text), overrides)
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "0.0001", "1.0e-4", ".0001"])
def test_every_way_to_write_a_number_gives_one_hash(tmp_path: Path, text: str) -> None:
    spec = load_spec(write(tmp_path, f"data: {{dataset: random}}\noptimizer: {{lr: {text}}}"))
    plain = load_spec(write(tmp_path, "data: {dataset: random}\noptimizer:\n  lr: 0.0001"))
    assert spec.optimizer.lr == 1e-4
    assert spec_hash(spec) == spec_hash(plain)


def test_integers_may_group_their_digits(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, "data: {dataset: random}\ntraining: {steps: 5_000}"))
    assert spec.training.steps == 5000


@pytest.mark.parametrize("text", ["010", "1:30", "0x10", "yes", "1e3.5", "5_00", "'100'", "1.5"])
def test_what_is_not_an_integer_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    (fault,) = faults(tmp_path, f"data: {{dataset: random}}\ntraining:\n  steps: {text}\n")
    assert "run.yaml:3: training.steps" in fault
    assert "an integer >= 0" in fault


@pytest.mark.parametrize("value", ["yes", "on", "'true'", "1"])
def test_only_true_and_false_are_booleans(tmp_path: Path, value: str) -> None:
    (fault,) = faults(tmp_path, f"data: {{dataset: random}}\nmodel: {{qk_norm: {value}}}")
    assert "true | false" in fault


def test_all_faults_come_at_once_with_place_value_and_nearest(tmp_path: Path) -> None:
    text = """\
seed: -1
learnig_rate: 3e-4
lr: 1e-4
data: {dataset: sampel}
model:
  num-experts: 4
training:
  precision: fp16
"""
    found = "\n".join(faults(tmp_path, text, ["optimizer.learning=3"]))
    assert "run.yaml:1: seed" in found
    assert "-1" in found
    assert "run.yaml:3: lr" in found
    assert "'optimizer.lr'" in found
    assert "run.yaml:4: data.dataset" in found
    assert "sample | text | tokens | fineweb | random" in found
    assert "run.yaml:6: model.num-experts" in found
    assert "'num_experts'" in found
    assert "run.yaml:8: training.precision" in found
    assert "bf16 | fp32" in found
    assert "override optimizer.learning=3" in found
    assert "learnig_rate" in found


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("model: {hidden_size: 65, num_attention_heads: 4}", "model.hidden_size", "divisible"),
        ("model: {hidden_size: 12, num_attention_heads: 4}", "model.hidden_size", "even"),
        ("model: {num_key_value_heads: 3}", "model.num_key_value_heads", "1, 2, 4, 8"),
        ("model: {num_key_value_heads: 16}", "model.num_key_value_heads", "1, 2, 4, 8"),
        ("model: {num_key_value_heads: 0}", "model.num_key_value_heads", ">= 1"),
        (
            "model: {attention_type: mha, num_key_value_heads: 2}",
            "model.num_key_value_heads",
            "null or 8",
        ),
        (
            "model: {attention_type: mqa, num_key_value_heads: 2}",
            "model.num_key_value_heads",
            "null or 1",
        ),
        ("model: {intermediate_size: 130}", "model.intermediate_size", "a multiple of 4"),
        ("model: {top_k: 5}", "model.top_k", "1 to 4"),
        ("model: {top_k: 1, top_k_primary_weight: 0.5}", "model.top_k_primary_weight", "is 1"),
        ("model: {mlp_type: dense, num_experts: 4}", "model.num_experts", "dense"),
        ("model: {mlp_type: dense, shared_expert: false}", "model.shared_expert", "dense"),
        ("model: {routed_gate_init: 0.1}", "model.routed_gate_init", "no gate"),
        (
            "model: {shared_expert: false, shared_intermediate_size: 8}",
            "model.shared_intermediate_size",
            "shared",
        ),
        ("model: {profile: custom}", "model.hidden_size", "needed"),
        ("model: {profile: 90m}", "model.profile", "100m"),
        ("training: {seq_len: 4096}", "training.seq_len", "2048"),
        ("training: {compile_mode: default}", "training.compile_mode", "without compile"),
        ("schedule: {warmup_steps: 300}", "schedule.warmup_steps", "250"),
        ("evaluation: {sets: [held_out, held_out]}", "evaluation.sets", "twice"),
        ("tokenizer: {path: x.tiktoken}", "tokenizer.path", "only tokenizer 'file'"),
        ("tokenizer: {name: file}", "tokenizer.path", "needs it"),
        ("name: ../x", "name", "letters"),
        ("name: a/b", "name", "letters"),
        ("name: .hidden", "name", "letters"),
        ("optimizer: {lr: .nan}", "optimizer.lr", "finite"),
        ("optimizer: {lr: .inf}", "optimizer.lr", "finite"),
        ("optimizer: {betas: [0.9]}", "optimizer.betas", "2 items"),
        ("training: {batch_size: true}", "training.batch_size", "integer"),
        # What no int64 and no float32 holds.
        ("training: {batch_size: 1" + 20 * "0" + "}", "training.batch_size", "less than"),
        (
            "training: {loss_block_vocab: 1" + 20 * "0" + "}",
            "training.loss_block_vocab",
            "less than",
        ),
        ("optimizer: {name: muon_tr, muon_lr: 1e40}", "optimizer.muon_lr", "less than"),
        (
            "model: {learn_shared_routed_gates: true, routed_gate_final: -1e40}",
            "model.routed_gate_final",
            "greater than",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, text: str, place: str, words: str
) -> None:
    found = faults(tmp_path, f"data: {{dataset: random}}\n{text}")
    assert any(place in fault and words in fault for fault in found), found


def test_what_is_not_built_is_refused_not_ignored(tmp_path: Path) -> None:
    assert faults(tmp_path, "data: {dataset: random}\nevaluation: {select: best}")


def test_fields_that_belong_to_another_data_mode_are_refused(tmp_path: Path) -> None:
    found = faults(tmp_path, "data: {dataset: sample, text_file: a.txt, text_unit: line}")
    assert any("data.text_file" in fault and "'sample'" in fault for fault in found)
    assert any("data.text_unit" in fault for fault in found)
    assert faults(tmp_path, "data: {dataset: text}")
    assert faults(tmp_path, "seed: 1")  # the dataset has no default


def test_sets_that_would_be_logged_under_one_name_or_none_are_refused(tmp_path: Path) -> None:
    def asking(*names: str) -> str:
        sets = ", ".join(f'{{name: "{name}", path: a.txt}}' for name in names)
        return f"data: {{dataset: sample, held_out: [{sets}]}}"

    same = faults(tmp_path, asking("a:b", "wiki", "a@b"))[0]
    assert "data.held_out[2].name" in same
    assert "'a@b'" in same
    assert "'a:b'" in same
    for name in ("\U0001f600", "\u65e5\u672c", "@%", " "):
        (nameless,) = faults(tmp_path, asking(name))
        assert "data.held_out[0].name" in nameless
        assert "no letter from a to z and no digit" in nameless
    assert any("data.held_out[0].name" in fault for fault in faults(tmp_path, asking("")))
    spec = load_spec(write(tmp_path, asking("wiki (en), v2 @100%", "../x")))
    assert spec.evaluation.sets[2:] == ["held_out.wiki-en-v2-100-", "held_out.-x"]


def test_a_key_may_stand_only_once(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, "seed: 1\ndata: {dataset: random}\nseed: 2")
    assert "run.yaml:3" in fault
    assert "'seed'" in fault


@pytest.mark.parametrize(
    "text", ["a: [", "- 1", "a: !!python/object:os.system x", "seed: !foo 3", "? [a]\n: 1", "\t"]
)
def test_what_is_no_plain_mapping_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (fault,) = faults(tmp_path, text)
    assert "run.yaml" in fault


def test_anchors_that_explode_or_recur_are_refused(tmp_path: Path) -> None:
    assert faults(tmp_path, "a: &a [1]\nseed: *a\ndata: {dataset: random}")
    loop = "a: &a {b: *a}"
    (fault,) = faults(tmp_path, loop)
    assert "alias" in fault
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    (fault,) = faults(tmp_path, "\n".join(lines))
    assert "alias" in fault


def test_extends_merges_in_order_and_this_file_last(tmp_path: Path) -> None:
    write(tmp_path, "training: {steps: 10, batch_size: 2}\nmodel: {top_k: 1}", "base/one.yaml")
    write(tmp_path, "training: {steps: 20}", "base/two.yaml")
    text = "extends: [base/one.yaml, base/two.yaml]\ndata: {dataset: random}\nseed: 7"
    spec = load_spec(write(tmp_path, text))
    assert (spec.training.steps, spec.training.batch_size, spec.seed) == (20, 2, 7)
    assert spec.name == "run"
    assert spec.model.top_k == 1


def test_null_unsets_an_inherited_value(tmp_path: Path) -> None:
    write(tmp_path, "model: {num_experts: 8, intermediate_size: 160}", "base.yaml")
    text = "extends: [base.yaml]\ndata: {dataset: random}\nmodel: {mlp_type: dense}"
    assert any("num_experts" in fault for fault in faults(tmp_path, text))
    spec = load_spec(write(tmp_path, text), ["model.num_experts=null"])
    assert spec.model.num_experts is None
    assert spec.model.intermediate_size == 160


def test_extends_in_a_circle_or_of_nothing_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "extends: [run.yaml]", "base.yaml")
    (fault,) = faults(tmp_path, "extends: [base.yaml]")
    assert "circle" in fault
    (fault,) = faults(tmp_path, "extends: [bas.yaml]")
    assert "extended by run.yaml" in fault
    assert "Did you mean 'base.yaml'" in fault


def test_a_path_is_meant_relative_to_the_file_it_stands_in(tmp_path: Path) -> None:
    write(tmp_path, "data: {dataset: text, text_file: corpus/*.txt}", "configs/data.yaml")
    spec = load_spec(write(tmp_path, "extends: [../configs/data.yaml]", "experiments/run.yaml"))
    assert spec.data.text_file == str(tmp_path / "configs" / "corpus" / "*.txt")


def test_a_seed_override_marks_the_name(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {dataset: random}")
    assert load_spec(path, ["seed=43"]).name == "run-s43"
    assert load_spec(path, ["seed=43", "name=other"]).name == "other"
    assert load_spec(path, ["training.steps=3"]).name == "run"


@pytest.mark.parametrize("text", ["training.steps", "=3", "training.stepz=3", "training=3"])
def test_an_override_that_says_nothing_is_refused(tmp_path: Path, text: str) -> None:
    assert text in "\n".join(faults(tmp_path, "data: {dataset: random}", [text]))


@pytest.mark.parametrize(
    ("path", "words"),
    [("missing.yaml", "no such file"), ("folder", "a folder"), ("latin.yaml", "not UTF-8")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin.yaml").write_bytes(b"notes: caf\xe9")
    with pytest.raises(UserError, match=words):
        load_spec(tmp_path / path)


@pytest.mark.parametrize("kind", ["mha", "gqa", "mqa"])
@pytest.mark.parametrize("mlp", ["dense", "token_routed"])
@pytest.mark.parametrize("profile", ["50m", "100m", "200m", "300m", "1b", "8b"])
def test_a_resolved_spec_loads_again_to_itself(
    tmp_path: Path, kind: str, mlp: str, profile: str
) -> None:
    text = f"model: {{profile: {profile}, attention_type: {kind}, mlp_type: {mlp}}}"
    spec = load_spec(write(tmp_path, f"data: {{dataset: sample}}\n{text}"))
    import yaml

    again = load_spec(write(tmp_path, yaml.safe_dump(spec.model_dump(mode="json"))))
    assert again == spec
    assert spec_hash(again) == spec_hash(spec)
    if mlp == "dense":
        assert spec.model.num_experts is None


def test_derived_values() -> None:
    spec = RunSpec.model_validate(
        {
            "name": "a",
            "data": {"dataset": "random"},
            "training": {"steps": 100, "gradient_accumulation_steps": 2, "seq_len": 8},
        }
    )
    assert spec.sequences_per_update == 8
    assert spec.tokens_per_step == 64
    assert spec.total_tokens == 6400
    assert spec.warmup_steps == 5
    assert spec.model_copy(update={"training": spec.training.model_copy(update={"steps": 3})})
