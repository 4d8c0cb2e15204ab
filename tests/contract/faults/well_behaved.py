"""Clients that behave: their answers must stay the same, and the server as large, whatever others do."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from pipelines.serving.process import TritonServer
from tests.support.served_gemma import Answer, Client

IDS = [2, 388, 774, 340, 333, 514, 368]
PROMPT = "The capital of"


def core(ids: list[int] = IDS, tokens: int = 8, **more: Any) -> dict[str, Any]:
    """Inputs of tensorrt_llm; no token ends the answer."""
    given = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": tokens, "end_id": -1}
    return {**given, "exclude_input_in_output": True, **more}


BAD_WORDS = np.array([[[388, 774], [1, 2]]], dtype=np.int32)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("tensorrt_llm", core(tokens=48)),
    "streamed": ("tensorrt_llm", core(tokens=48, streaming=True)),
    "beams": ("tensorrt_llm", core(tokens=24, beam_width=3)),
    "bad words": ("tensorrt_llm", core(tokens=16, bad_words_list=BAD_WORDS, streaming=True)),
    "logits": ("tensorrt_llm", core(tokens=6, return_generation_logits=True)),
    "text": ("ensemble", {"text_input": PROMPT, "max_tokens": 24, "stream": True}),
    "scripted": ("tensorrt_llm_bls", {"text_input": PROMPT, "max_tokens": 24, "stream": True}),
}
"""Every way through the server: pipeline, beams, the loop for logits, ensemble and BLS. All of them greedy: drawn
tokens depend on who else draws, because the engine has one random generator for all."""


def content(answer: Answer) -> list[Any]:
    """Text or token ids, in one piece, however it was streamed."""
    assert not answer.error, answer.error
    if "text_output" in answer.parts[0]:
        return [answer.text]
    beams = answer.parts[0]["output_ids"].shape[1]
    return [[t for part in answer.parts for t in part["output_ids"][0, beam].tolist()] for beam in range(beams)]


class References:
    """One answer of each kind, and comparison with them."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._expected = {kind: content(answer) for kind, answer in self._ask().items()}

    def check(self) -> None:
        """Ask the same again."""
        assert {kind: content(answer) for kind, answer in self._ask().items()} == self._expected

    def same(self, kind: str, answer: Answer) -> bool:
        """Whether an answer is the reference."""
        return content(answer) == self._expected[kind]

    def begins(self, kind: str, answer: Answer) -> bool:
        """Whether an answer that was cut short is the reference as far as it goes."""
        return all(row == full[: len(row)] for row, full in zip(content(answer), self._expected[kind], strict=True))

    def _ask(self) -> dict[str, Answer]:
        client = Client(self._server.grpc_url)
        for kind, (model, inputs) in KINDS.items():
            client.send(model, kind, **inputs)
        answers = client.take(*KINDS)
        client.close()
        return answers

    @contextmanager
    def meanwhile(self) -> Iterator[Rounds]:
        """Ask again and again while the body runs; every answer must be the reference."""
        rounds = Rounds(self)
        thread = threading.Thread(target=rounds.run)
        thread.start()
        try:
            yield rounds
        finally:
            rounds.enough.set()
            thread.join(60)
        assert not rounds.faults, rounds.faults[0]
        assert rounds.done >= 2


@dataclass
class Rounds:
    """Rounds of all references, in a thread."""

    references: References
    enough: threading.Event = field(default_factory=threading.Event)
    faults: list[BaseException] = field(default_factory=list)
    done: int = 0

    def run(self) -> None:
        """Ask until it is enough, at least twice."""
        try:
            while not self.enough.is_set() or self.done < 2:
                self.references.check()
                self.done += 1
        except BaseException as fault:  # noqa: BLE001 - raised by the test
            self.faults.append(fault)


def resident_bytes(server: TritonServer) -> int:
    """Memory of tritonserver and its stubs that is theirs alone; the shared part is a fixed pool."""
    process = psutil.Process(server._running.pid)
    return sum(member.memory_full_info().uss for member in [process, *process.children(recursive=True)])


def gauge(server: TritonServer, family: str, kind: str) -> float:
    """One value of the metrics page."""
    with urllib.request.urlopen(server.metrics_url) as page:
        found = re.search(rf'^{family}{{[^}}]*="{kind}"[^}}]*}} (\S+)$', page.read().decode(), re.MULTILINE)
    assert found
    return float(found.group(1))


def is_idle(server: TritonServer) -> bool:
    """Nothing runs or waits, and no KV block is in use."""
    return not any(
        gauge(server, family, kind)
        for family, kind in (
            ("nv_trt_llm_request_metrics", "active"),
            ("nv_trt_llm_request_metrics", "waiting"),
            ("nv_trt_llm_kv_cache_block_metrics", "used"),
        )
    )
