"""Regenerate the zoo: ``python -m scripts.zoo [--only PART]``."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from scripts.zoo.build import (
    DRAFTS,
    KINDS,
    LLAVA,
    MODELS_DIR,
    TooInaccurateError,
    build_data,
    build_draft,
    build_llava,
    build_model,
)
from scripts.zoo.lora import ADAPTERS, UnconvincingError, build_adapter

_ROOT = Path(__file__).resolve().parents[2]
_USER_FAULT, _INTERRUPTED = 2, 130


def _parts() -> dict[str, tuple[str, Callable[[], None]]]:
    """Return by name, in the order in which they need each other, how long each part takes and what builds it."""
    parts: dict[str, tuple[str, Callable[[], None]]] = {"data": ("writing", partial(build_data, _ROOT))}
    parts |= {name: ("training, about 20 minutes on one core", partial(build_model, name, _ROOT)) for name in KINDS}
    parts[LLAVA] = "training, about 20 minutes on one core", partial(build_llava, _ROOT)
    parts |= {name: ("training, about 10 minutes on one core", partial(build_draft, name, _ROOT)) for name in DRAFTS}
    models = _ROOT / MODELS_DIR
    few = "training, a few minutes on one core"
    return parts | {name: (few, partial(build_adapter, name, models, _ROOT)) for name in ADAPTERS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Build everything, or one part of it, and return the exit code.

    The old files of a part stay untouched until it is finished, even after an error or Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="python -m scripts.zoo", description=__doc__)
    parser.add_argument("--only", choices=tuple(_parts()), help="build only this part (default: everything)")
    only: str | None = parser.parse_args(arguments).only
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        for name, (duration, build) in _parts().items():
            if only in (None, name):
                logging.info("%s: %s", name, duration)
                build()
    except (TooInaccurateError, UnconvincingError) as error:
        logging.error("%s", error)
        return _USER_FAULT
    except KeyboardInterrupt:
        logging.error("interrupted; the part being built was not written, the old files are intact")
        return _INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
