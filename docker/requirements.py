"""List the packages that pip has to add to a base image's Python without changing its installed packages.

    python3 docker/requirements.py OUT_FOLDER EXTRA [EXTRA ...]

Reads pyproject.toml and constraints.txt next to this folder and writes three files for pip:

    requirements.txt   the core dependencies and those of the extras that are not installed yet
    constraints.txt    constraints.txt, with every installed package pinned to its installed version
    no_deps.txt        what pip installs with --no-deps, because its metadata refuses packages that it runs with

With these, pip can neither replace what NVIDIA's container ships (torch, tensorrt_llm, transformers, modelopt) nor
install untested versions of other packages. An installed package that is too old or too new ends the build with its
name. Uses only the standard library and `packaging`, or pip's own copy of it, because it runs before anything is
installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

try:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet
except ModuleNotFoundError:  # a bare Python; not elsewhere, because importing pip disables setuptools' distutils
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.specifiers import SpecifierSet

PROJECT = Path(__file__).resolve().parent.parent
CLIENT = "tritonclient"
CLIENT_NEEDS = ("grpcio", "ml_dtypes", "numpy", "packaging", "protobuf", "python-rapidjson", "urllib3")
"""What tritonclient[grpc] depends on, without its bounds: it asks for protobuf<7, and until 2.71 for grpcio<1.68.
NVIDIA's container has protobuf 7.34 or 7.35 and grpcio 1.80 or newer, under which it runs."""
CLIENT_FOR_OLDER_GRPC = {"1.81.1": "2.71.0", "1.67.1": ""}
"""The grpcio that generated a client's code, which refuses an older one -> the newest client for an older one."""
BUILD_TOOLS = ("pip", "setuptools", "wheel")
"""Packages that are not pinned: python:3.11-slim has a setuptools from 2022, and modelopt needs a newer one."""


def normal(name: str) -> str:
    """Normalize a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Return normalized name -> version of every installed distribution."""
    found = {normal(dist.metadata["Name"]): dist.version for dist in metadata.distributions() if dist.metadata["Name"]}
    return {name: version for name, version in found.items() if name not in BUILD_TOOLS}


def wanted(project: Mapping[str, Any], extras: Iterable[str]) -> list[Requirement]:
    """Return the core dependencies and those of the extras.

    Raises:
        SystemExit: an extra is unknown.
    """
    known = project["project"]["optional-dependencies"]
    if missing := sorted(set(extras) - set(known)):
        sys.exit(f"error: {', '.join(missing)}: no such extra in pyproject.toml. Known: {', '.join(sorted(known))}.")
    lines = list(project["project"]["dependencies"])
    for extra in extras:
        lines += known[extra]
    return [Requirement(line) for line in lines]


def to_install(requirements: Iterable[Requirement], here: Mapping[str, str]) -> list[str]:
    """Return the requirements that are not installed yet, sorted, without duplicates.

    Raises:
        SystemExit: installed packages have versions that the project cannot use; the message names all of them.
    """
    missing: set[str] = set()
    unfit: set[str] = set()
    for requirement in requirements:
        version = here.get(normal(requirement.name))
        if version is None:
            missing.add(str(requirement))
        elif not requirement.specifier.contains(version, prereleases=True):
            unfit.add(f"{requirement.name} {version} is installed, but the project needs {requirement.specifier}")
    if unfit:
        sys.exit(f"error: {'; '.join(sorted(unfit))}. Use another base image; its packages are never replaced.")
    return sorted(missing)


def without_bounds(lines: Iterable[str], tested: str, here: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Split the client off where protobuf or grpcio is installed already: (requirements, lines for --no-deps).

    Raises:
        SystemExit: grpcio is too old for every client.
    """
    lines = list(lines)
    client = [line for line in lines if normal(Requirement(line).name) == CLIENT]
    if not client or not {"protobuf", "grpcio"} & set(here):
        return lines, []
    needs = [name for name in CLIENT_NEEDS if normal(name) not in here]
    return sorted({*lines, *needs} - set(client)), [f"{CLIENT}=={client_version(tested, here.get('grpcio'))}"]


def client_version(tested: str, grpcio: str | None) -> str:
    """Return the version of tritonclient whose generated code takes this grpcio.

    Raises:
        SystemExit: there is none.
    """
    version = next(pin.split("==")[1] for pin in pins(tested) if normal(pin.split("==")[0]) == CLIENT)
    for needed, older in CLIENT_FOR_OLDER_GRPC.items():
        if grpcio is None or SpecifierSet(f">={needed}").contains(grpcio, prereleases=True):
            return version
        version = older
    sys.exit(f"error: grpcio {grpcio} is installed, {CLIENT} needs >={needed}. Take another base image.")


def pins(tested: str) -> list[str]:
    """Return the lines of constraints.txt without its comments."""
    return [line.strip() for line in tested.splitlines() if line.strip() and not line.startswith("#")]


def constraints(tested: str, here: Mapping[str, str]) -> list[str]:
    """Return pip constraints: installed versions for installed packages, tested versions for all others."""
    kept = [pin for pin in pins(tested) if normal(pin.split("==")[0]) not in here]
    return sorted([*kept, *(f"{name}=={version}" for name, version in here.items())])


def main(arguments: list[str]) -> None:
    """Write the files."""
    out, extras = Path(arguments[0]), arguments[1:]
    here = installed()
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    tested = (PROJECT / "constraints.txt").read_text(encoding="utf-8")
    requirements, no_deps = without_bounds(to_install(wanted(project, extras), here), tested, here)
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in {
        "requirements.txt": requirements,
        "constraints.txt": constraints(tested, here),
        "no_deps.txt": no_deps,
    }.items():
        (out / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
