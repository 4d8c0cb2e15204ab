"""Planning and other quick commands answer in two seconds, because they do not load what only the work needs."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

NOT_LOADED = {
    "pipelines.doctor.doctor_command": "torch openvino transformers",
    "triton_repo.config, triton_repo.llmapi, pipelines.stages.repository, pipelines.engines.limits": (
        "torch tritonclient numpy google.protobuf"
    ),
    "eval.compare, eval.dataset, pipelines.stages.evaluate": "torch transformers lm_eval datasets numpy",
    "pipelines.serving.locate": "numpy tritonclient pytriton fastapi grpc jinja2",
    "pipelines.compress": "torch transformers modelopt pyarrow numpy",
    "pipelines.report.report_command": "mlflow",
}
"""What importing these modules does not load."""
ALSO_RUN = {
    "pipelines.serving.locate": "from pipelines.serving.config import ServingSettings as S\n"
    "pipelines.serving.locate.why_no_server(S())",
}


@pytest.mark.parametrize("modules", NOT_LOADED)
def test_importing_it_loads_nothing_heavy(modules):
    code = f"import sys, {modules}\n{ALSO_RUN.get(modules, '')}\n"
    code += f"print(sorted(set({NOT_LOADED[modules].split()}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
