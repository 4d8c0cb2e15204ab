"""What the report's words mean. One place, so that Markdown, HTML and the terminal say the same."""

from __future__ import annotations

CONVENTIONS: tuple[tuple[str, str], ...] = (
    ("measured", "Taken from a run on the machine named beside it. Nothing in this report is estimated unless it says "
     "modelled; what was not measured is named as absent."),
    ("ISL, OSL", "Input and output length of a request in tokens, as the engine counts them: mean (least..greatest)."),
    ("TTFT", "Time to first token: from when the request was due to the first non-empty response. Queue, prefill and "
     "network are inside. In an open loop a request is due by the schedule, not when a slow client got to send it, so "
     "that waiting cannot hide (coordinated omission)."),
    ("ITL", "Inter-token latency of a request: (E2E - TTFT) / (OSL - 1), the first token excluded; the same as TPOT of "
     "NIM, genai-perf and MLPerf. None below two output tokens. vLLM's benchmark calls the pooled gaps between "
     "responses ITL; those are listed as token gaps."),
    ("E2E", "From when the request was due to its last token."),
    ("output tokens/s", "Output tokens of finished requests that arrived in the window, divided by its length: the "
     "throughput of the system. Total tokens/s counts input tokens as well."),
    ("tokens/s per user", "1 / ITL: how fast one answer streams."),
    ("requests/s", "Requests finished in the window, divided by its length; per GPU divides by TP x PP."),
    ("goodput", "Finished requests per second that met every limit of the SLO. A load meets the SLO when its 99th "
     "percentiles do, as MLPerf counts."),
    ("p50, p90, p95, p99", "Percentiles over requests, linear between neighbours (numpy's default; trtllm-bench takes "
     "the nearest below)."),
    ("closed loop, open loop", "Concurrency keeps so many requests in flight; a request rate sends on schedule "
     "whatever the server does."),
    ("client-limited", "The load generator itself was the bottleneck: the number says more about it than about the "
     "server, and is a lower bound."),
    ("loss, verdict", "Loss is in percent of the 16-bit baseline's accuracy, over the same questions. A verdict other "
     "than 'no measurable loss' needs p < 0.05 in McNemar's exact test."),
)  # fmt: skip
