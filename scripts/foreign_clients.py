"""Run the clients that people use, unchanged and each in an environment of its own, against a CPU server.

    python -m scripts.foreign_clients WORK [--only NAME ...] [--nvidia-clients FOLDER] [--write]

WORK is a folder for the clients' environments (made once, by pip from PyPI or by npm) and for what they leave. Clients
of npm are left out, with a sentence, where Node.js is not installed. FOLDER is NVIDIA's
`triton_backend` of a TensorRT-LLM checkout, or a checkout of its tensorrtllm_backend up to v0.18; nothing of it is
copied. perf_analyzer needs Debian's libb64-0d. Results are kept in WORK, so that a client can be run again by itself;
--write puts the table of all into docs/serving.md. What a client counts is compared with what the server counts.
Figures of speed are not looked at.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pipelines.serving.config import ServingSettings
from pipelines.serving.ports import choose_ports
from scripts.foreign.clients import CLIENTS, QUESTIONS, ROOT, Client, Counts, Finished, Run, UnfitError

PROGRAMS = ROOT / "scripts" / "foreign"
PAGE = ROOT / "docs" / "serving.md"
BEGIN = "<!-- clients: made by python -m scripts.foreign_clients -->"
END = "<!-- end of clients -->"
MODEL = "tiny_llama"
SERVED = (
    f"model={MODEL}", "quant=none", "guided=llguidance", "serving.openai=true",
    "build.trtllm.gather_context_logits=true", "build.trtllm.gather_generation_logits=true",
    "triton.fold_token_ids=true",
)  # fmt: skip
NODE = 20
"""Version of Node.js that the clients of npm need, or a later one."""
READY_S, PATIENCE_S, SETTLE_S = 900, 900, 1.5
ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Place:
    """What commands may name.

    Attributes:
        openai: URL of the service, with /v1.
        front: the same without.
        grpc: tritonserver's gRPC port as host:port.
        metrics: URL of its metrics.
        tokenizer: folder of the served model's tokenizer.
        nvidia: folder of NVIDIA's clients; None if it was not given.
    """

    openai: str
    front: str
    grpc: str
    metrics: str
    tokenizer: Path
    nvidia: Path | None

    def counts(self) -> Counts:
        """Read what the engine has counted."""
        time.sleep(SETTLE_S)  # it is updated twice a second
        with urllib.request.urlopen(self.metrics, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        counters = {
            line.partition("{")[0]: int(float(line.rpartition(" ")[2])) for line in lines if "token_len_" in line
        }
        return Counts(counters.get("nv_llm_input_token_len_count", 0), counters.get("nv_llm_input_token_len_sum", 0),
                      counters.get("nv_llm_output_token_len_sum", 0))  # fmt: skip


@dataclass(slots=True)
class Row:
    """A line of the table."""

    client: str
    version: str
    asked: str
    command: str
    result: str
    fine: bool = True


def environment(client: Client, work: Path) -> tuple[Path, str]:
    """Make the client's environment, if it is not there, and return its `bin`, and its first package with its version.

    Raises:
        UnfitError: pip cannot install it.
    """
    if client.npm:
        return npm_environment(client, work)
    folder = work / "environments" / hashlib.sha256(" ".join(client.packages).encode()).hexdigest()[:12]
    python = folder / "bin" / "python"
    made = folder / "made"
    if not made.exists():
        say(f"{client.name}: pip install {shlex.join(client.packages)}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", *client.packages]
        done = subprocess.run(["nice", "-n", "19", *pip], capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnfitError(f"pip: {done.stderr.strip().splitlines()[-1][:200]}")
        made.touch()
    name = re.split(r"[\[=]", client.packages[0])[0]
    query = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    process = subprocess.run([python, "-c", query], capture_output=True, text=True, check=True)
    return folder / "bin", f"{name} {process.stdout.strip()}"


def npm_environment(client: Client, work: Path) -> tuple[Path, str]:
    """Install the client's packages beside copies of our programs, which look for them there."""
    folder = work / "environments" / client.name.replace(" ", "-")
    packages = [f"{name}@{version}" for name, version in client.npm]
    done = subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *packages],
                          capture_output=True, text=True, check=False)  # fmt: skip
    if done.returncode:
        raise UnfitError(f"npm: {done.stderr.strip()[-200:]}")
    for program in PROGRAMS.glob("*.mjs"):
        shutil.copy(program, folder)
    return folder, " ".join(client.npm[0])


