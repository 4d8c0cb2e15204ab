"""`nvidia-smi --query-gpu=... --format=csv,noheader,nounits` of the emulated machine."""

import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One emulated GPU: name, compute capability, memory in MiB."""

    name: str
    sm: str
    mib: str


def gpus() -> list[Gpu]:
    """Read the GPUs from EMULATED_GPUS."""
    return [Gpu(*row.split(",")) for row in os.environ.get("EMULATED_GPUS", "").split(";") if row]


def main() -> int:
    """Answer the only query that is supported."""
    if not gpus():
        sys.stdout.write("No devices were found\n")
        return 6
    wanted = next(word for word in sys.argv if word.startswith("--query-gpu=")).partition("=")[2].split(",")
    for index, gpu in enumerate(gpus()):
        known = {"name": gpu.name, "compute_cap": gpu.sm, "memory.total": gpu.mib, "memory.free": gpu.mib}
        known |= {"driver_version": "590.44.01", "index": str(index), "memory.used": "0"}
        sys.stdout.write(", ".join(known.get(name, "[N/A]") for name in wanted) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
