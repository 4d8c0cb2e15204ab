"""`make sweep hydra/launcher=slurm` through a real Slurm: jobs are killed and cancelled, what is missing runs again."""

import re
import signal
import time
from dataclasses import replace

import pytest

from pipelines.deploy.cluster import script_files
from pipelines.serving.config import ServingSettings
from tests.support.cluster_targets import SLURM, target
from tests.support.slurm_cluster import SlurmCluster, why_not

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]
SWEEP = ("sweep", "hydra/launcher=slurm", "quant=none", "eval.limit=1,2", "hydra.launcher.array_parallelism=1")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def user(cli, slurm):
    """A user on the cluster's login node, with a store that every test shares."""
    cli.environment.update(slurm.environment)
    return cli


def read_until(process, pattern: str, limit_s: float = 120) -> str:
    """Read what a command prints until a line matches."""
    text, end = "", time.monotonic() + limit_s
    while time.monotonic() < end:
        line = process.stdout.readline()
        assert line, f"it ended before {pattern!r}:\n{text}"
        text += line
        if re.search(pattern, line):
            return text
    raise AssertionError(f"{pattern!r} did not come:\n{text}")


def test_ctrl_c_cancels_the_jobs(user, slurm):
    process = user.start(*SWEEP)
    text = read_until(process, r"running on")
    assert re.search(r"slurm: submitted 2 cells as job \d+; Ctrl-C cancels it", text)
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(30) == 130
    assert re.search(r"cancelled job \d+", rest)
    assert "Traceback" not in text + rest
    slurm.wait_until_idle()


def test_a_killed_job_is_named_and_only_its_cell_runs_again(user, slurm):
    """The other cell finishes; the second sweep submits one job."""
    process = user.start(*SWEEP)
    text = read_until(process, r"\[1\] running on")
    job = re.search(r"as job (\d+)", text)[1]
    killed = slurm.kill(f"{job}_0")
    for part in ("slurm_script", "submitit.core._submit", "pipelines.sweep.cell"):  # batch script, launcher, cell
        assert any(part in command for command in killed), killed
    text += process.stdout.read()
    assert process.wait(30) == 1
    assert "[2] queued (JobArrayTaskLimit)" in text
    assert re.search(r"\[2\] done in .*: eval\.limit=2", text)
    unbroken = " ".join(text.split())
    wanted = rf"\[1\] eval\.limit=1 Slurm job {job}_0 ended as FAILED and left no result; .*cell-1\.log"
    assert re.search(wanted, unbroken)

    again = user.run(*SWEEP)
    assert "2 cells, 1 finished already, 1 to run with slurm" in again
    assert "submitted 1 cell as job" in again
    assert re.search(r"\[1\] done in .*: eval\.limit=1", again)
    assert "eval.baseline=hugging_face compares it with the model itself." in " ".join(again.split())

    assert "2 cells, 2 finished already, 0 to run with slurm" in user.run(*SWEEP)


@pytest.mark.parametrize("name", ["build.sbatch", "serve.sbatch"])
def test_sbatch_takes_the_scripts_for_clusters(slurm, tmp_path, name):
    """Two nodes of eight GPUs, as the directives ask; a ninth GPU is refused."""
    script = tmp_path / name
    text = script_files(target(tmp_path / "a folder"), SLURM, ServingSettings())[name]
    script.write_text(text)
    slurm.run("sbatch", "--test-only", str(script))
    script.write_text(text.replace("--gpus-per-node=8", "--gpus-per-node=9"))
    with pytest.raises(AssertionError, match="Requested node configuration is not available"):
        slurm.run("sbatch", "--test-only", str(script))


def test_ranks_start_on_their_nodes(slurm, tmp_path):
    """The serve script runs over both nodes, with a recorder in tritonserver's place and srun without PMIx."""
    server, repo = tmp_path / "tritonserver", tmp_path / "repository"
    server.write_text(f'#!/bin/bash\necho "$SLURMD_NODENAME $*" > {tmp_path}/rank-$SLURM_PROCID\n')
    server.chmod(0o755)
    repo.mkdir()
    cluster = SLURM.model_copy(update={"server": server, "srun_mpi": "none"})
    wanted = replace(target(tmp_path / "scripts", repository=repo), world_size=4)
    wanted.folder.mkdir()
    wanted.runs.mkdir()
    for name, text in script_files(wanted, cluster, ServingSettings()).items():
        (wanted.folder / name).write_text(text)
    slurm.run("sbatch", "--wait", str(wanted.folder / "serve.sbatch"), timeout=60)
    said = [(tmp_path / f"rank-{rank}").read_text().split() for rank in range(4)]
    assert [words[0] for words in said] == ["gpu1", "gpu1", "gpu2", "gpu2"]
    assert ["--load-model=tensorrt_llm" in words for words in said] == [False, True, True, True]
    (log,) = [path for path in wanted.runs.glob("serve-*.log") if path.stem.count("-") == 1]
    assert "The server answers on gpu1, HTTP port 8000" in log.read_text()
