"""`repository`, `serve`, `benchmark`, `report`, `compare` and `all`, with the real engine and the real tritonserver."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from pipelines.domain.benchmark import RESULT, BenchmarkResult
from tests.conftest import ROOT

QUICK = ["quant=int4_wo", "build.max_batch_size=16", "engine.openvino.num_threads=1"]
SHORT = ["workload.isl=16", "workload.osl=8", "benchmark.warmup_s=0.2", "benchmark.duration_s=1"]


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def newest(cli, label="tiny_gemma-int4_wo") -> BenchmarkResult:
    folder = max((cli.store / "benchmark").glob(f"{label}-*"), key=lambda path: path.stat().st_mtime_ns)
    return BenchmarkResult.from_json(json.loads((folder / RESULT).read_text()))


def processes_below(folder: Path) -> list[str]:
    """Command lines of processes that work in a folder or name it; what a stopped server must not leave."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            place = str((entry / "cwd").readlink())
        except OSError:
            continue
        if ("triton" in line) and (str(folder) in line or str(folder) in place):
            found.append(line)
    return found


def wait_until_gone(folder: Path) -> None:
    end = time.monotonic() + 60
    while processes_below(folder):
        assert time.monotonic() < end, processes_below(folder)
        time.sleep(0.1)


class Served:
    """`serve` as a user has it in a terminal: its output until it is ready, and the lines to paste."""

    def __init__(self, cli, *words):
        self.process = cli.start("serve", *words)
        self.lines = []
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("END"):
                break
        self.text = "".join(self.lines)
        assert "Ctrl-C drains" in self.text, self.text

    def paste(self, first: str) -> str:
        """Run the printed command that starts with a word, as a shell does."""
        start = next(index for index, line in enumerate(self.lines) if line.lstrip().startswith(first))
        rest = "".join(self.lines[start:])
        command = rest.split("\n\n")[0] if first == "curl" else rest
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def grpc_url(self) -> str:
        return re.search(r"gRPC +(\S+)", self.text)[1]

    def stop(self, number=signal.SIGINT) -> str:
        self.process.send_signal(number)
        return self.process.communicate(timeout=60)[0]


@pytest.fixture(scope="module")
def copied(cli, tmp_path_factory):
    """A repository made here and copied to another place, as to another machine."""
    cli.run("repository", *QUICK)
    place = tmp_path_factory.mktemp("elsewhere") / "models"
    shutil.copytree(only(cli.store / "repository", "tiny_gemma-int4_wo-*"), place)
    return place


def test_a_repository_holds_all_it_needs(copied):
    assert {path.name for path in copied.iterdir() if path.is_dir()} == {
        "preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls",
    }  # fmt: skip
    assert (copied / "tensorrt_llm/1/engine/openvino_model.bin").is_file()
    assert not [path for path in copied.rglob("*") if path.is_symlink()]
    assert "${" not in "".join(path.read_text() for path in copied.rglob("config.pbtxt"))


def test_a_second_repository_is_not_made(cli, copied):
    assert "Nothing to do: every stage is cached." in cli.run("repository", *QUICK)


@pytest.mark.thorough
def test_a_repository_becomes_manifests_that_start_it(cli, copied):
    """The arguments of the pod start the server here, except for the place of the repository and the address."""
    text = cli.run("manifests", *QUICK)
    overlay = cli.folder / re.search(r"kubectl apply -k (\S+)", text)[1]
    template = yaml.safe_load((overlay / "deployment.yaml").read_text())["spec"]["template"]
    command, *words = template["spec"]["containers"][0]["args"]
    assert (command, words[0]) == ("serve", "serving.repository=/repository")
    kept = [word for word in words[1:] if not re.match(r"serving\.(host|\w+_port)=", word)]
    server = Served(cli, f"serving.repository={copied}", *kept)
    rest = server.stop(signal.SIGTERM)
    assert "Started HTTPService" in server.text + rest  # kubectl logs shows the server's own log
    assert "Draining" in rest
    assert server.process.returncode == 0
    assert "unchanged: manifests" in cli.run("manifests", *QUICK)


def test_the_printed_lines_work_and_ctrl_c_drains(cli, copied):
    served = Served(cli, f"serving.repository={copied}")
    answer = json.loads(served.paste("curl"))
    assert answer["text_output"].strip()
    assert "text_output" not in served.paste(next(line.split()[0] for line in served.lines if "- <<'END'" in line))
    rest = served.stop()
    assert served.process.returncode == 0, rest
    assert "Draining" in rest
    wait_until_gone(copied)


