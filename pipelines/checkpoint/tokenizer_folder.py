"""The tokenizer of a Hugging Face folder: its tokens, the tokens that end an answer, its chat templates.

The serialized tokenizer.json is the law, whatever class tokenizer_config.json names; the files beside it add tokens and
say what the special ones are, as Transformers' `PreTrainedTokenizerFast` reads them. Source: Transformers 5.14
`tokenization_utils_base.py` (_from_pretrained), `tokenization_utils_tokenizers.py` (TokenizersBackend).

This module needs the standard library and `tokenizers` alone: a Triton repository has a copy of it beside its models.
"""

from __future__ import annotations

import json
import stat
from functools import cached_property
from pathlib import Path
from typing import Any

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
OF_PROCESSORS = "chat_template.json"
"""Template of a model that sees, as its processor saves it."""
MORE_TEMPLATES = "additional_chat_templates"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MIB = 2**20
MOST_BYTES = 16 * MIB
"""Largest small file that is read; published ones have up to 2 MiB."""
MOST_TOKENIZER_BYTES = 512 * MIB
"""Largest tokenizer.json; published ones have up to 40 MiB."""
OTHERS = ("tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model", "spiece.model")
CLASSES = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<|endoftext|>"),
}
"""Special tokens of Transformers' classes, for a folder that does not name its own."""


class TokenizerFaultError(ValueError):
    """A file of a tokenizer cannot be used; the message names it and says what to do."""


