"""Tokenizers: text to ids and back, with the identity that comparisons rest on.

A document's text is encoded as ordinary text: what looks like a special token in it is not one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import tiktoken

from workbench.core.data import rank_files
from workbench.core.data.errors import DataError, UnencodableError
from workbench.core.data.workers import cores

Ids = npt.NDArray[np.integer]

TASK_CHARACTERS = 1 << 16  # encoded by one thread at a time
END_OF_DOCUMENT = "<|endoftext|>"
FILE_PATTERN_OF = "o200k_base"  # how a rank file's text is cut before merging


class Codec(Protocol):
    """What turns text into ids: tiktoken's `Encoding`, or bytes as they are."""

    def encode(self, text: str) -> Ids:
        """The ids of `text` [length]."""


class Tokenizer:
    """A vocabulary with its end-of-document id.

    Ids are below `vocab_size`; some ids below it may name no token (o200k_base has such holes).
    `content_sha256` covers ranks, special tokens and the pre-tokenization pattern: two tokenizers
    with the same hash encode every text alike.
    """

    def __init__(
        self,
        name: str,
        codec: Codec,
        ranks: dict[bytes, int],
        special: dict[str, int],
        pattern: str,
    ) -> None:
        self.name = name
        self.eod_id = special[END_OF_DOCUMENT]
        self.vocab_size = max(*ranks.values(), *special.values()) + 1
        self.content_sha256 = _content_sha256(ranks, special, pattern)
        self._codec = codec
        self._ranks = ranks
        self._special = special

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, on all cores; no end-of-document id is added.

        Raises:
            UnencodableError: the tokenizer cannot take a text (runs of about a million blanks).
        """

        # tiktoken releases the interpreter lock while it encodes; short texts go in one task, since
        # handing each of them to a thread costs more than encoding it
        def encode_all(some: Sequence[str]) -> list[Ids]:
            return [self._codec.encode(text) for text in some]

        with ThreadPoolExecutor(cores()) as pool:
            return [ids for part in pool.map(encode_all, _tasks(texts)) for ids in part]

    def encode(self, text: str) -> Ids:
        """The ids of one text, on this core; raises what `encode_documents` does."""
        return self._codec.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`. Bytes that are not UTF-8 (a cut character) become U+FFFD.

        Raises:
            ValueError: an id that names no token.
        """
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int], unknown: bytes | None = None) -> bytes:
        """The bytes of `ids`; a special token is its name, an id that names no token `unknown`.

        Raises:
            ValueError: an id that names no token, and no `unknown`.
        """
        try:
            return b"".join(map(self._bytes_of_id.__getitem__, ids))
        except KeyError as error:
            if unknown is not None:
                return b"".join([self._bytes_of_id.get(i, unknown) for i in ids])
            raise ValueError(f"tokenizer {self.name}: id {error} names no token") from None

    @cached_property
    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """Text bytes of each id [V]; 0 for special tokens and holes."""
        lengths = np.zeros(self.vocab_size, np.int64)
        for token, rank in self._ranks.items():
            lengths[rank] = len(token)
        return lengths

    @cached_property
    def _bytes_of_id(self) -> dict[int, bytes]:
        table = {rank: token for token, rank in self._ranks.items()}
        return table | {rank: token.encode() for token, rank in self._special.items()}


def load_tokenizer(
    name: str,
    path: str | Path | None,
    cache_dir: Path,
    keep: bool = True,
    may_download: bool = True,
) -> Tokenizer:
    """The tokenizer of a spec: `bytes`, `file` (with `path`) or the name of a tiktoken encoding.

    - `bytes`: the 256 bytes of UTF-8 and the end-of-document id 256.
    - `file`: the ranks of a .tiktoken file, the pattern of o200k_base, and the number of ranks as
      the end-of-document id.
    - tiktoken encodings: read from `cache_dir` or the user's own cache; o200k_base and cl100k_base
      never need a network. Without `keep` nothing is written into `cache_dir`; without
      `may_download` the network is not asked for the others.

    Raises:
        DataError: unknown name, a path that is missing or out of place, a file that is not valid.
    """
    if name == "file":
        if path is None:
            raise DataError.at("tokenizer.path", "tokenizer `file` needs the path of a rank file")
        return _file_tokenizer(Path(path).expanduser())
    if path is not None:
        raise DataError.at("tokenizer.path", f"does not apply to tokenizer {name}", str(path))
    if name == "bytes":
        single = {bytes([byte]): byte for byte in range(256)}
        return Tokenizer("bytes", _Bytes(), single, {END_OF_DOCUMENT: 256}, pattern="")
    encoding = rank_files.load_encoding(name, cache_dir, keep, may_download)
    if END_OF_DOCUMENT not in encoding._special_tokens:
        raise DataError.at("tokenizer.name", f"the encoding has no {END_OF_DOCUMENT}", name)
    return _tiktoken_tokenizer(name, encoding)


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest stored type that holds every id below `vocab_size`, little-endian.

    65,536 ids (0 to 65,535) still fit 16 bits.
    """
    if vocab_size > 2**32:
        raise ValueError(f"a vocabulary of {vocab_size:,} does not fit 32-bit ids")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class _Bytes:
    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8"), np.uint8)


class _Tiktoken:
    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding

    def encode(self, text: str) -> Ids:
        try:
            # no allowed and no disallowed special tokens: all of it is ordinary text
            ids: Ids = self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError as error:
            reason = f"tiktoken cannot encode it: {error}"
            raise UnencodableError.of(text, reason) from error
        return ids


def _tiktoken_tokenizer(name: str, encoding: tiktoken.Encoding) -> Tokenizer:
    # These three attributes are the documented way to extend an encoding.
    return Tokenizer(
        name,
        _Tiktoken(encoding),
        encoding._mergeable_ranks,
        encoding._special_tokens,
        encoding._pat_str,
    )


def _file_tokenizer(path: Path) -> Tokenizer:
    ranks = rank_files.read_rank_file(path)
    encoding = tiktoken.Encoding(
        "file",
        pat_str=rank_files.pattern_of(FILE_PATTERN_OF),
        mergeable_ranks=ranks,
        special_tokens={END_OF_DOCUMENT: len(ranks)},
    )
    return _tiktoken_tokenizer("file", encoding)


def _content_sha256(ranks: dict[bytes, int], special: dict[str, int], pattern: str) -> str:
    """SHA-256 over every token in order of rank, the special tokens and the pattern."""
    digest = hashlib.sha256(b"workbench tokenizer v1\n")
    by_rank = sorted(zip(ranks.values(), ranks.keys(), strict=True))
    digest.update(b"".join([b"%d %s\n" % (rank, token.hex().encode()) for rank, token in by_rank]))
    for rank, name in sorted((rank, name) for name, rank in special.items()):
        digest.update(b"special %d %s\n" % (rank, name.encode().hex().encode()))
    digest.update(b"pattern " + pattern.encode())
    return digest.hexdigest()


def _tasks(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """`texts` in consecutive parts of at least TASK_CHARACTERS, the last one aside."""
    start = characters = 0
    for end, text in enumerate(texts, 1):
        characters += len(text)
        if characters >= TASK_CHARACTERS:
            yield texts[start:end]
            start, characters = end, 0
    if start < len(texts):
        yield texts[start:]
