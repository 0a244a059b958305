"""`wb compare` of arms: which runs of the store each arm is made of, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.answers import Answer, readable, say
from workbench.errors import Fault, UserError
from workbench.output import write_document, write_line

if TYPE_CHECKING:
    from workbench.track.store import RunEntry, Store

# Options that take every word up to the next option, as in `--a run1 run2 --b run3 run4`.
SEVERAL = ("--a", "--b")


@dataclass(frozen=True)
class ArmsRequest:
    """The arms as the command line names them."""

    a: Sequence[str] = ()
    b: Sequence[str] = ()
    a_tags: Sequence[str] = ()
    b_tags: Sequence[str] = ()
    arms: Sequence[str] = ()
    names: str | None = None
    baseline: str | None = None
    primary: str | None = None
    power: bool = False
    differences: Sequence[float] = field(default=())

    @property
    def is_given(self) -> bool:
        """Whether arms are asked for, and not two single runs."""
        return bool(self.a or self.b or self.a_tags or self.b_tags or self.arms)


def with_several(arguments: Sequence[str]) -> list[str]:
    """The arguments of `wb compare`, with the option put before every further run of an arm."""
    found: list[str] = []
    option: str | None = None
    for word in arguments:
        if word.startswith("-"):
            option = word if word in SEVERAL else None
            found.append(word)
            continue
        if option is not None and found[-1] != option:
            found.append(option)
        found.append(word)
    return found


def compare_groups(
    request: ArmsRequest,
    store: Store,
    *,
    treatment: Sequence[str],
    allow: Mapping[str, str],
    claims: Sequence[str],
    at: int | None,
    strict: bool,
    as_json: bool,
    color: bool,
) -> Answer:
    """Compares the arms, says the verdict, writes the report, and says what else came of it.

    Raises:
        UserError: the arms are named in two ways at once, or a run or a tag is not found.
    """
    from workbench.compare import compare_arms, render_rest, render_verdict, write_arms_report
    from workbench.publish import publish
    from workbench.track.tuning import tuning_runs

    entries = store.list_runs()
    arms = _arms(request, store, entries)
    every = [entry for group in arms.values() for entry in group]
    compared = partial(
        compare_arms,
        {name: [entry.folder for entry in group] for name, group in arms.items()},
        baseline=request.baseline,
        treatment=treatment,
        allow=allow,
        claims=claims,
        at=at,
        primary=request.primary,
        tuning={name: tuning_runs(group, every, entries) for name, group in arms.items()},
        statuses={entry.folder: entry.status or "RUNNING" for entry in every},
        planned=planned_seeds(arms),
    )
    if not as_json:
        # Before the scores of all evaluations are read, and the report is made, which takes longer.
        power = request.power or bool(request.differences)
        verdict = compared(over_documents=False)
        write_line(render_verdict(verdict, color, power=power, differences=request.differences))
        write_line("")
    comparison = write_arms_report(compared(), store.reports)
    assert comparison.report is not None
    document = comparison.to_json()
    # Before MLflow is told, which takes seconds.
    if as_json:
        write_document(document)
    else:
        write_line(render_rest(comparison))
    folders = [entry.folder for entry in every]
    publish(document, allow, comparison.names, folders, comparison.report, say)
    return Answer(None, comparison.exit_code(strict))


def planned_seeds(arms: Mapping[str, Sequence[RunEntry]]) -> dict[str, list[int]]:
    """Arm -> every seed that the studies of its runs planned for them: none may be left out.

    Arms of runs that no study planned are not among them.

    Raises:
        UserError: the plan of a study is damaged or was edited.
    """
    from workbench.track.parents import folder_of_study

    found: dict[str, list[int]] = {}
    for name, group in arms.items():
        of_arm: dict[tuple[Path, str], None] = {}
        for entry in group:
            assert entry.record
            folder = folder_of_study(entry.record, entry.folder)
            if folder is not None and entry.record.study is not None:
                of_arm[folder, entry.record.study[1]] = None
        for folder, arm in of_arm:
            from workbench.study.plan import read_plan  # for runs of studies alone: it takes long

            plan = read_plan(folder)
            seeds = [run.seed for run in plan.runs if run.arm == arm] if plan else []
            if seeds:
                found[name] = list(dict.fromkeys([*found.get(name, []), *seeds]))
    return found


def of_studies(entries: Sequence[RunEntry]) -> list[str]:
    """For single runs: that their studies planned further seeds, of which a pair says nothing."""
    found: dict[str, None] = {}
    for entry in entries:
        record = entry.record
        assert record
        planned = planned_seeds({entry.name: [entry]}).get(entry.name, [])
        if record.study is not None and len(planned) > 1:
            seeds = ", ".join(map(str, planned))
            said = f"the study {record.study[0]} planned the seeds {seeds}; this is of one alone"
            found[f"{said}: wb study report {record.study[0]}"] = None
    return list(found)


def _arms(
    request: ArmsRequest, store: Store, entries: Sequence[RunEntry]
) -> dict[str, list[RunEntry]]:
    from workbench.track.server_runs import find_run

    if request.arms:
        return _named_arms(request, store, entries)
    names, own = _names(request), entries
    if request.a_tags or request.b_tags:
        entries = [*entries, *_of_the_server(store, entries)]
    found: dict[str, list[RunEntry]] = {}
    for option, name, runs, tags in (
        ("--a", names[0], request.a, request.a_tags),
        ("--b", names[1], request.b, request.b_tags),
    ):
        group = [readable(find_run(store, text, whole=True, entries=own)) for text in _split(runs)]
        if tags:
            group += [
                one if one.folder.parent == store.runs else find_run(store, _id_of(one), whole=True)
                for one in _tagged(f"{option}-tag", tags, entries)
            ]
        if not group:
            message = "this arm has no runs"
            raise UserError.at(option, message, None, f"{option} RUN... or {option}-tag KEY=VALUE")
        found[name] = group
    return found


def _names(request: ArmsRequest) -> list[str]:
    if request.names is None:
        defaults = []
        for fallback, tags in (("a", request.a_tags), ("b", request.b_tags)):
            values = [tag.partition("=")[2] for tag in tags]
            defaults.append(values[0] if len(values) == 1 and values[0] else fallback)
        return defaults if defaults[0] != defaults[1] else ["a", "b"]
    names = [name.strip() for name in request.names.split(",")]
    if len(names) != 2 or not all(names) or names[0] == names[1]:
        raise UserError.at("--names", "two names are needed", request.names, "such as mha,gqa")
    return names


def _named_arms(
    request: ArmsRequest, store: Store, entries: Sequence[RunEntry]
) -> dict[str, list[RunEntry]]:
    from workbench.track.server_runs import find_run

    if request.a or request.b or request.a_tags or request.b_tags or request.names:
        message = "arms are named either here or by --a and --b"
        raise UserError.at("--arm", message, request.arms[0], "--arm NAME=RUN,RUN for each")
    found: dict[str, list[RunEntry]] = {}
    for given in request.arms:
        name, _, runs = given.partition("=")
        if not name or not runs:
            raise UserError.at("--arm", "a name and runs are needed", given, "NAME=RUN,RUN")
        if name in found:
            raise UserError.at("--arm", "this name stands twice", name, "another name")
        found[name] = [
            readable(find_run(store, text, whole=True, entries=entries)) for text in _split([runs])
        ]
    return found


def _of_the_server(store: Store, entries: Sequence[RunEntry]) -> list[RunEntry]:
    """The runs that the server alone has: a tag means those of the others as well."""
    from workbench.track.server_runs import other_runs

    others, faults = other_runs(store, entries)
    for fault in faults:
        say(f"not looked at: {fault}")
    return others


def _id_of(entry: RunEntry) -> str:
    assert entry.record
    return entry.record.id


def _tagged(option: str, tags: Sequence[str], entries: Sequence[RunEntry]) -> list[RunEntry]:
    """The runs whose `tracking.tags` have all of these."""
    wanted: dict[str, str] = {}
    for tag in tags:
        key, mark, value = tag.partition("=")
        if not key or not mark:
            raise UserError.at(option, "a key and a value are needed", tag, "KEY=VALUE")
        wanted[key] = value
    found = [entry for entry in entries if entry.record and _tags(entry).items() >= wanted.items()]
    if not found:
        known = sorted(
            {f"{k}={v}" for entry in entries if entry.record for k, v in _tags(entry).items()}
        )
        allowed = ", ".join(known[:20]) or "no run has a tag (tracking.tags)"
        raise UserError(Fault(option, "no run has this", " ".join(tags), allowed))
    return [readable(entry) for entry in found]


def _tags(entry: RunEntry) -> dict[str, str]:
    assert entry.record
    tags = (entry.record.spec.get("tracking") or {}).get("tags") or {}
    return {str(key): str(value) for key, value in tags.items()}


def _split(words: Sequence[str]) -> list[str]:
    """Runs may also be given with commas between them."""
    return [one.strip() for word in words for one in word.split(",") if one.strip()]


def single_pair(request: ArmsRequest, a: str | None, b: str | None) -> tuple[str, str] | None:
    """The two single runs that are to be compared; None: arms are.

    Raises:
        UserError: there are neither, or both, or options of arms beside single runs.
    """
    single = [run for run in (a, b) if run is not None]
    if request.is_given:
        if single:
            message = "single runs and arms cannot be compared at once"
            raise UserError.at("wb compare", message, single[0], "A B, or --a RUN... --b RUN...")
        return None
    if a is None or b is None:
        message = "two runs or two arms are needed"
        raise UserError.at("wb compare", message, a, "A B, or --a RUN... --b RUN...")
    given: dict[str, Any] = {
        "--names": request.names,
        "--baseline": request.baseline,
        "--primary": request.primary,
        "--power": request.power,
        "--difference": list(request.differences),
    }
    for option, value in given.items():
        if value:
            message = "this is for arms of several seeds"
            raise UserError.at(option, message, value, "--a RUN... --b RUN...")
    return a, b
