"""From text to token shards: training and held-out documents apart, the same whoever computes.

    1. parts      the documents are read once and, on all cores, encoded, hashed and cut into words;
                  what comes of each stretch of them is kept as a part beside the output
    2. sides      near-duplicates are grouped and each group falls on one side (see `sides`)
    3. shards     the parts are written, in order, to the shard of each document's side

A process that is killed loses the parts it was working on: started again, it takes those that are
whole. The output folder appears under its name when all of it is there.

Memory: the index of near-duplicates (at most 1 GB, see `near_duplicates`) and that of the held-out
n-grams (at most 1 GB, see `overlap`), 250 bytes a document, and for each process four stretches of
`PART_CHARACTERS` or the longest document. Disk, while it works: the shards once more, and 8 bytes
a word.

Shapes: N documents with text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.core.data import atomic, parts
from workbench.core.data.corpus import Corpus
from workbench.core.data.encoded import batches
from workbench.core.data.errors import DataError
from workbench.core.data.files import real_path
from workbench.core.data.near_duplicates import NearDuplicates
from workbench.core.data.ngrams import Ragged, UInt64
from workbench.core.data.overlap import Passages, Settings
from workbench.core.data.parts import Part, Task, TokenizerName
from workbench.core.data.prepared_folder import (
    FORMAT,
    begin,
    locked,
    publish,
    require_replaceable,
    standing,
)
from workbench.core.data.shard_index import INDEX
from workbench.core.data.shards import ShardWriter
from workbench.core.data.sides import Documents, Sides, choose_sides, first_of_each
from workbench.core.data.split import MIN_DOCUMENTS, merged
from workbench.core.data.workers import Workers
from workbench.errors import storing

PART_CHARACTERS = 2 << 20
WORDS_AT_ONCE, MOST_MAPS = 1 << 16, 64  # words indexed, and files mapped, at a time

Int64 = npt.NDArray[np.int64]


class Progress(NamedTuple):
    """How far it is: `done` of `total` bytes (None: not known) of the step `what`."""

    what: str
    done: int
    total: int | None


@dataclass(frozen=True)
class Prepared:
    """The output: its manifest, and whether it stood there already."""

    folder: Path
    manifest: dict[str, Any]
    was_there: bool


def prepare(
    corpus: Corpus,
    out: Path,
    tokenizer: TokenizerName,
    held_out_ratio: float = 0.05,
    processes: int = 1,
    report: Callable[[Progress], None] = lambda progress: None,
    settings: Settings | None = None,
    part_characters: int = PART_CHARACTERS,
) -> Prepared:
    """Writes the shards of a corpus: `out/train` and, with a ratio above 0, `out/held_out`.

    `processes` and `part_characters` change no byte of them.

    Raises:
        DataError: a document that cannot be used, too few of them, or an `out` that holds something
            else.
        StoreError: the disk is full or cannot be written.
        WorkerDiedError: a process was killed. After either, what is done is kept for the next call.
    """
    if not 0 <= held_out_ratio < 1:
        message = "is a share of the text"
        raise DataError.at("--held-out-ratio", message, held_out_ratio, "0 to below 1")
    settings = settings or Settings()
    loaded = parts.tokenizer_of(tokenizer)
    inputs = {
        "corpus": corpus.key,
        "tokenizer": loaded.name,
        "tokenizer_sha256": loaded.content_sha256,
        "held_out_ratio": held_out_ratio,
        "ngram": settings.ngram,
        "document_share": settings.document_share,
    }
    out = real_path(out)  # of a link, the folder that is meant
    require_replaceable(out)
    work = out.with_name(f".{out.name}.prepare")
    if (found := standing(out, inputs)) is not None:
        atomic.remove(work)
        return Prepared(out, found, was_there=True)
    # A file is packed to a tenth of its text at most: of more processes some would have no part.
    if corpus.file_bytes is not None:
        processes = min(processes, 1 + 10 * corpus.file_bytes // part_characters)
    with storing(work), locked(work):
        if (found := standing(out, inputs)) is not None:  # of a process that has just ended
            atomic.remove(work)
            return Prepared(out, found, was_there=True)
        try:
            begin(work, inputs)
            job = _Job(corpus, tokenizer, held_out_ratio, settings, work, part_characters, report)
            with Workers(processes) as workers, corpus.placing():
                known = job.build_parts(workers)
            manifest = {"format": FORMAT, "inputs": inputs, "source": corpus.source}
            manifest |= job.write_shards(known)
            publish(work, out, manifest)
        except DataError:
            atomic.remove(work)  # other text, or other settings: nothing to go on with
            raise
        atomic.remove(work)
    return Prepared(out, manifest, was_there=False)


@dataclass(frozen=True, eq=False)
class _Known:
    """What is known of all documents, part by part in order."""

    parts: list[int]  # documents of each
    lengths: Int64  # [N], ids with the end-of-document id
    byte_counts: Int64
    content_sha256: npt.NDArray[np.uint8]
    split_sha256: npt.NDArray[np.uint8]
    word_spans: Int64  # [N, 2], in the words of their part
    groups: Int64
    rate: float
    skipped_empty: int

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class _Job:
    corpus: Corpus
    tokenizer: TokenizerName
    ratio: float
    settings: Settings
    work: Path
    part_characters: int
    report: Callable[[Progress], None]

    @property
    def folder(self) -> Path:
        return self.work / "parts"

    def build_parts(self, workers: Workers) -> _Known:
        """Step 1, and the groups."""
        near = NearDuplicates(self.settings.document_share)
        read = 0

        def tasks() -> Iterator[Task]:
            nonlocal read
            number = 0
            for texts, count in batches(self.corpus.read(), self.part_characters):
                read += count
                if not texts:
                    continue
                there = parts.is_whole(self.folder, number)
                words = self.settings.ngram
                some = None if there else texts
                yield Task(self.folder, self.tokenizer, words, number, some, near.halvings)
                number += 1

        found: list[Part] = []
        done, total = 0, self.corpus.file_bytes
        self.report(Progress("reading and encoding", 0, total))
        for number in workers.map(parts.build_part, tasks()):
            part = parts.read_part(self.folder, number)
            assert part.sample is not None
            near.add_sample(part.sample)
            found.append(part.without_sample())
            done += int(part.byte_counts.sum())
            self.report(Progress("reading and encoding", done, max(total or 0, done) or None))
        self.report(Progress("reading and encoding", done, done))
        documents = sum(len(part.lengths) for part in found)
        if not documents:
            problem = f"no text: {read:,} documents, all of them empty or blanks"
            allowed = "at least one document with text in it"
            raise DataError.at(self.corpus.place, problem, self.corpus.given, allowed)
        if documents < MIN_DOCUMENTS and self.ratio > 0:
            counted = "1 document" if documents == 1 else f"{documents} documents"
            problem = f"{counted} with text: too few to hold whole ones out"
            allowed = (
                f"at least {MIN_DOCUMENTS} documents (--text-unit line or blank_line finds more in"
                " a .txt), or 0: all of them train, and data.held_out of a spec brings other text"
            )
            raise DataError.at("--held-out-ratio", problem, self.ratio, allowed)
        self.report(Progress("grouping near-duplicates", 0, None))
        groups = near.groups()
        return _Known(
            [len(part.lengths) for part in found],
            np.concatenate([part.lengths for part in found]),
            np.concatenate([part.byte_counts for part in found]),
            np.concatenate([part.content_sha256 for part in found]),
            np.concatenate([part.split_sha256 for part in found]),
            np.concatenate(
                [np.stack([p.word_offsets[:-1], p.word_offsets[1:]], axis=1) for p in found]
            ),
            groups.numbers,
            groups.rate,
            read - documents,
        )

    def write_shards(self, known: _Known) -> dict[str, Any]:
        """Steps 2 and 3: what the manifest says of them."""
        self.report(Progress("choosing what is held out", 0, None))
        documents = Documents(
            known.byte_counts,
            known.content_sha256,
            known.split_sha256,
            known.groups,
            lambda chosen: self._passages(known, chosen),
        )
        sides = choose_sides(documents, self.ratio, self.settings)
        kept = np.ones(len(known), bool)
        held_out = np.flatnonzero(sides.is_held_out)
        kept[held_out] = False  # of copies the first alone is scored
        kept[held_out[first_of_each(known.content_sha256[held_out])]] = True
        shards = self.work / "out"
        atomic.remove(shards)
        shards.mkdir()
        chosen = {"train": ~sides.is_held_out}
        if self.ratio > 0:
            chosen["held_out"] = sides.is_held_out & kept
        counts = _counts(known, sides, kept)
        written = {
            side: self._write(known, which, shards / side, sides.rule, counts)
            for side, which in chosen.items()
        }
        return {"shards": written, "split": sides.rule, "counts": counts}

    def _passages(self, known: _Known, chosen: Int64) -> StoredPassages:
        return StoredPassages(
            "",
            known.content_sha256[chosen],
            folder=self.folder,
            numbers=np.searchsorted(np.cumsum(known.parts), chosen, "right"),
            spans=known.word_spans[chosen],
        )

    def _write(
        self,
        known: _Known,
        which: npt.NDArray[np.bool_],
        final: Path,
        rule: str,
        counts: dict[str, int],
    ) -> dict[str, Any]:
        total, documents = int(known.byte_counts[which].sum()), int(which.sum())
        tokenizer = parts.tokenizer_of(self.tokenizer)
        done = start = ids_written = 0
        with ShardWriter(
            final,
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            tokenizer_sha256=tokenizer.content_sha256,
            eod_id=tokenizer.eod_id,
            side=final.name,
            rule=rule,
        ) as writer:
            for number, count in enumerate(known.parts):
                here = slice(start, start + count)
                start += count
                chosen = which[here]
                if not chosen.any():
                    continue
                lengths, sizes = known.lengths[here], known.byte_counts[here][chosen]
                ids = parts.stored_ids(self.folder, number)[np.repeat(chosen, lengths)]
                hashes = known.content_sha256[here][chosen]
                writer.extend(ids, lengths[chosen], sizes, hashes)
                ids_written += len(ids)
                done += int(sizes.sum())
                self.report(Progress(f"writing {final.name}", done, total))
            writer.finish(counts)
        return {
            "documents": documents,
            "ids": ids_written,
            "tokens": ids_written - documents,
            "text_bytes": total,
            "sha256": json.loads((final / INDEX).read_bytes())["sha256"],
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredPassages(Passages):
    """The words of M chosen documents, out of the parts they stand in.

    It has no identity: what is measured here is not kept, since the words are not.
    """

    folder: Path
    numbers: Int64  # [M], the part of each document
    spans: Int64  # [M, 2], its words in that part

    @property
    def unit(self) -> str:
        """What its n-grams are made of."""
        return "word"

    def documents(self) -> Iterator[Ragged]:
        """The words of every document, in the order in which they were chosen."""
        opened: dict[int, UInt64] = {}
        rows: list[UInt64] = []
        held = 0
        for number, (start, end) in zip(self.numbers.tolist(), self.spans.tolist(), strict=True):
            if number not in opened:
                if len(opened) >= MOST_MAPS:
                    opened.clear()
                opened[number] = parts.stored_words(self.folder, number)
            rows.append(opened[number][start:end])
            held += end - start
            if held >= WORDS_AT_ONCE:
                yield _ragged(rows)
                rows, held = [], 0
        if rows:
            yield _ragged(rows)

    def stream(self, overlap: int) -> Iterator[Ragged]:
        """The words in order of the parts, those of a part at once."""
        numbers, starts = np.unique(self.numbers, return_index=True)
        for number, spans in zip(numbers, np.split(self.spans, starts[1:]), strict=True):
            lengths = spans[:, 1] - spans[:, 0]
            offsets = np.r_[0, np.cumsum(lengths)].astype(np.int64)
            words = parts.stored_words(self.folder, int(number))
            yield Ragged(np.concatenate([words[a:b] for a, b in merged(spans).tolist()]), offsets)


def _ragged(rows: list[UInt64]) -> Ragged:
    lengths = [len(row) for row in rows]
    return Ragged(np.concatenate(rows), np.r_[0, np.cumsum(lengths)].astype(np.int64))


def _counts(known: _Known, sides: Sides, kept: npt.NDArray[np.bool_]) -> dict[str, int]:
    exact = len(known) - len(first_of_each(known.content_sha256))
    alike = len(known) - len(first_of_each(known.split_sha256))
    return {
        "documents": len(known),
        "skipped_empty": known.skipped_empty,
        "exact_duplicates": exact,
        "normalised_duplicates": alike - exact,
        "near_duplicate_groups": sides.shared_groups,
        "near_duplicate_sample": round(1 / known.rate),  # 1 in so many n-grams
        "moved_to_training": sides.moved,
        "held_out_dropped": int((~kept).sum()),
    }
