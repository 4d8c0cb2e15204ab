"""The first run of docs/gpu.md is followed block by block, as far as a machine without a GPU can.

Real: planning, quantizing, writing repositories, and all checks and messages. Emulated: trtllm-build and nvidia-smi.
Recorded: docker, tritonserver and trtllm-serve, whose command lines are compared with what they document. Commands for
a model that is not bundled, or that need TensorRT-LLM's runtime, are planned on the emulated machine.

A block that no function here knows how to follow fails. `--rewrite-golden` puts what `make plan` prints into the page.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent

import pytest

from tests.conftest import REFERENCE, ROOT
from tests.support.emulated_trtllm import A100, environment
from triton_repo.check import check_repository

pytestmark = pytest.mark.thorough

PAGE = ROOT / "docs" / "gpu.md"
FOLLOWED = PAGE.read_text().partition("\n## What works on this machine\n")[0]
"""The doctor's part has tests of its own."""
BLOCK = re.compile(r"(?<=\n\n)(?:    .*\n)+")
RECORDED = ("docker", "tritonserver", "trtllm-serve")
TINY = ["engine=tensorrt_llm", "model=tiny_llama", "quant=int8_wo", "hardware=h100_sxm", "build.max_batch_size=8"]


def flat(text: str) -> str:
    return " ".join(text.split())


def commands(block: str) -> list[list[str]]:
    """Words of each command of a block."""
    return [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]


