"""Read numbers from a Hugging Face config.json. It comes with the model, so nothing in it is trusted."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from pipelines.domain.errors import Fault, UserError

LARGEST = 2**24
"""Largest size of any kind: 16,777,216 tokens of context, above that of every published model."""
LARGEST_BY_NAME = {
    "num_hidden_layers": 10_000,
    "sliding_window_pattern": 10_000,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
}
MOST_SHOWN = 80
"""Characters of a value in a message; one from a file may be megabytes long."""
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 3, 60, 60, 60
REALS: Mapping[str, tuple[float, float]] = {
    "rms_norm_eps": (0.0, 1.0),
    "rope_theta": (0.0, 1e12),
    "partial_rotary_factor": (0.0, 1.0),
    "original_max_position_embeddings": (0.0, LARGEST),
    "rope_local_base_freq": (0.0, 1e12),
}
"""Numbers that an engine computes with: they must be above the first and at most the second."""
ROPE_REALS: Mapping[str, tuple[float, float]] = {
    "rope_theta": (0.0, 1e12),
    "partial_rotary_factor": (0.0, 1.0),
    "factor": (0.0, 1e6),
    "low_freq_factor": (0.0, 1e6),
    "high_freq_factor": (0.0, 1e6),
    "original_max_position_embeddings": (0.0, LARGEST),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"), (0.0, 1e6)),
}
"""The same inside rope_scaling (Transformers 4) or rope_parameters (Transformers 5)."""


def shown(value: object) -> str:
    """Return a value from a file for a message: short, without control characters, text in quotes."""
    text = _SHORT.repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


class ConfigNumbers:
    """Typed access to a config.json that collects every fault, so that all are reported at once."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        """Read nothing yet.

        Args:
            config: content of the file.
            source: name of the file, for messages.
        """
        self.config, self._source = config, source
        self._faults: list[Fault] = []

    @property
    def fine(self) -> bool:
        """Whether nothing is at fault so far."""
        return not self._faults

    def size(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a size; the default if it is absent or null, and 1 in place of one that is at fault."""
        value = self.config.get(name)
        if value is None:
            if default is None:
                self.fault(f"has no '{name}'; it is not a complete model configuration.")
                return 1
            return default
        most = LARGEST_BY_NAME.get(name, LARGEST)
        if type(value) is not int or not least <= value <= most:
            self.fault(f"has {name}={shown(value)}.", f"It must be a whole number from {least} to {most:,}.")
            return 1
        return value

    def has(self, *names: str) -> bool:
        """Return whether one of these is stated."""
        return any(self.config.get(name) is not None for name in names)

    def switch(self, name: str, default: bool) -> bool:
        """Return a truth value; the default if it is absent or null."""
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fault(f"has {name}={shown(value)}.", "It must be true or false.")
        return bool(value)

    def items(self, name: str) -> list[Any]:
        """Return a list; empty if it is absent or null."""
        value = self.config.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.fault(f"has {name}={shown(value)}.", "It must be a list.")
            return []
        return value

    def architecture(self) -> str:
        """Return the first name in `architectures`; empty if there is none."""
        names = self.config.get("architectures")
        if names is None or names == []:
            return ""
        if not isinstance(names, list) or not isinstance(names[0], str):
            self.fault(f"has architectures={shown(names)}.", "It must be a list of names.")
            return ""
        return str(names[0])

    def check_reals(self) -> None:
        """Check the numbers that are not sizes, and the block that scales positions."""
        self._reals(self.config, REALS, "")
        for name in ("rope_scaling", "rope_parameters"):
            block = self.config.get(name)
            if block is not None:
                self.block(name, block)

    def block(self, name: str, block: object) -> bool:
        """Check the numbers of one block that scales positions, and return whether it is one."""
        if not isinstance(block, Mapping):
            self.fault(f"has {name}={shown(block)}.", "It must be a JSON object.")
            return False
        self._reals(block, ROPE_REALS, f"{name}.")
        for key in ("rope_type", "type"):
            if not isinstance(block.get(key, ""), str):
                self.fault(f"has {name}.{key}={shown(block[key])}.", "It must be the name of a type.")
        return True

    def _reals(self, block: Mapping[str, Any], bounds: Mapping[str, tuple[float, float]], prefix: str) -> None:
        for name, (above, most) in bounds.items():
            value = block.get(name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and above < value <= most):
                allowed = f"It must be a number above {above:g} and at most {most:g}."
                self.fault(f"has {prefix}{name}={shown(value)}.", allowed)

    def fault(self, message: str, allowed: str = "") -> None:
        """Note something wrong with the file."""
        self._faults.append(Fault(f"{self._source} {message}", allowed))

    def refuse(self) -> None:
        """Raise what was noted.

        Raises:
            UserError: every fault at once.
        """
        if self._faults:
            raise UserError.of(self._faults)
