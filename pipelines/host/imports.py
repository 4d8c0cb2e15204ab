"""Import a library without the optional packages that it would take along."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

TRANSFORMERS_TAKES_ALONG = ("sklearn", "scipy", "pandas", "datasets")
"""What Transformers imports, where it is installed, for assisted generation, for losses of object detectors, and to
recognize tables of datasets; nothing here uses these, and they take two seconds."""


@contextmanager
def without(*packages: str, asked_for_by: str) -> Iterator[None]:
    """Let a library that is imported inside find that these packages are not installed.

    Nothing is hidden that has been imported already, and nothing at all where the library has been: it has asked, and
    would not understand another answer. What asks and remembers goes without them for good; whoever imports them later
    gets them.
    """
    hidden = [] if asked_for_by in sys.modules else [name for name in packages if name not in sys.modules]
    sys.modules |= dict.fromkeys(hidden)  # type: ignore[arg-type] # how Python itself marks what cannot be imported
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