@dataclass
class Hour:
    """The folder of someone who reads the page, and what was printed so far."""

    folder: Path
    rewrite: bool = False
    printed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "Makefile").symlink_to(ROOT / "Makefile")
        (self.folder / "scripts").symlink_to(ROOT / "scripts")
        bin_folder = self.folder / "bin"
        bin_folder.mkdir()
        for name in RECORDED:
            program = bin_folder / name
            program.write_text(
                f'#!/bin/sh\n[ "$1" = info ] || printf "%s\\n" "$PWD" "{name} $*" >> {self.folder}/calls\n'
            )
            program.chmod(0o755)
        self.gpu = {**self.here, **environment(self.folder)}
        self.gpu["PATH"] = f"{bin_folder}{os.pathsep}{self.gpu['PATH']}"

    @property
    def here(self) -> dict[str, str]:
        """A machine without a GPU."""
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "EMULATED"))}
        path = f"{self.folder}/bin{os.pathsep}{os.environ['PATH']}"
        own = {"HOME": str(self.folder), "HF_HOME": f"{self.folder}/hub", "PYTHON": sys.executable}
        return {**outer, **own, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}

    def run(self, words: list[str], environment: dict[str, str], code: int = 0, script: str | None = None) -> str:
        """Run a command in the reader's folder and return what it printed."""
        done = subprocess.run(
            words, cwd=self.folder, env=environment, input=script, timeout=300,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == code, f"{shlex.join(words)}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def calls(self) -> list[tuple[str, list[str]]]:
        """Folder and words of every recorded call, and forget them."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.is_file() else []
        file.unlink(missing_ok=True)
        return [(where, words.split(" ")) for where, words in zip(lines[::2], lines[1::2], strict=True)]

    def same(self, block: str, printed: str) -> None:
        """Compare a block of the page with what was printed, or write it there."""
        if self.rewrite:
            page, old = PAGE.read_text(), indent(block, "    ")
            assert page.count(old) == 1
            PAGE.write_text(page.replace(old, indent(printed, "    ")))
        else:
            assert block == printed


def documented(calls: list[tuple[str, list[str]]]) -> list[str]:
    """Check that docker documents every option of the calls, and return their verbs."""
    options = json.loads((REFERENCE / "docker_options.json").read_text())
    for _, (_program, verb, *words) in calls:
        given = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert given <= set(options[verb]), f"docker {verb} has no option {given - set(options[verb])}"
    return [words[1] for _, words in calls]


def containers(hour: Hour, block: str) -> None:
    for words in commands(block):
        hour.run(words, hour.here)
    calls = hour.calls()
    assert documented(calls) == ["build", "run"]
    tag = next(word for word in calls[0][1] if word.startswith("--tag=")).removeprefix("--tag=")
    assert calls[1][1][-1] == tag


def bare_python(hour: Hour, block: str) -> None:
    """`-S` leaves out every installed package, as in a Python without this project's environment."""
    (words,) = commands(block)
    python, *rest = words
    assert python == "python3"
    hour.printed["python3"] = hour.run([sys.executable, "-S", *rest], hour.here, code=2)


def bare_python_says(hour: Hour, block: str) -> None:
    printed = flat(hour.printed["python3"]).replace(sys.executable, "/usr/bin/python3")
    assert flat(block) == printed


def plan(hour: Hour, block: str) -> None:
    (words,) = commands(block)
    hour.printed["plan"] = hour.run(words, hour.here)


def plan_says(hour: Hour, block: str) -> None:
    """The paragraph that begins with the same word is the same."""
    first = block.split()[0]
    (paragraph,) = re.findall(rf"^{first}(?:.+\n)+", hour.printed["plan"], re.M)
    hour.same(block, paragraph)


def doctor(hour: Hour, block: str) -> None:
    (words,) = commands(block)
    assert "trtllm-build" in hour.run(words, hour.gpu)


def build(hour: Hour, block: str) -> None:
    for words in commands(block):
        if "model=tiny_llama" in words:
            hour.printed["build"] = hour.run(words, hour.gpu)
        else:
            planned(hour, shlex.join(words))


def build_says(hour: Hour, block: str) -> None:
    """Words are the same; seconds and sizes differ."""
    amount = re.compile(r"\d[\d.,]* (?:min \d+ s|[a-zA-Z]+)")
    printed = hour.printed["build"]
    start = printed.index("build: tiny_llama-none")
    wanted = [amount.sub("#", line) for line in block.splitlines()]
    shown = [line for line in printed[start:].splitlines() if not line.startswith("  trtllm-build: ")]
    assert [amount.sub("#", line) for line in shown[: len(wanted)]] == wanted


def build_writes(hour: Hour, block: str) -> None:
    (folder,) = (hour.folder / "artifacts" / "build").glob("tiny_llama-none-*")
    names = set(re.findall(r"[\w-]+\.(?:json|engine|log)", block))
    assert names == {path.name for path in folder.iterdir()}
    named = block.partition("facts: ")[2].partition("trtllm-build.log")[0]
    facts = json.loads((folder / "manifest.json").read_text())["facts"]
    assert set(re.findall(r"\w+", named)) <= set(facts)


def planned(hour: Hour, block: str) -> None:
    for words in commands(block):
        assert words[0] == "make"
        text = hour.run(["make", "plan", f"plan.target={words[1]}", *words[2:]], hour.gpu)
        assert "not run here" not in text
        assert re.search(r"^run +\S", text, re.M)


def engine_alone(hour: Hour, block: str) -> None:
    """The engine is a bundled model's; running it needs TensorRT-LLM."""
    stage, (python, *words) = commands(block)
    hour.run([*(word for word in stage if "=" not in word or word.startswith("stage.")), *TINY], hour.gpu)
    assert python == "python3"
    assert (hour.folder / words[-1] / "rank0.engine").is_file()
    assert "usage: measure_engine.py" in hour.run([sys.executable, *words[:-1], "--help"], hour.here)


def other_gpu(hour: Hour, block: str) -> None:
    words = ["make", "repository", *TINY[:2], "quant=none", "build.max_batch_size=64"]
    hour.run(words, hour.gpu)
    (folder,) = (hour.folder / "artifacts" / "repository").iterdir()
    there = {**hour.gpu, **environment(hour.folder, gpus=(A100,))}
    there["PATH"] = hour.gpu["PATH"]
    said = hour.run(["make", "serve", f"serving.repository={folder}"], there, code=2)
    wanted = ".*".join(re.escape(flat(part)) for part in block.split("..."))
    assert re.search(wanted, flat(said))
    command = re.split(r"Build\s+it\s+here:\n", said)[1].partition("\nmake: ")[0].replace("\\\n", " ")
    assert shlex.split(command) == ["python", "-m", "pipelines", "repository", *words[2:]]


def gpu_tests(hour: Hour, block: str) -> None:
    """They are not run here; make knows them, and the program exists."""
    (words,) = commands(block)
    said = hour.run([*words, "--dry-run"], hour.here)
    (module,) = re.findall(r"-m (tests\.\w+)", said)
    assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()


def edge(hour: Hour, block: str) -> None:
    """The exporter itself runs in tests/e2e/test_edge.py."""
    setup, plan_words, build_words = commands(block)
    assert "scripts/setup_edge.sh" in hour.run([*setup, "--dry-run"], hour.here)
    assert "Edge" in hour.run(plan_words, hour.here)
    assert build_words == ["make", "build", *plan_words[2:]]


Way = Callable[[Hour, str], None]
WAYS: dict[str, Way] = {
    r"make image ": containers,
    r"python3 -m pipelines plan": bare_python,
    r"error: /usr/bin/python3 lacks": bare_python_says,
    r"make plan ": plan,
    r"download: ": plan_says,
    r"Commands \(not run here": plan_says,
    r"make doctor": doctor,
    r"make build ": build,
    r"build: tiny_llama-none": build_says,
    r"config\.json ": build_writes,
    r"make evaluate ": planned,
    r"make serve ": planned,
    r"make stage ": engine_alone,
    r"error: The engine '": other_gpu,
    r"make test-gpu": gpu_tests,
    r"make setup-edge": edge,
}
"""Beginning of a block -> how it is followed."""


def blocks(page: str) -> list[str]:
    return [re.sub(r"^    ", "", block, flags=re.M) for block in BLOCK.findall(page)]


def way(block: str) -> Way:
    """Return the only way to follow a block.

    Raises:
        LookupError: there is none, or more than one.
    """
    found = [follow for beginning, follow in WAYS.items() if re.match(beginning, block)]
    if len(found) != 1:
        raise LookupError(f"docs/gpu.md has a block that {len(found)} functions follow:\n{block}")
    return found[0]


@pytest.fixture(scope="module")
def hour(tmp_path_factory, request) -> Hour:
    return Hour(tmp_path_factory.mktemp("checkout"), request.config.getoption("--rewrite-golden"))


@pytest.mark.parametrize("block", blocks(FOLLOWED), ids=lambda block: block.splitlines()[0][:40])
def test_the_page_is_followed(hour, block):
    """One after the other: later blocks need what earlier ones made."""
    way(block)(hour, block)


def test_every_way_is_one_of_the_page():
    assert len(blocks(FOLLOWED)) == len(WAYS)


def test_a_block_that_nobody_can_follow_is_found():
    (block,) = blocks("Then:\n\n    make coffee cups=2\n\nand so on\n")
    with pytest.raises(LookupError, match=r"that 0 functions follow:\nmake coffee cups=2"):
        way(block)


def pasted(text: str) -> str:
    """What a reader copies from a plan: every command, without titles."""
    start = text[text.index("\nCommands ") :].partition("\n\nmodelled under")[0]
    return "".join(f"{line}\n" for line in start.splitlines() if line.startswith("    "))


def test_the_commands_of_a_plan_build_and_serve_when_pasted(tmp_path):
    """Planned here, pasted on the machine with the GPU."""
    hour = Hour(tmp_path)
    text = hour.run(["make", "plan", *TINY, "plan.target=serve"], hour.here)
    hour.run(["bash", "-e"], hour.gpu, script=pasted(text))
    *docker, (where, served) = hour.calls()
    assert documented(docker) == ["build", "run"]
    assert served == ["tritonserver", "--model-repository=.", "--disable-auto-complete-config"]
    repository = Path(where).resolve()
    assert repository == (tmp_path / "tiny_llama-int8_wo-repository").resolve()
    assert check_repository(repository) == []
    engine = tmp_path / "tiny_llama-int8_wo-engine"
    assert {path.name for path in engine.iterdir()} == {"config.json", "rank0.engine"}
    assert json.loads((engine / "config.json").read_text())["build_config"]["max_batch_size"] == 8
    assert (tmp_path / "timing.cache").is_file()
    assert not (tmp_path / "artifacts" / "build").exists()  # the engine built by hand is the one that is served
    link = tmp_path / "tiny_llama-int8_wo-checkpoint"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()


def test_the_commands_of_the_llm_api_serve_when_pasted(tmp_path):
    hour = Hour(tmp_path)
    words = ["engine=tensorrt_llm_llmapi", "model=tiny_llama", "quant=none", "hardware=h100_sxm"]
    text = hour.run(["make", "plan", *words, "plan.target=serve"], hour.here)
    by_hand, _, triton = pasted(text).rpartition("    (cd ")
    assert triton.startswith("tiny_llama-none-repository")
    hour.run(["bash", "-e"], hour.gpu, script=by_hand)
    *docker, (where, served) = hour.calls()
    assert documented(docker) == ["run"]
    where_to = ["--host", "127.0.0.1", "--port", "9000"]
    assert served == ["trtllm-serve", "checkpoint", *where_to, "--extra_llm_api_options", "extra_llm_api_options.yaml"]
    assert (Path(where) / served[1] / "config.json").is_file()
    assert (Path(where) / served[-1]).is_file()
    assert (tmp_path / "tiny_llama-none-repository" / "repository.json").is_file()
