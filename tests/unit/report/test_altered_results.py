"""Results and manifests altered by hand: one clear error in report, size and calibrate, which names the value."""

import gzip
import json

import pytest

from eval.results import EvalResult
from pipelines.domain.benchmark import BenchmarkResult
from pipelines.domain.errors import UserError
from pipelines.predict.performance.read_measured import read_measured
from pipelines.report.collect import collect
from pipelines.store.store import Store
from tests.support.report_store import benchmark, evaluation, full_store


@pytest.fixture(scope="module")
def result():
    return benchmark("fp8")[0].to_json()


def altered(raw, place, value):
    """A copy of JSON values with another value at a place such as "levels.0.summary.requests"."""
    copy = json.loads(json.dumps(raw))
    *way, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    at = copy
    for part in way:
        at = at[part]
    at[last] = value
    return copy


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("tp_size", "two", r"tp_size='two' is not a whole number"),
        ("tp_size", 1.5, r"tp_size=1\.5 is not a whole number"),
        ("tp_size", True, r"tp_size=True is not a whole number"),
        ("model", ["a"], r"model=\['a'\] is not text"),
        ("machine", [], r"machine=\[\] is not an object"),
        ("versions", {"torch": 2}, r"versions\.torch=2 is not text"),
        ("complete", "yes", r"complete='yes' is not true or false"),
        ("slo", {"ttft_ms": "fast"}, r"slo\.ttft_ms='fast' is not"),
        ("levels", 7, r"levels=7 is not a list"),
        ("levels.0.summary.requests", -3, r"levels\[0\]\.summary\.requests=-3 is negative"),
        ("levels.0.summary.requests_per_s", "many", r"levels\[0\]\.summary\.requests_per_s='many' is not a finite"),
        ("levels.0.summary.requests_per_s", float("inf"), r"requests_per_s=inf is not a finite number"),
        ("levels.1.summary.ttft_s.p50", float("nan"), r"levels\[1\]\.summary\.ttft_s\.p50=nan is not"),
        ("levels.1.summary.ttft_s.p50", -0.5, r"levels\[1\]\.summary\.ttft_s\.p50=-0\.5 is negative"),
        ("levels.0.client", {"bottleneck": 1, "reason": "", "facts": {}}, r"client\.bottleneck=1 is not true or false"),
    ],
)
def test_a_copied_result_with_a_wrong_value_is_refused_by_size_and_calibrate(tmp_path, result, place, value, message):
    """A copy has no manifest beside it: its values are all there is to check."""
    path = tmp_path / "benchmark.json"
    path.write_text(json.dumps(altered(result, place, value)))
    with pytest.raises(UserError, match=message) as caught:
        read_measured([path])
    assert str(path) in str(caught.value)


def test_a_result_that_is_right_passes(tmp_path, result):
    (tmp_path / "benchmark.json").write_text(json.dumps(result))
    assert len(read_measured([tmp_path]).levels) == len(result["levels"])


@pytest.mark.parametrize("content", [b"[]", b"7", b'"text"', b"{}", b"null", b"{", b"\x00" * 50, b"\xff\xfe{"])
def test_a_result_that_is_something_else_is_refused(tmp_path, content):
    path = tmp_path / "benchmark.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"benchmark\.json"):
        read_measured([path])


@pytest.mark.parametrize(
    ("name", "alter", "message"),
    [
        ("benchmark.json", lambda raw: raw.replace(b'"requests": 2', b'"requests": 9'), r"benchmark\.json has SHA-256"),
        ("benchmark.json", lambda raw: raw + b" ", r"benchmark\.json has \d+ bytes instead of"),
        ("requests-0.json.gz", lambda raw: gzip.compress(b"{}", mtime=0) + raw, r"requests-0\.json\.gz has \d+ bytes"),
        ("manifest.json", lambda raw: raw.replace(b"12.5", b"13.5"), r"manifest\.json does not match its own checksum"),
        ("manifest.json", lambda raw: raw[:-20], r"manifest\.json is not readable JSON"),
    ],
)
def test_an_artifact_altered_by_hand_is_refused_everywhere(tmp_path, name, alter, message):
    """A better figure typed into a result, or into the manifest, is not reported, sized from or fitted to."""
    store = full_store(tmp_path, ("fp8",))
    (path,) = tmp_path.glob(f"benchmark/*/{name}")
    raw = path.read_bytes()
    path.write_bytes(alter(raw))
    assert path.read_bytes() != raw
    with pytest.raises(UserError, match=message):
        read_measured([path.parent])
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        collect(store)


def test_a_folder_without_its_request_files_can_still_be_sized_from(tmp_path):
    full_store(tmp_path, ("fp8",))
    (folder,) = tmp_path.glob("benchmark/*")
    for path in folder.glob("requests-*"):
        path.unlink()
    assert read_measured([folder]).levels


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("overall.accuracy", "good", r"overall\.accuracy='good' is not a finite number"),
        ("overall.questions", None, r"overall\.questions=None is not a whole number"),
        ("records.0.logprobs", 5, r"records\[0\]\.logprobs=5 is not a list"),
        ("records.3.logprobs", ["a"], r"records\[3\]\.logprobs\[0\]='a' is not a finite number"),
        ("subjects.letters.accuracy", float("inf"), r"subjects\.letters\.accuracy=inf is not a finite number"),
    ],
)
def test_an_evaluation_with_a_wrong_value_is_refused(place, value, message):
    raw = json.loads(json.dumps(evaluation("fp8", 3).to_json()))
    assert EvalResult.from_json(raw).questions == 200
    with pytest.raises(UserError, match=message):
        EvalResult.from_json(altered(raw, place, value), "evaluation.json")


@pytest.mark.parametrize("record", [EvalResult, BenchmarkResult])
@pytest.mark.parametrize("raw", [[], 7, "text", None])
def test_another_json_value_is_not_a_result(record, raw):
    with pytest.raises(UserError, match="is not a JSON object"):
        record.from_json(raw, "it")


def test_every_result_of_a_store_still_reads(tmp_path):
    assert len(collect(Store(full_store(tmp_path).root)).formats) == 5
