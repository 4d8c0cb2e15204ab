"""What Slurm says about jobs, through squeue and scancel: they are there without accounting, unlike sacct."""

from __future__ import annotations

import logging
import subprocess
from dataclasses import dataclass

log = logging.getLogger("pipelines")
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED", "RESIZING", "STOPPED")
RUNNING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING")
ANSWER_S = 60.0
GONE = "Invalid job id"


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One job as squeue shows it.

    Attributes:
        state: Slurm's word: PENDING, RUNNING, COMPLETED, CANCELLED, TIMEOUT, OUT_OF_MEMORY, NODE_FAIL, ...
        reason: why it is in that state, "None" where there is nothing to say.
    """

    state: str
    reason: str

    @property
    def ended(self) -> bool:
        """It will not run again."""
        return self.state not in WAITING + RUNNING

    @property
    def text(self) -> str:
        """For people, while its cell has not reported."""
        if self.state in RUNNING:
            return "starting"
        return "queued" if self.reason in ("None", "") else f"queued ({self.reason})"


def states(job_id: str) -> dict[str, SlurmJob] | None:
    """Jobs of a submission by their ids ("17", or "17_0", "17_1" of an array); None when Slurm does not answer.

    A job that ended some minutes ago is not listed any more.
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
    """Cancel a submission; an empty string, or what scancel said against it."""
    try:
        answer = subprocess.run(["scancel", job_id], capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return answer.stderr.strip() if answer.returncode else ""
