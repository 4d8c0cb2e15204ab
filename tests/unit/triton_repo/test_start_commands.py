"""The command lines recorded in repository.json."""

from dataclasses import replace

from triton_repo.config import TritonSettings
from triton_repo.parameters import RepositorySpec, start_commands

GPU = RepositorySpec("tensorrt_llm", "llama", "fp8")


def commands(settings=None, spec=GPU):
    """Mode -> shell line."""
    return start_commands(settings or TritonSettings(), spec)["commands"]


def test_one_gpu_needs_no_mpirun():
    assert commands()["leader"] == "tritonserver --model-repository=. --disable-auto-complete-config"


def test_leader_mode_starts_one_server_per_rank():
    line = commands(spec=replace(GPU, tp_size=2, pp_size=2))["leader"]
    assert line.startswith("mpirun --allow-run-as-root -n 1 tritonserver")
    assert line.count("tritonserver") == 4
    assert line.count("--model-control-mode=explicit --load-model=tensorrt_llm") == 3  # all but rank 0
    assert [f"shm-region-prefix-name=prefix{rank}_" in line for rank in range(4)] == [True] * 4


def test_orchestrator_mode_is_one_server_that_spawns():
    line = commands(spec=replace(GPU, tp_size=2))["orchestrator"]
    assert line.startswith("TRTLLM_ORCHESTRATOR=1 tritonserver")
    assert "--cuda-memory-pool-byte-size=0:0 --cuda-memory-pool-byte-size=1:0" in line


def test_spawning_does_not_reach_other_nodes():
    assert set(commands(TritonSettings(num_nodes=2), replace(GPU, tp_size=16))) == {"leader"}


def test_given_ranks_mean_an_orchestrator_without_spawning():
    """Rank 0 is the orchestrator itself, so ranks 1 and 2 make three processes."""
    [(mode, line)] = commands(TritonSettings(participant_ids=((1, 2),)), replace(GPU, tp_size=2)).items()
    assert mode == "orchestrator_without_spawning"
    assert line.startswith("TRTLLM_ORCHESTRATOR=1 TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=0 mpirun")
    assert line.count("tritonserver") == 3


def test_the_cpu_flavour_is_one_process():
    assert set(commands(spec=RepositorySpec("openvino", "m", "none"))) == {"one_process"}


def test_llmapi_takes_its_code_from_the_container():
    line = commands(spec=RepositorySpec("llmapi", "m", "none"))["one_process"]
    assert line.startswith("cp /app/all_models/llmapi/tensorrt_llm/1/*.py tensorrt_llm/1/ && tritonserver")
