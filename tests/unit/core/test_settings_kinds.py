"""Python counts with true and false, and YAML reads a name of digits as a number: neither reaches a setting."""

import pytest

from pipelines.domain.errors import UserError
from pipelines.engines.tensorrt_llm.config import BuildSettings
from pipelines.loadgen.config import BenchmarkSettings
from pipelines.settings.model import ModelSettings
from pipelines.settings.paths import PathSettings

MODEL = {"name": "x", "hub_id": "org/name", "revision": "main", "bundled": None, "path": None, "shape": None}


def test_a_truth_value_is_not_a_number():
    with pytest.raises(UserError, match=r"build\.tp_size is true, and a number belongs there"):
        BuildSettings.judged({"tp_size": True}, "build.")
    with pytest.raises(UserError, match=r"benchmark\.concurrency is false, and a number belongs there"):
        BenchmarkSettings.judged({"concurrency": [4, False]}, "benchmark.")


def test_a_truth_value_is_taken_where_it_belongs():
    assert BuildSettings.judged({"weight_sparsity": True}).weight_sparsity is True


def test_a_name_of_digits_is_a_name():
    """A short commit may have no letter: model.revision=1234567."""
    model = ModelSettings.judged(MODEL | {"revision": 1234567, "name": 7})
    assert (model.revision, model.name) == ("1234567", "7")
    assert str(PathSettings.judged({"store": 2024, "runs": "runs", "trtllm_examples": "x"}).store) == "2024"
