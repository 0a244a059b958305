"""How often torch.compile had to start again while a run trained: what its record says of it."""

from __future__ import annotations

from typing import NamedTuple


class Compiled(NamedTuple):
    """What torch.compile did in this process beyond the graphs that a run needs.

    `recompilations` are the graphs made after the first update: each is for a value or a shape that
    the graphs before it do not hold for. `graph_breaks` are the places that it could not compile,
    or would not any more, and left to plain Python.
    """

    recompilations: int = 0
    graph_breaks: int = 0

    def words(self) -> str:
        """What it means, for a person."""
        return (
            f"after the first update the model was compiled {self.recompilations:,} times more,"
            f" with {self.graph_breaks:,} places left to plain Python: such a run is slower than"
            " its settings, and its numbers may differ in their last digits"
        )


class CompileWatch:
    """Counts what torch.compile does from here on; the first update makes the graphs it needs."""

    def __init__(self, on: bool) -> None:
        """Without `on` nothing is counted, and the compiler is not loaded for it."""
        self._on = on
        self._breaks = _graph_breaks() if on else 0
        self._graphs: int | None = None

    def after_update(self) -> Compiled:
        """What there was since the watch began; to be called once after every update."""
        if not self._on:
            return Compiled()
        if self._graphs is None:
            self._graphs = _graphs()
        return Compiled(_graphs() - self._graphs, _graph_breaks() - self._breaks)


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))


def _graph_breaks() -> int:
    from torch._dynamo.utils import counters

    # A break that ends a whole frame (the limit of recompilations, say) stands in the second one.
    return sum(sum(counters[kind].values()) for kind in ("graph_break", "unimplemented"))
