"""The groups of conf/ and their choices, from file names alone, and Hydra on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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

    from pipelines.settings.resolvers import RESOLVERS
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
