"""What a user may set, and what is refused with which words."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from tests.conftest import ROOT
from triton_repo import parameters
from triton_repo.config import TritonSettings

CONF = ROOT / "conf" / "triton"


@pytest.mark.parametrize("file", sorted(CONF.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_file_is_valid(file: Path):
    values = yaml.safe_load(file.read_text()) or {}
    values.pop("defaults", None)
    TritonSettings(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kv_cache_free_gpu_mem_fraction": 1.5}, "1.5"),
        ({"batch_scheduler_policy": "max_util"}, "max_util"),
        ({"max_queue_size": -1}, "-1"),
        ({"medusa_choices": "0, 0"}, "'0, 0' is not a tree"),
        ({"lora_prefetch_dir": "${lora_prefetch_dir}"}, r"'\$\{lora_prefetch_dir\}' is not filled in"),
        ({"executor_worker_path": " "}, "' ' is not filled in"),
        ({"decoding_mode": "lookahead", "lookahead_window_size": 7}, r"needs lookahead_window_size.*\(7, None, None\)"),
        ({"speculative_decoding_fast_logits": True, "participant_ids": ((1,),)}, "ranks of the draft model's own"),
        ({"gpu_device_ids": []}, "gpu_device_ids"),
        ({"max_batch_size": 4}, "max_batch_size"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(ValidationError, match=message):
        TritonSettings(**values)


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (0.9, "0.9"), (3, "3"), ((1, 2), "1,2"), (((0, 1), (2, 3)), "0,1;2,3"), ("V1", "V1")],
)
def test_values_are_written_as_the_backend_parses_them(value, text):
    assert parameters.text(value) == text


def test_what_the_cpu_engine_lacks_is_refused_at_once():
    chosen = TritonSettings(medusa_choices="{0}", decoding_mode="eagle")
    found = "\n".join(str(fault) for fault in parameters.cpu_faults(chosen))
    for name in ("medusa_choices='{0}'", "decoding_mode='eagle'"):
        assert f"triton.{name} is not supported by engine=openvino" in found


def test_where_a_gpu_works_is_no_fault_on_a_cpu():
    """One configuration serves both."""
    chosen = TritonSettings(kv_cache_free_gpu_mem_fraction=0.5, gpu_device_ids=((0, 1),))
    assert parameters.cpu_faults(chosen) == []
    assert set(chosen.changed(parameters.PLACES)) == {"kv_cache_free_gpu_mem_fraction", "gpu_device_ids"}
