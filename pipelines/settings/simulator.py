"""The group `simulator`: settings of `make simulate`. Imports nothing heavy."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from pipelines.domain.errors import did_you_mean
from pipelines.settings.base import Group, Positive

Policy = Literal["static", "inflight", "inflight_chunked", "one_prefill"]
POLICIES = get_args(Policy)
Time = Annotated[float, Field(gt=0)]


class SimulatorSettings(Group):
    """How an engine schedules requests, in ticks or in seconds.

    Attributes:
        policy: the policies compared, in the order shown.
        time: "auto" is seconds when a GPU is named or `sizing.fit` is given, ticks otherwise.
        slots: requests scheduled together; None is 4 in ticks, the engine's max_batch_size in seconds.
        prefill: ticks of a prompt.
        decode: ticks of a decode step.
        chunks: iterations that a prompt is spread over, in ticks.
        max_num_tokens: of an iteration; None is no limit in ticks, and in seconds the engine's, except for static.
        admission: as TensorRT-LLM's batch_scheduler_policy; None is the repository's, or the fit's.
        kv_blocks: of the paged KV cache; None is no limit in ticks, what fits into the GPU in seconds.
        tokens_per_block: of one; None is the build's, or the fit's.
        prefix_tokens: cached tokens of each prompt; None is 0 in ticks, the shared part of the prompts in seconds.
        until: when the run ends, ticks or seconds; None is when all requests are done.
        client_delay: closed loop: ticks or seconds from an answer to the arrival of the user's next request, beside
            workload.think_time_s; None is 0 in ticks, the performance model's in seconds.
        drawn: ticks or seconds that the picture of the slots shows; None chooses.
    """

    policy: tuple[Policy, ...]
    time: Literal["auto", "ticks", "seconds"]
    slots: Positive | None
    prefill: Time
    decode: Time
    chunks: Positive
    max_num_tokens: Positive | None
    admission: Literal["guaranteed_no_evict", "max_utilization"] | None
    kv_blocks: Positive | None
    tokens_per_block: Positive | None
    prefix_tokens: Annotated[int, Field(ge=0)] | None
    until: Time | None
    client_delay: Annotated[float, Field(ge=0)] | None
    drawn: Time | None

    @model_validator(mode="before")
    @classmethod
    def _one_policy(cls, data: object) -> object:
        """Accept a single policy for a list, and name the nearest one for an unknown word."""
        if not isinstance(data, dict):
            return data
        given = data.get("policy")
        policies = [given] if isinstance(given, str) else given
        if isinstance(policies, list | tuple):
            for word in policies:
                if word not in POLICIES:
                    near = did_you_mean(str(word), POLICIES)
                    raise ValueError(f"has policy='{word}', which is none of {', '.join(POLICIES)}. {near}".strip(". "))
        return {**data, "policy": policies}

    @model_validator(mode="after")
    def _fits_together(self) -> SimulatorSettings:
        if not self.policy:
            raise ValueError("has policy=[], which simulates nothing; give at least one")
        if len(set(self.policy)) < len(self.policy):
            raise ValueError(f"has policy=[{','.join(self.policy)}], which names one twice")
        return self
