"""The groups of conf/ and their choices, from file names alone, Hydra on them, and the functions of `${...}`.

Completion reads this, so what is heavy is imported late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONF = Path(__file__).resolve().parents[1] / "conf"
"""In a checkout a link to the folder conf/ at its root, in an installed package the folder itself."""

DEFAULTS = "settings"
"""In conf/config.yaml: the defaults of all keys, which the classes of the settings have."""


@contextmanager
def hydra_on_conf() -> Iterator[None]:
    """Let Hydra compose conf/, with the defaults of all keys and the functions of `${...}`."""
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    from pipelines.settings.root import Settings

    ConfigStore.instance().store(DEFAULTS, Settings.defaults())
    for name, resolver in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    with initialize_config_dir(str(CONF), job_name="pipelines", version_base="1.3"):
        yield


def groups() -> list[str]:
    """List all groups of conf/ that describe a deployment."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")


def choices(group: str) -> list[str]:
    """List the choices of a group, e.g. quant -> fp8, int4_awq, ..."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if path.stem != "base")


def _bundled(place: str) -> str:
    """Return the path of something that ships with the project."""
    from pipelines.settings.model import BUNDLED

    return str(BUNDLED / place)


def _product(*factors: int) -> int:
    return math.prod(factors)


def _lookahead_draft_len(window: int, ngram: int, verification: int) -> int:
    from pipelines.settings.features import lookahead_draft_len

    return lookahead_draft_len(window, ngram, verification)


RESOLVERS: Mapping[str, Callable[..., Any]] = {
    "bundled": _bundled,
    "product": _product,
    "lookahead_draft_len": _lookahead_draft_len,
}
"""What a value in conf/ can be computed with: `${product:${a.b},${c.d}}`."""
