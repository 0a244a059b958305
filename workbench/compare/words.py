"""The sentences of a judgement: why a rule came out as it did for this pair, and what to do.

One table holds what each rule has to say; the values come from the leaves.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.compare.facts import FINITE, PROOF, same, set_of
from workbench.compare.held_out import SMOKE_TEST
from workbench.compare.rules import Judgement, Leaf, Ruling
from workbench.spec.checklist import Claim


@dataclass(frozen=True)
class _Wording:
    """What a difference under a rule means, what makes a pair comparable, what else may be done.

    `remedy` may use {a} and {b}, the names of the two sides.
    """

    means: str
    remedy: str
    instead: str = ""


_WORDING: dict[str, _Wording] = {
    "model": _Wording(
        "the architectures differ, which is a result only where it is what is studied",
        "declare it: --treatment model",
    ),
    "tokenizer": _Wording(
        "nats per token of two tokenizers have no common unit",
        "train both with one tokenizer",
        "ask for --claim bpb, which counts bytes",
    ),
    "data": _Wording(
        "the models were not trained on the same tokens in the same order",
        "train both on the same text, split and order",
    ),
    "budget": _Wording(
        "a model that has had more training, or is further down its schedule, is ahead for that",
        "train both to the same number of tokens under one schedule",
    ),
    "parameters": _Wording(
        "part of the difference may be size alone",
        "size {b} to the parameters of {a}; wb run SPEC --dry-run prints the count",
    ),
    "seeds": _Wording(
        "the difference then holds the luck of two draws of weights and of order",
        "train both with one seed",
        "declare --treatment seed, to study seeds",
    ),
    "optimizer": _Wording(
        "the two were optimised in another way",
        "train both with the same optimizer settings",
    ),
    "precision": _Wording(
        "the two computed with other arithmetic, which moves loss, speed and memory",
        "train both in the same precision, on a machine that computes it in the same way",
    ),
    "hardware": _Wording(
        "speed and memory belong to the machine and its libraries, and rounding may too",
        "run both on the same machine with the same installed packages",
    ),
    "telemetry": _Wording(
        "what is measured during training costs time and memory",
        "run both with the same telemetry",
    ),
    "execution": _Wording(
        "the two took other code paths, which changes speed and memory, and rounding",
        "run both with the same execution settings",
    ),
    "evaluation": _Wording(
        "the two numbers do not measure the same thing",
        "evaluate both on the same documents in the same way",
    ),
    "interval": _Wording(
        "throughput over other steps is another quantity",
        "run both over the same steps",
    ),
    "code": _Wording(
        "other sources may compute something else",
        "run both from the same sources",
    ),
}

_LABELS = {
    "effective.budget.tokens": "tokens consumed",
    "effective.budget.bytes": "bytes of text read",
    "effective.budget.decay_tokens": "tokens at which the learning-rate decay ends",
    "effective.budget.lr_trace": "learning rate of every update so far",
    "effective.budget.finished": "finished",
    "effective.data.order_digest": "digest of the windows consumed",
    "effective.parameters.total": "total parameters",
    "effective.optimizer.sequences_per_update": "sequences per update",
    "effective.optimizer.warmup_steps": "warm-up steps",
    "effective.code.package_sha256": "package sources (SHA-256)",
}

_BEST = (
    "both stand for their best checkpoint, chosen by the numbers compared here, which makes both"
    " look better than they are"
)
_UNPROVEN = "not shown to be disjoint from the training text of either run"
_CLEAN_TEXT = (
    "evaluate on documents that the training text does not hold (data.held_out, or the corpus's own"
    " split); clean_nll is the NLL over the clean documents alone"
)
_FINISHED = "effective.budget.finished"
_DECAY = "effective.budget.decay_tokens"
_LAYOUT = ("training.batch_size", "training.gradient_accumulation_steps", "training.seq_len")
_FOLLOWERS = 2
_SHOWN = 3  # leaves named in one sentence; all are in the table


def why(ruling: Ruling) -> str:
    """One sentence: what this rule found in this pair."""
    wording = _WORDING[ruling.rule]
    text: str
    if ruling.counted:
        text = f"{_pairs(ruling.counted)}: {_meaning(ruling, wording)}"
    elif ruling.outcome == "studied":
        studied = [leaf for leaf in ruling.leaves if leaf.outcome == "studied"]
        source = "inferred from the differences, not declared" if ruling.inferred else "declared"
        text = f"{_pairs(studied)}: the treatment ({source})"
        if "refuse" in ruling.effects.values() or ruling.allowed:
            text += f"; still, {wording.means}"
    elif ruling.outcome == "follows":
        text = ""
    elif ruling.both_best:
        text = _BEST
    elif ruling.unproven:
        names = ", ".join(path.removeprefix("effective.evaluation.") for path in ruling.unproven)
        text = f"{names}: {_UNPROVEN}"
    elif ruling.outcome == "not yet known":
        text = "known only after a run"
    else:
        text = "the same in both"
    following = [_follows(leaf) for leaf in ruling.leaves if leaf.outcome == "follows"]
    if len(following) > _FOLLOWERS:
        following[_FOLLOWERS:] = [f"{len(following) - _FOLLOWERS} more follow"]
    text = "; ".join(part for part in (text, *following) if part)
    return text + (f" (allowed: {ruling.allowed})" if ruling.allowed else "")


def remedy(ruling: Ruling, judgement: Judgement, names: tuple[str, str]) -> str | None:
    """What would make this rule match; None where it is no obstacle."""
    if not any(ruling.effects.values()):
        return None
    if ruling.both_best and not ruling.counted:
        return "compare the last checkpoints: evaluation.select=last"
    if ruling.unproven and not ruling.counted:
        return "add a set from files (data.held_out), whose overlap can be measured"
    if ruling.counted and all(map(_not_proven, ruling.counted)):
        smoke = any(_reason(leaf) == SMOKE_TEST for leaf in ruling.counted)
        return "train on text: data.dataset=sample or text" if smoke else _CLEAN_TEXT
    general = _WORDING[ruling.rule].remedy.format(a=names[0], b=names[1])
    if ruling.rule == "model":
        return general
    if ruling.counted and all(map(_not_finite, ruling.counted)):
        return "compare at a point where both are finite (--at), or train again what diverged"
    counted = {leaf.path: leaf for leaf in ruling.counted}
    if (leaf := counted.get(_FINISHED)) and leaf.outcome == "differs":
        return "train both runs to their planned end"
    settings = overrides([*ruling.counted, *_asked(ruling, judgement)])
    if settings:
        general += f" ({' '.join(settings)} in {names[1]}, as in {names[0]})"
    elif _DECAY in counted and not _counts(judgement, _LAYOUT):
        planned = show(counted[_DECAY].a)
        general += f" (choose training.steps so that both plan {planned} tokens)"
    elif any(leaf.outcome == "missing" for leaf in ruling.counted):
        general = f"run again what has no record of it; {general}"
    instead = _WORDING[ruling.rule].instead
    return f"{general}, or {instead}" if instead else general


def overrides(leaves: Iterable[Leaf]) -> list[str]:
    """`key=value` words that give the second run the settings of the first."""
    words = {}
    for leaf in leaves:
        if leaf.outcome == "differs" and not leaf.path.startswith("effective."):
            words[leaf.path] = f"{leaf.path}={setting(leaf.a)}"
    return list(words.values())


def matching_overrides(judgement: Judgement, claims: Iterable[Claim]) -> list[str]:
    """The overrides that remove every difference which counts for these claims.

    Settings of the model are left alone: they are what a comparison is most often about.
    """
    claims = tuple(claims)
    words: dict[str, None] = {}
    for ruling in judgement.rules:
        if ruling.over(claims) == "comparable" or ruling.rule in ("model", "parameters"):
            continue
        words |= dict.fromkeys(overrides([*ruling.counted, *_asked(ruling, judgement)]))
    return list(words)


def setting(value: Any) -> str:
    """A value as a word of a command line that reads back as it."""
    text = value if isinstance(value, str) else json.dumps(value)
    return shlex.quote(text)


def show(value: Any) -> str:
    """A value for people: whole numbers grouped, hashes shortened, no secrets."""
    if value is None:
        return "-"
    if isinstance(value, dict) and set(value) == {"not_applicable"}:
        return f"n/a: {value['not_applicable']}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        text = re.sub(r"//[^/@\s]*@", "//***@", value)  # user:password of an address
        if text.startswith("/"):  # a path: where the reader is, not where the store of a run was
            text = os.path.relpath(text) if Path(text).is_relative_to(Path.cwd()) else text
        return text[:12] + "…" if re.fullmatch(r"[0-9a-f]{32,}", text) else text
    return re.sub(r"//[^/@\s]*@", "//***@", json.dumps(value, sort_keys=True, default=str))


def show_pair(a: Any, b: Any, width: int = 40) -> tuple[str, str]:
    """Two values, each within `width` characters, cut so that a difference stays visible."""
    shown = show(a), show(b)
    if shown[0] == shown[1] and not same(a, b):
        shown = repr(a), repr(b)  # equal only as they are shown
    if max(map(len, shown)) <= width:
        return shown
    first = next(
        (i for i, (x, y) in enumerate(zip(*shown, strict=False)) if x != y),
        min(map(len, shown)) if shown[0] != shown[1] else 0,
    )
    start = 0 if first < width - 8 else first - width // 4
    return _cut(shown[0], start, width), _cut(shown[1], start, width)


def label(path: str) -> str:
    """What a leaf is called in a sentence."""
    if (name := set_of(path)) and path.endswith(f".{FINITE}"):
        return f"{name}/nll"
    if name and path.endswith(f".{PROOF}"):
        return name
    return _LABELS.get(path, path.removeprefix("effective."))


def _cut(text: str, start: int, width: int) -> str:
    head = "…" if start else ""
    rest = text[start:]
    room = width - len(head)
    return head + (rest if len(rest) <= room else rest[: room - 1] + "…")


def _pairs(leaves: Iterable[Leaf]) -> str:
    leaves = list(leaves)
    parts = []
    for leaf in leaves[:_SHOWN]:
        where = f" ({leaf.runs[0]} against {leaf.runs[1]})" if leaf.runs else ""
        if leaf.note:
            parts.append(leaf.note)
        elif leaf.outcome == "missing":
            parts.append(f"{label(leaf.path)} {_lacking(leaf)}{where}")
        else:
            a, b = show_pair(leaf.a, leaf.b)
            parts.append(f"{label(leaf.path)} {a} against {b}{where}")
    if len(leaves) > _SHOWN:
        parts.append(f"{len(leaves) - _SHOWN} more")
    return "; ".join(parts)


def _not_finite(leaf: Leaf) -> bool:
    return set_of(leaf.path) is not None and leaf.path.endswith(f".{FINITE}")


def _not_proven(leaf: Leaf) -> bool:
    return set_of(leaf.path) is not None and leaf.path.endswith(f".{PROOF}")


def _reason(leaf: Leaf) -> str:
    """Why no claim may rest on a set."""
    given = next((one for one in (leaf.a, leaf.b) if isinstance(one, dict) and "reason" in one), {})
    return str(given.get("reason", "not held out"))


def _lacking(leaf: Leaf) -> str:
    if _not_proven(leaf):
        return f"is {_reason(leaf)}"
    if leaf.path == "effective.budget.tokens":
        return "at a common evaluation point: there is none"
    if _not_finite(leaf):
        return _which(leaf, "is not finite in either", "is not finite in")
    return _which(leaf, "is not recorded in either", "is not recorded in")


def _which(leaf: Leaf, in_both: str, in_one: str) -> str:
    if leaf.a is None and leaf.b is None:
        return in_both
    return f"{in_one} {'the first' if leaf.a is None else 'the second'}"


def _meaning(ruling: Ruling, wording: _Wording) -> str:
    if all(leaf.outcome == "missing" for leaf in ruling.counted):
        if ruling.counted[0].path == "effective.budget.tokens":
            return "nothing can be compared at equal tokens"
        if all(map(_not_proven, ruling.counted)):
            return "such a number is no result of a held-out set"
        if all(map(_not_finite, ruling.counted)):
            return "a number that is not finite has no difference from another"
        return "what is not known cannot be taken as equal"
    if any(leaf.path == _FINISHED for leaf in ruling.counted):
        return "an unfinished run has not had its budget"
    return wording.means


def _follows(leaf: Leaf) -> str:
    more = f" and {len(leaf.follows) - 1} more" if len(leaf.follows) > 1 else ""
    return f"{label(leaf.path)} follows {label(leaf.follows[0])}{more}"


def _counts(judgement: Judgement, paths: Iterable[str]) -> bool:
    """Whether one of the leaves counts: setting it back settles what comes from it as well."""
    counted = {leaf.path for ruling in judgement.rules for leaf in ruling.counted}
    return not counted.isdisjoint(paths)


def _asked(ruling: Ruling, judgement: Judgement) -> list[Leaf]:
    """The requested settings that differ and became leaves which count here."""
    names = {name for leaf in ruling.counted for name in leaf.asked}
    return [leaf for leaf in judgement.asked if leaf.path in names]