@pytest.mark.thorough
def test_a_server_that_already_runs_is_measured(cli, copied):
    """Nothing is built for it, and nothing is claimed that nobody said."""
    served = Served(cli, f"serving.repository={copied}")
    try:
        words = [f"benchmark.url={served.grpc_url}", "benchmark.concurrency=[2]", *SHORT]
        text = cli.run("benchmark", *words)
        assert re.search(r"concurrency 2: +[\d.]+ req/s", text)
        result = newest(cli, "tiny_gemma-elsewhere")
        assert (result.precision, result.engine, result.complete) == ("unknown", "unknown", True)
        assert result.levels[0].summary.isl.mean == 16
        assert result.levels[0].summary.osl.mean == 8
        wrong = cli.run("benchmark", *words, "benchmark.model_name=ensembel", code=2)
        assert re.search(r"'ensembel'.*ensemble", re.sub(r"\s+", " ", wrong))
    finally:
        served.stop()


def test_no_server_at_the_url(cli):
    text = cli.run("benchmark", "benchmark.url=127.0.0.1:9", *SHORT, code=2)
    assert "127.0.0.1:9" in text
    assert "Traceback" not in text


def test_a_server_whose_parent_is_killed_goes_too(cli, copied):
    served = Served(cli, f"serving.repository={copied}")
    served.process.kill()
    served.process.communicate()
    wait_until_gone(copied)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ending_make_alone_ends_the_server_too(cli, copied, number):
    """As service managers do, which know only the process that they started."""
    words = ["make", f"PYTHON={sys.executable}", "serve", f"paths.store={cli.store}", f"serving.repository={copied}"]
    environment = {name: value for name, value in cli.env().items() if not name.startswith("MAKE")}
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as make:  # fmt: skip
        said = []
        for line in make.stdout:
            said.append(line)
            if "Ctrl-C drains" in line:
                break
        started = psutil.Process(make.pid).children(recursive=True)
        make.send_signal(number)
        make.wait()
        _, left = psutil.wait_procs(started, timeout=60)
        for process in left:
            process.kill()
    assert len(started) > 5, said  # shell, program, supervisor, server, stubs
    assert not left


def test_a_port_in_use_is_named(cli, copied):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = [f"serving.repository={copied}", f"serving.http_port={port}", "quant=int8_sq"]
        text = cli.run("serve", *words, code=2)
    assert "is served as it is; no effect on it: quant=int8_sq" in re.sub(r"\s+", " ", text)
    assert re.search(
        rf"serving\.http_port={port} is in use: \S+ \(process {os.getpid()}\) listens", re.sub(r"\s+", " ", text)
    )


def test_a_repository_that_does_not_fit_its_engine_is_refused(cli, copied, tmp_path):
    """Somebody raised the batch by hand; the engine was built for 16."""
    broken = shutil.copytree(copied, tmp_path / "broken")
    config = broken / "tensorrt_llm" / "config.pbtxt"
    config.write_text(re.sub(r"max_batch_size: \d+", "max_batch_size: 64", config.read_text()))
    text = re.sub(r"\s+", " ", cli.run("serve", f"serving.repository={broken}", code=2))
    assert "was changed after it was made: tensorrt_llm/config.pbtxt has" in text
    (broken / "manifest.json").unlink()  # a repository of one's own has none
    text = re.sub(r"\s+", " ", cli.run("serve", f"serving.repository={broken}", code=2))
    assert re.search(r"max_batch_size.*64.*16", text)


def test_benchmark_measures_every_level(cli):
    text = cli.run("benchmark", *QUICK, "benchmark.concurrency=[1,4]", "benchmark.slo.ttft_ms=60000", *SHORT)
    assert re.findall(r"^ +concurrency (\d+): ", text, re.MULTILINE) == ["1", "4"]
    result = newest(cli)
    assert [level.concurrency for level in result.levels] == [1, 4]
    assert (result.model, result.precision, result.engine, result.tp_size) == ("tiny_gemma", "int4_wo", "openvino", 1)
    for level in result.levels:
        assert level.summary.requests > 0
        assert level.summary.errors == {}
        assert level.summary.goodput_per_s == pytest.approx(level.summary.requests_per_s)
    wait_until_gone(cli.folder)


