"""Token shards: the reference files read and written, and every way in which one may lie."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.full_disks import largest_file, tree
from workbench.core.data import shard_files
from workbench.core.data.errors import DataError
from workbench.core.data.shards import ShardWriter, open_shard
from workbench.errors import StoreError

REFERENCE = Path(__file__).parents[2] / "data/token_shard"


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A copy of the reference shard: 6,000 ids of 512."""
    return Path(shutil.copytree(REFERENCE / "train", tmp_path / "shard"))


def edit(folder: Path, **values: Any) -> None:
    """Writes keys of an index; None takes one away."""
    path = folder / "tokens.idx.json"
    index = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in index.items() if v is not None}))


def write(folder: Path, ids: list[int], dtype: str = "<u2", **values: Any) -> Path:
    """A shard written by hand, its index true but for `values`."""
    folder.mkdir(parents=True)
    raw = np.array(ids, dtype).tobytes()
    (folder / "tokens.bin").write_bytes(raw)
    index = {
        "bin": "tokens.bin",
        "dtype": dtype,
        "format": "complexity-token-shard-v1",
        "max_token_id": max(ids, default=0),
        "num_tokens": len(ids),
        "sha256": hashlib.sha256(raw).hexdigest(),
        "tokenizer": "toy",
        "vocab_size": 512,
    }
    (folder / "tokens.idx.json").write_text(json.dumps(index | values))
    return folder


def writer(folder: Path, **options: Any) -> ShardWriter:
    return ShardWriter(folder, **({"tokenizer": "toy-512", "vocab_size": 512} | options))


def test_the_reference_shard_is_read_as_it_is() -> None:
    shard = open_shard(REFERENCE / "train")
    ids = np.fromfile(REFERENCE / "train/tokens.bin", "<u2")
    assert (len(shard.tokens), shard.vocab_size, shard.tokenizer) == (6000, 512, "toy-512")
    np.testing.assert_array_equal(shard.tokens[:], ids)
    np.testing.assert_array_equal(shard.tokens[4000:4100], ids[4000:4100])
    assert shard.sha256 == hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest()
    assert (shard.documents, shard.eod_id, shard.tokenizer_sha256) == (None, None, None)
    assert open_shard(REFERENCE / "train/tokens.bin").sha256 == shard.sha256


@pytest.mark.parametrize("side", ["train", "eval"])
def test_the_reference_shard_is_written_to_the_byte(side: str, tmp_path: Path) -> None:
    with writer(tmp_path / "new") as new:
        for part in np.split(open_shard(REFERENCE / side).tokens[:], [10, 10, 700]):
            new.append(part)
        new.finish()
    assert tree(tmp_path / "new") == tree(REFERENCE / side)


def test_documents_are_kept_beside_the_shard(tmp_path: Path) -> None:
    texts = [b"one", b"", b"three"]
    with writer(tmp_path / "a/b", eod_id=511, tokenizer_sha256="ab" * 32, rule="r") as new:
        for text in texts:
            new.append(np.frombuffer(text, np.uint8), len(text), hashlib.sha256(text).digest())
        new.finish({"skipped": 2})
    shard = open_shard(tmp_path / "a/b")
    assert shard.documents is not None
    assert (shard.eod_id, shard.tokenizer_sha256) == (511, "ab" * 32)
    for text, row in zip(texts, shard.documents, strict=True):
        assert shard.tokens[row["start"] : row["end"]].astype(np.uint8).tobytes() == text
        assert shard.tokens[row["start"] - 1 : row["start"]].tolist() == [511]
        assert (row["bytes"], row["sha256"].tobytes()) == (len(text), hashlib.sha256(text).digest())
    index = json.loads((tmp_path / "a/b/tokens.docs.json").read_text())
    assert (index["counts"], index["split"]) == ({"skipped": 2}, {"side": None, "rule": "r"})


