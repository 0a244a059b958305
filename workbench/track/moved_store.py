"""Lets a store that was moved or copied find its artifacts: MLflow keeps whole addresses."""

from __future__ import annotations

import contextlib
import sqlite3

from workbench.track.store import Store

_PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
)
_PATIENCE_SECONDS = 60.0


def follow(store: Store) -> None:
    """Makes the addresses in the store's database begin where its artifacts lie now.

    Else a UI shows no files, and those of new runs go to where the store was. Only what lay among
    the store's artifacts changes; an experiment whose artifacts somebody put elsewhere stays.

    Raises:
        sqlite3.Error: the database cannot be read or written.
    """
    database = sqlite3.connect(store.database, timeout=_PATIENCE_SECONDS)
    with contextlib.closing(database), database:
        # The first experiment is MLflow's own, made with the database: it tells where that was.
        first = database.execute(
            "SELECT artifact_location FROM experiments WHERE experiment_id = 0"
        ).fetchone()
        now = store.artifacts.as_uri()
        if first is None or not str(first[0]).endswith("/0"):
            return
        then = str(first[0]).removesuffix("/0")
        if then == now:
            return
        for table, column in _PLACES:
            database.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                f"WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                (now, len(then) + 1, then, len(then) + 1, then + "/"),
            )
