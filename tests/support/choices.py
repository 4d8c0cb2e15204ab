"""Overrides without which a choice of conf/ is refused, because a value of the user's is missing."""

from tests.conftest import ROOT

NEEDS: dict[tuple[str, str], list[str]] = {
    ("model", "hub"): ["model.hub_id=org/name"],
    ("calibration", "hub"): ["calibration.dataset=org/name"],
    ("calibration", "local"): ["calibration.path=/some/file"],
    ("workload", "trace"): ["workload.trace=/some/file"],
    ("sizing", "autoscaled"): ["sizing.autoscaling.cold_start_s=120"],
    ("manifests", "host_path"): ["manifests.host_path=/some/folder"],
    ("manifests", "hub"): ["manifests.fetch.hub=org/name"],
    ("eval", "local"): ["eval.path=questions.csv"],
    ("eval", "lm_eval"): ["eval.task=winogrande", "eval.dataset=org/name"],
    ("lora", "adapters"): ["lora.adapters={1:/some/adapter,2:/another}"],
    ("prune", "width"): ["prune.mlp=256"],
    ("prune", "depth"): ["prune.layers=1"],
    ("multimodal", "llava"): [f"multimodal.path={ROOT / 'pipelines/bundled/models/tiny_llava'}"],
    **{("speculative", mode): ["speculative.heads_path=/heads"] for mode in ("medusa", "redrafter", "eagle")},
}
