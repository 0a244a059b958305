"""Decides whether two runs may be compared, and reports what the comparison shows.

from workbench.compare import compare_runs

comparison = compare_runs("mlruns/runs/a", "mlruns/runs/b", treatment=["model"])
comparison.verdict
comparison.results.numbers["held_out/nll"].difference

`compare_arms({"mha": [...], "gqa": [...]})` does the same of arms of several seeds.
"""

from workbench.compare.arm_report import write_arms_report
from workbench.compare.arm_terminal import render_arms, render_rest, render_verdict
from workbench.compare.arms import ArmsComparison, compare_arms
from workbench.compare.check import Check, PlannedRun, check, check_specs
from workbench.compare.facts import facts_of_record, facts_of_spec
from workbench.compare.pair import Comparison, Side, compare_runs
from workbench.compare.report import write_report
from workbench.compare.rules import Judgement, judge
from workbench.compare.terminal import render_check, render_terminal

__all__ = [
    "ArmsComparison",
    "Check",
    "Comparison",
    "Judgement",
    "PlannedRun",
    "Side",
    "check",
    "check_specs",
    "compare_arms",
    "compare_runs",
    "facts_of_record",
    "facts_of_spec",
    "judge",
    "render_arms",
    "render_check",
    "render_rest",
    "render_terminal",
    "render_verdict",
    "write_arms_report",
    "write_report",
]
