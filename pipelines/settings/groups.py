"""The groups of conf/ and their choices, from file names alone, and the file of a project that stands above conf/."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines.domain.errors import UserError

CONF = Path(__file__).resolve().parents[1] / "conf"
"""In a checkout a link to the folder conf/ at its root, in an installed package the folder itself."""
PROJECT_FILE = "pipelines.yaml"
"""A project's own configuration, in its folder or in one above the current folder."""
CHOSEN_FILE = "TRTLLM_PIPELINES_CONFIG"
"""Environment variable with the project file that `config=FILE` names; processes that a command starts inherit it."""
NO_FILE = "none"
ROOT_USER = 0


def choose_project_file(name: str) -> None:
    """Use this project file in this process and those that it starts; `none` uses none."""
    os.environ[CHOSEN_FILE] = name if name == NO_FILE else str(Path(name).expanduser().absolute())


@contextmanager
def using_project_file(name: str) -> Iterator[None]:
    """Use this project file meanwhile; `none` composes conf/ alone."""
    before = os.environ.get(CHOSEN_FILE)
    choose_project_file(name)
    try:
        yield
    finally:
        os.environ.pop(CHOSEN_FILE)
        if before is not None:
            os.environ[CHOSEN_FILE] = before


def project_file() -> Path | None:
    """Find the project's own configuration: the chosen file, or pipelines.yaml here or in the nearest folder above.

    Raises:
        UserError: the chosen file does not exist, or the one found is no file or belongs to somebody else.
    """
    if chosen := os.environ.get(CHOSEN_FILE):
        if chosen != NO_FILE and not Path(chosen).is_file():
            raise UserError(f"config='{chosen}' is not a file.", todo="To write one: make init")
        return None if chosen == NO_FILE else Path(chosen)
    here = Path.cwd()
    places = [folder / PROJECT_FILE for folder in (here, *here.parents)]
    file = next((each for each in places if each.exists() or each.is_symlink()), None)
    if file and not file.is_file():
        if file.is_symlink():
            what, todo = f"a link to '{file.readlink()}', which is not a file", "Restore it."
        else:
            what, todo = "a folder" if file.is_dir() else "not a file", "Rename it."
        raise UserError(f"'{file}' is {what}.", todo=f"{todo} To do without: config={NO_FILE}")
    if file and file.parent != here and file.stat().st_uid not in (ROOT_USER, os.getuid()):
        raise UserError(
            f"'{file}' belongs to another user, who would decide what runs here.",
            todo=f"To use it: config={file}. To do without: config={NO_FILE}",
        )
    return file


def config_folders() -> tuple[Path, ...]:
    """List the folders that have choices of groups: conf/, then the project's own."""
    file = project_file()
    return (CONF, file.parent) if file else (CONF,)


def groups() -> list[str]:
    """List all groups of conf/ that describe a deployment."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")


def choices(group: str) -> list[str]:
    """List the choices of a group, e.g. quant -> fp8, int4_awq, ..., those of the project among them."""
    files = {path.stem for folder in config_folders() for path in (folder / group).glob("*.yaml")}
    return sorted(files - {"base"})


def hidden_choices(folder: Path, group: str) -> list[str]:
    """List files of a project that are never read, because conf/ has a choice of the same name."""
    names = [path.name for path in (folder / group).glob("*.yaml") if (CONF / group / path.name).is_file()]
    return [] if folder == CONF else [f"{group}/{name}" for name in names]
