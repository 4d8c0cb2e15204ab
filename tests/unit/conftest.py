"""Most commands make pages whose pictures their tests do not look at: these are drawn, but not written."""

import pytest

PLACEHOLDER = {"svg": b'<svg viewBox="0 0 1 1"></svg>', "png": b"\x89PNG\r\n\x1a\n"}


@pytest.fixture(autouse=True)
def _pictures(request, monkeypatch):
    """Spare writing SVG and PNG, which is nearly all of a command's time.

    Tests that look at pictures are marked with `pytest.mark.pictures`; fixtures of a wider scope make real ones too.
    """
    if request.node.get_closest_marker("pictures") is None:
        monkeypatch.setattr("pipelines.document.canvas._saved", lambda _, form: PLACEHOLDER[form])
