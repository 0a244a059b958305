"""Streams: the order is that of the documents alone, in batches of any size, from any position."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parquet_streams import made_up, stream_spec, three_files, write_files

from workbench.core.data.encoded import split_hash
from workbench.core.data.errors import DataError
from workbench.core.data.evaluation_sets import EvaluationSet
from workbench.core.data.loading import load_data
from workbench.core.data.overlap import Passages, Settings, measure
from workbench.core.data.passing import Passing, Watched
from workbench.core.data.retry import Patience
from workbench.core.data.sides import Documents as SplitDocuments
from workbench.core.data.sides import choose_sides, is_held_out
from workbench.core.data.stream import Documents, DocumentStream
from workbench.core.data.stream_data import load_stream
from workbench.core.data.stream_files import StreamFile, folder_key, folder_source
from workbench.core.data.stream_rows import Position, RowReader
from workbench.core.data.tokenizer import Tokenizer, load_tokenizer

RATIO, S = 0.2, 32


def trained(texts: list[str], ratio: float = RATIO) -> list[str]:
    return [t for t in texts if t.strip() and not is_held_out(split_hash(t), ratio)]


def packed(texts: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """Every window of the documents that train, from their definition."""
    ids = [i for t in trained(texts) for i in (tokenizer.eod_id, *t.encode("utf-8"))]
    count = (len(ids) - 1) // S
    return np.array([ids[i * S : i * S + S + 1] for i in range(count)])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer("bytes", None, tmp_path_factory.mktemp("none"))


@pytest.fixture
def stream_of(tmp_path: Path, tokenizer: Tokenizer) -> Any:
    def build(folder: Path, field: str = "text") -> DocumentStream:
        source = folder_source(str(folder), field, tmp_path / "cache")
        rows = RowReader(source.files, field, Patience(waits=()))
        documents = Documents(rows, tokenizer, RATIO)
        return DocumentStream(documents, S, {"content": source.key}, Passing({}, Settings()))

    return build


def read_all(stream: DocumentStream, count: int) -> list[np.ndarray]:
    found = []
    while stream.has_next(count):
        found.append(stream.next_batch(count))
    return found


def test_windows_are_the_training_documents_in_order_each_after_its_end_id(
    tmp_path: Path, stream_of: Any, tokenizer: Tokenizer
) -> None:
    folder, texts = three_files(tmp_path / "s")
    expected = packed(texts, tokenizer)
    for count in (1, 3):
        found = np.concatenate(read_all(stream_of(folder), count))
        assert len(expected) - len(found) < count
        assert (found == expected[: len(found)]).all()


def test_a_cursor_goes_on_anywhere_and_reads_nothing_before_it(
    tmp_path: Path, stream_of: Any, tokenizer: Tokenizer
) -> None:
    folder, texts = three_files(tmp_path / "s")
    expected, straight = packed(texts, tokenizer), stream_of(folder)
    states = [json.dumps(straight.state_dict())]
    while straight.has_next(6):
        straight.next_batch(6)
        states.append(json.dumps(straight.state_dict()))
    files = {json.loads(state)["open"][0] for state in states}
    assert files == {0, 1, 2}
    end = straight.found()
    for number, state in enumerate(states):
        stream = stream_of(folder)
        stream.load_state_dict(json.loads(state))
        rest = read_all(stream, 6)
        assert (
            np.concatenate([expected[:0], *rest]) == expected[6 * number :][: 6 * len(rest)]
        ).all()
        assert len(rest) == len(states) - 1 - number
        assert stream.found() == end


def test_what_stands_before_a_cursor_is_not_fetched(
    tmp_path: Path, tokenizer: Tokenizer, stream_of: Any
) -> None:
    folder, _ = three_files(tmp_path / "s")
    straight = stream_of(folder)
    for _ in range(80):
        straight.next_batch(4)
    state = straight.state_dict()
    assert state["open"][0] == 2
    before = [folder / "000.parquet", folder / "001.parquet"]
    stream = stream_of(folder)
    opened: list[str] = []
    rows = stream.documents.rows
    rows.files = [
        StreamFile(f.name, lambda f=f: opened.append(f.name) or f.open()) for f in rows.files
    ]
    stream.load_state_dict(state)
    assert (stream.next_batch(4) == straight.next_batch(4)).all()
    assert not set(opened) & {str(path) for path in before}


def test_a_cursor_of_another_stream_is_refused(tmp_path: Path, stream_of: Any) -> None:
    folder, texts = three_files(tmp_path / "s")
    stream = stream_of(folder)
    stream.next_batch(1)
    other = stream_of(write_files(tmp_path / "t", texts))
    with pytest.raises(DataError, match="saved for other data: content"):
        other.load_state_dict(stream.state_dict())


def test_the_side_is_that_of_the_split_and_ignores_case_and_blanks() -> None:
    texts = made_up(200)
    hashes = np.frombuffer(b"".join(map(split_hash, texts)), np.uint8).reshape(-1, 32)
    lengths = np.full(len(texts), 50)

    def passages(chosen: Any) -> Passages:
        return Passages(str(len(chosen)), None, lambda: iter([texts[i] for i in chosen]))

    sides = choose_sides(SplitDocuments(lengths, hashes, hashes, None, passages), RATIO, Settings())
    assert [is_held_out(split_hash(t), RATIO) for t in texts] == sides.is_held_out.tolist()
    assert split_hash(" A  b\n") == split_hash("a B")


def test_held_out_documents_never_train_and_the_sets_are_the_first_of_each_side(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder, texts = three_files(tmp_path / "s")
    held = [t for t in texts if is_held_out(split_hash(t), RATIO)]
    spec = stream_spec(folder)
    data = load_stream(spec, tokenizer, tmp_path / "store", {})

    def texts_of(name: str) -> set[str]:
        return {bytes(ids.tolist()).decode() for ids in data.sets[name].documents}

    assert texts_of("held_out") == set(held[:6])
    assert texts_of("train_split") == set(trained(texts)[:6])
    stream = data.train_stream()
    seen = np.concatenate(read_all(stream, 1))[:, :-1].ravel().tolist()
    text = bytes(i if i < 256 else 10 for i in seen).decode()
    assert not any(one in text for one in held)
    assert all(one in text for one in trained(texts)[:-1])
    assert stream.found().counts["consumed_held_out"] == len(
        [t for t in held if texts.index(t) < texts.index(trained(texts)[-1])]
    )
    assert data.facts["counts"]["look_ahead"] == texts.index(held[5]) + 1


def test_the_look_ahead_is_bounded(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.core.data import stream_data

    monkeypatch.setattr(stream_data, "LEAST_LOOK_AHEAD", 7)
    folder, _ = three_files(tmp_path / "s")
    spec = stream_spec(folder, data={"stream_eval_documents": 1, "held_out_ratio": 0.5})
    data = load_stream(spec, tokenizer, tmp_path / "store", {})
    assert data.facts["counts"]["look_ahead"] <= 8
    spec = stream_spec(folder, data={"held_out_ratio": 1e-9, "stream_eval_documents": 1})
    monkeypatch.setattr(stream_data, "LOOK_AHEAD", 1e-9)
    with pytest.raises(DataError, match=r"none of the first 7 documents .* held-out side"):
        load_stream(spec, tokenizer, tmp_path / "store", {})


def test_a_stream_is_known_by_its_content(tmp_path: Path) -> None:
    folder, texts = three_files(tmp_path / "s")
    elsewhere = write_files(tmp_path / "t", texts[:45], texts[45:70], texts[70:])
    (tmp_path / "link").symlink_to(folder)
    keys = [load_data(stream_spec(f), tmp_path / "m", seed=1).facts for f in (folder, elsewhere)]
    keys.append(load_data(stream_spec(tmp_path / "link"), tmp_path / "m", seed=1).facts)
    assert keys[0] == keys[1] == keys[2]
    other = write_files(tmp_path / "u", texts[:45], texts[70:], texts[45:70])
    facts = load_data(stream_spec(other), tmp_path / "m", seed=1).facts
    assert facts["data"]["train_sha256"] != keys[0]["data"]["train_sha256"]


def watched(texts: list[str], tokenizer: Tokenizer) -> Watched:
    from workbench.core.data.stream_data import _set

    one: EvaluationSet = _set("held_out", texts, tokenizer)
    return Watched(one, texts)


def test_what_passes_is_what_measuring_all_of_it_finds(tokenizer: Tokenizer) -> None:
    held, train = made_up(12, 7, 25), made_up(30, 8)
    train[3] += " " + held[2]  # stands inside another
    train[9] = held[4]  # a copy
    train[11] = " ".join(held[6].split()[2:20])  # a part
    sets = {"held_out": watched(held, tokenizer)}
    whole = Passing(sets, Settings())
    whole.see(train)
    halves = Passing(sets, Settings())
    halves.see(train[:10])
    resumed = Passing(sets, Settings())
    resumed.load_state_dict(json.loads(json.dumps(halves.state_dict())))
    resumed.see(train[10:])
    hashes = sets["held_out"].documents.content_sha256
    sides = [Passages(str(len(t)), None, lambda t=t: iter(t)) for t in (held, train)]
    expected = measure(*sides, 13)
    for one in (whole, resumed):
        found = one.overlap("held_out")
        assert (found.found == expected.found).all()
        assert (found.ngrams == expected.ngrams).all()
        assert np.flatnonzero(found.copies).tolist() == [4]
    outcome = whole.found(30)["held_out"]
    assert outcome["outcome"] == "contaminated"
    assert (outcome["copies"], outcome["checked_documents"]) == (1, 30)
    assert halves.found(10) != whole.found(30)
    assert len(hashes) == 12
    clean = Passing(sets, Settings())
    clean.see(made_up(30, 9))
    assert clean.found(30)["held_out"]["outcome"] == "held_out"


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    def error(folder: Path, **data: Any) -> str:
        def read() -> None:
            found = load_data(stream_spec(folder, data=data), tmp_path / "store", seed=1)
            found.train_stream().has_next(10**6)

        with pytest.raises(DataError) as caught:
            read()
        return str(caught.value)

    assert "data.stream_path: no such folder" in error(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/readme.txt").write_text("x")
    assert "holds no .parquet file (1 of other kinds)" in error(tmp_path / "empty")
    good = write_files(tmp_path / "good", made_up(20))
    assert "column 'txt' is missing. Did you mean 'text'?" in error(good, text_field="txt")
    assert "the column 'score' holds no text" in error(good, text_field="score")
    null = write_files(tmp_path / "null", made_up(20), [*made_up(33, 2), None])
    said = error(null)
    assert "001.parquet, row 34" in said
    assert "'text' is not text" in said
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/a.parquet").write_bytes(b"PAR1 not parquet PAR1")
    assert "not a readable parquet file" in error(tmp_path / "bad")
    assert "is a file" in error(tmp_path / "bad/a.parquet")


def test_a_file_that_changes_is_noticed(tmp_path: Path, stream_of: Any) -> None:
    folder, _ = three_files(tmp_path / "s")
    stream = stream_of(folder)
    stream.next_batch(1)
    os.utime(folder / "001.parquet", ns=(1, 1))
    with pytest.raises(DataError, match=r"001\.parquet: the file changed"):
        read_all(stream, 1)
    (folder / "001.parquet").unlink()
    with pytest.raises(DataError, match=r"changed|cannot be read"):
        read_all(stream_of_again(stream), 1)


def test_a_file_that_another_of_its_size_and_time_takes_the_place_of(
    tmp_path: Path, stream_of: Any
) -> None:
    folder, _ = three_files(tmp_path / "s")
    path, other = folder / "001.parquet", tmp_path / "other.parquet"
    os.utime(path, ns=(10**18, 10**18))
    first = stream_of(folder).identity
    shutil.copy(path, other)
    raw = bytearray(path.read_bytes())
    raw[9] ^= 1
    other.write_bytes(raw)
    os.utime(other, ns=(10**18, 10**18))
    stream = stream_of(folder)
    other.replace(path)
    with pytest.raises(DataError, match=r"001\.parquet: the file changed"):
        read_all(stream, 1)
    assert stream_of(folder).identity != first  # nor is its hash remembered


def test_a_hash_is_not_remembered_of_a_file_whose_time_was_set_back(
    tmp_path: Path, stream_of: Any
) -> None:
    folder, _ = three_files(tmp_path / "s")
    path = folder / "001.parquet"
    os.utime(path, ns=(10**18, 10**18))
    first = stream_of(folder).identity
    raw = bytearray(path.read_bytes())
    raw[9] ^= 1
    with path.open("r+b") as file:
        file.write(raw)
    os.utime(path, ns=(10**18, 10**18))
    assert stream_of(folder).identity != first


def test_a_document_that_no_tokenizer_takes_is_found(tmp_path: Path) -> None:
    texts = made_up(12)
    texts[7] = "x" + " " * 1_000_000 + "x"
    write_files(tmp_path / "s", made_up(9, 1), texts)
    rank_file = Path(__file__).parents[3] / "configs/tokenizer/o200k-4096.tiktoken"
    tokenizer = load_tokenizer("file", rank_file, tmp_path)
    source = folder_source(str(tmp_path / "s"), "text", tmp_path / "cache")
    documents = Documents(RowReader(source.files, "text", Patience(waits=())), tokenizer, 0.0)
    with pytest.raises(DataError, match=r"001\.parquet \(file 2 of 2\), row 8, the document start"):
        list(documents.read())


def test_a_folder_whose_file_is_gone_is_one_clear_error(tmp_path: Path) -> None:
    folder, _ = three_files(tmp_path / "s")
    (folder / "003.parquet").symlink_to(tmp_path / "gone")
    for read in (
        lambda: folder_source(str(folder), "text", tmp_path / "cache"),
        lambda: folder_key(str(folder), tmp_path / "cache"),
    ):
        with pytest.raises(DataError, match=r"003\.parquet: cannot be read: no such file"):
            read()


def stream_of_again(stream: DocumentStream) -> DocumentStream:
    return DocumentStream(stream.documents, S, stream.identity, stream.passing)


def test_blank_documents_are_passed_over_and_counted(tmp_path: Path, stream_of: Any) -> None:
    texts = made_up(40)
    folder = write_files(tmp_path / "s", [*texts[:5], "", " \n", *texts[5:]])
    stream = stream_of(folder)
    read_all(stream, 1)
    assert stream.found().counts["consumed_empty"] == 2
    assert stream.found().counts["consumed_documents"] == len(trained(texts))


def test_fewer_sequences_than_planned_is_an_error(tmp_path: Path, stream_of: Any) -> None:
    stream = stream_of(write_files(tmp_path / "s", made_up(8)))
    with pytest.raises(DataError, match="the stream ends after 0 sequences"):
        stream.next_batch(10**6)


def test_positions_in_words(tmp_path: Path, stream_of: Any) -> None:
    rows = stream_of(three_files(tmp_path / "s")[0]).documents.rows
    assert rows.describe(Position(1, 4)).endswith("001.parquet (file 2 of 3), row 5")
    assert rows.describe(Position(3, 0)) == "the end of the stream"
