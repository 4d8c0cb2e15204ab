"""Fuzz one target with atheris (libFuzzer with coverage of Python): python -m tests.fuzz.run TARGET SECONDS.

Needs an environment with atheris: scripts/fuzz.sh makes one. New inputs that reach more code go to
build/fuzz/TARGET, and one that is a finding to build/fuzz/TARGET-crash-*; put the latter into tests/fuzz/corpus.
"""

import resource
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["pipelines", "jinja2"]):
    from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
MEMORY_BYTES = 4 * 2**30


def main() -> None:
    """Fuzz until the time is over or a finding stops it."""
    name, seconds = sys.argv[1], int(sys.argv[2])
    new = Path("build") / "fuzz" / name
    new.mkdir(parents=True, exist_ok=True)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    options = [
        f"-max_total_time={seconds}",
        "-timeout=600",  # by the clock, and this runs at the lowest priority
        "-rss_limit_mb=3000",
        "-max_len=4096",
        "-print_final_stats=1",
    ]
    dictionary = CORPUS.parent / f"{name}.dict"
    options += [f"-dict={dictionary}"] if dictionary.is_file() else []
    options += [f"-artifact_prefix=build/fuzz/{name}-"]
    atheris.Setup([sys.argv[0], *options, str(new), str(CORPUS / name)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
