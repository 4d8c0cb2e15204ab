"""What every test shares: no GPU, no network, one thread."""

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.update(
    {
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",  # one process per core tests
        "COLUMNS": "80",  # whatever the terminal is
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
)

ROOT = Path(__file__).resolve().parent.parent
GPU_TESTS = {"gpu", "gpu_trtllm"}
WHOLE_FILE_IS_THOROUGH = re.compile(r"^pytestmark = .*\bpytest\.mark\.thorough\b", re.MULTILINE)
REFERENCE = Path(__file__).resolve().parent / "reference"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make golden` sets the switch."""
    parser.addoption("--rewrite-golden", action="store_true", help="rewrite the files under tests/golden")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPU from all tests but those of a GPU, asked for by their folders: others would compute there.

    Examples of Hypothesis have no deadline: on a busy machine an import in the first one is enough to miss it.
    """
    if not all(GPU_TESTS & set(Path(argument).parts) for argument in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import settings

        settings.register_profile("no deadline", settings(), deadline=None)
        settings.load_profile("no deadline")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why a test was repeated: the repetition that passed would hide it."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"repeated: {report.nodeid}")
        terminalreporter.line(report.longreprtext)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run, the same for all workers: see `tests.support.made_once`."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without the garbage collector, which finds nothing meanwhile: an eighth of the processor time of collection.

    Nor does it look afterwards at what was loaded: a million objects, each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spare `make test` the import of files of which it would run nothing."""
    if config.option.markexpr != "not thorough" or not collection_path.name.startswith("test_"):
        return None
    return True if WHOLE_FILE_IS_THOROUGH.search(collection_path.read_text(encoding="utf-8")) else None
