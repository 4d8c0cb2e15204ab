"""How many GPUs a measured rate belongs to: as the result says, or else as the user says; never assumed.

2.4 requests/s are 13 servers for 31 requests/s if a server of 8 GPUs did them, and 13 GPUs if one GPU did.
"""

from __future__ import annotations

from dataclasses import replace

from pipelines.domain.errors import UserError
from pipelines.engines.registry import runs_on_cpu
from pipelines.predict.performance.gpus import rows
from pipelines.predict.performance.measured import Measured, Served
from pipelines.settings.root import Settings

TELL = (
    "Add sizing.measured_gpus=8 (all GPUs that served the load; 1 for a server without GPUs), or the ranks of the one "
    "instance that was measured: sizing.tp=8 sizing.pp=1."
)


def told(settings: Settings) -> Served:
    """Return what the settings say of the GPUs that were measured.

    Raises:
        UserError: they contradict each other.
    """
    sizing, build = settings.sizing, settings.build
    tp = _one(sizing.tp, "sizing.tp") or (build.tp_size if build.tp_size > 1 else None)
    pp = _one(sizing.pp, "sizing.pp") or (build.pp_size if build.pp_size > 1 else None)
    gpus = sizing.measured_gpus
    if tp is None and pp is None:
        ranks = 1 if gpus == 1 else None
        return Served(gpus, ranks, ranks, f"sizing.measured_gpus={gpus}") if gpus else Served()
    tp, pp = tp or 1, pp or 1
    if gpus is not None and gpus % (tp * pp):
        raise UserError(
            f"sizing.measured_gpus={gpus} is not a whole number of instances of TP {tp} x PP {pp} = {tp * pp} GPUs.",
            todo="Correct one of them.",
        )
    where = f"sizing.measured_gpus={gpus}" if gpus else "the ranks in the settings"
    return Served(gpus or tp * pp, tp, pp, where)


def _one(sizes: tuple[int, ...] | None, name: str) -> int | None:
    if sizes is None:
        return None
    if len(set(sizes)) > 1:
        raise UserError(
            f"{name}={list(sizes)} names several sizes, but one was measured.", todo=f"Give that one: {name}={sizes[0]}"
        )
    return sizes[0]


def with_gpus(measured: Measured, settings: Settings) -> Measured:
    """Complete a benchmark with what the settings say of its GPUs.

    Raises:
        UserError: neither says how many there were, or they contradict each other, also in the kind of GPU.
    """
    if runs_on_cpu(measured.engine):
        return measured
    _same_gpu(measured, settings)
    seen, said = measured.served, told(settings)
    if seen.gpus is None and said.gpus is None:
        raise UserError(
            f"{', '.join(measured.sources)} ({measured.tool}) does not say how many GPUs served the load.", todo=TELL
        )
    if said.gpus is None:
        return measured
    if seen.gpus is None:
        return replace(measured, served=said)
    if not seen.certain:
        note = f"{said.source} counts, not the {seen.gpus} that telemetry shows."
        return replace(measured, served=said, notes=(*measured.notes, *([note] if said.gpus != seen.gpus else [])))
    pairs = (("GPUs", said.gpus, seen.gpus), ("TP", said.tp, seen.tp), ("PP", said.pp, seen.pp))
    for name, mine, theirs in pairs:
        if None not in (mine, theirs) and mine != theirs:
            raise UserError(
                f"{name} is {mine} by {said.source}, but {theirs} by {seen.source} in {measured.sources[0]}.",
                todo="Leave out the setting, or give the file of that deployment.",
            )
    return replace(measured, served=replace(seen, tp=seen.tp or said.tp, pp=seen.pp or said.pp))


def _same_gpu(measured: Measured, settings: Settings) -> None:
    """Refuse a named GPU if the result comes from another one of conf/hardware."""
    wanted, seen = settings.hardware, (measured.gpu or "").replace("-", " ")
    if wanted.name == "auto":
        return
    theirs = [row.name for row in rows() if seen in {name.replace("-", " ") for name in row.nvidia_smi}]
    if theirs and wanted.name not in theirs:
        raise UserError(
            f"hardware={wanted.name}, but {measured.sources[0]} was measured on {measured.gpu}.",
            todo=f"Set hardware={theirs[0]}, or give a result of {wanted.name}.",
        )


def ranks(measured: Measured) -> tuple[int, int]:
    """Return TP and PP of the one instance that was measured, for a fit, which simulates one instance.

    Raises:
        UserError: they are not known, or there were several instances.
    """
    served = measured.served
    if served.tp is None or served.pp is None:
        raise UserError(
            f"{measured.sources[0]} ({measured.tool}) was served by {served.gpus} GPUs, but how they shared the model "
            "is not known.",
            todo="Add the ranks of the instance that was measured, e.g. sizing.tp=8 sizing.pp=1.",
        )
    if served.gpus is not None and served.gpus != served.tp * served.pp:
        raise UserError(
            f"{measured.sources[0]} ({measured.tool}) is from {served.gpus} GPUs, several instances of "
            f"TP {served.tp} x PP {served.pp}; a fit simulates one.",
            todo="Measure one instance. `make size sizing.measured=...` sizes from several.",
        )
    return served.tp, served.pp
