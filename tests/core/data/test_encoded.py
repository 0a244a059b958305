"""The encoded corpus: what comes back is what was encoded, whatever happens to the cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import workbench
from workbench.core.data import atomic
from workbench.core.data.corpus import Corpus, text_corpus
from workbench.core.data.encoded import EncodedCorpus, encode_corpus, normalised
from workbench.core.data.errors import DataError
from workbench.core.data.tokenizer import Tokenizer
from workbench.errors import StoreError

CorpusOf = Callable[..., Corpus]
TEXTS = ["first é", "", "x", "  \n\t", "Second  document\n"]
KEPT = ["first é", "x", "Second  document\n"]


def as_lists(encoded: EncodedCorpus) -> list[list[int]]:
    return [encoded.document(i).tolist() for i in range(len(encoded))]


def test_documents_come_back(
    corpus_of: CorpusOf, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for _ in range(2):  # built, then opened
        encoded = encode_corpus(corpus_of(*TEXTS), byte_tokenizer, tmp_path)
        assert as_lists(encoded) == [list(text.encode()) for text in KEPT]
        assert encoded.skipped_empty == 2
        assert encoded.tokens[encoded.offsets[:-1]].tolist() == [256] * 3
        assert encoded.tokens.dtype == np.dtype("<u2")
        assert encoded.byte_counts.tolist() == [len(text.encode()) for text in KEPT]
        hashes = [hashlib.sha256(text.encode()).digest() for text in KEPT]
        assert encoded.content_sha256.tobytes() == b"".join(hashes)
        split = [
            hashlib.sha256(text).digest() for text in (b"first \xc3\xa9", b"x", b"second document")
        ]
        assert encoded.split_sha256.tobytes() == b"".join(split)


def test_large_vocabularies_take_four_bytes(
    corpus_of: CorpusOf, o200k: Tokenizer, tmp_path: Path
) -> None:
    text = o200k.decode([150_000])
    encoded = encode_corpus(corpus_of(text), o200k, tmp_path)
    assert encoded.tokens.dtype == np.dtype("<u4")
    assert encoded.tokens[0] == 199_999
    assert o200k.decode(encoded.document(0)) == text
    assert encoded.document(0).tolist() == [150_000]  # 18,928 in two bytes


def test_an_entry_is_used_again(
    corpus_of: CorpusOf, byte_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_corpus(corpus_of(*TEXTS), byte_tokenizer, tmp_path)
    monkeypatch.setattr(
        byte_tokenizer, "encode_documents", lambda texts: pytest.fail("encoded again")
    )
    encode_corpus(corpus_of(*TEXTS), byte_tokenizer, tmp_path)


def test_another_text_or_tokenizer_is_another_entry(
    corpus_of: CorpusOf, byte_tokenizer: Tokenizer, small: Tokenizer, tmp_path: Path
) -> None:
    encode_corpus(corpus_of("a", key="1"), byte_tokenizer, tmp_path)
    other = encode_corpus(corpus_of("b", key="2"), byte_tokenizer, tmp_path)
    assert as_lists(other) == [[98]]
    encode_corpus(corpus_of("a", key="1"), small, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_documents_are_the_same_in_batches_of_any_size(
    corpus_of: CorpusOf, byte_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"document {i}" if i % 3 else " " for i in range(50)]
    whole = encode_corpus(corpus_of(*texts), byte_tokenizer, tmp_path / "a")
    monkeypatch.setattr("workbench.core.data.encoded.BATCH_DOCUMENTS", 4)
    parts = encode_corpus(corpus_of(*texts), byte_tokenizer, tmp_path / "b")
    monkeypatch.setattr("workbench.core.data.encoded.BATCH_CHARACTERS", 1)
    single = encode_corpus(corpus_of(*texts), byte_tokenizer, tmp_path / "c")
    assert as_lists(whole) == as_lists(parts) == as_lists(single)
    assert whole.skipped_empty == parts.skipped_empty == single.skipped_empty == 17


@pytest.mark.parametrize("texts", [[], [""], ["\n\n", " ", "\u2003"]])
def test_no_text_is_an_error_and_leaves_nothing(
    corpus_of: CorpusOf, byte_tokenizer: Tokenizer, tmp_path: Path, texts: list[str]
) -> None:
    with pytest.raises(DataError, match=f"no text: {len(texts)} documents"):
        encode_corpus(corpus_of(*texts), byte_tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_text_names_the_setting_and_its_value(byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text("\n\n")
    corpus = text_corpus(str(tmp_path / "blank.txt"))
    with pytest.raises(DataError) as caught:
        encode_corpus(corpus, byte_tokenizer, tmp_path / "cache")
    (fault,) = caught.value.faults
    assert (fault.place, fault.value) == ("data.text_file", str(tmp_path / "blank.txt"))
    assert fault.allowed


def _cut(name: str, keep: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(entry: Path) -> None:
        os.truncate(entry / name, keep((entry / name).stat().st_size))

    return damage


def _flip(name: str) -> Callable[[Path], None]:
    def damage(entry: Path) -> None:
        raw = bytearray((entry / name).read_bytes())
        raw[-1] ^= 1
        (entry / name).write_bytes(raw)

    return damage


def _change_count(entry: Path) -> None:
    index = json.loads((entry / "index.json").read_text())
    index["header"]["skipped_empty"] += 1
    (entry / "index.json").write_text(json.dumps(index))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a byte short": _cut("tokens.bin", lambda size: size - 1),
    "a token short": _cut("tokens.bin", lambda size: size - 2),
    "half": _cut("tokens.bin", lambda size: size // 2),
    "empty": _cut("tokens.bin", lambda size: 0),
    "longer": _cut("tokens.bin", lambda size: size + 2),
    "a flipped bit": _flip("tokens.bin"),
    "flipped offsets": _flip("offsets.npy"),
    "short hashes": _cut("content_sha256.npy", lambda size: size - 1),
    "no tokens": lambda entry: (entry / "tokens.bin").unlink(),
    "no index": lambda entry: (entry / "index.json").unlink(),
    "half an index": _cut("index.json", lambda size: size // 2),
    "an index that lies": _change_count,
    "an index of another shape": lambda entry: (entry / "index.json").write_text("[]") and None,
    "an empty folder": lambda entry: [p.unlink() for p in entry.iterdir()] and None,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_entry_is_built_again_with_a_warning(
    corpus_of: CorpusOf,
    byte_tokenizer: Tokenizer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    encode_corpus(corpus_of(*TEXTS), byte_tokenizer, tmp_path)
    (entry,) = tmp_path.iterdir()
    DAMAGE[kind](entry)
    with caplog.at_level(logging.WARNING):
        encoded = encode_corpus(corpus_of(*TEXTS), byte_tokenizer, tmp_path)
    assert "damaged" in caplog.text
    assert as_lists(encoded) == [list(text.encode()) for text in KEPT]
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]
    caplog.clear()
    encode_corpus(corpus_of(*TEXTS), byte_tokenizer, tmp_path)
    assert caplog.text == ""


def test_a_short_file_is_seen_by_its_size_where_it_is_too_large_to_hash(
    corpus_of: CorpusOf,
    byte_tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("workbench.core.data.encoded.FULL_CHECK_BYTES", 0)
    encode_corpus(corpus_of(*TEXTS), byte_tokenizer, tmp_path)
    (entry,) = tmp_path.iterdir()
    DAMAGE["a token short"](entry)
    encoded = encode_corpus(corpus_of(*TEXTS), byte_tokenizer, tmp_path)
    assert "tokens.bin has" in caplog.text
    assert as_lists(encoded) == [list(text.encode()) for text in KEPT]


def test_an_id_outside_the_vocabulary_is_not_stored(
    corpus_of: CorpusOf, byte_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        byte_tokenizer, "encode_documents", lambda texts: [np.array([65_536 + 7]) for _ in texts]
    )
    with pytest.raises(ValueError, match="65,543 is outside the vocabulary of 257"):
        encode_corpus(corpus_of(*TEXTS), byte_tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_entry_of_another_corpus_is_not_taken(
    corpus_of: CorpusOf, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    encode_corpus(corpus_of("a", key="1"), byte_tokenizer, tmp_path)
    (first,) = tmp_path.iterdir()
    encode_corpus(corpus_of("b", key="2"), byte_tokenizer, tmp_path)
    (second,) = set(tmp_path.iterdir()) - {first}
    shutil.rmtree(second)
    shutil.copytree(first, second)
    assert as_lists(encode_corpus(corpus_of("b", key="2"), byte_tokenizer, tmp_path)) == [[98]]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_while_building_leaves_nothing(
    corpus_of: CorpusOf,
    byte_tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(StoreError if isinstance(error, OSError) else KeyboardInterrupt):
        encode_corpus(corpus_of(*TEXTS), byte_tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(
    corpus_of: CorpusOf, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
    living = [f".x.{host}.{os.getpid()}.aa.tmp", f".x.{host}-2.{child.pid}.aa.tmp", ".odd.tmp"]
    dead = f".x.y.{host}.{child.pid}.aa.tmp"
    for name in (*living, dead):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens.bin").write_bytes(b"x")
    encode_corpus(corpus_of(*TEXTS), byte_tokenizer, tmp_path)
    assert {path.name for path in tmp_path.glob(".*")} == set(living)


BUILDER = """
import sys, time, pathlib
from workbench.core.data.corpus import text_corpus
from workbench.core.data.encoded import encode_corpus
from workbench.core.data.tokenizer import load_tokenizer
store, text, ranks, name = sys.argv[1:]
store = pathlib.Path(store)
(store / f"ready-{name}").touch()
while not (store / "go").exists():
    time.sleep(0.001)
