"""Golden copies of the manifests: a person reads the diff before `make golden` makes it the new truth."""

import pytest

from pipelines.deploy.commands import files
from tests.conftest import ROOT
from tests.support.deployments import KINDS, deployed

GOLDEN = ROOT / "tests" / "golden" / "manifests"


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifests_are_the_golden_ones(kind, tmp_path, request):
    found = files(deployed(tmp_path, kind))
    folder = GOLDEN / kind
    if request.config.getoption("--rewrite-golden"):
        for name, text in found.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    golden = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert golden == found
