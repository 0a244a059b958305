"""Runs and comparisons for notebooks and scripts: the functions that `import workbench` offers.

In a cell::

    from workbench import compare_runs, load_run, load_runs, to_frame

    load_runs()                                   # the runs of the store, newest first
    run = load_run("quickstart")                  # by name, id, unique prefix, or folder
    run.final["held_out/nll"]
    comparison = compare_runs("quickstart", "quickstart_dense", treatment=["model"])
    comparison.verdict, comparison.results.numbers["held_out/nll"].difference
    to_frame(comparison)                          # as a pandas DataFrame

What they return shows itself as a table where it is the last value of a cell. The judge is that of
`wb compare`: the same runs and options give the same verdict and the same numbers. Nothing here
trains. A run that the store does not have is looked for at the server that MLFLOW_TRACKING_URI
names, as the commands do, and its files are kept in the store's cache.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError
from workbench.track.record import RunRecord, Status
from workbench.track.store import METRICS, RECORD, RunEntry, Store, read_entry
from workbench.views import run_cells, run_facts, run_row

if TYPE_CHECKING:
    from pandas import DataFrame

    from workbench.compare import ArmsComparison, Comparison
    from workbench.compare.document import Block


@dataclass(frozen=True)
class Run:
    """One run as it was when it was loaded.

    Attributes:
        folder: where its files are.
        record: what was asked for, what ran, and what came of it.
        status: RUNNING, FINISHED, FAILED, KILLED (also one that died without saying so), or
            UNKNOWN (an imported run whose source does not say).
    """

    folder: Path
    record: RunRecord = field(repr=False)
    status: Status

    @property
    def name(self) -> str:
        """The name, of which there is one in a store."""
        return self.record.name

    @property
    def id(self) -> str:
        """The id, of which there is one anywhere."""
        return self.record.id

    @property
    def spec(self) -> dict[str, Any]:
        """What was asked for, resolved, with every setting that applies."""
        return self.record.spec

    @property
    def seed(self) -> int | None:
        """The seed; None of an imported run whose source does not say."""
        seed = self.spec.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def final(self) -> dict[str, float]:
        """Name -> the last value measured, those of `wb eval` too. NLL is in nats per token."""
        found = dict(self.record.results.final)
        for added in self.record.results.additions:
            found |= added.values
        return found

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """A metric over training, as (tokens consumed, value) of every row that measured it.

        Raises:
            UserError: the run has no such metric, or its `metrics.csv` cannot be read.
        """
        from workbench.compare.table import read_table
        from workbench.errors import did_you_mean

        path = self.folder / METRICS
        table = read_table(path)
        if metric not in table or "tokens" not in table:
            measured = [name for name in table if table.known(name).any()]
            message = "the run has no such metric." + did_you_mean(metric, measured)
            raise UserError.at(str(path), message.rstrip("."), metric, ", ".join(measured))
        known = table.known(metric) & table.known("tokens")
        tokens, values = (table.numbers(name)[known].tolist() for name in ("tokens", metric))
        return [(int(at), value) for at, value in zip(tokens, values, strict=True)]

    def _repr_html_(self) -> str:
        from workbench.compare import page

        return page.fragment(self._blocks())

    def _repr_markdown_(self) -> str:
        from workbench.compare import markdown

        return markdown.render(self._blocks())

    def _blocks(self) -> list[Block]:
        from workbench.compare.document import table

        head, *rows = run_facts(self.record, self.status, self.folder)
        return [table(head, rows)]


class Runs(tuple[Run, ...]):
    """Runs in an order; a tuple that shows itself as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from workbench.compare import page

        return page.fragment(self._blocks())

    def _repr_markdown_(self) -> str:
        from workbench.compare import markdown

        return markdown.render(self._blocks())

    def _blocks(self) -> list[Block]:
        from workbench.compare.document import paragraph, table

        if not self:
            return [paragraph("no runs")]
        head, *rows = run_cells([run_row(_entry_of(run)) for run in self])
        return [table(head, rows)]


