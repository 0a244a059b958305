"""The overlap of token shards is measured on the words behind their ids, where they are known."""

from __future__ import annotations

import hashlib
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RANKS_4096

from workbench.core.data import passages
from workbench.core.data.errors import DataError
from workbench.core.data.loading import Data, load_data
from workbench.core.data.ngrams import LongText, Text, windows, word_batches
from workbench.core.data.overlap import Settings
from workbench.core.data.overlap_check import Reading, overlap_of
from workbench.core.data.passages import texts_of
from workbench.core.data.rank_files import _download
from workbench.core.data.shard_tokenizer import tokenizer_of_shards
from workbench.core.data.shards import ShardWriter, TokenShard, open_shard
from workbench.core.data.token_data import tokenizer_by_shards
from workbench.core.data.tokenizer import Tokenizer, load_tokenizer
from workbench.spec.run import RunSpec


def texts(count: int, seed: int) -> list[str]:
    """Sentences of one small vocabulary: no 13 words in common, but many a row of 13 bytes."""
    rng = np.random.default_rng(seed)
    words = [f"word{i}" for i in range(90)]
    return [" ".join(words[i] for i in row) for row in rng.integers(0, 90, (count, 40))]


def write_shard(
    folder: Path,
    documents: list[str],
    tokenizer: Tokenizer,
    content_sha256: str | None = None,
    name: str | None = None,
) -> str:
    with ShardWriter(
        folder,
        tokenizer=name or tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        tokenizer_sha256=content_sha256 or tokenizer.content_sha256,
        eod_id=tokenizer.eod_id,
    ) as writer:
        for text in documents:
            raw = text.encode()
            writer.append(tokenizer.encode(text), len(raw), hashlib.sha256(raw).digest())
        writer.finish()
    return str(folder)


def without_documents(folder: str) -> str:
    for file in Path(folder).glob("tokens.docs.*"):
        file.unlink()
    return folder


def overlap(train: str, evaluation: str, **reading: Any) -> dict[str, Any]:
    return overlap_of(train, evaluation, Reading(**reading), Settings(), Path("unused"))


@pytest.fixture
def tokenizers(byte_tokenizer: Tokenizer, small: Tokenizer) -> dict[str, Tokenizer]:
    return {"bytes": byte_tokenizer, "file": small}


@pytest.fixture
def sides() -> tuple[list[str], list[str]]:
    """200 training documents; 60 fresh ones, one of which shares 25 words, and one copy."""
    train, fresh = texts(200, 0), texts(60, 1)
    part = " ".join([*train[3].split()[:25], *texts(1, 9)[0].split()])
    return train, [*fresh, part, train[7]]


