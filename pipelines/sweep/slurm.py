"""hydra-submitit-launcher with a different way of waiting.

The plugin asks `sacct` about its jobs and stops at the first job without a result: on a cluster without accounting it
waits forever for a killed job, and elsewhere the other cells are lost. Here the cells' files and squeue are the source,
every cell is waited for, and Ctrl-C cancels what was submitted.
"""

import logging
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import submitit
from hydra.core.singleton import Singleton
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher as PluginLauncher
from omegaconf import OmegaConf

from pipelines.domain.errors import UserError
from pipelines.host.disk import relative_to_cwd
from pipelines.host.screen import say
from pipelines.settings.paths import PROJECT_ROOT
from pipelines.sweep.cells import RunCell, SweepCell, Watch, read

# Query and cancel Slurm jobs with squeue and scancel, which, unlike sacct, work without accounting.

log = logging.getLogger("pipelines")
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED", "RESIZING", "STOPPED")
RUNNING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING")
ANSWER_S = 60.0
GONE = "Invalid job id"


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One job as squeue reports it.

    Attributes:
        state: Slurm's word: PENDING, RUNNING, COMPLETED, CANCELLED, TIMEOUT, OUT_OF_MEMORY, NODE_FAIL, ...
        reason: why it is in that state; "None" if there is no reason.
    """

    state: str
    reason: str

    @property
    def ended(self) -> bool:
        """Whether the job will not run again."""
        return self.state not in WAITING + RUNNING

    @property
    def text(self) -> str:
        """Describe the job while its cell has not reported yet."""
        if self.state in RUNNING:
            return "starting"
        return "queued" if self.reason in ("None", "") else f"queued ({self.reason})"


def queue_states(job_id: str) -> dict[str, SlurmJob] | None:
    """Return the jobs of a submission by id ("17", or "17_0", "17_1" for an array), or None if Slurm does not answer.

    A job that ended some minutes ago is no longer listed.
    """
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r", f"--jobs={job_id}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    if answer.returncode != 0:
        if GONE in answer.stderr:
            return {}
        log.warning("squeue: %s", answer.stderr.strip())
        return None
    rows = [line.strip().split("|", 2) for line in answer.stdout.splitlines() if line.strip()]
    return {name: SlurmJob(state, reason) for name, state, reason in rows}


def cancel(job_id: str) -> str:
    """Cancel a submission; return an empty string, or scancel's error."""
    try:
        answer = subprocess.run(["scancel", job_id], capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return answer.stderr.strip() if answer.returncode else ""


POLL_S, POLL_GROWTH, POLL_MAX_S = 1.0, 1.1, 30.0
SILENT_S = 300.0  # silence of Slurm before a warning
FILE_S = 5.0  # how long a file may take to become visible here: network file systems cache
FOR_THE_EXECUTOR = ("python", "max_num_timeout")
"""Options of submitit's executor; all others belong to the submission."""


class SlurmLauncher(PluginLauncher):  # type: ignore[misc]
    """One job array, one element per cell."""

    task_function: RunCell

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        """Submit the jobs and report on them until every cell has ended.

        Raises:
            UserError: sbatch refuses the jobs.
            KeyboardInterrupt: after the jobs were cancelled.
        """
        jobs = self._submit(job_overrides, initial_job_idx)
        number = jobs[0].job_id.split("_")[0]
        say(f"slurm: submitted {len(jobs)} cell{'s' if len(jobs) > 1 else ''} as job {number}; Ctrl-C cancels it")
        try:
            _Waiting(number, jobs, self.task_function).until_ended()
        except KeyboardInterrupt:
            problem = cancel(number)
            say(f"It could not be cancelled ({problem}): scancel {number}" if problem else f"cancelled job {number}")
            raise
        return []

    def _submit(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[Any]:
        folder = self.params["submitit_folder"]
        init = {f"slurm_{name}": self.params.get(name) for name in FOR_THE_EXECUTOR}
        executor = submitit.AutoExecutor(cluster="slurm", folder=folder, **init)
        try:
            executor.update_parameters(**self._options())
        except (AssertionError, NameError, TypeError, ValueError) as error:
            raise UserError(f"submitit refused hydra.launcher: {str(error).splitlines()[0]}.") from None
        count, state = len(job_overrides), Singleton.get_state()
        numbers = range(first, first + count)
        ids = [f"cell-{number}" for number in numbers]
        try:
            return list(
                executor.map_array(
                    self, [list(o) for o in job_overrides], ["hydra.sweep.dir"] * count, numbers, ids, [state] * count
                )
            )
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
            reasons = "; ".join(line.split("error: ")[-1] for line in str(error).splitlines() if line.strip())
            raise UserError(
                f"sbatch refused the jobs: {reasons}.",
                todo="Set what this cluster requires, e.g. hydra.launcher.partition=... hydra.launcher.account=...; "
                "`sinfo` lists the partitions.",
            ) from None

    def _options(self) -> dict[str, Any]:
        """Return the options of the submission; those that only Slurm has get submitit's prefix."""
        common = set(OmegaConf.structured(BaseQueueConf).keys()) - {"submitit_folder"}
        skipped = {*FOR_THE_EXECUTOR, "submitit_folder", "setup"}
        options = {k if k in common else f"slurm_{k}": v for k, v in self.params.items() if k not in skipped}
        path = f"export PYTHONPATH={shlex.quote(str(PROJECT_ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}"
        return {**options, "slurm_setup": [path, *(self.params.get("setup") or [])]}


class _Waiting:
    """Waits on the submitting side until every cell has ended."""

    def __init__(self, number: str, jobs: Sequence[Any], task: RunCell) -> None:
        self._number = number
        self._jobs = jobs
        self._folder = task.folder
        self._watch = Watch(task.folder, [read(file) for file in task.files])
        self._gone: dict[int, float] = {}  # when a job was first seen to have ended while its cell had no result
        self._answered = time.monotonic()

    def until_ended(self) -> None:
        """Poll files and queue, less and less often."""
        poll = POLL_S
        while not self._all_over():
            time.sleep(poll)
            poll = min(POLL_MAX_S, POLL_GROWTH * poll)
        self._watch.poll()

    def _all_over(self) -> bool:
        states = queue_states(self._number)
        if states is None:
            if time.monotonic() - self._answered > SILENT_S:
                self._answered = time.monotonic()
                say(f"Slurm has not answered for {SILENT_S / 60:.0f} minutes; still waiting for job {self._number}")
            self._watch.poll()
            return False
        self._answered = time.monotonic()
        jobs = [states.get(job.job_id) for job in self._jobs]
        queued = {cell.number: job.text for cell, job in zip(self._watch.cells, jobs, strict=True) if job}
        cells = self._watch.poll(queued)
        return all([self._is_over(*row) for row in zip(cells, self._jobs, jobs, strict=True)])

    def _is_over(self, cell: SweepCell, submitted: Any, job: SlurmJob | None) -> bool:
        """Return whether the job is over for good; Slurm may restart a failed cell (preemption)."""
        if cell.state == "done":
            return True
        if job is not None and not job.ended:
            self._gone.pop(cell.number, None)
            return False
        if cell.state == "failed":
            return True
        if time.monotonic() - self._gone.setdefault(cell.number, time.monotonic()) < FILE_S:
            return False
        how = f"ended as {job.state}" if job else "is no longer in the queue"
        output = relative_to_cwd(submitted.paths.stdout)
        cell.failed(f"Slurm job {submitted.job_id} {how} and left no result; its output: {output}").write(self._folder)
        return True
