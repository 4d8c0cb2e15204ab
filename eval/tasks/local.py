"""Build tasks of lm-eval on a local copy of their data; nothing is fetched from the Hub."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets import get_dataset_config_names
from datasets.exceptions import DatasetsError
from jinja2 import UndefinedError
from lm_eval.tasks import TaskManager

from eval.spec import EvalSpec, find
from pipelines.domain.errors import Fault, UserError, refuse

SEED = 1234
"""Of the choice of worked examples, as lm-eval's own command line has it."""


def load_lm_eval_task(name: str, spec: EvalSpec) -> dict[str, Any]:
    """Return lm-eval's `TaskDict` of one of its tasks, groups or tags, with its data in memory.

    Raises:
        UserError: the data are missing, are not those of the task, or have too few examples; the task needs a package
            that is not installed, or runs code that a model has written.
    """
    assert spec.dataset_path is not None  # checked by EvalSpec
    reader = _LocalCopy(spec.dataset_path)
    with tempfile.TemporaryDirectory() as cache, reader.instead_of_the_hub(cache), _explained(name, reader):
        # the index of one task's folder, because all would take 20 seconds; all if it lacks members of a group
        file = find(name)
        manager = TaskManager(include_defaults=False, include_path=file.parent) if file else None
        if manager is None or not _complete(name, manager.task_index):
            manager = TaskManager()
        loaded: dict[str, Any] = manager.load([name])
        for task in loaded["tasks"].values():  # as lm-eval's `simple_evaluate` does: a task's own 0 examples stay
            own = task.get_config("num_fewshot")
            shots = own if own == 0 or spec.num_fewshot is None else spec.num_fewshot
            task.set_config(key="num_fewshot", value=shots or 0)
            task.set_fewshot_seed(seed=SEED)
    refuse(_faults(name, loaded["tasks"], spec.dataset_path))
    return loaded


def _complete(name: str, index: Mapping[str, Any]) -> bool:
    entry = index.get(name)
    if entry is None or entry.kind.name == "TAG":  # tasks of other folders may have the same tag
        return False
    members = (entry.cfg or {}).get("task")
    if not isinstance(members, list):
        return True
    return all(isinstance(member, str) and _complete(member, index) for member in members)


def _faults(name: str, tasks: Mapping[str, Any], folder: Path) -> Iterator[Fault]:
    for each, task in tasks.items():
        shots = int(task.get_config("num_fewshot"))
        examples = len(list(task.fewshot_docs() or ())) if shots else 0
        if examples < shots:
            yield Fault(f"eval.num_fewshot={shots}, but the data of {each} at '{folder}' have {examples} examples.")
        if getattr(task, "UNSAFE_CODE", False):
            yield Fault(f"eval.task='{name}' runs code that the model has written, which is not supported.")
        if (repeats := int(task.get_config("repeats") or 1)) > 1:
            yield Fault(
                f"{each} wants {repeats} sampled answers to each question; engines here give one.",
                todo="Choose another task with eval.task.",
            )
        if getattr(task, "MULTIMODAL", False):
            yield Fault(f"eval.task='{name}' has images or sound, which are not supported.")


class _LocalCopy:
    """Reads data sets from a folder where lm-eval asks for them by their Hub name.

    Attributes:
        folder: of one data set, or of several under their names.
        columns: names of the columns that were found, by split.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.columns: dict[str, list[str]] = {}

    @contextmanager
    def instead_of_the_hub(self, cache: str) -> Iterator[None]:
        """Let `datasets.load_dataset` read the local copy; lm-eval and its tasks have no other way in."""
        original = datasets.load_dataset

        def load(path: str, name: str | None = None, **settings: Any) -> Any:
            # the folder of one data set, or of its part that lm-eval calls `dataset_name`
            root = self.folder / path if (self.folder / path).is_dir() else self.folder
            folder = root / name if name and not _named(root, name) and (root / name).is_dir() else root
            # Settings such as data_files and revision locate data on the Hub; it is local already.
            arguments = {key: value for key, value in settings.items() if key == "split"}
            part = name if _named(folder, name) else None
            data = original(str(folder), part, cache_dir=cache, keep_in_memory=True, **arguments)
            splits = data if isinstance(data, dict) else {"data": data}
            self.columns |= {split: list(rows.column_names) for split, rows in splits.items()}
            return data

        bars = datasets.utils.logging.is_progress_bar_enabled()
        datasets.utils.logging.disable_progress_bar()
        datasets.load_dataset = load
        try:
            yield
        finally:
            datasets.load_dataset = original
            if bars:
                datasets.utils.logging.enable_progress_bar()

    def __str__(self) -> str:
        return "; ".join(f"{split}: {', '.join(names)}" for split, names in self.columns.items())


def _named(folder: Path, name: str | None) -> bool:
    """Return whether the card of a data set defines a part of this name."""
    return name is not None and (folder / "README.md").is_file() and name in get_dataset_config_names(str(folder))


_FOREIGN = (KeyError, IndexError, TypeError, AttributeError, ValueError, OSError, UndefinedError, StopIteration)
"""What a task's code raises on data that are not its own."""


@contextmanager
def _explained(name: str, reader: _LocalCopy) -> Iterator[None]:
    """Turn what a task's code raises on foreign data into a fault of the user's files."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"eval.task='{name}' needs a package that is not installed: {error}.", todo=f"Install lm-eval[{name}]."
        ) from None
    except (*_FOREIGN, DatasetsError) as error:
        cause = error.__cause__ if isinstance(error, DatasetsError) else None  # the error itself only says: failed
        what = " ".join(f"{type(cause or error).__name__}: {cause or error}".split())[:300]
        if isinstance(cause or error, StopIteration):  # without words: a reader found no first row
            what = "a file or a split has no rows"
        columns = f" It has these columns: {reader}." if reader.columns else ""
        raise UserError(
            f"The data at '{reader.folder}' do not fit eval.task='{name}': {what}.{columns}",
            allowed="A copy of the task's data set on the Hub is needed, with its columns and splits.",
            todo="Check eval.dataset_path.",
        ) from None
