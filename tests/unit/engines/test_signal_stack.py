"""What OpenVINO's plugin leaves for signals is taken back from the thread that loaded it."""

import ctypes

import numpy as np
import openvino as ov
from openvino import opset13 as op

from pipelines.engines.openvino.runtime import SS_DISABLE, SignalStack, take_back_signal_stack


def test_signals_use_the_ordinary_stack_after_loading() -> None:
    """With AMX, Ctrl-C after the plugin had gone ended the process with SIGSEGV."""
    given = op.parameter(ov.PartialShape([1]), ov.Type.f32)
    ov.Core().compile_model(ov.Model([op.relu(given)], [given]), "CPU")(np.ones(1, dtype=np.float32))
    take_back_signal_stack()
    stack = SignalStack()
    ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack))
    assert stack.flags == SS_DISABLE
