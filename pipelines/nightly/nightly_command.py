"""The command `nightly`: measure the matrix, judge it by its history, write the report, and list the regressions.

Exit codes: 0 nothing got worse; 3 a regression; 1 a cell failed, or none could be measured; 2 invalid input.
"""

import http.client
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from eval.verdict import Verdict
from pipelines.document.canvas import missing_packages, write_document
from pipelines.domain.errors import Fault, UserError, collecting, refuse
from pipelines.domain.units import show_seconds
from pipelines.engines.registry import choose
from pipelines.host.disk import check_folders, relative_to_cwd
from pipelines.host.files import write_json, write_text
from pipelines.host.machine import Machine, gather, library_versions
from pipelines.host.screen import say, tell, warn, wrapped
from pipelines.nightly import facts
from pipelines.nightly.accuracy import Record, measured_loss
from pipelines.nightly.config import NightlySettings
from pipelines.nightly.matrix import NightlyCell, cells, own_overrides
from pipelines.nightly.sentences import WAIT, History, by_reason, causes, headline
from pipelines.nightly.trend import trend_document
from pipelines.nightly.verdict import NightVerdict, is_suspect, judge, without_effect
from pipelines.plan.plan import make_plan
from pipelines.run.runner import git_commit
from pipelines.settings.compose import load
from pipelines.settings.root import Settings
from pipelines.store.store import Store, fingerprint
from pipelines.sweep.cells import SweepCell, run_process

# Measure the cells of a run one after another; each writes its line in the history before the next begins.

RESUMED = timedelta(hours=18)
"""A run older than this is not resumed, because its results would mix two nights."""


@dataclass(frozen=True)
class Night:
    """One run of the nightly."""

    run: str
    since: datetime
    settings: Settings
    history: History
    machine: Machine
    machine_class: str
    commit: str
    store: Path
    logs: Path


def measure(settings: Settings, cells: Sequence[NightlyCell]) -> str:
    """Measure every cell that this run has not finished yet.

    Returns:
        the id of the run.

    Raises:
        UserError: a cell's configuration is wrong, or another run measures on this host with this history or store.
        KeyboardInterrupt: the run was stopped; the same command resumes it.
    """
    faults: list[Fault] = []
    configured = []
    for cell in cells:  # a wrong override is found before the night begins
        with collecting(faults):
            configured.append(load(cell.overrides))
    refuse(dict.fromkeys(faults))
    history, root = History(settings.nightly.history), settings.paths.store.absolute()
    host = socket.gethostname()

    def busy() -> None:
        raise UserError(f"Another nightly run measures on {host} with the store {root}.", todo=WAIT)

    with history.only_run(host), Store(root).lock(fingerprint(["nightly", host]), busy):
        night = _begin(settings, cells, history, host)
        with Store(night.store).leases.hold(night.store):  # also between two cells
            done = {record.key for record in night.history.read().records if record.run == night.run}
            if done:
                say(f"resuming run {night.run}: {len(done)} of {len(cells)} cells are done")
            for number, (cell, own) in enumerate(zip(cells, configured, strict=True), 1):
                if cell.key in done:
                    continue
                say(f"[{number}/{len(cells)}] {cell.name}")
                start = time.monotonic()
                record = _cell(night, cell, own, number, len(cells))
                night.history.append(record)
                tell(f"  {summary(record, night.settings.nightly)} ({show_seconds(time.monotonic() - start)})")
        _state(history, host).unlink(missing_ok=True)
    return night.run


def _state(history: History, host: str) -> Path:
    return history.folder / f"run-{host}.json"


def _begin(settings: Settings, cells: Sequence[NightlyCell], history: History, host: str) -> Night:
    """Resume a stopped run if nothing has changed, else begin a new one."""
    machine, commit = gather(), git_commit()
    kind = facts.machine_class(machine)
    plan = fingerprint([[cell.key, cell.overrides] for cell in cells] + [commit, kind])
    place = _state(history, host)
    try:
        state: dict[str, Any] = json.loads(place.read_text())
    except (OSError, ValueError):
        state = {}
    now = datetime.now(UTC).replace(microsecond=0)
    if state.get("plan") != plan or now - datetime.fromisoformat(state["since"]) > RESUMED:
        if state:
            tell(f"run {state['run']} was stopped and is not resumed: other cells, commit or machine, or too old")
        state = {"plan": plan, "run": f"{now:%Y%m%dT%H%M%SZ}-{host}-{os.getpid()}", "since": now.isoformat()}
        write_json(place, state)
    root = settings.paths.store.absolute()
    store = fresh_store(root / ".nightly" / host / state["run"], root) if settings.nightly.rebuild else root
    logs = settings.paths.runs.absolute() / "nightly" / state["run"]
    logs.mkdir(parents=True, exist_ok=True)
    since = datetime.fromisoformat(state["since"])
    return Night(state["run"], since, settings, history, machine, kind, commit, store, logs)


