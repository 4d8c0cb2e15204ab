"""The group `cluster`: what `make scripts` cannot derive from the deployment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from pipelines.settings.base import Group, Positive

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,|&+/@:*()\[\]-]+$")]
"""A name without spaces or quotes."""
Unset = BeforeValidator(lambda value: {} if value is None else value)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ClusterSettings(Group):
    """Where an engine is built and served when one machine is not enough, or is not this one.

    Attributes:
        kind: what starts the ranks: Slurm's srun, or Open MPI's mpirun over ssh.
        folder: where the scripts are written, in one folder per deployment.
        python: interpreter that runs this project on the nodes; None is that of this environment.
        server: tritonserver on the nodes.
        env: variables of every rank.
        hosts: names of the nodes, for mpirun.
        partition: for Slurm, like the following ones; None leaves it to the cluster.
        account: that is charged.
        qos: quality of service.
        constraint: features a node must have.
        cpus_per_gpu: processors per rank.
        build_minutes: time limit of the build.
        serve_minutes: time limit of the server.
        srun_mpi: interface between srun and Open MPI.
        image: a container image, for Slurm with Pyxis.
        mounts: further folders of that container.
    """

    kind: Literal["none", "slurm", "mpi"] = "none"
    folder: Path = Path("cluster")
    python: str | None = None
    server: Path = Path("/opt/tritonserver/bin/tritonserver")
    env: Annotated[dict[str, str], Unset] = Field(default_factory=dict)
    hosts: tuple[Word, ...] = ()
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    cpus_per_gpu: Positive = 8
    build_minutes: Positive = 480
    serve_minutes: Positive = 1440
    srun_mpi: Word = "pmix"
    image: str | None = None
    mounts: tuple[Path, ...] = ()

    @field_validator("env")
    @classmethod
    def _are_names(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not NAME.fullmatch(name):
                raise ValueError(f"'{name}' is no name of a variable: letters, digits and _ only")
        return env