def load_run(
    run: str | os.PathLike[str] | Run, *, store: Store | str | os.PathLike[str] | None = None
) -> Run:
    """The run of this name, id, unique prefix of one of them, or folder.

    Args:
        run: text is a name or the like; a path, or text with a slash in it, is a run's folder. A
            run that was loaded before is loaded again, as it is now.
        store: the store to look in, or its folder; by default that of `wb`: `WB_HOME`, else
            `mlruns` of the nearest parent folder that has one. Where it has no such run, the
            server that MLFLOW_TRACKING_URI names is asked.

    Raises:
        UserError: there is no such run, more than one is meant, or its record is damaged or, on a
            server, another than the one that was logged.
        StoreError: the store or the server cannot be read.
    """
    entry = _find(run, store)
    if entry.record is None:
        message = f"this run has no readable record: {entry.fault}"
        raise UserError.at(str(entry.folder), message)
    return Run(entry.folder, entry.record, entry.status or "RUNNING")


def load_runs(
    pattern: str = "*",
    *,
    study: str | None = None,
    server: bool = False,
    store: Store | str | os.PathLike[str] | None = None,
) -> Runs:
    """The runs of the store, the newest first; those with a damaged record are left out.

    Args:
        pattern: of their names, as a shell has it: `100m_*`.
        study: only the runs that this study planned.
        server: also the ended runs of the server that MLFLOW_TRACKING_URI names; those that are
            returned are fetched whole. A warning names the runs whose files were changed there.
        store: as for `load_run`.

    Raises:
        UserError: `server`, and none is named.
        StoreError: the store or the server cannot be read.
    """
    where = _store(store)
    entries = where.list_runs()

    def is_meant(record: RunRecord, name: str) -> bool:
        planned = study is None or (record.study or ("",))[0] == study
        return planned and fnmatchcase(name, pattern)

    if server:
        from workbench.track.server_runs import other_runs, server_address

        if server_address() is None:
            message = "no server is named to look for runs at"
            raise UserError.at("load_runs", message, None, "MLFLOW_TRACKING_URI in the environment")
        others, faults = other_runs(where, entries, lambda record: is_meant(record, record.name))
        entries = sorted(
            [*entries, *others],
            key=lambda one: (one.record and one.record.started) or "",
            reverse=True,
        )
        for fault in faults:
            warnings.warn(f"left out: {fault}", stacklevel=2)
    return Runs(
        Run(entry.folder, entry.record, entry.status or "RUNNING")
        for entry in entries
        if entry.record is not None and is_meant(entry.record, entry.name)
    )


def compare_runs(
    a: str | os.PathLike[str] | Run,
    b: str | os.PathLike[str] | Run,
    *,
    treatment: Sequence[str] = (),
    allow: Mapping[str, str] | None = None,
    claims: Iterable[str] = ("nll",),
    at: int | None = None,
    store: Store | str | os.PathLike[str] | None = None,
) -> Comparison:
    """Judges two ended runs as `wb compare A B` does, and takes the numbers that this permits.

    A refused claim has no numbers, whatever is asked for. `write_report` of `workbench.compare`
    makes the report of what is returned.

    Args:
        a: the first run, as `load_run` takes it; differences are second minus first.
        b: the second run.
        treatment: what is meant to differ: spec fields or sections, `rule:X` for a whole rule.
        allow: rule -> reason; turns a refusal by that rule into a flag.
        claims: what the comparison is used for (nll, bpb, throughput, memory); these alone set
            the verdict.
        at: the token count to compare at; by default the last where both were evaluated.
        store: as for `load_run`.

    Raises:
        UserError: there is no such run, a run is compared with itself or still going, an option
            names nothing, `at` is no common point, or record, metrics and scores are damaged or
            contradict one another.
        StoreError: the store cannot be read.
    """
    from workbench.compare import compare_runs as compare

    first, second = load_run(a, store=store), load_run(b, store=store)
    return compare(
        first.folder,
        second.folder,
        treatment=_words(treatment),
        allow=allow,
        claims=_words(claims),
        at=at,
        statuses=(first.status, second.status),
    )


