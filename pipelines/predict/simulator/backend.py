"""Choose how the loop runs: interpreted ("numpy") or compiled ("numba"), from the same functions."""

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

from pipelines.domain.errors import UserError
from pipelines.predict.simulator import loop, scheduler

Backend = Literal["auto", "numba", "numpy"]


def loop_of(backend: Backend) -> tuple[Callable[..., Any], str]:
    """Return the function `loop.run` and the name of the backend it runs in.

    Raises:
        UserError: numba is requested but not installed, or the backend does not exist.
    """
    if backend not in ("auto", "numba", "numpy"):
        raise UserError(f"Simulator backend '{backend}' is unknown.", allowed="auto, numba, numpy.")
    installed = importlib.util.find_spec("numba") is not None
    if backend == "numba" and not installed:
        raise UserError("Simulator backend 'numba' is not installed.", todo="pip install 'trtllm-pipelines[size]'")
    if backend == "numpy" or not installed:
        return loop.run, "numpy"
    return compiled(), "numba"


@cache
def compiled() -> Callable[..., Any]:
    """Compile `loop.run` with numba; cached on disk, beside the source or in the user's cache folder.

    The functions are compiled as copies that call one another instead of the plain ones. Only `run` is called from
    Python, so only it gets a wrapper (which would double the compile time if all had one) and is cached. Numba caches
    by function name and file and misses changes in functions that it calls, so the name carries a digest of all the
    source, including this file with its compile options.
    """
    import numba

    with suppress(ImportError):  # colorama, which numba starts, would end every run on a terminal with a colour code
        import colorama.initialise

        colorama.initialise.atexit_done = True
    modules = (scheduler, loop)
    sources = [__file__, *(str(module.__file__) for module in modules)]
    digest = hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()[:12]
    names: dict[str, Any] = {"__name__": loop.__name__}
    for module in modules:
        names |= {name: value for name, value in vars(module).items() if not name.startswith("__")}
    njit: Any = numba.njit  # its type stubs lack the options
    inner = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}
    functions = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
    }
    for name, function in functions.items():
        copy = FunctionType(function.__code__, names, name)
        copy.__qualname__ = f"{name}_{digest}"
        if name != "run":
            names[name] = njit(**inner)(copy)
            continue
        try:
            names[name] = njit(cache=True)(copy)
        except RuntimeError:  # no writable cache folder
            names[name] = njit(copy)
    return _announced(names["run"])


def _announced(function: Any) -> Callable[..., Any]:
    """Announce on standard error that the function must be compiled, which takes a while."""
    from numba.core import event

    class Compiling(event.Listener):
        def on_start(self, event: Any) -> None:
            if event.data["dispatcher"] is function:
                sys.stderr.write("compiling the simulator, once per version: about 10 s\n")
                sys.stderr.flush()

        def on_end(self, event: Any) -> None: ...

    register: Any = event.register  # has no type stubs
    register("numba:compile", Compiling())
    return function  # type: ignore[no-any-return]
