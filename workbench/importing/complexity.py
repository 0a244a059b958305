"""Reads a run of the runner that this package replaces: its `run_config.json` and `metrics.csv`.

What it wrote is taken for what it is: a setting is what was asked for, and nothing is said to have
run that it did not see. Where it is known to have written what was not so, the record holds the
truth, or nothing, and says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import Fault, UserError, reason_of
from workbench.importing.complexity_metrics import evaluation_set, measure
from workbench.importing.complexity_model import DENSE, model_settings
from workbench.importing.draft import Draft
from workbench.json_files import parse_json
from workbench.track.record_fields import RECORD_FIELDS

CONFIG, METRICS = "run_config.json", "metrics.csv"

# What has to be there, and of which type, for a record to be one of that runner's.
_NEEDED: dict[str, type] = {
    "schema_version": int,
    "args": dict,
    "model_config": dict,
    "backend": dict,
    "params": int,
    "world_size": int,
    "tokens_per_step": int,
    "total_tokens": int,
}
_NEEDED_ARGS: dict[str, type] = {
    "run_name": str,
    "seed": int,
    "steps": int,
    "batch_size": int,
    "seq_len": int,
    "dataset": str,
    "optimizer": str,
    "bf16": bool,
}

# Constants of that runner, which its record does not repeat.
_BETAS, _EPS, _MIN_LR_RATIO, _MUON_MOMENTUM = [0.9, 0.95], 1e-8, 0.1, 0.95

# Settings under the names that they still have; all were asked for, and none was chosen by itself.
_SETTINGS = {
    "training.steps": "steps",
    "training.batch_size": "batch_size",
    "training.seq_len": "seq_len",
    "training.grad_ckpt": "grad_ckpt",
    "training.max_grad_norm": "max_grad_norm",
    "training.loss_backend": "loss_backend",
    "training.loss_chunk_tokens": "loss_chunk_tokens",
    "training.label_smoothing": "label_smoothing",
    "training.z_loss": "z_loss",
    "training.compile": "compile",
    "optimizer.lr": "lr",
    "optimizer.weight_decay": "weight_decay",
    "evaluation.eval_steps": "eval_steps",
    "telemetry.log_steps": "log_steps",
    "telemetry.moe": "moe_telemetry",
    "data.dataset": "dataset",
    "data.tokens_path": "tokens_path",
    "data.eval_tokens_path": "eval_tokens_path",
    "data.text_file": "text_file",
}
_MUON = {
    "muon_scope": "muon_scope",
    "muon_lr": "muon_lr",
    "muon_ns_steps": "muon_ns_steps",
    "muon_orthogonal_blend": "muon_orthogonal_blend",
    "muon_max_update_rms": "muon_max_update_rms",
    "shared_weight_decay": "shared_weight_decay",
    "expert_weight_decay": "expert_weight_decay",
}
# What made its Muon another one than this package's, unless it has this value.
_MUON_OFF = {
    "muon_adaptive_ns": False,
    "muon_lr_decay_end_step": 0,
    "muon_max_param_rms_ratio": None,
    "muon_orthogonal_blend_decay_steps": 0,
    "muon_skip_ns_warmup_steps": 0,
    "muon_token_count_scaling": False,
}


def read_complexity(folder: Path, name: str | None = None) -> Draft:
    """What is known of a run of the original runner.

    Args:
        folder: holds its `run_config.json` and `metrics.csv`.
        name: what to call it here; by default what it was called there.

    Raises:
        UserError: a file is missing or not that runner's; with every fault found.
    """
    contents = {file: _read(folder / file) for file in (CONFIG, METRICS)}
    document = _document(folder / CONFIG, contents[CONFIG])
    args: dict[str, Any] = document["args"]
    draft = Draft(name or args["run_name"], "complexity", str(folder), originals=contents)
    draft.params, draft.world_size = document["params"], document["world_size"]
    draft.tokens_per_step = document["tokens_per_step"]
    draft.total_tokens = document["total_tokens"]
    draft.model_config, draft.backend = document["model_config"], document["backend"]
    draft.git_commit = document.get("git_commit")

    dense = document["model_config"].get("mlp_type") in DENSE
    _settings(draft, args)
    _optimizer(draft, args, dense)
    model_settings(draft, args, document["model_config"])
    _ran(draft, document)
    _data(draft, document)
    measure(draft, folder / METRICS, args, evaluation_set(draft, document))
    return draft


def _settings(draft: Draft, args: Mapping[str, Any]) -> None:
    """What was asked for, under the names of a run spec."""
    draft.setting("seed", args["seed"])
    for path, key in _SETTINGS.items():
        if key in args:
            draft.setting(path, args[key])
    draft.setting("training.precision", "bf16" if args["bf16"] else "fp32")
    draft.setting("training.gradient_accumulation_steps", 1)  # it had none
    if "compile" in args:
        draft.setting(
            "training.compile_mode", args.get("compile_mode") if args["compile"] else None
        )
    if args["dataset"] == "tokens" and "token_order" in args:
        draft.setting("data.order", args["token_order"])
    elif args["dataset"] == "text":
        draft.setting("data.order", "random")
    draft.setting("schedule.decay", "cosine")
    draft.setting("schedule.min_lr_ratio", _MIN_LR_RATIO)
    draft.setting("evaluation.select", "last")
    draft.setting("optimizer.name", args["optimizer"])
    draft.setting("optimizer.betas", list(_BETAS))
    draft.setting("optimizer.eps", _EPS)
    draft.notes.append(
        "betas, epsilon and the floor of the cosine are constants of that runner, not recorded"
    )


def _optimizer(draft: Draft, args: Mapping[str, Any], dense: bool) -> None:
    """The settings of the groups of parameters, and of Muon where that trained."""
    muon = args["optimizer"] == "muon_tr"
    for key in ("shared_lr_scale", "expert_lr_scale"):
        if dense:
            draft.setting(f"optimizer.{key}", None)
        elif not muon and key in args:
            draft.setting(f"optimizer.{key}", args[key])
    if not muon:
        for key in _MUON:
            if key.startswith("muon_") or dense:
                draft.setting(f"optimizer.{key}", None)
        for key in ("muon_momentum", "muon_nesterov"):
            draft.setting(f"optimizer.{key}", None)
    else:
        for key, theirs in _MUON.items():
            if theirs in args:
                draft.setting(f"optimizer.{key}", args[theirs])
        draft.setting("optimizer.muon_momentum", _MUON_MOMENTUM)
        if "muon_no_nesterov" in args:
            draft.setting("optimizer.muon_nesterov", not args["muon_no_nesterov"])
        on = {k: args[k] for k, off in _MUON_OFF.items() if k in args and args[k] != off}
        if on:
            draft.spec["optimizer"].pop("muon_lr", None)
            why = "its Muon had a mechanism that this package has not: another rate than the name"
            draft.correct("optimizer.muon_lr", on, None, why)
        draft.notes.append(
            "that runner multiplied Muon's own warm-up by the schedule's: no rate here is like it"
        )
    draft.correct(
        "effective.optimizer.warmup_steps",
        args.get("warmup_steps") or "5 % of the steps",
        None,
        "its first step trained at rate 0 and its log showed the next step's rate, so its warm-up"
        " is not the one of that many steps here",
    )


def _ran(draft: Draft, document: Mapping[str, Any]) -> None:
    """What ran, as far as its record says so and is known to be right."""
    args, backend = document["args"], document["backend"]
    world = document["world_size"]
    draft.fact("parameters.total", document["params"])
    draft.fact("optimizer.sequences_per_update", args["batch_size"] * world)
    device = "hip" if backend.get("hip_version") else backend.get("device")
    device = str(device).partition(":")[0] if device else None
    draft.fact("hardware.device_type", device)
    draft.fact("hardware.device_count", world)
    if device != "cpu":
        draft.fact("hardware.device_name", backend.get("device_name"))
    draft.fact("execution.parallel", "one process" if world == 1 else None)
    if args.get("compile") is False:
        draft.fact("execution.compiled", False)

    if device == "cpu":
        draft.fact("precision.compute_dtype", "float32")
        if args["bf16"]:
            draft.correct(
                "effective.precision.compute_dtype",
                "bfloat16 (args.bf16 is true)",
                "float32",
                "on a CPU that runner computed in float32 and recorded bf16",
            )
    elif args["bf16"]:
        draft.notes.append("bf16 was asked for; which dtype ran is not on record")

    active = args.get("loss_backend_active")
    if active == "liger" and device == "cpu":
        draft.fact("execution.loss_backend", "full logits")
        draft.correct(
            "effective.execution.loss_backend",
            "liger",
            "full logits",
            "Liger's kernels need a GPU: on a CPU that runner chose and recorded Liger, and its"
            " code fell back to full logits",
        )
    elif active is not None:
        draft.fact("execution.loss_backend", active)
    if args.get("force_resume"):
        draft.fact("code.forced_resume", "forced; that runner kept no reason")
    draft.fact("code.git_commit", document.get("git_commit"))


def _data(draft: Draft, document: Mapping[str, Any]) -> None:
    """The training text: that runner hashed none, so there is no proof of what it read."""
    args = document["args"]
    source = args.get("tokens_path") or args.get("text_file") or args["dataset"]
    draft.fact("data.source", f"{args['dataset']}: {source}, as that runner's record says")
    shards = document.get("dataset_shards") or {}
    train = shards.get("train") or {}
    if args.get("vocab_size"):
        draft.fact("tokenizer.vocab_size", args["vocab_size"])
    if args.get("tokenizer") and args["dataset"] != "random":
        draft.notes.append(f"tokenizer {args['tokenizer']}: a path, whose content was not hashed")
    if train.get("sha256"):
        draft.correct(
            "effective.data.train_sha256",
            train["sha256"],
            None,
            "copied from the shard's index; that runner never hashed the tokens it read",
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        allowed = f"a folder with the original runner's {CONFIG} and {METRICS}"
        raise UserError.at(str(path), reason_of(error), str(path), allowed) from None


def _document(path: Path, content: bytes) -> dict[str, Any]:
    try:
        document = parse_json(content)
    except (ValueError, RecursionError) as error:
        raise UserError.at(str(path), f"not JSON: {error}") from None
    allowed = "a record of the original runner"
    if not isinstance(document, dict):
        raise UserError.at(str(path), "not a record of a run", type(document).__name__, allowed)
    if "spec" in document and RECORD_FIELDS.keys() & document.keys() >= {"spec", "effective"}:
        message = "this is a record of this package, which needs no import"
        raise UserError.at(str(path), message, None, allowed)
    faults = list(_shape_faults(path, "", document, _NEEDED))
    if isinstance(document.get("args"), dict):
        faults += _shape_faults(path, "args.", document["args"], _NEEDED_ARGS)
    if not faults:
        faults = _contradictions(path, document)
    if faults:
        raise UserError(*faults)
    return document


def _shape_faults(
    path: Path, prefix: str, found: Mapping[str, Any], needed: Mapping[str, type]
) -> list[Fault]:
    words = {int: "a whole number", str: "text", dict: "a mapping", bool: "true or false"}
    return [
        Fault(f"{path}: {prefix}{key}", "missing or not what it should be", value, words[kind])
        for key, kind in needed.items()
        if type(value := found.get(key)) is not kind
    ]


def _contradictions(path: Path, document: Mapping[str, Any]) -> list[Fault]:
    """What the record says twice and says otherwise."""
    args = document["args"]
    per_step = args["batch_size"] * args["seq_len"] * document["world_size"]
    total = document["tokens_per_step"] * args["steps"]
    faults = []
    if document["schema_version"] != 1:
        message = "another version of that runner's record"
        faults.append(Fault(f"{path}: schema_version", message, document["schema_version"], "1"))
    if document["tokens_per_step"] != per_step:
        message = "this is not batch_size x seq_len x world_size"
        place = f"{path}: tokens_per_step"
        faults.append(Fault(place, message, document["tokens_per_step"], str(per_step)))
    if document["total_tokens"] != total:
        place, message = f"{path}: total_tokens", "this is not tokens_per_step x steps"
        faults.append(Fault(place, message, document["total_tokens"], str(total)))
    return faults
