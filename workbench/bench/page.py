"""The page that `wb bench` prints of its result."""

from __future__ import annotations

from typing import Any

WIDTH = 12


def render(result: dict[str, Any]) -> str:
    """The result of `bench.bench` as a page for the terminal."""
    compared, matmul = result["compared_with"], result["matmul_tflops"]
    lines = [_head(result["spec"], result)]
    if compared:
        lines = [f"A: {lines[0]}", f"B: {_head(compared['spec'], compared)}"]
        lines += _differences(compared["differs"])
    lines += [f"{result['device']}, {result['threads']} threads, torch {result['torch']}", ""]
    lines += _table(result)
    ratios = ", ".join(f"{ratio:.2f}" for ratio in result["ratios"])
    than = "A has {:.3f} times the tokens/s of B" if compared else "{:.2f} times the plain step"
    lines += ["", f"{than.format(result['ratio'])} (by round: {ratios})"]
    lines += _telemetry(result)
    for one in (result, compared) if compared else (result,):
        used = one["matmul_tflops"]
        lines.append(
            f"MFU {one['mfu']:.1%} of {used['used']:.3g} TFLOP/s ({used['used_is']}); "
            f"{one['flops_per_token']:,} FLOPs a token"
        )
    lines.append(
        f"matrix products: bf16 {matmul['bf16']:.3g}, float32 {matmul['fp32']:.3g} TFLOP/s"
    )
    if result["trace"]:
        lines.append(f"trace of a step, for ui.perfetto.dev or chrome://tracing: {result['trace']}")
    return "\n".join([*lines, *result["notes"]])


def _head(name: str, measured: dict[str, Any]) -> str:
    settings = measured["settings"]
    shape = f"{settings['batch_size']} x {settings['seq_len']:,} tokens"
    if settings["gradient_accumulation_steps"] > 1:
        shape += f" x {settings['gradient_accumulation_steps']} micro-batches"
    head = f"{name}: {shape}, {settings['precision']['compute_dtype']}"
    return head + (", compiled" if settings["compile"] else ", not compiled")


def _differences(differs: dict[str, dict[str, Any]]) -> list[str]:
    if not differs:
        return ["the two take the same step"]
    return [
        f"  {field}: {_value(values['spec'])} in A, {_value(values['compared'])} in B"
        for field, values in differs.items()
    ]


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(value)


def _table(result: dict[str, Any]) -> list[str]:
    """Both arms side by side."""
    compared = result["compared_with"]
    other = "compared" if compared else "plain"
    peak, step = result["peak_rss_gb"], result["step_seconds"]
    tokens = compared["tokens_per_s"] if compared else result["plain_tokens_per_s"]
    parts = compared["seconds"] if compared else result["plain_seconds"]

    def line(title: str, mine: str, theirs: str) -> str:
        return f"{title:22}{mine:>{WIDTH}}{theirs:>{WIDTH}}"

    lines = [
        line("", *(("A", "B") if compared else ("spec", "plain"))),
        line("tokens/s", f"{result['tokens_per_s']:,.0f}", f"{tokens:,.0f}"),
    ]
    if compared:
        lines.append(line("MFU", f"{result['mfu']:.1%}", f"{compared['mfu']:.1%}"))
    lines += [
        line("peak memory, GB", f"{peak['spec']:.2f}", f"{peak[other]:.2f}"),
        line("seconds of a step", f"{step['spec']:.3f}", f"{step[other]:.3f}"),
    ]
    for part, seconds in result["seconds"].items():
        lines.append(line(f"  {part}", f"{seconds:.3f}", f"{parts[part]:.3f}"))
    return lines


def _telemetry(result: dict[str, Any]) -> list[str]:
    """What expert telemetry costs, where that was measured."""
    cost = result["telemetry"]
    if not cost:
        return []
    parts = [f"a row of metrics at {cost['reporting_share']:.3g} of the steps"]
    for title, name in (("such a step", "of_reporting_step"), ("the others", "of_other_step")):
        if cost[name] is not None:
            parts.append(f"{title} {cost[name]:+.1%}")
    rounds = ", ".join(f"{one:+.1%}" for one in cost["by_round"])
    return [
        f"expert telemetry: {cost['cost']:+.1%} of a step's time (by round: {rounds}; "
        f"{', '.join(parts)})"
    ]
