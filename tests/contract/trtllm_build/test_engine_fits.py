"""An engine on a machine it was not built on is refused with the way to build it there."""

import json

import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress
from pipelines.engines.port import SamplingParams
from pipelines.engines.registry import open_engine
from pipelines.engines.tensorrt_llm import folder as fits
from pipelines.engines.tensorrt_llm.folder import BuiltOn
from tests.support.emulated_trtllm import A100, H100, environment
from tests.support.engine_folders import write_engine

BUILT = BuiltOn("NVIDIA H100 80GB HBM3", 9.0, "1.2.1", "10.14.1.48")


@pytest.fixture
def engine(tmp_path):
    """An engine of TensorRT-LLM 1.2.1 that this project built on an H100."""
    folder = write_engine(tmp_path / "engine")
    BUILT.save(folder)
    return folder


@pytest.fixture
def on(monkeypatch, tmp_path):
    """Move to an emulated machine."""

    def move(**changes):
        made = environment(tmp_path / "machine", **changes)
        for name, value in made.items():
            monkeypatch.setenv(name, value)
        monkeypatch.syspath_prepend(made["PYTHONPATH"].rpartition(":")[2])

    return move


def told(engine):
    return " ".join(str(fault) for fault in fits.fit_faults(engine))


def test_on_its_own_machine_it_fits(engine, on):
    on(gpus=(H100,))
    assert told(engine) == ""


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"gpus": (A100,)}, r"built on NVIDIA H100 80GB HBM3 (compute capability 9); this machine has NVIDIA A100"),
        ({"tensorrt_llm": "1.2.0"}, "was built by TensorRT-LLM 1.2.1; this machine has TensorRT-LLM 1.2.0"),
        ({"tensorrt": "10.13.3.9"}, "was built by TensorRT 10.14.1.48; this machine has TensorRT 10.13.3.9"),
    ],
)
def test_on_another_it_is_refused(engine, on, machine, message):
    on(**machine)
    assert message in told(engine)
    assert "Build it here: make build engine=tensorrt_llm" in told(engine)


def test_the_command_that_made_it_is_told(engine, on):
    (engine / "manifest.json").write_text(json.dumps({"repeat": "python -m pipelines build model=gemma_2b quant=fp8"}))
    on(gpus=(A100,))
    assert "Build it here: python -m pipelines build model=gemma_2b quant=fp8" in told(engine)


def test_of_an_engine_from_elsewhere_only_its_version_is_known(engine, on):
    (engine / "built_on.json").unlink()
    on(gpus=(A100,), tensorrt="10.13.3.9")
    assert told(engine) == ""
    on(tensorrt_llm="1.1.0")
    assert "TensorRT-LLM 1.2.1; this machine has TensorRT-LLM 1.1.0" in told(engine)


def test_where_nothing_is_installed_nothing_is_compared(engine):
    """A repository is laid out anywhere; the machine that serves it compares."""
    assert told(engine) == ""


def test_a_timing_cache_is_named_after_what_it_belongs_to():
    assert BUILT.file_name == "NVIDIA_H100_80GB_HBM3-sm9-tensorrt_llm1.2.1-tensorrt10.14.1.48"


def test_a_package_that_cannot_be_imported_is_named(engine, on):
    """TensorRT-LLM loads many libraries when it is imported; one that is missing is no fault of ours."""
    on(gpus=(H100,))
    with (
        open_engine("tensorrt_llm").open(engine) as session,
        pytest.raises(UserError, match=r"tensorrt_llm cannot be imported: tensorrt_llm is emulated\..*make shell"),
    ):
        session.generate([[1, 2]], SamplingParams(1), SilentProgress())
