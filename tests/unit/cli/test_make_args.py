"""Overrides typed after a make target reach Hydra unchanged."""

import os
import subprocess
import sys

import pytest

from pipelines.cli.main import overrides_from, split_words

TYPED = [
    "quant=fp8",
    "build.max_batch_size=64",
    "benchmark.concurrency=[1, 4]",
    "model.path=/some dir/it's",
    "a=$x{b}#c",
    'b="q\\n"',
    "+new.key=3",
    "~old=",
    "eval.dataset=",
]


def test_real_make_hands_over_every_word(tmp_path):
    """Quotes, blanks, lists, dollars, hashes and additions survive a real make."""
    makefile = tmp_path / "Makefile"
    program = "import os, sys; from pipelines.cli.main import overrides_from; print(overrides_from(os.environ))"
    makefile.write_text(f".PHONY: build\nbuild:\n\t@{sys.executable} -c '{program}'\n")
    outer = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # we may run in a make
    words = ["make", "-f", makefile, "build", *TYPED, "-j2"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=outer)
    assert done.stdout.strip() == str(TYPED)


def test_flags_without_variables_give_nothing():
    assert overrides_from({"MAKEFLAGS": "-j2 --jobserver-auth=3,4"}) == []
    assert overrides_from({}) == []


def test_variables_of_the_makefile_are_not_overrides():
    assert overrides_from({"MAKEFLAGS": " -- quant=fp8 PYTHON=python3"}) == ["quant=fp8"]


@pytest.mark.parametrize(("text", "words"), [(r"a\ b c", ["a b", "c"]), ("a$$b", ["a$b"]), (r"x=\\n", [r"x=\n"])])
def test_split_words(text, words):
    assert split_words(text) == words