@pytest.mark.parametrize("name", ["bytes", "file"])
def test_shards_are_measured_as_their_text_is(
    tmp_path: Path, tokenizers: dict[str, Tokenizer], sides: Any, name: str
) -> None:
    """Documents of a shard and of a file of text: the same n-grams, found as often. Blocks of the
    same ids differ by what their edges cut."""
    train, evaluation = sides
    for side, documents in zip("ab", sides, strict=True):
        (tmp_path / f"{side}.txt").write_text("\n\n".join(documents))
    of_text = overlap(str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    one = write_shard(tmp_path / "a", train, tokenizers[name])
    other = write_shard(tmp_path / "b", evaluation, tokenizers[name])
    given = {"tokenizer_path": str(RANKS_4096)} if name == "file" else {}
    of_shards = overlap(one, other, **given)
    counted = dict(of_shards["overlap"])
    assert counted.pop("measured_on") == f"words of the decoded ids ({name})"
    tokens = counted.pop("overlapping_tokens")
    assert tokens == sum(len(tokenizers[name].encode(text)) for text in evaluation[-2:])
    expected = dict(of_text["overlap"])
    assert expected.pop("measured_on") == "words of the text"
    assert expected.pop("overlapping_bytes") == sum(map(len, evaluation[-2:]))
    assert counted == expected
    assert (counted["ngrams_in_training"], counted["copies"]) == (13 + 28, 1)
    beside_text = overlap(one, str(tmp_path / "b.txt"), **given)
    assert beside_text["overlap"] == of_text["overlap"]
    assert beside_text["overlap_rule"] == of_text["overlap_rule"]
    fresh = write_shard(tmp_path / "fresh", evaluation[:-2], tokenizers[name])
    assert overlap(one, fresh, **given)["status"] == "held_out"
    blocks = overlap(without_documents(one), without_documents(other), **given)
    assert blocks["overlap"]["measured_on"] == f"words of the decoded ids ({name})"
    assert abs(blocks["overlap"]["ngrams_in_training"] - 41) <= 13


def test_ids_are_measured_where_nothing_decodes_them(
    tmp_path: Path, byte_tokenizer: Tokenizer, sides: Any
) -> None:
    """The very same sides: of bytes 13 in a row are two words, which stand everywhere."""
    one, other = (
        write_shard(tmp_path / side, documents, byte_tokenizer, "ab" * 32)
        for side, documents in zip("ab", (sides[0], sides[1][:-2]), strict=True)
    )
    found = overlap(one, other)
    assert found["status"] == "contaminated"
    assert found["overlap_rule"].startswith("n-grams of 13 tokens;")
    said = f"token ids: 'bytes' is not its tokenizer: SHA-256 {byte_tokenizer.content_sha256}, not"
    assert found["overlap"]["measured_on"] == f"{said} {'ab' * 32}"


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Data]:
    def build(tokenizer: dict[str, Any] | None = None, **data: Any) -> Data:
        changes = {"training": {"seq_len": 32}, "data": {"dataset": "tokens", **data}}
        changes["tokenizer"] = tokenizer or {}
        spec = RunSpec.model_validate({"name": "x", **changes})
        return load_data(spec, tmp_path / "store", seed=1)

    return build


def test_a_run_on_shards_measures_their_words(
    load: Callable[..., Data], tmp_path: Path, byte_tokenizer: Tokenizer, sides: Any
) -> None:
    one = write_shard(tmp_path / "a", sides[0], byte_tokenizer)
    other = write_shard(tmp_path / "b", sides[1][:-2], byte_tokenizer)
    data = load(tokens_path=one, eval_tokens_path=other)
    found = data.facts["evaluation"]["held_out"]
    assert (found["status"], found["overlap"]["ngrams"]) == ("held_out", 60 * 28)
    assert found["overlap"]["measured_on"] == "words of the decoded ids (bytes)"
    assert data.train_passages is not None
    assert data.train_passages.unit == "word"
    everything = write_shard(tmp_path / "c", sides[1], byte_tokenizer)
    found = load(tokens_path=one, eval_tokens_path=everything).facts["evaluation"]["held_out"]
    assert (found["status"], found["overlap"]["overlapping_documents"]) == ("contaminated", 2)
    # Known by name alone: the ids themselves show that it is the one.
    for folder in (one, other):
        without_documents(folder)
    data = load(tokens_path=one, eval_tokens_path=other)
    found = data.facts["evaluation"]["held_out"]
    assert (found["status"], found["unit"]) == ("held_out", "block of 1024 tokens")
    assert found["overlap"]["measured_on"] == "words of the decoded ids (bytes)"
    assert str(data.facts["tokenizer"]["sha256"]).startswith("shards:")


def reason(shard: str, path: str | None = None, **given: Any) -> str:
    found = tokenizer_of_shards([open_shard(shard, **given)], path, Path("unused"))
    assert isinstance(found, str)
    return found


def random_shard(folder: Path, name: str, vocab_size: int, below: int) -> str:
    with ShardWriter(folder, tokenizer=name, vocab_size=vocab_size) as writer:
        writer.append(np.random.default_rng(0).integers(0, below, 3_000))
        writer.finish()
    return str(folder)


