"""Golden copies of the manifests: a person reads the diff before `make golden` makes it the new truth."""

import pytest

from pipelines.deploy.commands import files
from tests.conftest import ROOT
from tests.support.deployments import KINDS, deployed
from tests.support.golden import check_folder

GOLDEN = ROOT / "tests" / "golden" / "manifests"


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifests_are_the_golden_ones(kind, tmp_path, request):
    found = files(deployed(tmp_path, kind))
    check_folder(found, GOLDEN / kind, rewrite=request.config.getoption("--rewrite-golden"))
