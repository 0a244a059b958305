"""Token files of other trainers, from bytes written here by hand as the formats say."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from workbench.core.data.errors import DataError
from workbench.core.data.shards import TokenShard, open_shard

IDS = [5, 0, 50_256, 65_535, 7, 7]


def words(ids: list[int], kind: str = "H") -> bytes:
    return struct.pack(f"<{len(ids)}{kind}", *ids)


def llmc(
    path: Path,
    ids: list[int],
    magic: int = 20240520,
    version: int = 1,
    count: int | None = None,
    order: str = "<",
    kind: str = "H",
) -> Path:
    header = [magic, version, len(ids) if count is None else count] + [0] * 253
    path.write_bytes(struct.pack(f"{order}256i", *header) + words(ids, kind))
    return path


def megatron(
    stem: Path,
    sequences: list[list[int]],
    documents: list[int],
    code: int = 8,
    kind: str = "H",
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    lengths: list[int] | None = None,
    offsets: list[int] | None = None,
    cut: int = 0,
) -> Path:
    """NAME.bin and NAME.idx; what is given otherwise than as it is makes the index lie."""
    raw = [words(ids, kind) for ids in sequences]
    stem.with_name(stem.name + ".bin").write_bytes(b"".join(raw))
    starts = [sum(map(len, raw[:n])) for n in range(len(raw))]
    index = magic + struct.pack("<QBQQ", version, code, len(sequences), len(documents))
    index += words([len(ids) for ids in sequences] if lengths is None else lengths, "i")
    index += words(starts if offsets is None else offsets, "q") + words(documents, "q")
    stem.with_name(stem.name + ".idx").write_bytes(index[: len(index) - cut])
    return stem


def read(path: Path, format: str = "auto") -> TokenShard:
    return open_shard(path, format, vocab_size=65_536, tokenizer="gpt2")


@pytest.mark.parametrize("format", ["auto", "llmc"])
def test_llmc(format: str, tmp_path: Path) -> None:
    shard = read(llmc(tmp_path / "fineweb_train_000001.bin", IDS), format)
    assert (shard.format, shard.tokens[:].tolist(), shard.vocab_size) == ("llmc", IDS, 65_536)
    assert (shard.documents, shard.eod_id, shard.tokenizer_sha256) == (None, None, None)
    assert shard.tokens[2:4].tolist() == IDS[2:4]


@pytest.mark.parametrize("format", ["auto", "llmc"])
def test_llmc_of_large_vocabularies(format: str, tmp_path: Path) -> None:
    path, ids = tmp_path / "llama3.bin", [128_000, 0, 70_000]
    llmc(path, ids, magic=20240801, version=7, kind="I")
    shard = open_shard(path, format, vocab_size=128_256)
    assert (shard.format, shard.tokens[:].tolist()) == ("llmc", ids)
    llmc(path, ids, magic=20240801, version=1, kind="I")
    with pytest.raises(DataError, match=r"another version of the format \(got 1\); allowed: 7"):
        open_shard(path, format, vocab_size=128_256)
    llmc(path, IDS, magic=20240801, version=7)
    with pytest.raises(DataError, match=r"6 ids of 4 bytes \(got '1,036 bytes: 3 ids'"):
        open_shard(path, format, vocab_size=128_256)
    llmc(path, ids, magic=20240801, version=7, kind="I", order=">")
    with pytest.raises(DataError, match="big-endian"):
        open_shard(path, format, vocab_size=128_256)


def test_nanogpt_where_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(words(IDS))
    shard = read(tmp_path / "train.bin", "nanogpt")
    assert (shard.format, shard.tokens[:].tolist()) == ("nanogpt", IDS)


@pytest.mark.parametrize("named", ["corpus", "corpus.bin", "corpus.idx"])
def test_megatron(named: str, tmp_path: Path) -> None:
    megatron(tmp_path / "corpus", [[1, 2], [3], [4, 5, 6]], [0, 1, 3])
    shard = read(tmp_path / named)
    assert (shard.format, shard.tokens[:].tolist()) == ("megatron", [1, 2, 3, 4, 5, 6])
    assert shard.documents is not None
    assert shard.documents["start"].tolist() == [0, 2]
    assert shard.documents["end"].tolist() == [2, 6]
    assert not shard.has_text_facts


@pytest.mark.parametrize(("code", "kind"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q")])
def test_megatron_types(code: int, kind: str, tmp_path: Path) -> None:
    megatron(tmp_path / "c", [[1, 2, 100]], [0, 1], code, kind)
    assert read(tmp_path / "c").tokens[:].tolist() == [1, 2, 100]


def test_the_same_ids_are_the_same_data_in_every_format(tmp_path: Path) -> None:
    (tmp_path / "raw.bin").write_bytes(words(IDS))
    megatron(tmp_path / "pair", [IDS], [0, 1], 4, "i")
    found = {
        read(tmp_path / "raw.bin", "nanogpt").sha256,
        read(llmc(tmp_path / "l.bin", IDS)).sha256,
        read(tmp_path / "pair").sha256,
    }
    assert len(found) == 1


def test_auto_never_guesses_a_raw_file(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(words(IDS))
    with pytest.raises(DataError, match=r"data.tokens_path: has no signature.*nanogpt"):
        read(tmp_path / "train.bin")
    with pytest.raises(DataError, match=r"the folder holds no tokens.idx.json"):
        read(tmp_path)


def test_a_named_format_is_not_another(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(words(IDS) * 200)
    with pytest.raises(DataError, match=r"train.bin: does not start with the mark of an llm.c"):
        read(tmp_path / "train.bin", "llmc")
    with pytest.raises(DataError, match=r"no such file.*train.idx"):
        read(tmp_path / "train.bin", "megatron")
    with pytest.raises(DataError, match=r"tokens.idx.json: cannot be read"):
        read(tmp_path / "train.bin", "complexity")
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path, "nanogpt")


def test_they_need_a_vocabulary(tmp_path: Path) -> None:
    path = llmc(tmp_path / "a.bin", IDS)
    with pytest.raises(DataError, match=r"tokenizer.vocab_size: the llmc file .*a.bin does not"):
        open_shard(path)
    with pytest.raises(DataError, match=r"a.bin: .*vocabulary of 50,257 entries.*65535.*50256"):
        open_shard(path, vocab_size=50_257)


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    megatron(tmp_path / "c", [[1, -2, 3]], [0, 1], 3, "h")
    with pytest.raises(DataError, match=r"c.bin: .*outside the vocabulary.*got -2"):
        read(tmp_path / "c")


def test_an_llmc_file_that_lies(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    for count in (5, 7):
        llmc(path, IDS, count=count)
        with pytest.raises(DataError, match=rf"says {count} ids.*1,036 bytes: 6 ids"):
            read(path)
    for count in (0, -1):
        llmc(path, IDS, count=count)
        with pytest.raises(DataError, match="holds no ids"):
            read(path)
    llmc(path, IDS, version=7)
    with pytest.raises(DataError, match=r"another version of the format \(got 7\)"):
        read(path)
    llmc(path, IDS, order=">")
    with pytest.raises(DataError, match="big-endian"):
        read(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"too short for its header.*100 bytes.*1024 bytes"):
        read(path)
    llmc(path, IDS)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"1,035 bytes: 5 ids and 1 byte.*1,036 bytes"):
        read(path)


def test_a_raw_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(b"")
    for format in ("nanogpt", "auto"):
        with pytest.raises(DataError, match="the shard is empty"):
            read(path, format)
    path.write_bytes(b"123")
    with pytest.raises(DataError, match=r"3 bytes.*multiple of 2"):
        read(path, "nanogpt")


def test_a_megatron_pair_that_lies(tmp_path: Path) -> None:
    stem, sequences = tmp_path / "c", [[1, 2], [3]]

    def refused(match: str, documents: list[int] | None = None, **options: object) -> None:
        given = [0, 1, 2] if documents is None else documents
        megatron(stem, sequences, given, **options)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=match):
            read(stem, "megatron")

    refused(r"c.bin: .*says 4 ids.*6 bytes: 3 ids.*8 bytes", lengths=[2, 2], offsets=[0, 4])
    refused(r"c.bin: .*says 2 ids.*6 bytes: 3 ids.*4 bytes", lengths=[1, 1], offsets=[0, 2])
    refused(r"c.bin: .*says 3 ids.*6 bytes: 1 ids and 2 bytes.*12 bytes", code=4, offsets=[0, 8])
    refused("sequence 1 does not start", offsets=[0, 2])
    refused("sequence 1 does not start", lengths=[3, 0], offsets=[0, 4])
    refused("sequence 0 does not start", lengths=[-1, 4], offsets=[0, -2])
    refused("mark of a Megatron index", magic=b"MMIDIDX\x00\x01")
    refused(r"another version of the format \(got 2\)", version=2)
    refused(r"holds no token ids.*7 \(float32\)", code=7)
    refused("holds no token ids.*unknown", code=9)
    refused("too short for 2 sequences", cut=1)
    refused("too short for its header", cut=60)
    for documents in ([0, 1], [1, 2], [0, 2, 1, 2], [0, 3], [0], []):
        refused("document indices do not run", documents)
    sequences = [[], []]
    refused("the shard is empty: no ids", offsets=[0, 0])
    sequences = []
    refused("no sequences", [0])
    (tmp_path / "c.idx").unlink()
    refused_path = tmp_path / "c.bin"
    with pytest.raises(DataError, match=r"no such file.*c.idx"):
        read(refused_path, "megatron")


def test_a_large_uint32_id_is_not_cut(tmp_path: Path) -> None:
    """An id that a cast to 16 bits would make valid."""
    megatron(tmp_path / "c", [[1, 65_536 + 3]], [0, 1], 4, "i")
    with pytest.raises(DataError, match="got 65539"):
        read(tmp_path / "c")
    megatron(tmp_path / "d", [[1, 2**32 + 3]], [0, 1], 5, "q")
    with pytest.raises(DataError, match=f"got {2**32 + 3}"):
        read(tmp_path / "d")
    assert open_shard(tmp_path / "c", vocab_size=65_540).tokens[:].dtype == np.int32
