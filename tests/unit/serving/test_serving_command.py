"""The command lines, exactly; those for several GPUs are checked by their text only."""

from pathlib import Path

import pytest

from pipelines.cli.main import main
from pipelines.serving.command_lines import Ranks, server_command
from pipelines.serving.config import ServingSettings

PORTS = {"http_port": 8000, "grpc_port": 8001, "metrics_port": 8002, "openai_port": 9000}
BINARY = Path("/opt/tritonserver/bin/tritonserver")
COMMON = [
    "/opt/tritonserver/bin/tritonserver",
    "--model-repository=.",
    "--http-address=127.0.0.1",
    "--grpc-address=127.0.0.1",
    "--metrics-address=127.0.0.1",
    "--http-port=8000",
    "--grpc-port=8001",
    "--metrics-port=8002",
    "--allow-metrics=true",
    "--disable-auto-complete-config",
    "--exit-timeout-secs=30",
]
ONE = Ranks()


def command(ranks: Ranks = ONE, **settings: object) -> list[str]:
    launch = server_command(
        BINARY, ServingSettings(**settings), PORTS, shm_prefix="p_", ranks=ranks
    )  # fmt: skip
    return list(launch.command)


def test_one_process_serves_one_gpu_or_none() -> None:
    assert command() == [*COMMON, "--backend-config=python,shm-region-prefix-name=p_"]


def test_the_wheels_server_gets_a_backend_directory() -> None:
    launch = server_command(BINARY, ServingSettings(), PORTS, shm_prefix="p_", backends=Path("/cache/backends"))
    assert launch.command[2] == "--backend-directory=/cache/backends"
    assert launch.env == {}


def test_leader_mode_starts_a_process_per_rank() -> None:
    """Rank 0 has every model and the verbose log; rank 1 only helps with the engine; shared memory is apart."""
    assert command(Ranks(world_size=2), log_verbose=3) == [
        "mpirun", "--allow-run-as-root",
        "-n", "1", *COMMON, "--backend-config=python,shm-region-prefix-name=p_0_", "--log-verbose=3", ":",
        "-n", "1", *COMMON, "--backend-config=python,shm-region-prefix-name=p_1_",
        "--model-control-mode=explicit", "--load-model=tensorrt_llm", ":",
    ]  # fmt: skip


def test_oversubscribing_is_mpiruns_flag() -> None:
    assert command(Ranks(world_size=2, oversubscribe=True))[:3] == ["mpirun", "--allow-run-as-root", "--oversubscribe"]


def test_orchestrator_mode_starts_one_process_without_gpu_pools() -> None:
    """The spawned ranks need the memory of both GPUs."""
    launch = server_command(BINARY, ServingSettings(), PORTS, shm_prefix="p_", ranks=Ranks(2, "orchestrator"))
    assert list(launch.command) == [
        *COMMON,
        "--backend-config=python,shm-region-prefix-name=p_",
        "--pinned-memory-pool-byte-size=0",
        "--enable-peer-access=false",
        "--cuda-memory-pool-byte-size=0:0",
        "--cuda-memory-pool-byte-size=1:0",
    ]
    assert launch.env == {"TRTLLM_ORCHESTRATOR": "1"}


def test_off_loopback_tritonserver_itself_stays_on_loopback() -> None:
    """Anyone who reaches its inference ports can end it, so only the service in front listens on other networks."""
    listening = [part for part in command(host="0.0.0.0") if "-address=" in part]
    assert listening == ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1"]
    asked_for = [part for part in command(host="0.0.0.0", expose_triton=True) if "-address=" in part]
    assert asked_for == ["--http-address=0.0.0.0", "--grpc-address=0.0.0.0", "--metrics-address=0.0.0.0"]


@pytest.mark.parametrize(
    ("given", "front", "triton_host", "local_host", "front_host"),
    [
        ({}, False, "127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ({"openai": True}, True, "127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ({"host": "127.0.0.2"}, False, "127.0.0.2", "127.0.0.2", "127.0.0.2"),
        ({"host": "0.0.0.0"}, True, "127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ({"host": "192.0.2.7"}, True, "127.0.0.1", "127.0.0.1", "192.0.2.7"),
        ({"host": "192.0.2.7", "expose_triton": True}, False, "192.0.2.7", "192.0.2.7", "192.0.2.7"),
        ({"host": "0.0.0.0", "expose_triton": True, "openai": True}, True, "0.0.0.0", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_who_listens_where(given, front, triton_host, local_host, front_host) -> None:
    found = ServingSettings(**given)
    assert (found.front, found.triton_host, found.local_host, found.front_host) == (
        front, triton_host, local_host, front_host,
    )  # fmt: skip


@pytest.mark.parametrize("flag", ["--http-restricted-api", "--grpc-restricted-protocol"])
def test_off_loopback_the_dangerous_endpoints_need_a_key_that_nobody_has(flag: str) -> None:
    """And another one every time."""
    first, second = (
        next(part for part in command(host="0.0.0.0") if part.startswith(f"{flag}=")) for _ in range(2)
    )  # fmt: skip
    assert first.startswith(f"{flag}=shared-memory,model-repository,trace,logging:admin-key=")
    assert first != second
    assert not any(part.startswith(flag) for part in command(host="127.0.0.2"))


def test_settings_of_a_service_that_does_not_run_are_said():
    assert ServingSettings(api_key=True).unused.startswith("serving.api_key=true is not used: its service runs with")
    given = {"max_prompts": 3, "cors_origins": ("http://a.b",)}
    said = "serving.cors_origins=http://a.b, serving.max_prompts=3 are not used"
    assert ServingSettings(**given).unused == f"{said}: its service runs with serving.openai=true."
    assert ServingSettings(server="trtllm_serve", **given).unused == f"{said}: this server has no such setting."
    for runs in ({"openai": True}, {"host": "0.0.0.0"}):
        assert ServingSettings(**given, **runs).unused == ""
    assert ServingSettings(http_port=8100, log_verbose=2).unused == ""
    said = "serving.http_port=8100, serving.log_verbose=2 are not used: this server has no such setting."
    assert ServingSettings(server="trtllm_serve", http_port=8100, log_verbose=2).unused == said
    assert ServingSettings(server="trtllm_serve", openai=True).unused.startswith("serving.openai=true is not used: ")


def test_a_port_of_a_service_that_does_not_run_is_said(tmp_path, capsys):
    assert main(["serve", "serving.openai_port=9100", f"serving.repository={tmp_path / 'none'}"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "serving.openai_port=9100 is not used: its service runs with serving.openai=true" in said
    for runs in ({"openai": True}, {"host": "0.0.0.0"}, {"server": "trtllm_serve"}):
        assert ServingSettings(openai_port=9100, **runs).unused == ""


def test_a_server_that_only_this_program_asks_is_closed_to_others():
    """It was restricted like one that is open, and `make benchmark` could not ask it."""
    settings = ServingSettings(host="0.0.0.0", http_port=8123).on_free_ports
    assert (settings.loopback, settings.front, settings.http_port) == (True, False, None)
