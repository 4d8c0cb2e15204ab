"""What planning makes of an engine's capabilities, for one that has few."""

from dataclasses import replace

import pytest

from pipelines.engines import registry
from pipelines.engines.registry import OPENVINO, TENSORRT_LLM
from pipelines.plan.deployment import Deployment
from pipelines.plan.serving_checks import check
from pipelines.plan.targets import Target, farthest
from pipelines.settings.compose import load
from tests.unit.core.test_machine import MACHINE

UNSERVED = replace(OPENVINO, server=None)


@pytest.mark.parametrize("target", ["repository", "serve", "benchmark", "all"])
def test_an_engine_that_triton_does_not_serve_is_not_served(target: Target) -> None:
    found = [str(fault) for fault in check(Deployment(load(["engine=openvino"]), target, UNSERVED, MACHINE))]
    assert any(f"engine=openvino cannot {target}: Triton does not serve it" in text for text in found)
    assert any("It works with build, evaluate, fidelity, diagnose." in text for text in found)


@pytest.mark.parametrize(
    ("changes", "reached"),
    [
        ({}, "all"),
        ({"evaluates": False}, "benchmark"),
        ({"server": None}, "evaluate"),
        ({"server": None, "evaluates": False}, "build"),
    ],
)
def test_a_configuration_goes_as_far_as_its_engine(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], reached: Target
) -> None:
    monkeypatch.setitem(registry.ENGINES, "openvino", replace(OPENVINO, **changes))
    assert farthest(load(["engine=openvino"])) == reached


def test_every_rank_has_its_files_and_common_ones_stand_once() -> None:
    assert TENSORRT_LLM.files_of(2) == ["rank0.engine", "rank1.engine"]
    assert OPENVINO.files_of(2) == ["openvino_model.xml", "openvino_model.bin"]
