"""Engines by name."""

from dataclasses import replace
from typing import get_args

import pytest

from pipelines.domain.errors import UserError
from pipelines.engines import registry
from pipelines.engines.config import EngineSettings


def test_every_engine_is_a_choice_of_the_settings_and_the_other_way_round() -> None:
    choices = get_args(EngineSettings.model_fields["name"].annotation)
    assert {engine.setting for engine in registry.ENGINES.values()} == set(choices) - {"auto"}
    assert all(engine.options in ("", *EngineSettings.model_fields) for engine in registry.ENGINES.values())


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(UserError, match=r"engine='openvno' is not known.*Did you mean 'openvino'"):
        registry.open_engine("openvno")


def test_a_missing_package_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint is the command, not a traceback."""
    absent = replace(registry.OPENVINO, name="absent", factory="no_such_package_here:Engine", install="make absent")
    monkeypatch.setitem(registry.ENGINES, "absent", absent)
    with pytest.raises(UserError, match=r"needs the Python package 'no_such_package_here'.*To install: make absent"):
        registry.open_engine("absent")


def test_a_broken_module_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the program is not the user's."""
    broken = replace(registry.OPENVINO, name="broken", factory="pipelines.engines.no_such_module:Engine")
    monkeypatch.setitem(registry.ENGINES, "broken", broken)
    with pytest.raises(ModuleNotFoundError):
        registry.open_engine("broken")


def test_options_reach_the_engine() -> None:
    pytest.importorskip("openvino_genai")
    with pytest.raises(UserError, match=r"inference_precision='f64'.*f32"):
        registry.open_engine("openvino", inference_precision="f64")
    assert registry.open_engine("openvino", inference_precision="f32")._options.inference_precision == "f32"
