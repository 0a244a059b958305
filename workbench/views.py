"""The runs of the store as a terminal shows them: the list, and the page of one run."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from workbench.errors import reason_of
from workbench.spec.held_out import is_smoke_test, set_words
from workbench.track.record import RunRecord
from workbench.track.store import METRICS, RunEntry, Store

CURVE = "curves.png"
_HELD_OUT = ("held_out/nll", "contaminated/nll", "unproven/nll")

logger = logging.getLogger("workbench")


def run_rows(store: Store) -> list[dict[str, Any]]:
    """One row per run folder, newest first; a damaged record is a row that says so."""
    return [run_row(entry) for entry in store.list_runs()]


def run_row(entry: RunEntry) -> dict[str, Any]:
    """Who a run is and what came of it; of a damaged record, that it is damaged."""
    record = entry.record
    if record is None:
        return {"run": entry.name, "status": "DAMAGED", "error": entry.fault}
    final = record.results.final
    return {
        "run": record.name,
        "id": record.id,
        "status": "KILLED (died)" if entry.died else entry.status,
        "started": record.started,
        "seed": record.spec.get("seed"),
        "study": record.study and record.study[0],
        "arm": record.study and record.study[1],
        "tokens": _reached(record),
        "planned_tokens": record.total_tokens,
        "held_out/nll": final.get("held_out/nll"),
        **{n: final[n] for n in ("contaminated/nll", "unproven/nll") if n in final},
        "train_split/nll": final.get("train_split/nll"),
        "smoke_test": is_smoke_test(record.spec),
    }


def run_table(rows: list[dict[str, Any]]) -> str:
    """The rows as aligned columns."""
    if not rows:
        return "no runs yet; try: wb run experiments/quickstart.yaml"
    table = run_cells(rows)
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def run_cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The rows as text under their heads, which come first."""
    heads = ["run", "id", "status", "seed", "tokens", "held_out/nll", "train_split/nll", "started"]
    studies = any(row.get("study") for row in rows)
    fetched = any(row.get("where") for row in rows)
    table = [[*heads, *(["study"] if studies else []), *(["where"] if fetched else [])]]
    for row in rows:
        if row["status"] == "DAMAGED":
            table.append([row["run"], "", "DAMAGED", *[""] * (len(table[0]) - 3)])
            continue
        table.append(
            [
                row["run"],
                row["id"][:8],
                row["status"],
                str(row["seed"]),
                f"{row['tokens']:,}",
                _held_out(row),
                "" if row["smoke_test"] else _number(row["train_split/nll"]),
                (row["started"] or "").replace("T", " ")[:16],
                *([f"{row['study']}: {row['arm']}" if row["study"] else ""] if studies else []),
                *([row.get("where", "")] if fetched else []),
            ]
        )
    return table


def run_page(record: RunRecord, status: str, folder: Path) -> str:
    """What one run was, how it went, and where its files are."""
    lines = run_facts(record, status, folder)
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in lines)


def run_facts(record: RunRecord, status: str, folder: Path) -> list[tuple[str, str]]:
    """Name and text of everything that the page of a run says, in its order."""
    effective, results = record.effective, record.results
    spec = record.spec
    model = spec.get("model", {})
    kind = [_known(model.get(name)) for name in ("attention_type", "mlp_type")]
    layers, hidden = (model.get(name) for name in ("num_hidden_layers", "hidden_size"))
    sizes = f"{_known(layers)} layers x {_known(hidden)}"
    entries = effective.tokenizer.vocab_size
    lines = [
        ("run", f"{record.name}  ({record.id})"),
        ("status", status + (f": {record.error}" if record.error else "")),
        *([("study", f"{record.study[0]}, arm {record.study[1]}")] if record.study else []),
        ("started", _known(record.started) + (f", ended {record.ended}" if record.ended else "")),
        ("model", f"{', '.join(kind)}, {sizes}"),
        ("parameters", _counts(effective.parameters.total, effective.parameters.active)),
        ("tokenizer", f"{_known(effective.tokenizer.name)}, {_known(entries)} entries"),
        ("data", f"{effective.data.source}; split: {_plain(effective.data.split)}"),
        *([("order", _plain(order))] if (order := effective.data.order_proof) else []),
        (
            "tokens",
            f"{_reached(record):,} of {_planned(record)}, seed {spec.get('seed', 'unknown')}",
        ),
        *_evaluated(record),
        *_sets(record),
        ("precision", " ".join(_precision(record))),
        ("device", f"{_device(record)}, torch {_known(effective.hardware.torch)}"),
        ("code", f"{_known(effective.code.version)}, commit {_commit(record)}"),
        *_imported(record),
    ]
    lines += [(name, f"{value:.6f}") for name, value in sorted(results.final.items())]
    for added in results.additions:
        where = f"  (added {added.when[:10]}, step {added.step:,})"
        lines += [(name, f"{value:.6f}{where}") for name, value in sorted(added.values.items())]
    if results.tokens_per_s is not None:
        first, last = effective.interval.first_step, effective.interval.last_step
        lines.append(("tokens/s", f"{results.tokens_per_s:,.0f} (steps {first} to {last})"))
    if results.peak_memory_bytes is not None:
        lines.append(("peak memory", f"{results.peak_memory_bytes / 1e9:.2f} GB"))
    lines.append(("files", str(folder)))
    return lines


