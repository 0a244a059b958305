"""The commands of `wb data`: text into token shards, what a shard holds, what two sources share.

Everything heavy is imported inside the command that needs it, as in `commands`.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.answers import Answer, AsJson, Debug
from workbench.output import complain

if TYPE_CHECKING:
    from workbench.core.data.prepare import Prepared

app = typer.Typer(
    name="data",
    help="Prepares data, and says what they hold.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Unit(StrEnum):
    """What a document is in a .txt file."""

    auto = "auto"
    file = "file"
    blank_line = "blank_line"
    line = "line"


class ShardFormat(StrEnum):
    """How ids stand on the disk; `core.data.shards.FORMATS`."""

    auto = "auto"
    complexity = "complexity"
    llmc = "llmc"
    megatron = "megatron"
    nanogpt = "nanogpt"


@app.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SRC...", help="Files, folders or globs of .txt, .jsonl, .parquet."),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write: train/ and held_out/ in it.")],
    tokenizer: Annotated[
        str, typer.Option(metavar="NAME", help="A tiktoken encoding, bytes, or file.")
    ],
    tokenizer_path: Annotated[
        str | None, typer.Option(metavar="FILE", help="The rank file of tokenizer `file`.")
    ] = None,
    held_out_ratio: Annotated[
        float, typer.Option(help="Share of the documents to hold out; 0: none.")
    ] = 0.05,
    text_field: Annotated[
        str, typer.Option(help="The field or column that is the text (.jsonl, .parquet).")
    ] = "text",
    text_unit: Annotated[
        Unit, typer.Option(help="What a document is in .txt; auto: a file where there are several.")
    ] = Unit.auto,
    processes: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Default: one for each core.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Turn text into token shards, training and held-out documents apart.

    Started again after a stop, it goes on; the result does not depend on the processes.

    Example: wb data prepare texts/ --out shards --tokenizer o200k_base
    """
    from workbench.process import prepare_process

    prepare_process()  # memory that is freed is kept: numpy asks for the same sizes all the time
    from workbench.core.data.corpus import text_corpus
    from workbench.core.data.parts import TokenizerName, tokenizer_of
    from workbench.core.data.prepare import prepare as run
    from workbench.core.data.workers import cores
    from workbench.data_progress import DataReporter
    from workbench.track.store import Store

    name = TokenizerName(tokenizer, tokenizer_path, Store().home / "cache/tiktoken")
    tokenizer_of(name)
    corpus = text_corpus(sources, text_field, text_unit.value, place="SRC")
    try:
        with DataReporter(quiet=as_json) as reporter:
            done = run(corpus, out, name, held_out_ratio, processes or cores(), reporter)
    except KeyboardInterrupt:
        complain("stopped; the same command goes on from here")
        raise
    if as_json:
        return Answer({"out": str(done.folder), "was_there": done.was_there, **done.manifest})
    return Answer(_prepared_page(done))


