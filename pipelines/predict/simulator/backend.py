"""The loop as it is ("numpy") or compiled ("numba"): the same functions of `state`, `scheduler` and `loop`."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal

from pipelines.domain.errors import UserError
from pipelines.predict.simulator import loop, scheduler, state

Backend = Literal["auto", "numba", "numpy"]


def loop_of(backend: Backend) -> tuple[Callable[..., Any], str]:
    """The function `loop.run` and the name of the backend it runs in.

    Raises:
        UserError: numba is asked for and not installed, or there is no such backend.
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
    """`loop.run` compiled by numba; kept on disk, beside the source or in the user's cache folder.

    The functions are compiled as copies that see one another instead of the plain ones. Only `run` is called from
    Python, so only it gets a wrapper (half of the time to compile would go there) and is kept. Numba keeps a function
    by its name and file, blind to a change in a function it calls, so the name carries a digest of all the source,
    this file with its options too.
    """
    import numba

    with suppress(ImportError):  # colorama, which numba starts, would end every run on a terminal with a colour code
        import colorama.initialise

        colorama.initialise.atexit_done = True
    modules = (state, scheduler, loop)
    sources = [__file__, *(str(module.__file__) for module in modules)]
    digest = hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()[:12]
    names: dict[str, Any] = {"__name__": loop.__name__}
    for module in modules:
        names |= {name: value for name, value in vars(module).items() if not name.startswith("__")}
    njit: Any = numba.njit  # its types lack the options
    inner = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}
    for name, function in _functions(modules):
        copy = FunctionType(function.__code__, names, name)
        copy.__qualname__ = f"{name}_{digest}"
        names[name] = njit(**inner)(copy) if name != "run" else _kept(numba, copy)
    return _announced(names["run"])


def _announced(function: Any) -> Callable[..., Any]:
    """The function, which says on standard error when it has to be compiled, so that nobody waits without a word."""
    from numba.core import event

    class Compiling(event.Listener):
        def on_start(self, event: Any) -> None:
            if event.data["dispatcher"] is function:
                sys.stderr.write("compiling the simulator (once per version): about 10 s\n")
                sys.stderr.flush()

        def on_end(self, event: Any) -> None: ...

    register: Any = event.register  # has no types
    register("numba:compile", Compiling())
    return function  # type: ignore[no-any-return]


def _functions(modules: tuple[ModuleType, ...]) -> list[tuple[str, FunctionType]]:
    return [
        (name, value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
    ]


def _kept(numba: Any, function: FunctionType) -> Any:
    class Kept(numba.core.caching.FunctionCache):  # type: ignore[misc]
        """Numba's own, but what is kept is loaded without the parts of the compiler that only compiling needs.

        Numba imports all it can compile, linear algebra too, before it looks into the folder: 0.2 s of
        processor time, most of what the first call of a process took. When nothing is kept, it imports them to compile.
        """

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            try:
                numba.core.runtime.rtsys.initialize(target_context)  # lists are allocated by numba's runtime
                with self._guard_against_spurious_io_errors():
                    return self._load_overload(sig, target_context)
            except (AttributeError, TypeError):  # a version with other inner parts: as it loads by itself
                return super().load_overload(sig, target_context)

    fast = numba.njit(function)
    with suppress(RuntimeError):  # no folder to keep it in
        fast._cache = Kept(function)  # what `njit(cache=True)` does with numba's own
    return fast
