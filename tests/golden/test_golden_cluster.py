"""Golden copies of the scripts for clusters: a person reads the diff before `make golden` makes it the new truth."""

from pathlib import Path

import pytest

from pipelines.deploy.cluster import script_files
from pipelines.serving.config import ServingSettings
from tests.conftest import ROOT
from tests.support.cluster_targets import CONTAINER, MPI, SLURM, target
from tests.support.golden import check_folder

GOLDEN = ROOT / "tests" / "golden" / "cluster"
KINDS = {"slurm": SLURM, "mpi": MPI, "container": CONTAINER}


@pytest.mark.parametrize("kind", KINDS)
def test_the_scripts_are_the_golden_ones(kind, request):
    serving = ServingSettings(host="0.0.0.0" if kind == "container" else "127.0.0.1")
    found = script_files(target(Path("/home/user/project/cluster/llama_3_1_70b-fp8")), KINDS[kind], serving)
    check_folder(found, GOLDEN / kind, rewrite=request.config.getoption("--rewrite-golden"))
