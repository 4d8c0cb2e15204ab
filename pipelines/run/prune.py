"""The command `prune`: show the store's disk use and why each artifact is kept, and remove the rest."""

import time
from collections.abc import Sequence

from pipelines.document.show import count
from pipelines.domain.errors import Fault, refuse
from pipelines.domain.progress import PARTIAL
from pipelines.domain.units import DAY, show_bytes
from pipelines.host.disk import check_folders, disk_errors, relative_to_cwd
from pipelines.host.screen import say, table, wrapped
from pipelines.settings.compose import load
from pipelines.store.space import Space, freed, occupied, remove, survey
from pipelines.store.store import Store, recover


def prune(overrides: Sequence[str]) -> int:
    """List artifacts with their sizes and those that nothing needs; remove the latter if store.remove=true."""
    settings = load(overrides)
    refuse(
        Fault(f"'{word}' does not select what is pruned: that is the whole store.", todo="Leave it out.")
        for word in overrides
        if not word.lstrip("+").startswith(("store.", "paths.", "experiment="))
    )
    store_folder = {"paths.store": settings.paths.store}
    check_folders(store_folder if settings.store.remove else {}, read=store_folder)
    store = Store(settings.paths.store)
    with disk_errors("`prune`", store.root):
        space = survey(store, settings.store.keep_days)
        say(f"store: {relative_to_cwd(store.root)}")
        if not space.artifacts and not space.abandoned:
            say("It is empty.")
            return 0
        rows = [("artifact", "size", "last used", "kept because")]
        rows += [(each.name, show_bytes(each.bytes), _ago(each.used), each.needed or "-") for each in space.artifacts]
        for each in space.abandoned:
            stopped = (each.path / PARTIAL).is_dir()
            why = "a stopped run, which the same command continues" if stopped else "a killed run"
            rows.append((each.name, show_bytes(each.bytes), _ago(each.used), f"- (left by {why})"))
        say("\n" + "\n".join(table(rows, text_columns=(3,))) + "\n")
        if settings.store.remove:
            _remove(store, space)
        else:
            _offer(space)
    return 0


def _ago(used: float) -> str:
    days = int((time.time() - used) / DAY)
    return f"{count(days, 'day')} ago" if days > 0 else "today"


def _offer(space: Space) -> None:
    total = occupied((*space.artifacts, *space.abandoned))
    unneeded = (*space.unneeded, *space.abandoned)
    if not unneeded:
        say(f"All {show_bytes(total)} are needed; nothing would be removed.")
        return
    say(
        wrapped(
            f"Nothing needs {len(unneeded)} of {count(len(space.artifacts) + len(space.abandoned), 'folder')}. "
            f"Removing them frees {show_bytes(freed(unneeded))} of {show_bytes(total)} (files that others link to "
            "stay). Nothing was removed; the same command with store.remove=true removes them.",
            0,
        )
    )


def _remove(store: Store, space: Space) -> None:
    recover(store, continuable=False)
    gone = remove(store, space.unneeded)
    for each in space.unneeded:
        if each not in gone:
            say(f"kept {each.name}: a run has begun to use it")
    removed = (*gone, *space.abandoned)
    say(f"Removed {count(len(removed), 'folder')}: {show_bytes(freed(removed))} came back.")
