"""Calibration texts from every kind of file, lazily, with messages that name what is wrong."""

import json
from pathlib import Path

import pytest

from pipelines.checkpoint.tokenizer import RenderedChat
from pipelines.compress.texts import load_texts, token_ids
from pipelines.domain.errors import UserError
from pipelines.stages.quantize import ChatRenderer

ROWS = ["one", "two", "three"]


def write(folder: Path, kind: str) -> Path:
    path = folder / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    elif kind == "json":
        path.write_text(json.dumps([{"text": row} for row in ROWS]))
    elif kind == "csv":
        path.write_text("id,text\n" + "".join(f"{i},{row}\n" for i, row in enumerate(ROWS)))
    elif kind == "txt":
        path.write_text("one\n\ntwo\n\n\nthree\n")
    else:
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.table({"text": ROWS, "id": [1, 2, 3]}), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt", "parquet"])
def test_every_kind_of_file_gives_its_texts(kind, tmp_path) -> None:
    assert list(load_texts(write(tmp_path, kind))) == ROWS
    assert list(load_texts(tmp_path / f"data.{kind}", size=2)) == ROWS[:2]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_a_missing_column_names_those_that_exist(kind, tmp_path) -> None:
    with pytest.raises(UserError, match=r"no column 'article'.*Columns: .*text"):
        load_texts(write(tmp_path, kind), column="article")