@pytest.mark.thorough
def test_an_open_loop_keeps_its_rate(cli):
    cli.run("benchmark", *QUICK, "workload=poisson", "benchmark.request_rate=[5]", *SHORT, "benchmark.min_requests=5")
    (level,) = newest(cli).levels
    assert level.request_rate == 5
    assert level.summary.requests > 0


def measure_until(cli, line: str, *words):
    """Start a benchmark and read until a line of its output."""
    process = cli.start("benchmark", *QUICK, *SHORT, *words)
    for text in process.stdout:
        if re.search(line, text):
            return process
    raise AssertionError("the benchmark ended first")


def test_ctrl_c_keeps_what_was_measured(cli):
    process = measure_until(cli, r"concurrency 1: ", "benchmark.concurrency=[1,2,3,4]")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=120)[0]
    assert process.returncode == 130, rest
    result = newest(cli)
    assert (result.complete, result.levels[0].concurrency) == (False, 1)
    assert "interrupt" in result.reason
    wait_until_gone(cli.folder)


def test_a_killed_benchmark_is_found_by_the_next_command(cli):
    before = set((cli.store / "benchmark").glob("*"))
    process = measure_until(cli, r"concurrency 1: ", "benchmark.concurrency=[1,2]", "benchmark.duration_s=3")
    time.sleep(0.5)
    process.kill()
    process.communicate()
    wait_until_gone(cli.folder)
    text = cli.run("report")
    assert "kept 1 finished level, marked incomplete (the run was killed)" in text
    assert len(set((cli.store / "benchmark").iterdir()) - before) == 1


@pytest.mark.thorough
def test_a_server_that_dies_in_the_middle(cli):
    """What was measured is kept, marked incomplete with the reason; exit code 1."""
    process = measure_until(cli, r"concurrency 1: ", "benchmark.concurrency=[1,2]", "benchmark.duration_s=3")
    time.sleep(0.5)
    started = psutil.Process(process.pid).children(recursive=True)
    (server,) = [child for child in started if child.name() == "tritonserver"]
    server.kill()
    rest = process.communicate(timeout=120)[0]
    assert process.returncode == 1, rest
    assert "Traceback" not in rest
    assert newest(cli).complete is False


def test_all_ends_with_a_report(cli):
    words = ["quant=int8_wo", "eval.limit=5", "build.max_batch_size=16", "benchmark.concurrency=[1,4]", *SHORT]
    text = cli.run("all", *words)
    html = cli.folder / re.findall(r"^report: (\S+)$", text, re.MULTILINE)[-1]
    page = html.read_text()
    assert "int8_wo" in page
    assert "Divergence from the 16-bit model by format" in page
    assert re.search(r"bundled +4,\d{3} +\S+", text)  # predicted tokens, and then their mean divergence
    assert "http://" not in re.sub(r'"http://www\.w3\.org/[^"]*"', "", page)
    markdown = (html.parent / "report.md").read_text()
    assert "TTFT" in markdown
    assert "int4_wo" not in page  # the report of `all` is about what it was asked for


@pytest.mark.thorough
def test_the_report_can_be_made_again_elsewhere(cli, tmp_path):
    """From a copy of the store alone, twice, byte for byte."""
    store = shutil.copytree(cli.store, tmp_path / "store", ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    pages = []
    for number in (1, 2):
        cli.run("report", f"paths.store={store}", f"report.folder={tmp_path}/{number}")
        pages.append((tmp_path / str(number) / "tiny_gemma" / "report.html").read_bytes())
    assert pages[0] == pages[1]


@pytest.mark.thorough
def test_compare_names_the_format_to_take(cli):
    words = ["quant=none,int8_wo,nvfp4", "eval.limit=5", "build.max_batch_size=16", "benchmark.concurrency=[4]", *SHORT]
    text = cli.run("compare", *words, code=1)
    assert re.search(r"failed cells:\n.*quant=nvfp4.*nvfp4 is not supported", text)
    format_ = r"(none \(16 bit\)|int8_wo)"
    verdicts = (  # on a busy machine the load generator may be the limit of one format, or of both
        rf"{format_} (gives the most throughput|is the only format that qualifies) within an accuracy loss of 1 %",
        rf"The fastest format is not decided: {format_} gives .*, but {format_} reached",
        rf"{format_} gives .* No other format has a usable throughput, so there is nothing to choose from",
        r"No format can be recommended: not one has a usable throughput.*cut short or limited by the load generator",
    )
    unbroken = " ".join(text.split())
    assert any(re.search(verdict, unbroken) for verdict in verdicts), text