@app.command()
def inspect(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A shard (folder or file), or a prepared folder.")
    ],
    format: Annotated[
        ShardFormat, typer.Option(help="auto goes by signature; raw ids have none: nanogpt.")
    ] = ShardFormat.auto,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ids, where the shard does not say it.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its tokenizer, where it does not say it.")
    ] = None,
    tokenizer_path: Annotated[
        str | None, typer.Option(metavar="FILE", help="The rank file of tokenizer `file`.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Say what a token shard holds; all of it is read, and exit 2 if its hash does not hold.

    Example: wb data inspect shards/train
    """
    from workbench.core.data.inspection import inspect as read
    from workbench.track.store import Store

    cache = Store().home / "cache/tiktoken"
    shards = read(folder, cache, format.value, vocab_size, tokenizer, tokenizer_path)
    return Answer({"shards": shards} if as_json else "\n\n".join(map(_shard_page, shards)))


@app.command()
def overlap(
    training: Annotated[
        str,
        typer.Argument(metavar="TRAIN", help="Training text, or a token shard."),
    ],
    evaluation: Annotated[
        str, typer.Argument(metavar="EVAL", help="What is to be held out: likewise.")
    ],
    ngram: Annotated[int, typer.Option(min=1, max=256, help="Words, or ids, in a row.")] = 13,
    document_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of its n-grams at which a document overlaps.")
    ] = 0.2,
    limit: Annotated[
        float, typer.Option(min=0, max=1, help="Share of overlapping documents, or of their text.")
    ] = 0.01,
    text_field: Annotated[
        str, typer.Option(help="The field or column that is the text (.jsonl, .parquet).")
    ] = "text",
    text_unit: Annotated[
        Unit, typer.Option(help="What a document is in .txt; auto: a file where there are several.")
    ] = Unit.auto,
    format: Annotated[ShardFormat, typer.Option(help="Of shards.")] = ShardFormat.auto,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ids, where a shard does not say it.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of shards that do not say it.")
    ] = None,
    tokenizer_path: Annotated[
        str | None, typer.Option(metavar="FILE", help="The rank file of tokenizer `file`.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Say how much of EVAL stands in TRAIN, document by document; exit 3 if it is contaminated.

    Example: wb data overlap train.txt news.txt
    """
    from workbench.process import prepare_process

    prepare_process()
    from workbench.core.data.overlap import Settings
    from workbench.core.data.overlap_check import Reading, overlap_of
    from workbench.track.store import Store

    given = (vocab_size, tokenizer, tokenizer_path)
    reading = Reading(text_field, text_unit.value, format.value, *given)
    settings, cache = Settings(ngram, document_share, limit), Store().home / "cache/tiktoken"
    found = overlap_of(training, evaluation, reading, settings, cache)
    code = 0 if found["status"] == "held_out" else 3
    return Answer(found if as_json else _overlap_page(found), code)


def _overlap_page(found: dict[str, Any]) -> str:
    from workbench.spec.held_out import HISTOGRAM

    counted = found["overlap"]
    size = "tokens" if "tokens" in found else "bytes"
    rows = {
        "status": found["status"],
        "n-grams": f"{counted['ngrams']:,}, of which {counted['ngrams_in_training']:,} stand in "
        f"TRAIN: {100 * counted['share']:.3g} % ({counted['method']})",
        "of": counted["measured_on"],
        "overlapping": f"{counted['overlapping_documents']:,} of {found['documents']:,} "
        f"({found['unit']}), {counted[f'overlapping_{size}']:,} of {found[size]:,} {size}",
        "copies": f"{counted['copies']:,} stand in TRAIN as a whole",
        "rule": found["overlap_rule"],
    }
    lines = [f"{key:12} {value}" for key, value in rows.items()]
    lines += ["", "share of its n-grams in TRAIN    documents"]
    most = max(counted["histogram"])
    for label, count in zip(HISTOGRAM, counted["histogram"], strict=True):
        bar = "#" * -(-40 * count // most)
        lines.append(f"{label:>12}  {count:>12,}  {bar}".rstrip())
    return "\n".join(lines)


def _prepared_page(done: Prepared) -> str:
    manifest = done.manifest
    lines = []
    if done.was_there:
        lines.append(f"nothing to do: {done.folder} holds these shards already")
    for side in ("train", "held_out"):
        if (shard := manifest["shards"].get(side)) is None:
            continue
        lines.append(
            f"{side:9} {shard['documents']:>12,} documents {shard['tokens']:>15,} tokens "
            f"{shard['text_bytes']:>15,} bytes of text"
        )
    counts = manifest["counts"]
    lines += [
        f"split     {manifest['split']}",
        f"copies    {counts['exact_duplicates']:,} exact, {counts['normalised_duplicates']:,} more "
        f"up to case and blanks; {counts['near_duplicate_groups']:,} groups of near-duplicates; "
        f"{counts['moved_to_training']:,} documents moved to training; "
        f"{counts['held_out_dropped']:,} held-out copies left out",
        f"empty     {counts['skipped_empty']:,} documents left out",
        f"folder    {done.folder}",
    ]
    return "\n".join(lines)


def _shard_page(shard: dict[str, Any]) -> str:
    documents, text = shard["documents"], shard["first_text"]
    rows = {
        "shard": shard["path"],
        "format": f"{shard['format']}, {shard['dtype']}",
        "ids": f"{shard['ids']:,}, the largest {shard['max_id']:,}",
        "tokenizer": f"{shard['tokenizer'] or 'not known'}, vocabulary {shard['vocab_size']:,}",
        "sha256": f"{shard['sha256']} (holds)",
        "documents": "not known",
        "first ids": " ".join(map(str, shard["first_ids"])),
        "text": "the tokenizer cannot be loaded" if text is None else repr(text),
    }
    if documents:
        rows["documents"] = f"{documents['count']:,} with {documents['tokens']:,} tokens"
        if documents["text_bytes"] is not None:
            rows["documents"] += f", {documents['text_bytes']:,} bytes of text"
        if (split := documents["split"]) and split.get("side"):
            rows["side"] = f"{split['side']} ({split['rule']})"
    return "\n".join(f"{key:10} {value}" for key, value in rows.items())
