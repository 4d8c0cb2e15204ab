"""Results as runs of MLflow: MLflow's own client reads back what was logged, once for each result."""

from dataclasses import replace

import pytest

from pipelines.domain.errors import UserError
from pipelines.report import mlflow_runs
from pipelines.report.collect import collect
from pipelines.report.mlflow_runs import log_runs, logged_run
from pipelines.report.model_card import write_model_cards
from pipelines.report.report_command import report, write_report
from pipelines.settings.compose import load
from pipelines.store.store import Store
from tests.support.report_store import add_format, benchmark, commit


@pytest.fixture
def uri(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    return f"file:{tmp_path / 'mlruns'}"


def log(store, uri, folder):
    data = collect(store)
    paths = write_report(data, folder)
    return log_runs(data, uri, (paths.markdown, paths.html), write_model_cards(data, folder))


def runs(uri):
    from mlflow.tracking import MlflowClient  # collecting the tests need not wait for it

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("synthetic")
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def test_mlflow_reads_back_what_the_store_holds(two_formats, uri, tmp_path):
    log(two_formats, uri, tmp_path / "report")
    run = runs(uri)["synthetic-fp8"]
    item = next(each for each in collect(two_formats).formats if each.variant == "fp8")
    assert run.info.status == "FINISHED"
    assert run.data.params["quantize.qformat"] == "fp8"
    assert run.data.metrics["accuracy"] == item.accuracy.result.accuracy
    assert run.data.metrics["loss/points_at_most"] == pytest.approx(100 * item.accuracy.row["loss_most"])
    assert run.data.metrics["size/engine_bytes"] == item.artifact("build").facts["engine_bytes"]
    level = item.runs[0].result.levels[0]
    assert run.data.metrics["chat/concurrency 1/ttft_p50_s"] == pytest.approx(level.summary.ttft_s.p50)
    assert run.data.metrics["chat/concurrency 1/itl_p99_s"] == pytest.approx(level.summary.itl_s.p99)
    assert run.data.tags["verdict"] == item.accuracy.row["verdict"]


def test_open_loops_and_workloads_of_one_name_are_logged(uri, tmp_path):
    """MLflow takes no parentheses in names, and what two workloads differ in is in theirs."""
    store = Store(tmp_path / "store")
    repository = add_format(store, "fp8")
    for minute, isl in ((10, 128), (20, 512)):
        result, files = benchmark("fp8", (1,), isl=isl)
        level = replace(result.levels[0], arrival="poisson", concurrency=None, request_rate=4.0)
        made = files | {"benchmark.json": replace(result, levels=(level,)).to_json()}
        settings = {"model": "synthetic", "precision": "fp8"}
        commit(store, "benchmark", "synthetic-fp8", {}, {"repository": repository}, settings, made, minute)
    log(store, uri, tmp_path / "report")
    rates = [name for name in runs(uri)["synthetic-fp8"].data.metrics if name.endswith("output_tokens_per_s")]
    place = "chat workload.isl {}/4 requests/s poisson/output_tokens_per_s"
    assert sorted(rates) == [place.format(128), place.format(512)]


def test_one_workload_on_two_machines_is_logged_under_names_that_mlflow_takes(uri, tmp_path):
    """The facts of a machine are longer than a name may be: the second is numbered, and a tag says which it is."""
    store = Store(tmp_path / "store")
    repository = add_format(store, "fp8")
    platforms = [f"Linux-6.{minor}-generic-{'x' * 150}" for minor in (1, 8)]
    for minute, platform in zip((10, 20), platforms, strict=True):
        result, files = benchmark("fp8", (1,))
        machine = {"platform": platform, "cpu_count": minute, "cpu": f"CPU {'y' * 60} {minute}"}
        made = files | {"benchmark.json": replace(result, machine=machine).to_json()}
        settings = {"model": "synthetic", "precision": "fp8"}
        commit(store, "benchmark", "synthetic-fp8", {}, {"repository": repository}, settings, made, minute)
    log(store, uri, tmp_path / "report")
    logged = runs(uri)["synthetic-fp8"].data
    rates = [name for name in logged.metrics if name.endswith("output_tokens_per_s")]
    assert set(rates) == {f"{name}/concurrency 1/output_tokens_per_s" for name in ("chat", "chat 2")}
    for name, platform in zip(("chat", "chat 2"), platforms, strict=True):
        assert platform in logged.tags[f"workload.{name}"]


def test_report_and_card_are_kept_with_the_run(two_formats, uri, tmp_path):
    from mlflow.tracking import MlflowClient

    log(two_formats, uri, tmp_path / "report")
    client, found = MlflowClient(tracking_uri=uri), runs(uri)
    names = {name: {each.path for each in client.list_artifacts(run.info.run_id)} for name, run in found.items()}
    assert names == {
        "synthetic-none": {"report.md", "report.html"},
        "synthetic-fp8": {"report.md", "report.html", "README.md"},
    }


def test_the_same_result_is_logged_once(two_formats, uri, tmp_path):
    first = log(two_formats, uri, tmp_path / "report")
    again = log(two_formats, uri, tmp_path / "report")
    assert all("is run" in line for line in first)
    assert all("was logged before, as run" in line for line in again)
    assert len(runs(uri)) == 2


def test_a_run_that_was_cut_short_is_replaced(two_formats, uri, tmp_path, monkeypatch):
    with monkeypatch.context() as cut:
        cut.setattr("mlflow.tracking.MlflowClient.set_terminated", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            log(two_formats, uri, tmp_path / "report")
    log(two_formats, uri, tmp_path / "report")
    assert {name: run.info.status for name, run in runs(uri).items()} == {
        "synthetic-none": "FINISHED", "synthetic-fp8": "FINISHED",
    }  # fmt: skip


def test_another_result_is_another_run(two_formats):
    data = collect(two_formats)
    one = logged_run(data.formats[1], data.workloads)
    assert one.result != replace(one, metrics={**one.metrics, "accuracy": 0.5}).result


def test_without_mlflow_the_report_is_refused_before_it_is_made(two_formats, tmp_path, monkeypatch):
    monkeypatch.setattr(mlflow_runs.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="mlflow-skinny") as refused:
        report([f"paths.store={two_formats.root}", f"report.folder={tmp_path}/r", f"report.mlflow=file:{tmp_path}/m"])
    assert "pip install" in str(refused.value)
    assert not (tmp_path / "r").exists()


def test_a_store_that_cannot_be_used_is_named(two_formats, tmp_path):
    (tmp_path / "file").write_text("")
    uri = f"file:{tmp_path}/file"
    with pytest.raises(UserError, match=uri):
        log(two_formats, uri, tmp_path / "report")


@pytest.mark.parametrize("given", ["mlruns", "s3://bucket", "file:"])
def test_what_is_no_store_of_mlflow_is_refused(given):
    with pytest.raises(UserError, match=given):
        load([f"report.mlflow={given}"])


def test_a_password_in_the_address_is_refused_and_not_repeated():
    with pytest.raises(UserError, match="MLFLOW_TRACKING_PASSWORD") as refused:
        load(["report.mlflow=http://me:hunter2@host:5000"])
    assert "hunter2" not in str(refused.value)
