"""Tasks of lm-evaluation-harness as jobs of `wb eval`: run by the harness, kept in the record."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workbench.core.data import atomic
from workbench.errors import UserError, storing
from workbench.evaluate_run import Job, OpenRun, Say, addition
from workbench.track.additions import Write
from workbench.track.record import Addition, strict

REMEDY = 'pip install "workbench[lm-eval]"'


def harness_jobs(
    run: OpenRun, tasks: Sequence[str], include_path: Path | None, say: Say
) -> list[Job]:
    """Runs the tasks, and makes of each (of a group: each in it) what the record can take.

    Their numbers are named `downstream/lm-eval.<task>/<metric>`. The identity of a task is that of
    its documents, prompts and targets, as the harness hashes them.

    Raises:
        UserError: the harness is not installed, knows no such task, or cannot run it.
    """
    try:
        import lm_eval

        from workbench.lm_eval_adapter import WorkbenchLM
    except ImportError as error:
        message = f"lm-evaluation-harness is not installed ({error}): {REMEDY}"
        raise UserError.at("--lm-eval", message, ", ".join(tasks)) from None
    if include_path is not None and not include_path.is_dir():
        raise UserError.at("--include-path", "there is no such folder", str(include_path))
    say(f"lm-evaluation-harness {lm_eval.__version__}: {', '.join(tasks)}")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output holds the answer alone
            manager = _manager(tasks, include_path)
            found: Any = lm_eval.simple_evaluate(
                model=WorkbenchLM(run.loaded, run.tokenizer),
                tasks=list(tasks),
                task_manager=manager,
                bootstrap_iters=1000,
            )
    except UserError:
        raise
    except Exception as error:  # whatever a task's definition, its data or a metric may raise
        first = str(error).strip().partition("\n")[0]
        message = f"the harness cannot run this: {type(error).__name__}: {first}"
        raise UserError.at("--lm-eval", message, ", ".join(tasks)) from error
    return [_job(run, task, found) for task in found["samples"]]


def _manager(tasks: Sequence[str], include_path: Path | None) -> Any:
    """The harness's index of tasks. To read its own thousands takes ten seconds, so that is left
    out where all that is asked for lies in the folder."""
    from lm_eval.tasks import TaskManager

    unknown = list(tasks)
    for with_defaults in (False, True):
        if with_defaults or include_path is not None:
            where = include_path and str(include_path)
            manager = TaskManager(include_path=where, include_defaults=with_defaults)
            unknown = [task for task in tasks if not manager.match_tasks([task])]
            if not unknown:
                return manager
    raise UserError.at("--lm-eval", "the harness knows no such task", unknown[0])


def _job(run: OpenRun, task: str, found: Any) -> Job:
    import lm_eval

    samples = sorted(found["samples"][task], key=lambda one: (one["doc_id"], one["filter"]))
    name = "downstream/lm-eval." + re.sub(r"[^A-Za-z0-9_-]+", "-", task)
    hashed = [[one[f"{part}_hash"] for part in ("doc", "prompt", "target")] for one in samples]
    sha256 = hashlib.sha256(json.dumps(hashed).encode()).hexdigest()
    values = {}
    for key, value in found["results"][task].items():
        metric, _, applied = key.partition(",")
        if applied and isinstance(value, int | float):
            values[f"{name}/{metric}" + ("" if applied == "none" else f".{applied}")] = float(value)
    window = run.loaded.spec.training.seq_len
    items = len({one["doc_id"] for one in samples})
    facts = {
        "items": items,
        "few_shot": found["n-shot"].get(task),
        "task_version": str(found["versions"].get(task)),
        "lm_eval": lm_eval.__version__,
        "context": f"starts with the end-of-document id; the last {window} tokens",
    }

    def score() -> tuple[Addition, Write]:
        added = addition(name, run.loaded, f"lm-eval: {task}", sha256, values, facts)
        return added, _writer(task, samples)

    return Job(name, sha256, f"{items:,} items, run by the harness", score)


def _writer(task: str, samples: Sequence[dict[str, Any]]) -> Callable[[Path], None]:
    """Writes what the harness kept of every item; answers and metrics as JSON."""

    def write(path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = {
            "task": [task] * len(samples),
            "index": [int(one["doc_id"]) for one in samples],
            "filter": [str(one["filter"]) for one in samples],
            "item": [one["doc_hash"] for one in samples],
            "prompt": [one["prompt_hash"] for one in samples],
            "target": [_text(one["target"]) for one in samples],
            "responses": [_text(one["resps"]) for one in samples],
            "metrics": [_text({m: one.get(m) for m in one["metrics"]}) for one in samples],
        }
        content = io.BytesIO()
        with storing(path):
            pq.write_table(pa.table(table), content)
            atomic.write_file(path, content.getvalue())

    return write


def _text(value: Any) -> str:
    return json.dumps(strict(value), default=str, ensure_ascii=False)