def _evaluated(record: RunRecord) -> list[tuple[str, str]]:
    """Where the numbers shown were measured, when the run went on from there."""
    if not record.points or record.points[-1].tokens == _reached(record):
        return []
    last = record.points[-1]
    return [("evaluated", f"at step {last.step:,}, {last.tokens:,} tokens; not after it")]


def draw_curve(folder: Path) -> Path | None:
    """Draws the loss over the training of a run that has ended, into its folder.

    None: nothing was measured, or there is no room. The run is complete without it, so that is a
    warning and not an error.
    """
    from workbench.compare.plots import draw_run
    from workbench.track.journal import read_metrics

    metrics = read_metrics(folder / METRICS)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".curves-") as temporary:
            drawn = Path(temporary, CURVE)
            if not draw_run(metrics, drawn):
                return None
            return drawn.replace(folder / CURVE)
    except OSError as error:
        logger.warning("no curve could be drawn in %s: %s", folder, reason_of(error))
        return None


def closing_lines(
    record: RunRecord, folder: Path, store: Store, curve: Path | None, program: str
) -> str:
    """How a run ended: where it is, what came of it, and the next two commands to try."""
    final = record.results.final
    numbers = "  ".join(
        f"{name} {final[name]:.4f}" for name in (*_HELD_OUT, "train_split/nll") if name in final
    )
    numbers = f"{numbers} (nats/token)" if numbers else "not evaluated"
    if is_smoke_test(record.spec):
        numbers = "none: random ids, a smoke test"
    lines = [
        f"{record.name}: {record.status.lower()}" + (f" ({record.error})" if record.error else ""),
        f"  files      {folder}",
        f"  result     {numbers}",
    ]
    if curve is not None:
        lines.insert(2, f"  curve      {curve}")
    other = next((e.name for e in store.list_runs() if _goes_with(e, record)), None)
    commands = [f"{program} show {record.name}", f"{program} ui"]
    if other is not None:
        commands[0] = f"{program} compare {other} {record.name}"
    return "\n".join((*lines, f"next: {commands[0]}", f"      {commands[1]}"))


def _goes_with(entry: RunEntry, record: RunRecord) -> bool:
    """Whether a comparison with this run is worth proposing: finished, and alike in what refuses
    most comparisons."""
    other = entry.record
    if other is None or other.id == record.id or entry.status != "FINISHED":
        return False

    def kept(of: RunRecord) -> tuple[Any, ...]:
        ran, spec = of.effective, of.spec
        return (
            of.status,
            of.total_tokens,
            spec.get("seed"),
            ran.data.train_sha256,
            ran.tokenizer.sha256,
            ran.precision.compute_dtype,
            spec.get("optimizer", {}).get("lr"),
        )

    return kept(other) == kept(record)


def _held_out(row: dict[str, Any]) -> str:
    """The number of the main set; where it is not held out, with the name that it has instead."""
    if row["smoke_test"]:
        return "smoke test"
    for name in _HELD_OUT:
        if row.get(name) is not None:
            status = name.partition("/")[0]
            return _number(row[name]) + ("" if status == "held_out" else f" ({status})")
    return ""


def _sets(record: RunRecord) -> list[tuple[str, str]]:
    """What was shown of every evaluation set."""
    lines = []
    for name, facts in record.effective.evaluation.items():
        said = set_words(name, facts.status, facts.measured, facts.documents)
        logged, _, measured = said.partition(": ")
        lines.append((logged, f"{facts.status or 'status not recorded'}: {measured}"))
    if is_smoke_test(record.spec):
        lines.append(("smoke test", "random ids: no number of this run is a result"))
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _counts(total: int | None, active: int | None) -> str:
    if total is None:
        return "unknown"
    return f"{total:,} total, {_known(active)} active per token"


def _reached(record: RunRecord) -> int:
    if record.results.tokens is not None:
        return record.results.tokens
    return record.points[-1].tokens if record.points else 0


def _precision(record: RunRecord) -> tuple[str, str]:
    precision = record.effective.precision
    return _known(precision.compute_dtype), f"({_known(precision.matmul)})"


def _device(record: RunRecord) -> str:
    hardware = record.effective.hardware
    return _known(hardware.device_name or hardware.device_type)


def _imported(record: RunRecord) -> list[tuple[str, str]]:
    """Where an imported run comes from, and what of it was not taken at its word."""
    if record.imported is None:
        return []
    lines = [("imported", f"from {record.imported.source} ({record.imported.importer})")]
    for one in record.imported.corrections:
        lines.append(("corrected", f"{one.leaf}, was {one.recorded}: {one.why}"))
    return [*lines, *(("note", note) for note in record.imported.notes)]


def _known(value: Any) -> str:
    """A fact, or that it is not known."""
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _planned(record: RunRecord) -> str:
    total = record.total_tokens
    if total is None and record.imported is not None:
        return "an unknown number"
    return "a stream of unknown length" if total is None else f"{total:,}"


def _plain(fact: Any) -> str:
    reason = getattr(fact, "not_applicable", None)
    return f"none ({reason})" if reason else _known(fact)


def _commit(record: RunRecord) -> str:
    code = record.effective.code
    if code.git_commit is None:
        return "unknown"
    return code.git_commit[:12] + (" with uncommitted changes" if code.git_dirty else "")
