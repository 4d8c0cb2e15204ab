"""Run every probe and collect the results."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pipelines.doctor import gpus, hub, places, processor, templates, verdicts, versions
from pipelines.doctor.record import Diagnosis, ProbeResult
from pipelines.domain.errors import Fault, UserError
from pipelines.host.machine import Machine, library_versions
from pipelines.plan.plan import make_plan
from pipelines.settings.root import Settings
from pipelines.store.store import Store


def examine(settings: Settings, machine: Machine, environment: Mapping[str, str]) -> Diagnosis:
    """Run all probes, the slow ones (Hub, nvidia-smi, trtllm-build) at the same time.

    Args:
        settings: the configuration that should run here.
        machine: its facts.
        environment: variables, for the Hub.
    """
    release = versions.release_for(library_versions(("tensorrt-llm",))["tensorrt-llm"])
    builder = shutil.which("trtllm-build")
    with ThreadPoolExecutor() as pool:
        asked_hub = pool.submit(hub.look, environment, settings.doctor.timeout_s)
        asked_gpus = pool.submit(gpus.look, machine, release)
        asked_builder = pool.submit(versions.help_of_builder, builder) if builder else None
        software = [*versions.look(settings.serving)]
        folders = places.look(settings.paths.store, settings.paths.runs, environment)
        judged = verdicts.look(settings, machine)
        broken = _broken(settings, machine, software + folders)
        if asked_builder:
            software += asked_builder.result()
        sections = {
            "Machine": [*processor.look(machine), *asked_gpus.result()],
            "Software": [*software, *templates.look()],
            "Places": [*folders, *asked_hub.result()],
        }
    return Diagnosis(sections, judged, broken)


def _broken(settings: Settings, machine: Machine, found: list[ProbeResult]) -> list[ProbeResult]:
    """List what stops the configured pipeline here: what planning refuses and what the probes call broken."""
    broken = [finding for finding in found if finding.status == "bad"]
    try:
        faults: Sequence[Fault] = make_plan(settings, "all", Store(settings.paths.store), machine).refusals
    except UserError as error:
        faults = error.faults
    told = " ".join(finding.value for finding in broken)
    return broken + [
        ProbeResult("plan", fault.message, "bad", f"{fault.allowed} {fault.todo}".strip())
        for fault in faults
        if fault.message not in told
    ]