tokenizer = load_tokenizer("o200k_base", None, store / "tiktoken")
encoded = encode_corpus(text_corpus(text), tokenizer, store / "corpus")
print(len(encoded), int(encoded.tokens.sum()))
"""


def start_builder(store: Path, text: Path, name: str) -> subprocess.Popen[str]:
    root = str(Path(workbench.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(store), str(text), "", name],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    )


def test_processes_that_start_at_once_share_one_entry(
    tmp_path: Path, words: Callable[..., list[str]]
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("\n\n".join(words(3000)))
    builders = [start_builder(tmp_path, text, str(i)) for i in range(3)]
    while len(list(tmp_path.glob("ready-*"))) < 3:
        assert all(builder.poll() is None for builder in builders)
    (tmp_path / "go").touch()
    printed = [builder.communicate(timeout=60)[0] for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0, 0]
    assert len(set(printed)) == 1
    assert printed[0].startswith("3000 ")
    assert len(list((tmp_path / "corpus").iterdir())) == 1
    assert len(list((tmp_path / "tiktoken").iterdir())) == 1


KILLED = """
import os, pathlib, signal, sys
from workbench.core.data import atomic
from workbench.core.data.corpus import text_corpus
from workbench.core.data.encoded import encode_corpus
from workbench.core.data.tokenizer import load_tokenizer
atomic.write_synced = lambda path, data: os.kill(os.getpid(), signal.SIGKILL)
store, text = map(pathlib.Path, sys.argv[1:])
encode_corpus(text_corpus(str(text)), load_tokenizer("bytes", None, store), store)
"""


def test_what_a_killed_process_left_is_removed_and_built_anew(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    text, store = tmp_path / "a.txt", tmp_path / "store"
    text.write_text("one\n\ntwo")
    root = str(Path(workbench.__file__).parents[1])
    command = [sys.executable, "-c", KILLED, str(store), str(text)]
    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": root}).returncode == -9
    (left,) = store.iterdir()
    assert (left / "tokens.bin").stat().st_size == 16
    encoded = encode_corpus(text_corpus(str(text)), byte_tokenizer, store)
    assert as_lists(encoded) == [list(b"one"), list(b"two")]
    (entry,) = store.iterdir()
    assert not entry.name.startswith(".")


def test_the_entry_that_another_process_put_there_first_is_taken(
    corpus_of: CorpusOf, byte_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_corpus(corpus_of(*TEXTS), byte_tokenizer, tmp_path / "first")
    (made,) = (tmp_path / "first").iterdir()
    synced = atomic.write_synced

    def other_wins(path: Path, data: bytes) -> None:
        synced(path, data)
        shutil.copytree(made, tmp_path / "second" / made.name)

    monkeypatch.setattr(atomic, "write_synced", other_wins)
    encoded = encode_corpus(corpus_of(*TEXTS), byte_tokenizer, tmp_path / "second")
    assert as_lists(encoded) == [list(text.encode()) for text in KEPT]
    assert [path.name for path in (tmp_path / "second").iterdir()] == [made.name]


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    atomic.write_file(tmp_path / "f", b"old")

    def fail(path: Path, data: bytes) -> None:
        path.write_bytes(data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "write_synced", fail)
    with pytest.raises(OSError, match="No space"):
        atomic.write_file(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_takes_its_name_by_renaming_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    atomic.write_file(tmp_path / "f", b"old")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        atomic.write_file(tmp_path / "f", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"f": b"old"}


def test_normalising_by_hand() -> None:
    assert normalised("  Straße\r\n\tA\u00a0b ") == "strasse a b"


def test_ascii_is_normalised_like_any_text() -> None:
    draw = random.Random(1)
    characters = "".join(map(chr, range(128))) + " \t\n" * 30
    for size in range(200):
        text = "".join(draw.choice(characters) for _ in range(size))
        assert normalised(text) == " ".join(text.casefold().split())