def test_a_name_is_believed_where_the_ids_bear_it_out(
    tmp_path: Path, small: Tokenizer, sides: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = without_documents(write_shard(tmp_path / "s", sides[0], small))
    here = str(RANKS_4096)
    assert isinstance(tokenizer_of_shards([open_shard(ids)], here, Path("unused")), Tokenizer)
    assert reason(ids) == "the tokenizer is a file, and tokenizer.path does not name it"
    # 4,097 ids of another vocabulary: what they are decoded to is cut otherwise.
    other = random_shard(tmp_path / "r", "file", 4_097, 4_096)
    with pytest.raises(DataError, match=r"tokenizer.path: .*of its ids only \d+% stay the same"):
        tokenizer_of_shards([open_shard(other)], here, Path("unused"))
    said = "'bytes' is not its tokenizer: 257 entries beside 300, ids up to 299"
    assert reason(random_shard(tmp_path / "high", "bytes", 300, 300)) == said
    said = "'bytes' is not its tokenizer: 257 entries beside 200, ids up to 199"
    assert reason(random_shard(tmp_path / "low", "bytes", 200, 200)) == said
    few = reason(random_shard(tmp_path / "few", "bytes", 257, 257))
    assert "stay the same when their text is encoded again" in few
    assert "no such tokenizer" in reason(random_shard(tmp_path / "odd", "toy", 257, 257))


def test_nothing_is_downloaded_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode that can do without the tokenizer does not ask the network for it."""
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(f"{_download.__module__}._download", lambda address: 1 / 0)
    shard = random_shard(tmp_path / "s", "p50k_edit", 50_284, 50_284)
    assert "nothing is downloaded for it" in reason(shard)


@pytest.mark.parametrize("eods", [0, 5])
def test_long_stretches_are_decoded_in_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: Tokenizer, eods: int
) -> None:
    """No n-gram is lost or made up where a part ends, whatever its characters weigh."""
    rng = np.random.default_rng(0)
    words = ["straße", "été", "naïve", "plain", "日本語の本", "x" * 30, "two-part"]
    drawn = [words[i] for i in rng.integers(0, len(words), 3_000)]
    text = " ".join(f"{word}{i % 70}" for i, word in enumerate(drawn))
    ids = small.encode(text).astype(np.int64)
    places = np.sort(rng.integers(0, len(ids), eods))
    ids = np.insert(ids, places, small.eod_id)

    def grams(some: list[Text]) -> set[int]:
        batches = word_batches(some, 12)
        return {int(value) for batch in batches for value in windows(batch, 13).values}

    ranges = np.array([[0, 40], [40, len(ids)]])
    expected = grams(list(texts_of(ids, ranges, small)))
    monkeypatch.setattr(passages, "DECODED_AT_ONCE", 100)
    parts = list(texts_of(ids, ranges, small, in_parts=True))
    assert [type(part) for part in parts] == [str, LongText]
    assert grams(parts) == expected
    assert len(expected) > 2_900


def test_a_long_stretch_without_blanks_is_cut_between_characters(
    monkeypatch: pytest.MonkeyPatch, byte_tokenizer: Tokenizer
) -> None:
    text = "長い文章を切る" * 40
    ids = byte_tokenizer.encode(text).astype(np.int64)
    monkeypatch.setattr(passages, "DECODED_AT_ONCE", 100)
    (part,) = texts_of(ids, np.array([[0, len(ids)]]), byte_tokenizer, in_parts=True)
    assert isinstance(part, LongText)
    pieces = list(part.pieces())
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 40


def test_text_beside_shards_is_held_out_as_beside_text(
    load: Callable[..., Data], tmp_path: Path, byte_tokenizer: Tokenizer, sides: Any
) -> None:
    train, evaluation = sides
    (tmp_path / "a.txt").write_text("\n\n".join(train))
    (tmp_path / "b.txt").write_text("\n\n".join(evaluation))
    further = [{"name": "wiki", "path": str(tmp_path / "b.txt")}]
    common = {"held_out": further, "held_out_ratio": 0}
    shard = write_shard(tmp_path / "s", train, byte_tokenizer)
    data = load(tokens_path=shard, **common)
    assert list(data.evaluation_sets) == ["train_split", "contaminated.wiki"]
    found = data.facts["evaluation"]["held_out.wiki"]
    text = {"dataset": "text", "text_file": str(tmp_path / "a.txt"), **common}
    of_text = load(tokenizer={"name": "bytes"}, **text).facts["evaluation"]["held_out.wiki"]
    assert found == of_text
    assert (found["documents"], found["overlap"]["overlapping_documents"]) == (62, 2)
    # Also where only its name is known.
    data = load(tokens_path=without_documents(shard), **common)
    assert data.facts["evaluation"]["held_out.wiki"]["sha256"] == of_text["sha256"]


def test_text_beside_shards_that_nothing_decodes_is_one_clear_error(
    load: Callable[..., Data], tmp_path: Path, byte_tokenizer: Tokenizer, sides: Any
) -> None:
    (tmp_path / "b.txt").write_text("\n\n".join(sides[1]))
    shard = write_shard(tmp_path / "s", sides[0], byte_tokenizer, name="toy", content_sha256="1")
    further = [{"name": "wiki", "path": str(tmp_path / "b.txt")}]
    with pytest.raises(DataError, match=r"data.held_out: text cannot be encoded as the shard is"):
        load(tokens_path=shard, held_out=further)
    with pytest.raises(DataError, match=r"13 ids at a time.*data.overlap_ngram above 13"):
        load(tokens_path=shard)  # of bytes: they stand everywhere
    data = load(tokens_path=shard, overlap_ngram=90)
    assert data.facts["evaluation"]["held_out"]["overlap"]["measured_on"].startswith("token ids")


def test_a_rank_file_that_did_not_write_the_shard_is_refused(
    tmp_path: Path, small: Tokenizer, sides: Any
) -> None:
    shard: TokenShard = open_shard(write_shard(tmp_path / "s", sides[0], small, "cd" * 32))
    with pytest.raises(DataError, match=r"tokenizer.path: is not the tokenizer of the shard"):
        tokenizer_of_shards([shard], str(RANKS_4096), Path("unused"))
    with pytest.raises(DataError, match=r"none.tiktoken: cannot be read"):
        tokenizer_of_shards([shard], str(tmp_path / "none.tiktoken"), Path("unused"))
    assert isinstance(load_tokenizer("file", RANKS_4096, tmp_path), Tokenizer)


def test_a_shard_is_split_as_its_text_is(
    load: Callable[..., Data], tmp_path: Path, byte_tokenizer: Tokenizer, small: Tokenizer
) -> None:
    """Near-duplicates on one side, by whatever ids; each set is the same, to its hash."""
    alone = [text.title() if i % 2 else text for i, text in enumerate(texts(60, 0))]
    alike = [f"{' '.join(text.split()[:30])} {texts(1, 90 + i)[0]}" for i, text in enumerate(alone)]
    documents = [*alone, *alike[:25]]
    (tmp_path / "a.txt").write_text("\n\n".join(documents))
    common = {"held_out_ratio": 0.3}
    of_text = load(
        tokenizer={"name": "bytes"}, dataset="text", text_file=str(tmp_path / "a.txt"), **common
    )
    groups = of_text.facts["data"]["counts"]["near_duplicate_groups"]
    assert groups == 25
    for tokenizer in (byte_tokenizer, small):
        shard = write_shard(tmp_path / tokenizer.name, documents, tokenizer)
        given = {"name": "file", "path": str(RANKS_4096)} if tokenizer is small else {}
        data = load(tokens_path=shard, tokenizer=given, **common)
        assert data.facts["data"]["split"] == of_text.facts["data"]["split"]
        assert data.facts["data"]["train_sha256"] == of_text.facts["data"]["train_sha256"]
        assert data.facts["data"]["counts"]["near_duplicate_groups"] == groups
        found, expected = (one.facts["evaluation"]["held_out"] for one in (data, of_text))
        assert found["sha256"] == expected["sha256"]
        assert (found["status"], found["overlap"]["share"]) == ("held_out", 0)
        again = load(tokens_path=shard, tokenizer=given, **common)  # from what was remembered
        assert again.facts == data.facts
    # Of ids that nothing decodes: the same groups, by 13 ids.
    hidden = write_shard(tmp_path / "ids", documents, small, "ab" * 32, name="toy")
    data = load(tokens_path=hidden, **common)
    assert data.facts["data"]["split"].endswith("near-duplicates (13 tokens, 0.2) together")
    assert data.facts["data"]["counts"]["near_duplicate_groups"] >= 1
    assert data.facts["evaluation"]["held_out"]["status"] == "held_out"


def test_damaged_groups_are_found_again(
    load: Callable[..., Data], tmp_path: Path, byte_tokenizer: Tokenizer, caplog: Any
) -> None:
    shard = write_shard(tmp_path / "s", texts(40, 0), byte_tokenizer)
    first = load(tokens_path=shard, held_out_ratio=0.2)
    (kept,) = (tmp_path / "store/cache/shards").glob("*.npz")
    content = bytearray(kept.read_bytes())
    content[300] ^= 1
    kept.write_bytes(content)
    assert load(tokens_path=shard, held_out_ratio=0.2).facts == first.facts
    assert "are damaged (it does not match its own hash)" in caplog.text
    assert kept.read_bytes() != bytes(content)


def test_the_tail_of_few_documents_is_no_part_of_training(
    load: Callable[..., Data], tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    """The cut stands inside the last document, whose end does not train."""
    documents = [" ".join(texts(20, i)) for i in range(5)]
    shard = write_shard(tmp_path / "s", documents, byte_tokenizer)
    data = load(tokens_path=shard, held_out_ratio=0.05)
    found = data.facts["evaluation"]["held_out"]
    assert (found["unit"], found["status"]) == ("block of 1024 tokens", "held_out")
    assert found["overlap"]["ngrams_in_training"] == 0


def test_few_documents_beside_a_held_out_shard_are_scored_as_documents(
    load: Callable[..., Data], tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    train = write_shard(tmp_path / "a", texts(5, 0), byte_tokenizer)
    data = load(
        tokens_path=train,
        eval_tokens_path=write_shard(tmp_path / "b", texts(3, 1), byte_tokenizer),
    )
    facts = data.facts["evaluation"]
    assert {one["unit"] for one in facts.values()} == {"document"}
    scored = data.evaluation_sets["train_split"].documents
    assert {bytes(ids.tolist()).decode() for ids in scored} <= set(texts(5, 0))
    assert facts["train_split"]["documents"] == 3  # as many tokens as are held out
    empty = write_shard(tmp_path / "c", [""], byte_tokenizer)
    with pytest.raises(DataError, match=r"eval_tokens_path: the documents .* hold no ids"):
        load(tokens_path=train, eval_tokens_path=empty)


def write_megatron(stem: Path, documents: list[str], tokenizer: Tokenizer) -> str:
    rows = [np.append(tokenizer.encode(t), np.uint16(tokenizer.eod_id)) for t in documents]
    lengths = np.array([len(row) for row in rows], "<i4")
    starts = (np.cumsum(lengths) - lengths) * 2
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(rows), len(rows) + 1)
    table = [lengths, starts.astype("<i8"), np.arange(len(rows) + 1, dtype="<i8")]
    stem.with_suffix(".idx").write_bytes(head + b"".join(part.tobytes() for part in table))
    stem.with_suffix(".bin").write_bytes(b"".join(row.tobytes() for row in rows))
    return str(stem)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "order",
    ["sequential", pytest.param("shuffled", marks=SLOW), pytest.param("random", marks=SLOW)],
)
def test_documents_of_a_megatron_pair(
    load: Callable[..., Data], tmp_path: Path, byte_tokenizer: Tokenizer, order: str
) -> None:
    """Known by their boundaries, decoded by a tokenizer that is known by name: whole documents are
    held out, the same under every order, and never train."""
    documents = texts(60, 0)
    pair = write_megatron(tmp_path / "corpus", documents, byte_tokenizer)
    data = load(
        tokenizer={"name": "bytes", "vocab_size": 257},
        tokens_path=pair,
        held_out_ratio=0.2,
        order=order,
    )
    found = data.facts["evaluation"]["held_out"]
    assert (found["status"], found["unit"]) == ("held_out", "document")
    assert found["overlap"]["measured_on"] == "words of the decoded ids (bytes)"
    held_out = [
        bytes(ids[:-1].tolist()).decode() for ids in data.evaluation_sets["held_out"].documents
    ]
    assert len(held_out) == found["documents"] == data.facts["data"]["counts"]["held_out_documents"]
    assert set(held_out) < set(documents)
    assert 5 <= len(held_out) <= 20
    stream = data.train_stream()
    read = stream.next_batch(2 * (stream.windows_per_epoch or 100))
    trained = bytes(np.where(read < 256, read, 10).astype(np.uint8).ravel().tolist())
    assert not [text for text in held_out if text[40:70].encode() in trained]
    if order != "random":
        assert [text for text in documents if text[40:60].encode() in trained]
    hidden = load(
        tokenizer={"name": "toy", "vocab_size": 257},
        tokens_path=pair,
        held_out_ratio=0.2,
        overlap_ngram=100,
    )
    assert hidden.facts["evaluation"]["held_out"]["overlap"]["measured_on"].startswith("token ids")


def test_bytes_of_blocks_are_known_where_the_tokenizer_is(
    load: Callable[..., Data], tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    """By content, and on this machine; a shard trains without it all the same."""
    text = " ".join(texts(40, 0))
    one = write_shard(tmp_path / "a", [text], byte_tokenizer)
    found = load(tokens_path=one).facts["evaluation"]["held_out"]
    assert (found["unit"], found["bytes"]) == ("block of 1024 tokens", found["scored_tokens"])
    away = write_shard(tmp_path / "b", [text], byte_tokenizer, "ef" * 32, name="p50k_edit")
    data = load(tokens_path=away)
    found = data.facts["evaluation"]["held_out"]
    assert found["bytes"] == {"not_applicable": "the text of these ids is not known"}
    assert data.evaluation_sets["contaminated"].byte_counts is None


def test_the_tokenizer_of_a_run_is_known_by_its_shards(
    tmp_path: Path, byte_tokenizer: Tokenizer, sides: Any
) -> None:
    """Where they name no hash: as long as they are the ones that trained the run."""
    shard = without_documents(write_shard(tmp_path / "s", sides[0], byte_tokenizer))
    data = {"dataset": "tokens", "tokens_path": shard}
    spec = RunSpec.model_validate({"name": "x", "data": data})
    recorded = load_data(spec, tmp_path / "store", seed=1).facts["tokenizer"]["sha256"]
    found = tokenizer_by_shards(spec, tmp_path / "store", recorded)
    assert isinstance(found, Tokenizer)
    assert found.content_sha256 == byte_tokenizer.content_sha256
    shutil.rmtree(shard)
    without_documents(write_shard(tmp_path / "s", sides[1], byte_tokenizer))
    said = tokenizer_by_shards(spec, tmp_path / "store", recorded)
    assert isinstance(said, str)
    assert said.startswith("the shards are others now: shards:")


def test_shards_without_a_record_of_their_tokenizer_are_not_taken_as_alike(
    load: Callable[..., Data], tmp_path: Path
) -> None:
    """The same name and size prove nothing; the same ids do."""
    rng = np.random.default_rng(0)
    for name in "ab":
        with ShardWriter(tmp_path / name, tokenizer="toy", vocab_size=512) as writer:
            writer.append(rng.integers(0, 512, 4_000))
            writer.finish()
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    one, other, same = (
        load(tokens_path=str(tmp_path / name)).facts["tokenizer"] for name in ("a", "b", "copy")
    )
    assert one == same
    assert one.pop("sha256") != other.pop("sha256")
    assert one == other == {"name": "toy", "vocab_size": 512}
