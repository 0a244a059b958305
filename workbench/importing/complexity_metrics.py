"""The numbers of an original run: which of its 29 columns mean what they say, and under what name.

Its `metrics.csv` is kept as it was beside the record; here stand the numbers that a comparison may
use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from workbench.errors import UserError
from workbench.importing.draft import Draft
from workbench.spec.held_out import logged_name
from workbench.track.journal import ORIGINAL_COLUMNS, perplexity, read_metrics

EvaluationSet = Literal["held_out", "train_split"]

# What is as it says in any run; the rest has faults that no correction can undo.
_KEPT = ("shared_gate", "routed_gate", "shared_rms", "routed_rms")
_GRADIENTS = (
    "shared_grad_norm",
    "routed_grad_norm",
    *(f"expert_{index}_grad_norm" for index in range(4)),
)


def evaluation_set(draft: Draft, document: Mapping[str, Any]) -> EvaluationSet:
    """What that runner's "eval" was, and what is known of it; recorded in the draft."""
    args, shards = document["args"], document.get("dataset_shards") or {}
    train, held = ((shards.get(name) or {}).get("sha256") for name in ("train", "eval"))
    separate = args.get("eval_tokens_path") is not None
    if args["dataset"] == "random":
        separate = True  # ids of another seed: a smoke test in any case
    same = separate and (
        (train is not None and train == held)
        or (args["dataset"] == "tokens" and args["eval_tokens_path"] == args.get("tokens_path"))
    )
    name: EvaluationSet = "held_out" if separate and not same else "train_split"
    if name == "train_split":
        what = "the training shard itself" if same else "a tail of the training split"
        why = f'its "eval" was {what}: repeatable, not held out'
        draft.correct("evaluation.sets", "eval", "train_split", why)
    draft.setting("evaluation.sets", [name])
    if args.get("eval_ratio") is not None and not separate:
        draft.setting("data.held_out_ratio", args["eval_ratio"])
    draft.fact(
        f"evaluation.{name}",
        {
            "status": "train_split" if name == "train_split" else "unproven",
            "unit": "window",
            "context": f"windows of {args['seq_len']} ids of a stream, drawn by that runner",
        },
    )
    if held is not None and name == "held_out":
        why = "copied from the shard's index, and windows of it were scored, not the whole"
        draft.correct("effective.evaluation.held_out.sha256", held, None, why)
    return name


def measure(draft: Draft, path: Path, args: Mapping[str, Any], name: EvaluationSet) -> None:
    """Takes the rows of `metrics.csv` whose numbers hold, and how the run ended.

    Raises:
        UserError: the file is not that runner's table.
    """
    table = read_metrics(path)
    if tuple(table) != ORIGINAL_COLUMNS:
        message = "these are not the columns of the original runner"
        unlike = next(
            (pair for pair in zip(table, ORIGINAL_COLUMNS, strict=False) if pair[0] != pair[1]),
            (f"{len(table)} columns", f"{len(ORIGINAL_COLUMNS)} columns"),
        )
        raise UserError.at(str(path), message, unlike[0], unlike[1])
    lines = _surviving(draft, path, table["step"])
    steps = [int(table["step"][line] or 0) for line in lines]
    if not steps:
        raise UserError.at(str(path), "there is no row in it", None, "at least one logged step")
    if steps[-1] > args["steps"]:
        raise UserError.at(str(path), "the run has no such step", steps[-1], str(args["steps"]))

    plain = not args.get("label_smoothing") and not args.get("z_loss")
    alone = draft.world_size == 1
    unclipped = not args.get("max_grad_norm")
    set_name = logged_name(name, "train_split" if name == "train_split" else "unproven")
    for line, step in zip(lines, steps, strict=True):
        row: dict[str, float | int | None] = {"step": step}
        row["tokens"] = step * (draft.tokens_per_step or 0)
        loss, evaluated = table["train_loss"][line], table["eval_loss"][line]
        row["train/nll" if plain and alone else "train_loss"] = loss
        row["total_loss"] = table["total_loss"][line]
        if plain:
            row[f"{set_name}/nll"], row[f"{set_name}/perplexity"] = evaluated, perplexity(evaluated)
        else:
            row["eval_loss"] = evaluated
        kept = (*_KEPT, *(_GRADIENTS if alone and unclipped else ()))
        row |= {column: table[column][line] for column in kept}
        draft.rows.append(row)
        if evaluated is not None and plain:
            draft.evaluated.append(step)
            draft.final = {f"{set_name}/nll": evaluated}
            draft.final[f"{set_name}/perplexity"] = perplexity(evaluated) or math.nan
    _say_what_is_left_out(draft, plain, alone, unclipped)
    if steps[-1] == args["steps"]:
        draft.status = "FINISHED"
        draft.fact("budget.finished", True)
    else:
        draft.notes.append(
            f"the last row is of step {steps[-1]} of {args['steps']}: whether it went on is not"
            " on record"
        )


def _surviving(draft: Draft, path: Path, steps: list[float | None]) -> list[int]:
    """The lines of the branch that went on: after a resume, rows of steps trained again go."""
    kept: list[int] = []
    dropped = 0
    for line, step in enumerate(steps):
        if step is None or not math.isfinite(step) or step != int(step) or step < 0:
            raise UserError.at(f"{path}:{line + 2}", "not a step", step, "a whole number")
        while kept and (steps[kept[-1]] or 0) >= step:
            kept.pop()
            dropped += 1
        kept.append(line)
    if dropped:
        why = "a resume kept rows past its checkpoint: the later branch stands, the earlier is left"
        draft.correct("metrics.csv", f"{dropped} rows of steps trained again", "left out", why)
    return kept


def _say_what_is_left_out(draft: Draft, plain: bool, alone: bool, unclipped: bool) -> None:
    draft.correct("lr", "the column lr", None, "each row shows the rate of the step after it")
    draft.correct(
        "tokens_per_s",
        "the column tok_s",
        None,
        "intervals held evaluation and start-up: it is no speed of training",
    )
    draft.correct(
        "expert shares",
        "the columns expert_*_share, expert_dead_count",
        None,
        "evaluation tokens were counted, and an expert dead in one layer did not show",
    )
    if not plain:
        why = "label smoothing or z-loss was inside the losses: none of them is an NLL"
        draft.correct("nll", "the columns train_loss, eval_loss", None, why)
    if not alone:
        draft.correct(
            "train/nll", "the column train_loss", None, "it was the first process's alone"
        )
    if not (alone and unclipped):
        why = "gradient norms were taken after clipping, and inflated by several processes"
        draft.correct("grad_norm", "the columns *_grad_norm", None, why)
