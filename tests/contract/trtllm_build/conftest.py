"""The emulated trtllm-build, run as a program."""

import os
import subprocess

import pytest

from tests.support.emulated_trtllm import environment


@pytest.fixture(scope="module")
def trtllm_build(tmp_path_factory):
    """Run it with some words; returns the finished process, output and error together."""
    folder = tmp_path_factory.mktemp("emulated")

    def run(*words, **changes):
        env = {**os.environ, "COLUMNS": "80", **environment(folder, **changes)}
        command = ["trtllm-build", *words]
        return subprocess.run(command, env=env, cwd=folder, text=True, stdout=-1, stderr=subprocess.STDOUT, check=False)

    return run
