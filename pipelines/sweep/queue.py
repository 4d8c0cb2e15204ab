"""Query and cancel Slurm jobs with squeue and scancel, which, unlike sacct, work without accounting."""

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


def states(job_id: str) -> dict[str, SlurmJob] | None:
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