def fresh_store(store: Path, root: Path) -> Path:
    """Create an empty store for one run, and remove the stores of earlier runs on this host.

    Args:
        store: folder to create; if it exists, the run is resumed.
        root: the usual store, with which downloads and timing caches are shared.
    """
    if store.parent.is_dir():
        for old in store.parent.iterdir():
            if old != store:
                shutil.rmtree(old)  # links inside are removed, not followed
    store.mkdir(parents=True, exist_ok=True)
    for shared in ("download", ".locks", ".leases", ".timing_caches"):
        (root / shared).mkdir(exist_ok=True)
        if not (store / shared).is_symlink():
            (store / shared).symlink_to(root / shared)
    return store


def _cell(night: Night, cell: NightlyCell, own: Settings, number: int, count: int) -> Record:
    """Plan and measure a cell, and measure it again if it looks worse."""
    values = facts.deciding(own)
    digest = facts.digest(values)
    night.history.keep_settings(digest, values)
    job = SweepCell(number, "all", (*cell.overrides, f"paths.store='{night.store}'"), cell.name)
    record = Record(
        run=night.run,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        cell=cell.name,
        key=cell.key,
        machine_class=night.machine_class,
        status="failed",
        commit=night.commit,
        overrides=cell.overrides,
        model=own.model.label,
        precision=own.variant.label,
        engine=choose(own.engine.name, night.machine, own.hardware.name).engine.name,
        tp_size=own.build.tp_size,
        protocol=facts.protocol(own),
        settings_digest=digest,
        machine=night.machine.to_json(),
        versions={k: v for k, v in library_versions(facts.LIBRARIES).items() if v != "absent"},
        log=relative_to_cwd(job.log(night.logs)),
    )
    measured = _measured(night, own, record, job, count)
    return replace(measured, at=datetime.now(UTC).isoformat(timespec="seconds"))


def _measured(night: Night, own: Settings, record: Record, job: SweepCell, count: int) -> Record:
    try:
        make_plan(own, job.target, Store(night.store), night.machine)
    except UserError as error:
        return replace(record, status="not possible", reason=str(error))
    try:
        artifacts = _artifacts(night, job)
        fields = facts.of_artifacts(artifacts, night.since)
        record = replace(record, **fields | {"versions": {**record.versions, **fields["versions"]}})
        record = replace(record, status="done", measurements=[facts.loads(artifacts["benchmark"])])
        before = night.history.read().records
        for _ in range(night.settings.nightly.confirmations):
            if not is_suspect(before, record, night.settings.nightly, count):
                break
            say("  looks worse than before; measuring again")
            loads = facts.loads(_artifacts(night, job)["benchmark"])
            record = replace(record, measurements=[*record.measurements, loads])  # the median of all counts
    except UserError as error:
        again = "measured again: " if record.status == "done" else ""
        return replace(record, status="failed", reason=f"{again}{error}")
    return record


