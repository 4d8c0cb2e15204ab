"""Overrides given to make: `make build quant=fp8` -> ["quant=fp8"].

Make takes `key=value` words for variables of its own and passes them on in the environment variable MAKEFLAGS,
after ` -- `, newest first, with blanks and backslashes escaped by a backslash and `$` doubled
(GNU make manual, "Communicating Options to a Sub-make").
"""

from __future__ import annotations

from collections.abc import Mapping

OWN = ("PYTHON", "VENV")
"""Variables of our Makefile; everything else goes to Hydra."""


def overrides_from(environ: Mapping[str, str]) -> list[str]:
    """Read the command-line variables out of MAKEFLAGS, in the order they were typed."""
    flags = environ.get("MAKEFLAGS", "")
    _, mark, variables = f" {flags}".partition(" -- ")
    words = split_words(variables) if mark else []
    return [word for word in reversed(words) if word.split("=")[0] not in OWN]


def split_words(text: str) -> list[str]:
    r"""Undo make's escaping: blanks separate unless escaped, `\\x` is x, `$$` is `$`."""
    words, word, inside, letters = [], "", False, iter(text)
    for letter in letters:
        if letter == "\\":
            word, inside = word + next(letters, ""), True
        elif letter in " \t\n":
            if inside:
                words.append(word)
            word, inside = "", False
        else:
            word, inside = word + letter, True
    if inside:
        words.append(word)
    return [item.replace("$$", "$") for item in words]
