"""Complete a command line: groups, choices and keys by Hydra's completion, values by the settings."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from pipelines.settings.groups import CONF

LISTS = ","
LAUNCHER = "hydra/launcher="
"""The only choice of a user in the group hydra."""


def complete(words: Sequence[str]) -> list[str]:
    """List candidates for the last word, which may be empty; the words before it are overrides."""
    *before, word = words
    head, comma, _ = word.rpartition(LISTS)
    if comma and "=" in head:  # quant=fp8,in: keep what is left of the comma
        key, _, value = word.partition("=")
        done, _, part = value.rpartition(LISTS)
        return [f"{key}={done},{found.partition('=')[2]}" for found in _complete(before, f"{key}={part}")]
    return _complete(before, word)


def _complete(before: Sequence[str], word: str) -> list[str]:
    found = {LAUNCHER if each == "hydra" else each for each in (*_asked_hydra(before, word), *_values(word))}
    return sorted(each for each in found if each.startswith(word) and not each.startswith("hydra."))


def _asked_hydra(before: Sequence[str], word: str) -> list[str]:
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.errors import HydraException
    from hydra.plugins.completion_plugin import CompletionPlugin
    from omegaconf.errors import OmegaConfBaseException

    with initialize_config_dir(str(CONF), version_base="1.3"):
        plugins: Any = Plugins.instance().discover(CompletionPlugin)
        plugin = next(each for each in plugins if each.provides() == "bash")
        said = io.StringIO()
        os.environ["COMP_LINE"] = " ".join(["program", *before, word])
        try:
            with redirect_stdout(said):
                plugin(GlobalHydra.instance().config_loader()).query("config")
        except (HydraException, OmegaConfBaseException, ValueError):
            return []  # an earlier word is wrong, which the command itself will report
    return said.getvalue().split()


def _values(word: str) -> list[str]:
    """List `key=value` for each value that a key may have."""
    key, equals, _ = word.partition("=")
    group = key.partition(".")[0]
    if not equals or group == key:
        return []
    from pipelines.settings.describe import keys_of

    return [f"{key}={value}" for each in keys_of(group) if each.name == key for value in each.choices]