def _artifacts(night: Night, job: SweepCell) -> dict[str, Path]:
    """Run one measurement in its own process, which may crash or run out of memory, and return its artifacts."""
    timeout_s = night.settings.nightly.timeout_s
    job.write(night.logs)
    try:
        job = run_process(job, night.logs, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        raise UserError(f"took longer than nightly.timeout_s={timeout_s:g}; stopped") from None
    if job.state == "failed":
        raise UserError(job.reason)
    return {node: Path(place) for node, place in job.artifacts.items()}


def summary(record: Record, settings: NightlySettings) -> str:
    """Summarize the outcome of a cell in one line."""
    if record.status != "done":
        return f"{record.status}: {record.reason}" + (f"; log: {record.log}" if record.status == "failed" else "")
    best = max(record.measurements[-1], key=lambda load: float(load["output_tokens_per_s"]))
    text = f"{best['output_tokens_per_s']:,.0f} output tokens/s at {best['load']}"
    if record.accuracy and record.accuracy["loss_percent"] is not None:
        loss = measured_loss(record, settings.expect, settings.false_alarms)
        text += f", accuracy loss {Verdict.NOT_MEASURED if loss is None else f'{loss:.2f} %'}"
    times = len(record.measurements)
    return text if times == 1 else f"{text}, measured {times} times"


def run(overrides: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    settings = load(own_overrides(overrides))
    refuse(missing_packages())
    folders = {"nightly.history": settings.nightly.history, "report.folder": settings.report.folder}
    issue = settings.nightly.issue
    check_folders(folders | ({"nightly.issue": issue.absolute().parent} if issue else {}))
    history = History(settings.nightly.history)
    if settings.nightly.measure:
        run_id = measure(settings, cells(settings.nightly, overrides))
        read = history.read()
    else:
        read = history.read()
        if not read.records:
            raise UserError(
                f"nightly.history='{settings.nightly.history}' contains no results.",
                todo="Measure first (make nightly), or choose the folder of a history: nightly.history=/some/folder",
            )
        run_id = read.records[-1].run
    read = replace(read, notes=(*read.notes, *without_effect(read.records, settings.nightly.expect)))
    verdict = judge(read.records, run_id, settings.nightly)
    folder = settings.report.folder / f"nightly-{settings.nightly.name}"
    paths = write_document(trend_document(history, read, verdict, settings.nightly), folder)
    for note in read.notes:
        tell(f"note: {note}")
    say("\n" + "\n".join(words(history, verdict)))
    say(f"\nhistory: {relative_to_cwd(history.file)}")
    say(f"report: {relative_to_cwd(paths.markdown.absolute())}")
    say(f"report: {relative_to_cwd(paths.html.absolute())}")
    report_bad_night(settings.nightly, run_id, words(history, verdict) if verdict.exit_code else [])
    return verdict.exit_code


WEBHOOK = "NIGHTLY_WEBHOOK"
"""Environment variable with the address that gets the outcome of a bad night; such addresses are secrets."""
WEBHOOK_S = 15.0


def report_bad_night(settings: NightlySettings, run_id: str, outcome: Sequence[str]) -> None:
    """Write the issue file and call the webhook; after a good night remove the file of an earlier one.

    A failure here is only a warning, because the night's results are already saved.
    """
    title = f"nightly {settings.name}: {run_id}"  # which has the host that measured
    lines = [" ".join(x.split()) for x in outcome]
    if settings.issue is not None:
        try:
            if lines:
                items = [line if line.startswith("- ") else f"\n{line}\n" for line in lines]
                write_text(settings.issue, f"# {title}\n" + "\n".join(items) + "\n")
                say(f"issue:  {relative_to_cwd(settings.issue.absolute())}")
            else:
                settings.issue.unlink(missing_ok=True)
        except OSError as error:
            warn(f"nightly.issue={settings.issue} cannot be written: {error.strerror}.")
    if lines and (url := os.environ.get(WEBHOOK)):
        refusals: list[str] = []
        text = "\n".join([title, *lines])
        # A time limit of urllib is one of each read: a server that sends a byte now and then would never meet it.
        posting = threading.Thread(target=lambda: refusals.append(_post(url, text)), daemon=True)
        posting.start()
        posting.join(WEBHOOK_S)
        if reason := refusals[0] if refusals else f"no answer within {WEBHOOK_S:g} s":
            warn(f"The webhook in {WEBHOOK} did not take the outcome: {reason}.")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib follows a redirect of POST with GET, which loses the text."""

    def redirect_request(self, *_: object) -> None:
        """Follow none: the status is the answer."""


def _post(url: str, text: str) -> str:
    """Return why a webhook did not take a text, without its address, which is secret; empty if it did."""
    if not url.startswith(("http://", "https://")):
        return "its address does not begin with http:// or https://"
    try:
        request = urllib.request.Request(url, json.dumps({"text": text}).encode(), {"Content-Type": "application/json"})
        urllib.request.build_opener(_NoRedirect).open(request, timeout=WEBHOOK_S).close()
    except urllib.error.HTTPError as error:
        return f"status {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)
        return getattr(cause, "strerror", None) or type(cause).__name__
    return ""


def words(history: History, verdict: NightVerdict) -> list[str]:
    """Render the verdict for a terminal."""
    lines = []
    for cause in causes(history, verdict.regressions):
        lines += [f"REGRESSION  {cause.text}", *(f"- {item}" for item in cause.items)]
    lines += [f"FAILED  {cells}: {reason}" for cells, reason in by_reason(verdict.failures)]
    lines.append(headline(verdict))
    return [wrapped(line) for line in lines]
