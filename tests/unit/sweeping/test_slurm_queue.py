"""What squeue and scancel answer, and what submitit is told."""

import pytest
import submitit

from pipelines.settings.paths import PROJECT_ROOT
from pipelines.sweep import slurm
from pipelines.sweep.launch import expand
from pipelines.sweep.slurm import SlurmJob


def test_every_element_of_an_array_is_read(programs):
    programs("squeue", "echo '17_0|RUNNING|None'; echo '17_1|PENDING|JobArrayTaskLimit'; echo '17_2|TIMEOUT|TimeLimit'")
    states = slurm.queue_states("17")
    assert {name: (job.ended, job.text) for name, job in states.items()} == {
        "17_0": (False, "starting"),
        "17_1": (False, "queued (JobArrayTaskLimit)"),
        "17_2": (True, "queued (TimeLimit)"),
    }


def test_a_job_that_ended_long_ago_is_gone(programs):
    programs("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert slurm.queue_states("17") == {}


def test_a_controller_that_does_not_answer_says_nothing_about_jobs(programs):
    programs("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    assert slurm.queue_states("17") is None


@pytest.mark.parametrize("state", ["CANCELLED", "FAILED", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "COMPLETED"])
def test_these_states_are_final(state):
    assert SlurmJob(state, "None").ended


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED"])
def test_these_states_are_not(state):
    assert not SlurmJob(state, "None").ended


def test_what_scancel_says_against_it_is_kept(programs):
    programs("scancel", "echo 'scancel: error: Access denied' >&2; exit 1")
    assert "Access denied" in slurm.cancel("17")


def test_every_option_of_the_launcher_reaches_the_script(tmp_path, programs, monkeypatch):
    """Names that submitit does not know would be refused; the values stand in the sbatch script."""
    from pipelines.sweep.slurm import SlurmLauncher

    programs("srun", "true")
    sweep = expand(
        [
            "hydra/launcher=slurm",
            "hydra.launcher.partition=h100",
            "hydra.launcher.gpus_per_node=2",
            "+hydra.launcher.additional_parameters.reservation=night",
            'hydra.launcher.setup=["module load cuda"]',
        ],
        tmp_path,
    )
    options = {name: value for name, value in sweep.config.hydra.launcher.items() if name != "_target_"}
    executor = submitit.AutoExecutor(cluster="slurm", folder=tmp_path)
    executor.update_parameters(**SlurmLauncher(**options)._options())
    script = executor._executor._make_submission_file_text("run the cell", "id").splitlines()
    for line in (
        "#SBATCH --partition=h100",
        "#SBATCH --gpus-per-node=2",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --mem=64GB",
        "#SBATCH --time=240",
        "#SBATCH --reservation=night",
        "#SBATCH --job-name=pipelines",
        "module load cuda",
        "run the cell",
        f"export PYTHONPATH={PROJECT_ROOT}${{PYTHONPATH:+:$PYTHONPATH}}",
    ):
        assert line in script