def test_a_data_set_snapshot_is_read_by_split(tmp_path) -> None:
    """data/train-0000.jsonl and test/part.jsonl are two splits; other files are not data."""
    for name, text in (("data/train-00000-of-00002.jsonl", "a"), ("data/train-00001-of-00002.jsonl", "b")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": text}))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "part.jsonl").write_text(json.dumps({"text": "c"}))
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.jsonl").write_text("broken")
    assert list(load_texts(tmp_path, split="train")) == ["a", "b"]
    assert list(load_texts(tmp_path)) == ["a", "b", "c"]
    with pytest.raises(UserError, match="no file of the split 'dev'"):
        load_texts(tmp_path, split="dev")


def test_reading_is_lazy(tmp_path) -> None:
    """A broken third line does not matter to someone who wants two texts."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n{"text": broken\n')
    assert list(load_texts(path, size=2)) == ["one", "two"]
    with pytest.raises(UserError, match=r"data\.jsonl, line 3: not valid JSON"):
        list(load_texts(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.jsonl", '{"text": ""}\n\n', r"contains no text\."),
        ("data.jsonl", '{"text": 5}\n', "column 'text' contains int"),
        ("data.jsonl", "[1]\n", "a row must be a JSON object, not list"),
        ("data.jsonl", '"a"\nnull\n', "data.jsonl, line 2: a row must be a JSON object, not null"),
        ("data.jsonl", '{"text": "ok"}\n{"text": "a\\ud800b"}\n', r"line 2: half of a surrogate .* 'text', \\ud800 at"),
        ("data.jsonl", '{"text": ' + "[" * 100_000, "line 1: not valid JSON"),
        ("data.json", '{"text": "a"}\n{"text": "b"}', "not valid JSON .*named .jsonl"),
        ("data.jsonl", '{"messages": "a"}', "no column 'text'.* Columns: messages"),
        ("data.jsonl", '{"messages": [{"role": "user"}]}', "message 1: the column 'messages' has a message without"),
        ("data.jsonl", '{"conversations": [{"from": "gpt", "value": "\\udc00"}]}', "message 1: half of a surrogate"),
        ("data.csv", b"id,text\n1,a\n2,\xff\n", "data.csv, line 3: byte 3 .0xff. is not UTF-8"),
        ("data.txt", "text\n".encode("utf-16"), "data.txt, line 1: byte 1 .0xff. is not UTF-8"),
        ("data.csv", "", "no column 'text'.* Columns: none"),
        ("data.txt", "", r"data\.txt contains no text\."),
        ("data.json", '{"text": "a"}', "contains a dict, not a list"),
        ("data.xml", "<a/>", "unknown file type '.xml'"),
    ],
)
def test_bad_content_is_named(name, content, message, tmp_path) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        list(load_texts(tmp_path / name))


def test_a_file_without_columns_has_none_to_choose(tmp_path) -> None:
    (tmp_path / "data.txt").write_text("one")
    with pytest.raises(UserError, match="has no columns, so no column 'prompt'"):
        load_texts(tmp_path / "data.txt", column="prompt")


def test_nothing_there_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        load_texts(tmp_path / "nowhere")
    with pytest.raises(UserError, match="contains no data file"):
        load_texts(tmp_path)


def test_a_broken_parquet_file_is_named(tmp_path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "data.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match=r"data\.parquet is not a valid parquet file"):
        load_texts(tmp_path / "data.parquet")


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("spreadsheet.csv", b"\xef\xbb\xbftext,label\na,1\n", ["a"]),
        ("windows.jsonl", b'\xef\xbb\xbf{"text": "a"}\r\n', ["a"]),
        ("windows.json", b'\xef\xbb\xbf["a"]', ["a"]),
        ("WINDOWS.TXT", b"\xef\xbb\xbfa\r\nb\r\n\r\nc", ["a\nb", "c"]),
        ("emoji.jsonl", b'{"text": "\\ud83d\\ude00"}', ["\N{GRINNING FACE}"]),
        ("gaps.jsonl", b'{"text": null}\n"b"\n{"text": "c"}\n', ["b", "c"]),
        ("short.csv", b"label,text\n1\n2,b\n", ["b"]),
        ("long.csv", b"text\n" + b"a" * 200_000, ["a" * 200_000]),
    ],
)
def test_files_as_other_programs_write_them(name, content, texts, tmp_path) -> None:
    (tmp_path / name).write_bytes(content)
    assert list(load_texts(tmp_path / name)) == texts


def test_chats_in_either_layout_are_read_as_chats(tmp_path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, chat[1]]
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    rows = [{"messages": chat}, {"messages": parts}, {"conversations": shared}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(pa.table({"id": [1], "messages": [chat]}), tmp_path / "data.parquet")
    large = pa.large_list(pa.struct({"role": pa.large_string(), "content": pa.large_string()}))
    parquet.write_table(pa.table({"messages": pa.array([chat], large)}), tmp_path / "polars.parquet")
    assert list(load_texts(tmp_path)) == ["User: Hi\n\nAssistant: Hello"] * 5
    assert list(load_texts(tmp_path / "data.parquet", column="messages", render=str)) == [str(chat)]


def test_a_row_of_a_parquet_file_is_named(tmp_path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": [5]}), tmp_path / "data.parquet")
    with pytest.raises(UserError, match=r"data.parquet, row 1: the column 'text' contains int, not text"):
        load_texts(tmp_path / "data.parquet")


def test_chats_take_the_form_of_the_models_template(tmp_path) -> None:
    """The template writes the special tokens, so the tokenizer adds none; without a template a chat is plain text."""
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n{"text": "plain"}')
    template = "<s>{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    config = {"bos_token": "<s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    def tokenizer(text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [0] * add_special_tokens + [len(text)]}

    chat, plain = load_texts(tmp_path / "rows.jsonl", render=ChatRenderer(tmp_path))
    assert (chat, type(chat)) == ("<s><user>Hi", RenderedChat)
    assert (token_ids(tokenizer, chat), token_ids(tokenizer, plain)) == ([11], [0, 5])
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert next(load_texts(tmp_path / "rows.jsonl", render=ChatRenderer(tmp_path))) == "User: Hi"
    config["chat_template"] = "{{ raise_exception('no chats') }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"rows.jsonl, line 1: the chat template of .* no chats"):
        load_texts(tmp_path / "rows.jsonl", render=ChatRenderer(tmp_path))