def test_the_writer_takes_the_type_that_holds_the_largest_id(tmp_path: Path) -> None:
    """Ids wrap around in uint16 files: ids that do not fit are never cast."""
    for vocab, dtype in ((65_536, "<u2"), (65_537, "<u4"), (100_278, "<u4")):
        ids = np.array([0, 65_535, vocab - 1])
        with writer(tmp_path / str(vocab), vocab_size=vocab) as new:
            new.append(ids)
            new.finish()
        shard = open_shard(tmp_path / str(vocab))
        assert (shard.tokens.dtype.str, shard.tokens[:].tolist()) == (dtype, ids.tolist())


@pytest.mark.parametrize("wrong", [512, 65_536, 119_547, -1])
def test_the_writer_refuses_ids_outside_the_vocabulary(wrong: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"), writer(tmp_path / "s") as new:
        new.append(np.array([0, wrong]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("known_first", [True, False])
def test_the_writer_keeps_boundaries_of_all_documents_or_of_none(
    known_first: bool, tmp_path: Path
) -> None:
    facts: list[dict[str, Any]] = [{"bytes": 3, "sha256": bytes(32)}, {}]
    first, second = facts if known_first else facts[::-1]
    with writer(tmp_path / "s") as new:
        new.append(np.arange(3), **first)
        with pytest.raises(ValueError, match="of all documents or of none"):
            new.append(np.arange(3), **second)
    assert list(tmp_path.iterdir()) == []


def test_the_writer_leaves_nothing_half_written(tmp_path: Path) -> None:
    ids = np.zeros(1 << 20, np.uint16)
    with largest_file(1 << 20), pytest.raises(StoreError), writer(tmp_path / "s") as new:
        new.append(ids)
    assert list(tmp_path.iterdir()) == []
    with largest_file(1 << 12), writer(tmp_path / "s") as new:
        new.append(ids[:2100])
        with pytest.raises(StoreError):
            new.finish()  # what was still in memory
    with writer(tmp_path / "s") as new:
        new.append(np.arange(3))  # and no finish
    with pytest.raises(DataError, match="at least one token"), writer(tmp_path / "s") as new:
        new.finish()
    assert list(tmp_path.iterdir()) == []


def test_the_writer_never_writes_over_what_is_there(shard: Path) -> None:
    before = tree(shard.parent)
    with pytest.raises(DataError, match="is there already"), writer(shard):
        pass
    with writer(shard.parent / "new") as new:
        new.append(np.arange(3))
        shutil.copytree(shard, shard.parent / "new")
        with pytest.raises(DataError, match="is there already"):
            new.finish()
    shutil.rmtree(shard.parent / "new")
    assert tree(shard.parent) == before


def resize(change: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / "tokens.bin", 12_000 + change)


def zeros(folder: Path) -> None:
    (folder / "tokens.bin").write_bytes(bytes(12_000))


def no_bin(folder: Path) -> None:
    (folder / "tokens.bin").unlink()


def a_folder(folder: Path) -> None:
    no_bin(folder)
    (folder / "tokens.bin").mkdir()


def index_text(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "tokens.idx.json").write_text(text) and None


def keys(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, **values)


def other_index(folder: Path) -> None:
    shutil.copy(REFERENCE / "eval/tokens.idx.json", folder)


def other_bin(folder: Path) -> None:
    """As long as the right one."""
    ids = np.fromfile(folder / "tokens.bin", "<u2")
    ids[::-1].tofile(folder / "tokens.bin")


LIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut by a byte": (resize(-1), r"tokens.bin.*11,999 bytes: 5,999 ids and 1 byte.*12,000 bytes"),
    "cut by a token": (resize(-2), r"tokens.bin.*11,998 bytes: 5,999 ids.*12,000 bytes"),
    "cut by half": (resize(-6000), r"tokens.bin.*6,000 bytes: 3,000 ids.*12,000 bytes"),
    "grown": (resize(2), r"tokens.bin.*12,002 bytes: 6,001 ids.*12,000 bytes"),
    "zero bytes": (resize(-12_000), r"tokens.bin.*0 bytes: 0 ids.*12,000 bytes"),
    "all zeros": (zeros, r"tokens.bin: holds other ids.*allowed: SHA-256 8de3594a"),
    "other ids": (other_bin, r"tokens.bin: holds other ids.*allowed: SHA-256 8de3594a"),
    "no bin": (no_bin, r"tokens.bin: cannot be read: No such file"),
    "a folder": (a_folder, r"tokens.bin: is not a regular file"),
    "larger count": (keys(num_tokens=6001), r"num_tokens 6,001.*6,000 ids.*12,002 bytes"),
    "smaller count": (keys(num_tokens=10), r"num_tokens 10.*12,000 bytes: 6,000 ids.*20 bytes"),
    "empty": (keys(num_tokens=0), r"num_tokens: the shard is empty"),
    "another file's index": (other_index, r"num_tokens 2,500.*12,000 bytes.*5,000 bytes"),
    "bad JSON": (index_text("{"), r"tokens.idx.json: not valid JSON"),
    "deep JSON": (index_text("[" * 10**5), r"tokens.idx.json: not valid JSON"),
    "no object": (index_text("[1]"), r"tokens.idx.json: holds no JSON object"),
    "not text": (index_text("\x00"), r"tokens.idx.json: not valid JSON"),
    "wrong type": (keys(num_tokens="6000"), r"num_tokens: has another type.*whole number"),
    "true count": (keys(num_tokens=True), r"num_tokens: has another type"),
    "other format": (keys(format="v2"), r"`format` \(got 'v2'\).*complexity-token-shard-v1"),
    "uint32 said": (keys(dtype="<u4"), r"4 bytes.*12,000 bytes: 3,000 ids.*24,000 bytes"),
    "signed": (keys(dtype="<i2"), r"dtype: .*'<i2'.*<u2 or <u4"),
    "big-endian": (keys(dtype=">u2"), r"dtype: .*'>u2'.*<u2 or <u4"),
    "native": (keys(dtype="uint16"), r"dtype: .*<u2 or <u4"),
    "bin above": (keys(bin="../tokens.bin"), r"bin: leaves the folder"),
    "bin elsewhere": (keys(bin="/etc/passwd"), r"bin: leaves the folder"),
    "bin is the folder": (keys(bin="."), r"bin: leaves the folder"),
    "ids outside": (keys(vocab_size=511), r"tokens.bin: .*outside the vocabulary of 511.*511.*510"),
    "no vocabulary": (keys(vocab_size=0), r"vocab_size: "),
    "too many for 16 bits": (keys(vocab_size=119_547), r"vocab_size: .*119547.*65536"),
    "lying largest id": (keys(max_token_id=510), r"largest id.*got 511.*510"),
    "other hash": (keys(sha256="0" * 64), r"tokens.bin: holds other ids.*allowed: SHA-256 0000"),
    **{
        f"no {key}": (keys(**{key: None}), rf"tokens.idx.json: {key}")
        for key in ("bin", "dtype", "max_token_id", "num_tokens", "sha256", "tokenizer")
    },
    "no vocab_size": (keys(vocab_size=None), r"tokens.idx.json: vocab_size: the key is missing"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_shard_that_lies_is_refused_with_the_place(lie: str, shard: Path, tmp_path: Path) -> None:
    """Truncated token file or index that does not match it."""
    change, expected = LIES[lie]
    change(shard)
    with pytest.raises(DataError, match=expected) as error:
        open_shard(shard, memory=tmp_path / "memory")
    assert len(error.value.faults) == 1
    assert not (tmp_path / "memory").exists()  # what is wrong is not remembered


def test_big_endian_ids_under_a_true_hash_are_refused(tmp_path: Path) -> None:
    raw = np.array([1, 2, 300, 511], ">u2").tobytes()
    write(tmp_path / "s", np.frombuffer(raw, "<u2").tolist(), max_token_id=511)
    with pytest.raises(DataError, match=r"tokens.bin: .*outside the vocabulary of 512"):
        open_shard(tmp_path / "s")


def test_ids_that_wrapped_are_refused(tmp_path: Path) -> None:
    """Token ids wrap around in uint16 files: the vocabulary says that they cannot be right."""
    ids = (np.array([0, 65_535, 65_536, 100_277]) & 0xFFFF).tolist()
    write(tmp_path / "s", ids, vocab_size=100_278)
    with pytest.raises(DataError, match=r"vocab_size: ids of 16 bits.*100278"):
        open_shard(tmp_path / "s")


def test_65536_entries_fit_16_bits(tmp_path: Path) -> None:
    write(tmp_path / "a", [0, 65_535], vocab_size=65_536)
    write(tmp_path / "b", [0, 65_535], "<u4", vocab_size=65_536)
    one, other = open_shard(tmp_path / "a"), open_shard(tmp_path / "b")
    assert one.tokens[:].tolist() == other.tokens[:].tolist() == [0, 65_535]
    assert one.sha256 == other.sha256  # the same ids, however they are stored


def with_documents(folder: Path) -> Path:
    with writer(folder, eod_id=0) as new:
        for number in range(3):
            new.append(np.full(5, number), 5, bytes(32))
        new.finish()
    return folder


def test_a_documents_file_that_lies_is_refused(tmp_path: Path) -> None:
    good = with_documents(tmp_path / "good")
    rows = np.load(good / "tokens.docs.npy")
    index = json.loads((good / "tokens.docs.json").read_text())

    def refused(match: str, rows: np.ndarray = rows, **values: Any) -> None:
        bad = tmp_path / "bad"
        shutil.copytree(good, bad)
        np.save(bad / "tokens.docs.npy", rows)
        sha256 = hashlib.sha256((bad / "tokens.docs.npy").read_bytes()).hexdigest()
        changed = index | {"sha256": sha256, "documents": len(rows)} | values
        (bad / "tokens.docs.json").write_text(
            json.dumps({k: v for k, v in changed.items() if v is not ...})
        )
        with pytest.raises(DataError, match=match):
            open_shard(bad)
        shutil.rmtree(bad)

    refused("does not hold what", sha256="0" * 64)
    refused("belongs to another tokens.bin", bin_sha256="0" * 64)
    refused("index of documents", format="v9")
    refused("4 rows", documents=4)
    refused("eod_id", eod_id=512)
    refused("tokenizer", tokenizer={"name": "other", "sha256": None})
    refused("cannot be used: KeyError", bin_sha256=...)
    refused("not a table", rows=np.zeros(3))
    for field, row, value in (("start", 1, 3), ("end", 2, 19), ("end", 0, -1)):
        wrong = rows.copy()
        wrong[field][row] = value
        refused(f"document {row}", rows=wrong)
    (good / "tokens.docs.npy").unlink()
    with pytest.raises(DataError, match=r"tokens.docs.npy: cannot be read"):
        open_shard(good)


def test_a_file_is_hashed_once(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[Path] = []
    scan = shard_files.StoredIds._scan

    def counted(self: shard_files.StoredIds) -> shard_files.Content:
        scans.append(self.file.path)
        return scan(self)

    monkeypatch.setattr(shard_files.StoredIds, "_scan", counted)
    monkeypatch.setattr(shard_files, "SETTLED_NS", 0)
    memory = tmp_path / "memory"
    first = open_shard(shard, memory=memory)
    link = tmp_path / "link"
    link.symlink_to(shard)
    assert open_shard(shard, memory=memory).sha256 == first.sha256
    assert open_shard(link, memory=memory).sha256 == first.sha256
    assert len(scans) == 1
    stat = (shard / "tokens.bin").stat()
    other_bin(shard)
    with pytest.raises(DataError, match="holds other ids"):
        open_shard(shard, memory=memory)
    os.utime(shard / "tokens.bin", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(DataError, match="holds other ids"):
        open_shard(shard, memory=memory)  # the time set back does not help
    for path in memory.iterdir():
        path.write_text("{}")
    with pytest.raises(DataError, match="holds other ids"):
        open_shard(shard, memory=memory)


def test_a_file_changed_this_moment_is_not_remembered(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change again without another time of change."""
    monkeypatch.setattr(shard_files, "SETTLED_NS", 60 * 10**9)  # longer than any test may take
    (shard / "tokens.bin").touch()
    open_shard(shard, memory=tmp_path / "memory")
    assert not (tmp_path / "memory").exists()
    os.utime(shard / "tokens.bin", (1, 1))  # a time set back hides nothing
    open_shard(shard, memory=tmp_path / "memory")
    assert not (tmp_path / "memory").exists()


def test_a_file_that_is_written_to_while_it_is_checked_is_refused(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written behind the part that is read already would pass unseen."""
    read = shard_files.StoredIds._read

    def written_behind(self: shard_files.StoredIds, at: int, size: int) -> bytes:
        raw = read(self, at, size)
        with self.file.path.open("r+b") as file:
            file.write(b"\x07")
        os.utime(self.file.path, (at + 5, at + 5))
        return raw

    monkeypatch.setattr(shard_files.StoredIds, "_read", written_behind)
    with pytest.raises(DataError, match=r"tokens.bin: is written to while it is read"):
        open_shard(shard)


def test_a_file_too_short_for_its_ids_is_not_opened(shard: Path) -> None:
    """Cut between the look at its index and this one."""
    file = shard_files.TokenFile(shard / "tokens.bin", np.dtype("<u2"), 0, 6_000)
    shard_files.StoredIds(file)
    os.truncate(file.path, 11_999)
    with pytest.raises(DataError, match=r"is too short.*11,999 bytes.*12,000 bytes"):
        shard_files.StoredIds(file)


def test_a_file_that_is_cut_while_it_is_read_is_noticed(shard: Path) -> None:
    opened = open_shard(shard)
    os.truncate(shard / "tokens.bin", 8000)
    with pytest.raises(DataError, match=r"tokens.bin: is too short.*8,000 bytes.*12,000 bytes"):
        opened.tokens[0:10]
    with pytest.raises(DataError, match="is too short"):
        opened.tokens[5000:5010]


def test_a_file_that_is_changed_while_it_is_read_is_noticed(shard: Path) -> None:
    opened = open_shard(shard)
    before = opened.tokens[:]
    (shard / "tokens.bin").touch()
    np.testing.assert_array_equal(opened.tokens[:], before)  # the same content stays
    with (shard / "tokens.bin").open("r+b") as file:
        file.write(b"\x01\x01")
    os.utime(shard / "tokens.bin", (1, 1))
    with pytest.raises(DataError, match="was changed while it is read"):
        opened.tokens[5000:5010]
    with pytest.raises(DataError, match="was changed while it is read"):
        opened.tokens[5000:5010]  # and again


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.tokens_path: no such file or folder"):
        open_shard(tmp_path / "none")
    with pytest.raises(DataError, match=r"data.eval_tokens_path: no such file"):
        open_shard(tmp_path / "none", place="data.eval_tokens_path")
    with pytest.raises(DataError, match=r"the folder holds no tokens.idx.json"):
        open_shard(tmp_path)
    with pytest.raises(DataError, match=r"tokens.idx.json: cannot be read"):
        open_shard(tmp_path, "complexity")


def test_the_index_of_another_file_is_not_taken(shard: Path) -> None:
    shutil.copy(shard / "tokens.bin", shard / "other.bin")
    assert open_shard(shard / "tokens.bin").vocab_size == 512
    with pytest.raises(DataError, match=r"tokens.idx.json beside it is the index of another file"):
        open_shard(shard / "other.bin", "complexity")


def test_what_the_shard_says_holds(shard: Path) -> None:
    assert open_shard(shard, vocab_size=512, tokenizer="toy-512").vocab_size == 512
    with pytest.raises(DataError, match=r"tokenizer.vocab_size: .*513.*null or 512"):
        open_shard(shard, vocab_size=513)
    with pytest.raises(DataError, match=r"tokenizer.name: .*gpt2.*null or toy-512"):
        open_shard(shard, tokenizer="gpt2")
