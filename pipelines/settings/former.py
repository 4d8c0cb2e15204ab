"""Settings that are gone or have another name."""

from pipelines.domain.errors import Fault

RENAMED = {"sizing.calibration": "sizing.fit", "sizing.autoscaling.trace": "workload.trace"}
"""Former names of settings whose nearest word would mislead: `calibration` is ModelOpt's text."""
IN_AN_OVERLAY = "Patch it in an overlay of your own."
REMOVED = {
    "calibration.seed": "Nothing is drawn: the first calibration.size texts are read.",
    "diagnose.new_tokens": "An answer has 24 tokens.",
    "diagnose.seed": "The prompts are always the same.",
    "eval.attempts": "A request is sent up to 6 times; the same command goes on from the answers that it has.",
    "eval.power": "The number of further questions is that which decides in 80 % of cases.",
    "image.ipc_host": "Give image.shm_size as much as the host has.",
    "manifests.mpi_prefix": "It is /opt/hpcx/ompi, as in NVIDIA's image.",
    "manifests.pre_stop_s": f"It is 5 s. {IN_AN_OVERLAY}",
    "manifests.read_mib_per_s": "For slow storage, raise serving.startup_timeout_s.",
    "manifests.scrape_interval_s": f"It is 15 s. {IN_AN_OVERLAY}",
    "nightly.least": "Four earlier nights are enough to know the noise.",
}
"""Former settings that nobody has to choose, and what holds now."""


def former(key: str) -> Fault | None:
    """Say what became of a setting that was renamed or removed."""
    if key in RENAMED:
        return Fault(f"{key} is not a known setting.", f"It is now '{RENAMED[key]}'.")
    return Fault(f"{key} is no longer a setting.", REMOVED[key]) if key in REMOVED else None