def without_node() -> str:
    """Say why clients of npm cannot run on this machine; nothing if they can."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return f"there are no node and npm on PATH; install Node.js {NODE} or later"
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    too_old = int(version.lstrip("v").partition(".")[0]) < NODE
    return f"node is {version}; install Node.js {NODE} or later" if too_old else ""


@contextmanager
def served(work: Path, nvidia: Path | None) -> Iterator[Place]:
    """Serve the bundled model on free ports until the block ends."""
    ports = choose_ports(ServingSettings(openai=True))
    where = [f"serving.{name}={port}" for name, port in ports.items()]
    stored = [f"paths.store={work}/store", f"paths.runs={work}/runs"]
    log = work / "serve.log"
    say(f"python -m pipelines serve {' '.join(SERVED)} (its words: {log})")
    with log.open("w") as out:
        process = subprocess.Popen(
            ["nice", "-n", "19", sys.executable, "-m", "pipelines", "serve", *SERVED, *where, *stored],
            cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + READY_S
        while "/completions" not in log.read_text():
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"The server did not start:\n{log.read_text()}")
            time.sleep(0.5)
        host = "127.0.0.1"
        *_, repository = re.findall(r"^repository: +(.+)$", log.read_text(), re.MULTILINE)  # its stage speaks before
        tokenizer = ROOT / repository / "preprocessing" / "1" / "tokenizer"
        yield Place(
            f"http://{host}:{ports['openai_port']}/v1", f"http://{host}:{ports['openai_port']}",
            f"{host}:{ports['grpc_port']}", f"http://{host}:{ports['metrics_port']}/metrics", tokenizer, nvidia,
        )  # fmt: skip
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def evaluate(work: Path) -> None:
    """Let the project answer the questions that lm-eval will ask, once."""
    for task in ("mini_mmlu", "mini_answers"):
        kept = work / "lm-eval" / f"{task}.json"
        if kept.exists():
            continue
        command = [sys.executable, "-m", "pipelines", "evaluate", f"model={MODEL}", "quant=none", f"eval={task}",
                   f"eval.limit={QUESTIONS}", f"paths.store={work}/store", f"paths.runs={work}/runs",
                   *(each for each in SERVED if each.startswith("build."))]  # fmt: skip
        say(shlex.join(command[1:]))
        with (work / "evaluate.log").open("w") as log:
            subprocess.run(["nice", "-n", "19", *command], cwd=ROOT, check=True, stdout=log, stderr=subprocess.STDOUT)
        newest = max((work / "store" / "evaluate").glob("*/evaluation.json"), key=lambda file: file.stat().st_mtime)
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(newest.read_text())


def run(client: Client, at: Run, programs: Path, place: Place, folder: Path) -> str:
    """Run one command and return its result.

    Raises:
        UnfitError: the client did not get what it needs.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.prepare is not None:
        client.prepare(folder)
    values = _values(place) | ({"programs": programs} if client.npm else {})
    words = [word.format(**values) for word in shlex.split(at.command)]
    variables = {**os.environ, **ENVIRONMENT, "PATH": f"{programs}:{os.environ['PATH']}"}
    variables.pop("PYTHONPATH", None)
    own = map(str, programs.parent.glob("lib/python*/site-packages/nvidia/cuda_runtime/lib"))
    variables["LD_LIBRARY_PATH"] = ":".join((*own, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])))
    before = place.counts()
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(
            ["nice", "-n", "19", *words], cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        code = process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise UnfitError(f"it did not end within {PATIENCE_S} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever the client has started
    text = (folder / "out.txt").read_text(errors="replace")
    if code != 0:
        raise UnfitError(f"it ended with code {code}: {text[-400:]}")
    return at.result(Finished(text, folder, place.counts() - before))


def _values(place: Place) -> dict[str, object]:
    return {**asdict(place), "programs": PROGRAMS, "model": MODEL, "questions": QUESTIONS}


def shown(command: str) -> str:
    """Write a command with shell variables for what differs from machine to machine."""
    named = {"openai": "$OPENAI", "front": "$FRONT", "grpc": "$GRPC", "tokenizer": "$TOKENIZER", "nvidia": "$NVIDIA",
             "programs": "scripts/foreign", "model": MODEL, "questions": QUESTIONS}  # fmt: skip
    return command.format(**named)


def ask(client: Client, place: Place, work: Path) -> Iterator[Row]:
    """Run the commands of a client one after the other."""
    if client.needs_nvidia and place.nvidia is None:
        yield Row(client.name, "", "", "", "not run: needs --nvidia-clients FOLDER")
        return
    try:
        programs, version = environment(client, work)
    except UnfitError as error:
        yield Row(client.name, "", "", shlex.join(client.packages), f"not installed: {error}", fine=False)
        return
    for number, at in enumerate(client.runs, 1):
        row = Row(client.name, version, at.what, shown(at.command), "")
        try:
            row.result = run(client, at, programs, place, work / client.name / str(number))
        except UnfitError as error:
            row.result, row.fine = str(error), False
        yield row


def table(rows: Sequence[Row]) -> str:
    """Write the rows in Markdown."""
    lines = ["| client | version | asked | command | result |", "|---|---|---|---|---|"]
    for row in rows:
        command = f"`{row.command}`" if row.command else ""
        result = row.result.replace("|", "\\|").replace("\n", " ")
        lines.append(
            f"| {row.client} | {row.version} | {row.asked} | {command} | {'' if row.fine else 'FAILED: '}{result} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the clients and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="+", choices=[client.name for client in CLIENTS], metavar="NAME")
    parser.add_argument("--nvidia-clients", type=Path, metavar="FOLDER")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ended by SIGTERM."))  # and what was started ends, too
    work = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    nvidia = arguments.nvidia_clients.absolute() if arguments.nvidia_clients else None
    clients = [client for client in CLIENTS if not arguments.only or client.name in arguments.only]
    if any(client.npm for client in clients) and (why := without_node()):
        say(f"{', '.join(client.name for client in clients if client.npm)}: left out: {why}")
        clients = [client for client in clients if not client.npm]
    if any(client.name == "lm-eval" for client in clients):
        evaluate(work)
    kept = work / "rows.json"
    rows = json.loads(kept.read_text()) if kept.exists() else {}
    with served(work, nvidia) as place:
        for client in clients:
            rows[client.name] = []
            for row in ask(client, place, work):
                say(f"{'ok    ' if row.fine else 'FAILED'} {row.client}: {row.asked}\n       {row.result}")
                rows[client.name].append(asdict(row))
            kept.write_text(json.dumps(rows))
    all_rows = [Row(**row) for client in CLIENTS for row in rows.get(client.name, ())]
    if arguments.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table(all_rows)}\n\n{END}{rest.partition(END)[2]}")
    else:
        say(table(all_rows))
    return 0 if all(row.fine for row in all_rows) else 1


if __name__ == "__main__":
    sys.exit(main())