def compare_arms(
    arms: Mapping[str, Iterable[str | os.PathLike[str] | Run]],
    *,
    baseline: str | None = None,
    treatment: Sequence[str] = (),
    allow: Mapping[str, str] | None = None,
    claims: Iterable[str] = ("nll",),
    at: int | None = None,
    primary: str | None = None,
    store: Store | str | os.PathLike[str] | None = None,
) -> ArmsComparison:
    """Compares arms of several seeds as `wb compare --arm NAME=RUN,RUN ...` does.

    Args:
        arms: name -> its runs, one for each seed, each as `load_run` takes it; two arms or more.
        baseline: the arm that the others are compared with; by default the first.
        treatment: what is meant to differ: spec fields or sections, `rule:X` for a whole rule.
        allow: rule -> reason; turns a refusal by that rule into a flag.
        claims: what the comparison is used for; these alone set the verdict.
        at: the token count to compare at; by default the last where all runs were evaluated.
        primary: the number that decides, such as `held_out/nll`; by default that of each claim.
        store: as for `load_run`.

    Raises:
        UserError: there are fewer than two arms or an empty one, there is no such run, a run
            stands twice or is still going, an option names nothing, `at` is no common point, or
            record, metrics and scores are damaged or contradict one another.
        StoreError: the store cannot be read.
    """
    from workbench.compare import compare_arms as compare
    from workbench.track.tuning import tuning_runs

    where = _store(store)
    found = {name: [load_run(run, store=where) for run in runs] for name, runs in arms.items()}
    every = [run for group in found.values() for run in group]
    entries, used = where.list_runs(), [_entry_of(run) for run in every]
    return compare(
        {name: [run.folder for run in group] for name, group in found.items()},
        baseline=baseline,
        treatment=_words(treatment),
        allow=allow,
        claims=_words(claims),
        at=at,
        primary=primary,
        tuning={
            name: tuning_runs([_entry_of(run) for run in group], used, entries)
            for name, group in found.items()
        },
        statuses={run.folder: run.status for run in every},
    )


def to_frame(what: Run | Comparison | ArmsComparison | Iterable[Run]) -> DataFrame:
    """A run, several runs, or a comparison as a pandas DataFrame; NaN is what was not measured.

    Args:
        what: decides the rows.
            A run: one row for each logged step (the index), one column for each number that was
            measured in any, named as in `metrics.csv`.
            Several runs: one row for each run (the index is its name): id, status, seed, study,
            arm, tokens, tokens_per_s (of the timed steps), peak_memory_bytes, every final number.
            A comparison of two runs: one row for each number (the index): claim, a, b, difference
            (b - a), unit, low and high (95 % over n documents), and a note where it is blank.
            A comparison of arms: one row for each arm and number (the index), with the arm that it
            is compared `against`: means `a` (of that arm) and `b`, their difference with low and
            high over seeds at `level`, p, p_adjusted, winner (the name of an arm, or None).

    Raises:
        UserError: the `metrics.csv` of a run cannot be read.
        TypeError: it is none of these.
    """
    from workbench import frames
    from workbench.compare import ArmsComparison, Comparison

    if isinstance(what, Run):
        return frames.of_metrics(what.folder / METRICS)
    if isinstance(what, Comparison):
        return frames.of_pair(what)
    if isinstance(what, ArmsComparison):
        return frames.of_arms(what)
    given: Any = what
    runs = list(given)
    for one in runs:
        if not isinstance(one, Run):
            message = f"a run, runs or a comparison is needed, not {type(one).__name__}"
            raise TypeError(message)
    return frames.of_runs([_row(run) for run in runs])


def _row(run: Run) -> dict[str, Any]:
    results = run.record.results
    speed = {"tokens_per_s": results.tokens_per_s, "peak_memory_bytes": results.peak_memory_bytes}
    return {**run_row(_entry_of(run)), **speed, **run.final}


def _find(
    run: str | os.PathLike[str] | Run, store: Store | str | os.PathLike[str] | None
) -> RunEntry:
    if isinstance(run, Run):
        return read_entry(run.folder)
    if isinstance(run, str) and os.sep not in run:
        from workbench.track.server_runs import find_run

        return find_run(_store(store), run, whole=True)
    folder = Path(run).expanduser()
    if not (folder / RECORD).is_file():
        raise UserError.at(str(folder), f"there is no {RECORD} in it", None, "the folder of a run")
    return read_entry(folder.resolve())


def _store(given: Store | str | os.PathLike[str] | None) -> Store:
    return given if isinstance(given, Store) else Store(None if given is None else Path(given))


def _entry_of(run: Run) -> RunEntry:
    return RunEntry(run.folder.name, run.folder, run.status, run.record)


def _words(given: Iterable[str]) -> list[str]:
    """One word alone is what is meant where a list of them is expected."""
    return [given] if isinstance(given, str) else list(given)
