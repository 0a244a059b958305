"""The command lines that a report suggests: to reproduce a run, or to make a pair comparable."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from workbench.compare.rules import Judgement
from workbench.compare.words import matching_overrides
from workbench.spec.checklist import Claim
from workbench.track.record import RunRecord


def run_words(record: RunRecord) -> list[str]:
    """What followed `wb run` when the run was made: its spec file and overrides.

    Where that is not on record, the spec file is left as SPEC.
    """
    try:
        words = shlex.split(str(record.provenance.get("command") or ""))
    except ValueError:  # a quotation without an end: no shell has run that
        words = []
    if "run" not in words:
        return ["SPEC"]
    arguments = [word for word in words[words.index("run") + 1 :] if not word.startswith("-")]
    specs = [word for word in arguments if "=" not in word]
    return [specs[0] if specs else "SPEC", *(word for word in arguments if "=" in word)]


def matched_run(record: RunRecord, judgement: Judgement, claims: Iterable[Claim]) -> str | None:
    """The command that trains the second run again with the settings of the first.

    None where no setting of the second run stands in the way, or another program made it.
    """
    if record.imported is not None:
        return None
    overrides = matching_overrides(judgement, claims)
    if not overrides:
        return None
    changed = {word.partition("=")[0] for word in overrides} | {"name"}
    spec, *given = run_words(record)
    kept = [shlex.quote(word) for word in given if word.partition("=")[0] not in changed]
    name = f"name={matched_name(record)}"
    return " ".join(["wb run", shlex.quote(spec), *kept, *overrides, name])


def matched_name(record: RunRecord) -> str:
    """The name for a rerun: an existing run is never overwritten."""
    return f"{record.name[:112]}-matched"


def options(
    treatment: Sequence[str], allow: dict[str, str], claims: Sequence[Claim], at: int | None
) -> list[str]:
    """The options of `wb compare` and `wb check`, quoted for a shell."""
    words = [f"--treatment {shlex.quote(name)}" for name in treatment]
    words += [f"--allow {shlex.quote(f'{rule}={reason}')}" for rule, reason in allow.items()]
    words += [f"--claim {claim}" for claim in claims if list(claims) != ["nll"]]
    return words + ([f"--at {at}"] if at is not None else [])
