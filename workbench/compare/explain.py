"""The page of each rule: what it guards, why, a measured example, and what to do.

The pages are data, in `rule_pages.yaml` beside this module; what a rule judges and does comes from
the checklist itself.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

from workbench.compare.facts import effective_leaves, set_leaves, spec_leaves
from workbench.errors import UserError, did_you_mean
from workbench.spec.checklist import CLAIMS, RULES, RULESET_VERSION, tag_of

PAGES = "rule_pages.yaml"
_WIDTH = 100


@dataclass(frozen=True)
class Example:
    """Two runs that were made and compared: the commands, and what was measured."""

    commands: tuple[str, ...]
    measured: str


@dataclass(frozen=True)
class Page:
    """What there is to know of one rule."""

    rule: str
    guards: str
    why: str
    example: Example
    do: tuple[str, ...]

    @property
    def effects(self) -> dict[str, str]:
        """What a difference does to each claim."""
        effects = RULES[self.rule].effects
        return {claim: effects.get(claim) or "none" for claim in CLAIMS}

    @property
    def leaves(self) -> tuple[str, ...]:
        """The values that the rule judges; `<set>` stands for each evaluation set."""
        sets = [leaf.replace(".held_out.", ".<set>.") for leaf in set_leaves("held_out")]
        every = dict.fromkeys((*spec_leaves(), *effective_leaves(), *sets))
        tags = {leaf: tag_of(leaf.replace("<set>", "held_out")) for leaf in every}
        return tuple(
            leaf for leaf, tag in tags.items() if tag.rule == self.rule and tag.kind == "judged"
        )

    def to_json(self) -> dict[str, Any]:
        """The document that `wb explain RULE --json` prints."""
        return {
            "rule": self.rule,
            "must_match": RULES[self.rule].must_match,
            "effects": self.effects,
            "guards": self.guards,
            "why": self.why,
            "example": asdict(self.example) | {"machine": machine()},
            "do": list(self.do),
            "leaves": list(self.leaves),
            "ruleset": RULESET_VERSION,
        }


def page_of(rule: str) -> Page:
    """The page of a rule.

    Raises:
        UserError: the checklist has no such rule.
    """
    if rule not in RULES:
        message = f"the checklist has no such rule.{did_you_mean(rule, RULES)}".rstrip(".")
        raise UserError.at("rule", message, rule, ", ".join(RULES))
    page = _pages()["rules"][rule]
    example = Example(tuple(page["example"]["commands"]), _flowed(page["example"]["measured"]))
    guards, why = _flowed(page["guards"]), _flowed(page["why"])
    return Page(rule, guards, why, example, tuple(map(_flowed, page["do"])))


def machine() -> str:
    """Where and when the examples were measured."""
    return _flowed(_pages()["machine"])


def rows() -> list[dict[str, Any]]:
    """Every rule with what must match and its effects, in the order of the checklist."""
    return [
        {"rule": name, "must_match": rule.must_match, "effects": page_of(name).effects}
        for name, rule in RULES.items()
    ]


def render_list() -> str:
    """The rules of the checklist, one a line."""
    letters = {"refuse": "R", "flag": "f", "none": "-"}
    lines = [f"the comparison checklist, ruleset {RULESET_VERSION}", ""]
    lines.append(f"{'rule':<11} {' '.join(claim[0].upper() for claim in CLAIMS)}  must match")
    for row in rows():
        effects = " ".join(letters[row["effects"][claim]] for claim in CLAIMS)
        lines.append(f"{row['rule']:<11} {effects}  {row['must_match']}")
    claims = ", ".join(CLAIMS)
    lines += ["", f"{claims}: R a difference refuses that claim, f flags it"]
    return "\n".join([*lines, "wb explain RULE says why, with a measured example"])


def render_page(page: Page) -> str:
    """A page for the terminal."""
    effects = ", ".join(f"{claim} {effect}" for claim, effect in page.effects.items())
    lines = [
        f"{page.rule}: {RULES[page.rule].must_match}",
        f"a difference: {effects} (ruleset {RULESET_VERSION})",
        "",
        *_wrap(page.guards),
        "",
        "why",
        *_wrap(page.why, "  "),
        "",
        "measured",
        *(f"  $ {command}" for command in page.example.commands),
        *_wrap(page.example.measured, "  "),
        *_wrap(f"({machine()})", "  "),
        "",
        "what to do",
    ]
    for item in page.do:
        first, *rest = _wrap(item, "    ")
        lines += [f"  - {first.strip()}", *rest]
    return "\n".join([*lines, "", *_wrap(f"judged: {', '.join(page.leaves)}")])


@cache
def _pages() -> dict[str, Any]:
    import yaml

    text = resources.files("workbench.compare").joinpath(PAGES).read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def _flowed(text: str) -> str:
    return " ".join(text.split())


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
