"""What a token shard holds: every id is read, and what its index says is checked against it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.core.data.errors import DataError
from workbench.core.data.prepared_folder import MANIFEST, require_as_written
from workbench.core.data.shard_index import DOCUMENTS_INDEX, INDEX, read_json
from workbench.core.data.shards import TokenShard, open_shard
from workbench.core.data.tokenizer import Tokenizer, load_tokenizer

FIRST = 32  # ids shown
SIDES = ("train", "held_out")


def inspect(
    path: Path,
    cache_dir: Path,
    format: str = "auto",
    vocab_size: int | None = None,
    tokenizer: str | None = None,
    tokenizer_path: str | None = None,
) -> list[dict[str, Any]]:
    """The facts of a shard, or of each side of a prepared folder; the arguments are `open_shard`'s.

    Raises:
        DataError: there is no shard, or it does not hold what it says.
    """
    sides = [path / side for side in SIDES if (path / side / INDEX).exists()]
    if not sides or (path / INDEX).exists():
        shard = open_shard(path, format, place="DIR", vocab_size=vocab_size, tokenizer=tokenizer)
        return [_facts(shard, cache_dir, tokenizer_path)]
    written = _written(path) if (path / MANIFEST).exists() else None
    shards = (
        open_shard(side, place="DIR")
        if written is None
        else require_as_written(side, written.get(side.name, {}))
        for side in sides
    )
    return [_facts(shard, cache_dir, tokenizer_path) for shard in shards]


def _facts(shard: TokenShard, cache_dir: Path, tokenizer_path: str | None) -> dict[str, Any]:
    content = shard.tokens.content(None)
    first = [int(i) for i in shard.tokens[:FIRST]]
    tokenizer = _tokenizer(shard, cache_dir, tokenizer_path)
    return {
        "path": str(shard.path),
        "format": shard.format,
        "dtype": shard.tokens.dtype.str,
        "ids": len(shard.tokens),
        "max_id": content.highest,
        "vocab_size": shard.vocab_size,
        "tokenizer": shard.tokenizer,
        "tokenizer_sha256": shard.tokenizer_sha256,
        "eod_id": shard.eod_id,
        "sha256": content.sha256,
        "ids_sha256": shard.sha256,
        "documents": _documents(shard),
        "first_ids": first,
        "first_text": None if tokenizer is None else _text(tokenizer, first),
        "holds": True,
    }


def _documents(shard: TokenShard) -> dict[str, Any] | None:
    """What is known of the documents; None where their boundaries are not."""
    if shard.documents is None:
        return None
    rows = shard.documents
    found: dict[str, Any] = {
        "count": len(rows),
        "tokens": int((rows["end"] - rows["start"]).sum()),
        "text_bytes": None,
        "split": None,
    }
    if shard.has_text_facts:
        folder = shard.path if shard.path.is_dir() else shard.path.parent
        described = read_json(folder / DOCUMENTS_INDEX)
        found |= {"text_bytes": int(rows["bytes"].sum()), "split": described.get("split")}
    return found


def _tokenizer(shard: TokenShard, cache_dir: Path, path: str | None) -> Tokenizer | None:
    """The tokenizer of a shard, where it can be had and is the very one that wrote it."""
    if shard.tokenizer is None:
        return None
    try:
        path = path if shard.tokenizer == "file" else None
        found = load_tokenizer(shard.tokenizer, path, cache_dir, keep=False)
    except DataError:
        return None
    same = shard.tokenizer_sha256 in (None, found.content_sha256)
    return found if same and found.vocab_size == shard.vocab_size else None


def _text(tokenizer: Tokenizer, ids: list[int]) -> str | None:
    try:
        return tokenizer.decode(ids)
    except ValueError:  # a hole of the vocabulary
        return None


def _written(path: Path) -> dict[str, dict[str, Any]]:
    """What the manifest of a prepared folder says of its shards.

    Raises:
        DataError: it does not say it.
    """
    manifest = path / MANIFEST
    shards = read_json(manifest).get("shards")
    if not isinstance(shards, dict) or not all(isinstance(one, dict) for one in shards.values()):
        raise DataError.at(str(manifest), "does not say which shards were written: `shards`")
    return shards
