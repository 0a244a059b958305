"""The process of one arm of `wb bench`: one request a line on standard input, one answer a line.

It works only when asked to, so that the other arm has the machine to itself; between requests it
waits for input. When its input ends, however the parent ended, it is gone at once, with whatever
it had started: even in the middle of a step.

    {"arm": "spec" | "plain", "spec": {...}}                    first, once
    {"call": "steps" | "matmul" | "profile", "with": {...}}     then
    {"result": ...} or {"error": text, "faults": [...] | null}  the answers
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from typing import Any, TextIO


def main() -> None:
    """Serves until the input ends."""
    # Standard output is the protocol's. Whatever else is printed there goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    try:
        _serve(requests, answers)
    except Exception as error:
        from workbench.errors import UserError

        faults = [vars(fault) for fault in error.faults] if isinstance(error, UserError) else None
        if faults is None:
            import traceback

            traceback.print_exc()
        _answer(answers, {"error": f"{type(error).__name__}: {error}", "faults": faults})
        sys.exit(1)


def _read(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    # The parent started this process as the leader of a group, for compilers and the like.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _serve(requests: queue.SimpleQueue[dict[str, Any]], answers: TextIO) -> None:
    order = requests.get()
    if order["arm"] == "spec":
        from workbench.process import prepare_process

        prepare_process()  # before torch is loaded, as `wb run` does; a plain script does not
    from workbench.bench.arms import Workbench

    bench = Workbench(order["arm"], order["spec"])
    _answer(answers, {"result": bench.facts()})
    while True:
        request = requests.get()
        assert request["call"] in ("steps", "matmul", "profile")
        result = getattr(bench, request["call"])(**request.get("with", {}))
        _answer(answers, {"result": result})


def _answer(answers: TextIO, document: dict[str, Any]) -> None:
    answers.write(json.dumps(document, default=str) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
