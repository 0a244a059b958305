"""`wb compare` of two runs or of arms; and the options that it shares with `wb check`."""

from __future__ import annotations

import gc
import sys
from typing import Annotated

import typer

from workbench import completion
from workbench.answers import Answer, AsJson, Debug, readable, say
from workbench.errors import UserError
from workbench.output import write_document, write_line

Treatment = Annotated[
    list[str] | None,
    typer.Option(
        help="What you mean to study: a field or section of the spec, or rule:NAME. Repeatable."
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(metavar="RULE=REASON", help="Turn one refusal into a flag. Repeatable."),
]
Claims = Annotated[
    list[str] | None,
    typer.Option("--claim", help="nll (default), bpb, throughput, memory. Repeatable."),
]
Strict = Annotated[bool, typer.Option(help="Exit 1 when the verdict is flagged.")]


def compare(
    a: Annotated[
        str | None,
        typer.Argument(help="A run: name, id, or unique prefix.", autocompletion=completion.runs),
    ] = None,
    b: Annotated[
        str | None, typer.Argument(help="Another run.", autocompletion=completion.runs)
    ] = None,
    arm_a: Annotated[
        list[str] | None,
        typer.Option("--a", metavar="RUN...", help="The runs of the first arm, one for each seed."),
    ] = None,
    arm_b: Annotated[
        list[str] | None, typer.Option("--b", metavar="RUN...", help="Those of the second arm.")
    ] = None,
    a_tag: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="First arm: all runs with this tag. Repeatable."),
    ] = None,
    b_tag: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="The same of the second arm.")
    ] = None,
    names: Annotated[
        str | None, typer.Option(metavar="A,B", help="What to call the two arms.")
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=RUN,RUN", help="One of several arms. Repeatable."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="The arm that the others are compared with (the first).")
    ] = None,
    primary: Annotated[
        str | None, typer.Option(help="The number that decides, such as held_out/nll.")
    ] = None,
    power: Annotated[
        bool, typer.Option("--power", help="Say what difference these seeds can find.")
    ] = False,
    difference: Annotated[
        list[float] | None,
        typer.Option(help="Say how many seeds a difference of this size needs. Repeatable."),
    ] = None,
    treatment: Treatment = None,
    allow: Allow = None,
    claim: Claims = None,
    at: Annotated[
        int | None, typer.Option(help="Compare at this token count; default: the last common.")
    ] = None,
    strict: Strict = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Say whether two runs, or arms of several seeds, may be compared, and how they differ.

    Arms: --a RUN... --b RUN..., or --arm NAME=RUN,RUN for each.

    Example: wb compare mha-s42 gqa-s42 --treatment model
    """
    from workbench.arms_command import ArmsRequest, compare_groups, of_studies, single_pair
    from workbench.track.store import Store

    request = ArmsRequest(
        a=arm_a or [],
        b=arm_b or [],
        a_tags=a_tag or [],
        b_tags=b_tag or [],
        arms=arm or [],
        names=names,
        baseline=baseline,
        primary=primary,
        power=power,
        differences=difference or [],
    )
    single = single_pair(request, a, b)
    # A call that is wrong has ended here, before numpy is loaded. The libraries that follow are a
    # million objects that stay: looking among them for garbage takes a fifth of the time.
    gc.set_threshold(100_000, 50, 50)
    from workbench.compare import compare_runs, render_terminal, write_report
    from workbench.publish import publish
    from workbench.track.server_runs import find_run

    store = Store()
    if single is None:
        return compare_groups(
            request,
            store,
            treatment=treatment or [],
            allow=parse_allow(allow),
            claims=claim or [],
            at=at,
            strict=strict,
            as_json=as_json,
            color=in_colour(),
        )
    entries = [readable(find_run(store, text, whole=True)) for text in single]
    statuses = [entry.status or "RUNNING" for entry in entries]
    comparison = compare_runs(
        entries[0].folder,
        entries[1].folder,
        treatment=treatment or [],
        allow=parse_allow(allow),
        claims=claim or [],
        at=at,
        statuses=(statuses[0], statuses[1]),
    )
    comparison = write_report(comparison, store.reports)
    assert comparison.report is not None
    document = comparison.to_json()
    # Before MLflow is told, which takes seconds.
    if as_json:
        write_document(document)
    else:
        write_line(render_terminal(comparison, color=in_colour()))
    folders = [entry.folder for entry in entries]
    allowed = comparison.judgement.allow
    publish(document, allowed, comparison.names, folders, comparison.report, say)
    for line in of_studies(entries):
        say(line)
    return Answer(None, comparison.exit_code(strict))


def parse_allow(pairs: list[str] | None) -> dict[str, str]:
    """`RULE=reason` options as a mapping.

    Raises:
        UserError: one has no reason.
    """
    allowed = {}
    for pair in pairs or []:
        rule, _, reason = pair.partition("=")
        if not rule or not reason.strip():
            message = "an override needs a reason, which will stand in the report"
            raise UserError.at("--allow", message, pair, "RULE=reason")
        allowed[rule] = reason.strip()
    return allowed


def in_colour() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()
