"""Refuse to predict the speed of what is not modelled.

docs/sizing.md says of every setting what predictions make of it: modelled, without effect, or refused. `unmodelled`
names what a configuration sets of the last kind; `make size`, `make simulate` and the table of `make plan` then refuse
to answer.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pipelines.domain.errors import Fault
from pipelines.engines.tensorrt_llm.config import key_of
from pipelines.settings.base import typed
from pipelines.settings.root import Settings

Finding = Callable[[Settings], str | None]


@dataclass(frozen=True, slots=True)
class Unmodelled:
    """A setting that changes the speed in a way that nothing here can compute.

    Attributes:
        how: why it cannot be modelled.
        found: returns the setting at fault, as an override, or None.
        without: what to leave out or change, as a sentence.
    """

    how: str
    found: Finding
    without: str


def _set(key: str, usual: object) -> Finding:
    def found(settings: Settings) -> str | None:
        group, *_, name = key.split(".")
        value = settings.build[name] if group == "build" else getattr(getattr(settings, group), name)
        if value == usual:
            return None
        return f"{key}={typed(value)}"

    return found


def _first(*findings: Finding) -> Finding:
    return lambda settings: next((text for each in findings if (text := each(settings))), None)


def _pictures(settings: Settings) -> str | None:
    images, path, fitted = settings.workload.images, settings.sizing.fit, 0
    if path is not None:
        with suppress(OSError, ValueError, AttributeError):  # reading the whole file reports its faults
            fitted = json.loads(path.expanduser().read_text()).get("fitted_on", {}).get("images", 0)
    return f"workload.images={images}" if images != fitted else None


def _adapters(settings: Settings) -> str | None:
    ids = ",".join(map(str, settings.lora.adapters))
    return f"lora.adapters with id {ids}" if ids else None


NO_KERNELS = {"context_fmha": "enable", "remove_input_padding": "enable", "kv_cache_type": "paged"}
NO_KERNELS |= {"paged_kv_cache": "enable", "gpt_attention_plugin": "auto", "streamingllm": "disable"}
LOGITS = ("gather_context_logits", "gather_generation_logits", "gather_all_token_logits")

REFUSED = (
    Unmodelled(
        "how fast a mix is depends on which linear gets which format",
        _set("quant.effective_bits", None),
        "Choose one format, e.g. quant=fp8",
    ),
    Unmodelled(
        "sizing and simulation take the sizes of the model as it is named; give those of the pruned one as model.shape",
        lambda settings: f"prune={settings.prune.method}" if settings.prune.prunes else None,
        "Leave pruning out, and give the smaller sizes as the model's own (model.path=/its/folder or model.shape.*)",
    ),
    Unmodelled(
        "the vision encoder's time is unknown, but for as many pictures as the benchmark of a fit had",
        _pictures,
        "Fit a benchmark with these pictures (make calibrate sizing.measured=FILE, then sizing.fit=FILE), or set "
        "workload.images to what the fit has, 0 without one",
    ),
    Unmodelled(
        "it depends on how many draft tokens are accepted, which only a measurement tells",
        lambda settings: f"speculative={mode}" if (mode := settings.speculative.mode) != "none" else None,
        "Leave speculative out for the speed without it, or measure with make benchmark",
    ),
    Unmodelled(
        "the products of adapters take time that depends on the mix of adapters in a batch",
        _first(_adapters, _set("build.trtllm.lora_plugin", "disable"), _set("build.trtllm.dora_plugin", "disable")),
        "Leave lora out for the speed of the model alone, or measure with make benchmark",
    ),
    Unmodelled(
        "beams share their prompt's KV cache and are chosen on the host",
        _set("build.max_beam_width", 1),
        "Set build.max_beam_width=1, or measure with make benchmark",
    ),
    Unmodelled(
        "the logits of every token are computed and kept",
        _first(*(_set(key_of(name), False) for name in LOGITS)),
        "Leave it out, or measure with make benchmark",
    ),
    Unmodelled(
        "engines without packed tokens, paged KV cache and fused attention are much slower, and were not measured",
        _first(*(_set(key_of(name), usual) for name, usual in NO_KERNELS.items())),
        "Leave it out, or measure with make benchmark",
    ),
    Unmodelled(
        "how long a request waits for company depends on Triton's own batcher",
        _set("triton.max_queue_delay_microseconds", 0),
        "Leave it out: in-flight batching needs no delay",
    ),
)


def unmodelled(settings: Settings) -> list[Fault]:
    """Return a fault for each thing that changes the speed and is not modelled."""
    return [
        Fault(f"{setting} changes the speed in a way that is not modelled: {row.how}.", todo=f"{row.without}.")
        for row, setting in ((row, row.found(settings)) for row in REFUSED)
        if setting
    ]