def read_text(path: Path, most: int = MOST_BYTES) -> str | None:
    """Read a file of a model folder; None without one.

    Raises:
        TokenizerFaultError: it is no ordinary file, too large, cannot be read, or is not UTF-8.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise TokenizerFaultError(f"{path} is not an ordinary file. Put the file itself there, or remove it.")
        if found.st_size > most:
            raise TokenizerFaultError(f"{path} has {found.st_size:,} bytes. It may have {most:,}.")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if path.is_symlink():
            raise TokenizerFaultError(f"{path} is a link to a file that does not exist.") from None
        return None
    except UnicodeDecodeError as error:
        raise TokenizerFaultError(f"{path} is not UTF-8 text: {error}. Download it again.") from None
    except OSError as error:
        raise TokenizerFaultError(f"{path} cannot be read: {error.strerror}.") from None


def read_object(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """Read a JSON object; empty without a file.

    Raises:
        TokenizerFaultError: as for `read_text`, or it is not a JSON object.
    """
    text = read_text(path, most)
    try:
        found = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise TokenizerFaultError(f"{path} is not valid JSON: {reason}. Download it again.") from None
    if not isinstance(found, dict):
        raise TokenizerFaultError(f"{path} is not a JSON object.")
    return found


class TokenizerFolder:
    """The tokenizer files of a folder, read lazily."""

    def __init__(self, folder: Path) -> None:
        """Read nothing yet."""
        self.folder = folder

    @cached_property
    def settings(self) -> dict[str, Any]:
        """tokenizer_config.json; without `added_tokens_decoder`, special_tokens_map.json takes precedence over it."""
        found = read_object(self.folder / SETTINGS)
        if "extra_special_tokens" not in found and "additional_special_tokens" in found:
            found["extra_special_tokens"] = found["additional_special_tokens"]
        if "added_tokens_decoder" in found:
            return found
        beside = read_object(self.folder / "special_tokens_map.json")
        listed, extra = beside.pop("additional_special_tokens", None), beside.pop("extra_special_tokens", None)
        known = found.get("extra_special_tokens") or []
        if isinstance(extra, list) and isinstance(known, list):
            names = {_content(each) for each in known}
            found["extra_special_tokens"] = [*known, *(each for each in extra if _content(each) not in names)]
        elif extra or listed:
            found["extra_special_tokens"] = extra or known or listed
        return found | beside

    @cached_property
    def special(self) -> dict[str, str]:
        """The special tokens by their names: eos_token and others, and those that the model has names for."""
        found = {name: _content(value) for name, value in self._named().items()}
        return {name: text for name, text in found.items() if text}

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer with the tokens of all files, as the `tokenizers` library has it.

        Raises:
            TokenizerFaultError: there is no tokenizer.json, or it or a token cannot be read.
        """
        from tokenizers import Tokenizer

        path = self.folder / TOKENIZER
        text = read_text(path, MOST_TOKENIZER_BYTES)
        if text is None:
            raise TokenizerFaultError(_missing(self.folder))
        try:
            opened = Tokenizer.from_str(text)
            opened.no_truncation()
            opened.no_padding()
            if new := self._new_tokens(opened):
                opened.add_tokens(new)
        except TokenizerFaultError:
            raise
        except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception for a file it cannot parse
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TokenizerFaultError(f"{path} is not a tokenizer: {reason[:200]}. Download it again.") from None
        opened.encode_special_tokens = bool(self.settings.get("split_special_tokens"))
        return opened

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer: the tokenizer's, then those of generation_config.json or else config.json."""
        first = self.id_of("eos_token")
        return tuple(dict.fromkeys([*(() if first is None else (first,)), *self._stated_ends()]))

    def _stated_ends(self) -> list[int]:
        for name in ("generation_config.json", "config.json"):
            given = read_object(self.folder / name).get("eos_token_id")
            ids = given if isinstance(given, list) else [] if given is None else [given]
            if unknown := [each for each in ids if not isinstance(each, int) or isinstance(each, bool) or each < 0]:
                raise TokenizerFaultError(
                    f"{self.folder / name} has eos_token_id={str(unknown[0])[:60]!r}. It must be a token's number."
                )
            if ids:
                return ids
        return []

    def check_files(self) -> None:
        """Read every file but tokenizer.json, which must be there; planning does, so it needs no library.

        Raises:
            TokenizerFaultError: one cannot be used.
        """
        self._stated_ends()
        self._entries()
        _ = self.templates
        if not (self.folder / TOKENIZER).exists():
            raise TokenizerFaultError(_missing(self.folder))

    def listed(self) -> tuple[object, list[tuple[int, str]]]:
        """Return the vocabulary of tokenizer.json and every added token, read without the library.

        Raises:
            TokenizerFaultError: tokenizer.json is not a tokenizer.
        """
        path = self.folder / TOKENIZER
        raw = read_object(path, MOST_TOKENIZER_BYTES)
        try:
            added = {token["id"]: token["content"] for token in raw.get("added_tokens") or ()}
            added |= {number: _content(entry) for number, entry in self._entries().items()}
            return raw["model"]["vocab"], sorted(added.items())
        except (KeyError, TypeError, AttributeError):
            raise TokenizerFaultError(f"{path} is not a tokenizer: it has no model.vocab. Download it again.") from None

    def id_of(self, name: str) -> int | None:
        """Return the id of a special token by its name; None without one."""
        text = self.special.get(name)
        found = None if text is None else self.tokenizer.token_to_id(text)
        return None if found is None else int(found)

    @property
    def end_id(self) -> int | None:
        """The first of the tokens that end an answer."""
        return self.end_ids[0] if self.end_ids else None

    @cached_property
    def templates(self) -> dict[str, str]:
        """The chat templates by name, usually "default" alone; files take precedence over tokenizer_config.json."""
        found: dict[str, str] = {}
        if (default := read_text(self.folder / TEMPLATE)) is not None:
            found["default"] = default
        for path in sorted((self.folder / MORE_TEMPLATES).glob("*.jinja")):
            found[path.stem] = read_text(path) or ""
        if found:
            return found
        given = read_object(self.folder / OF_PROCESSORS).get("chat_template", self.settings.get("chat_template"))
        if isinstance(given, str):
            return {"default": given}
        if isinstance(given, dict):
            return {str(name): text for name, text in given.items() if isinstance(text, str)}
        entries = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
        named = {str(each.get("name")): each.get("template") for each in entries}
        return {name: text for name, text in named.items() if isinstance(text, str)}

    def template(self, *, tools: bool = False) -> str | None:
        """Return the template of a chat: the one for tools where there is one, else the default."""
        return (self.templates.get("tool_use") if tools else None) or self.templates.get("default")

    def for_transformers(self) -> dict[str, Any]:
        """Return arguments of `PreTrainedTokenizerFast` by which it reads and writes as `tokenizer` does."""
        found: dict[str, Any] = {"tokenizer_object": self.tokenizer, "name_or_path": str(self.folder)}
        found |= {name: text for name, text in self.special.items() if name in SPECIAL}
        if templates := self.templates:
            found["chat_template"] = templates["default"] if set(templates) == {"default"} else templates
        for name in ("clean_up_tokenization_spaces", "split_special_tokens"):
            if isinstance(self.settings.get(name), bool):
                found[name] = self.settings[name]
        if type(self.tokenizer.model).__name__ == "BPE":  # Transformers 5 does not clean up there, and warns each time
            found["clean_up_tokenization_spaces"] = False
        return found

    def _named(self) -> dict[str, Any]:
        """Special tokens by name, as they are written."""
        settings = self.settings
        kind = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
        usual = CLASSES.get(kind, {})
        missing = usual.keys() - settings.keys() and (self.folder / TOKENIZER).exists()
        known = self.tokenizer.get_vocab() if missing else {}
        found = {name: text for name, text in usual.items() if name not in settings and text in known}
        return found | self._written

    @cached_property
    def _written(self) -> dict[str, Any]:
        """Special tokens by name, but for those that only the tokenizer's class names."""
        settings = self.settings
        found = {name: settings[name] for name in SPECIAL if settings.get(name) is not None}
        found |= {
            name: value
            for name, value in settings.items()
            if name not in SPECIAL and name.endswith("_token") and isinstance(value, str)
        }
        for key in ("model_specific_special_tokens", "extra_special_tokens"):
            extra = settings.get(key)
            found |= extra if isinstance(extra, dict) else {}
        return found

    def _new_tokens(self, opened: Any) -> list[Any]:
        """Return the tokens that the files beside tokenizer.json add, in the order in which Transformers does."""
        from tokenizers import AddedToken

        extra = self.settings.get("extra_special_tokens")
        listed = extra if isinstance(extra, list) else []
        named = list(self._written.values())
        special = {_content(each) for each in [*named, *listed]}
        there = {repr(each) for each in opened.get_added_tokens_decoder().values()}
        numbered = sorted(self._numbered(special).items())
        tokens = [token for _, token in numbered if repr(token) not in there]
        have = {each.content for each in opened.get_added_tokens_decoder().values()} | {each.content for each in tokens}
        for each in [*named, *listed]:
            text = _content(each)
            if text and text not in have:
                tokens.append(_token(each, special=True) if isinstance(each, dict) else AddedToken(text, special=True))
                have.add(text)
        return tokens

    def _numbered(self, special: set[str]) -> dict[int, Any]:
        """Return the tokens of `_entries` as the library has them."""
        from tokenizers import AddedToken

        named = {_content(each) for each in self._written.values()}
        return {
            number: _token(entry, special=bool(entry.get("special")) or _content(entry) in named)
            if isinstance(entry, dict)
            else AddedToken(entry, normalized=entry not in special, special=entry in special)
            for number, entry in self._entries().items()
        }

    def _entries(self) -> dict[int, Any]:
        """Return what stands with a number in tokenizer_config.json, objects, or else in added_tokens.json, texts."""
        if "added_tokens_decoder" in self.settings:
            return {_number(key): _checked(value) for key, value in _pairs(self.settings["added_tokens_decoder"])}
        return {_number(number): text for text, number in _pairs(read_object(self.folder / "added_tokens.json"))}


def _content(value: object) -> str:
    """Return the text of a token, which is written as a text or as an object with one."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _pairs(value: Any) -> Any:
    if not isinstance(value, dict):
        raise TokenizerFaultError(f"The added tokens are {str(value)[:60]!r}. They must be a JSON object.")
    return value.items()


def _number(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise TokenizerFaultError(f"An added token has the number {str(value)[:60]!r}.") from None


def _checked(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not _content(value):
        raise TokenizerFaultError(f"An added token is {str(value)[:60]!r}. It must be an object with its content.")
    return value


def _token(value: Any, *, special: bool | None = None) -> Any:
    from tokenizers import AddedToken

    value = _checked(value)
    flags = {name: bool(value[name]) for name in ("lstrip", "rstrip", "single_word", "normalized") if name in value}
    return AddedToken(value["content"], **flags, special=bool(value.get("special")) if special is None else special)


def _missing(folder: Path) -> str:
    there = [name for name in OTHERS if (folder / name).exists()]
    return (
        f"'{folder}' has no tokenizer.json{f', only {there[0]}' if there else ''}. Make one where the tokenizer's own"
        " library is installed: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
    )
