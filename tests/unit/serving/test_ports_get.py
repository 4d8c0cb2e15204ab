"""A page that a server which ends does not finish is no page, and no error of whoever stops the server."""

import socket
import threading

import pytest

from pipelines.serving.ports import answers_200, get


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf", b"no HTTP\r\n\r\n", b""])
def test_an_unfinished_answer_is_none(answer: bytes) -> None:
    """`IncompleteRead` and `BadStatusLine` are no `OSError`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def once() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        threading.Thread(target=once).start()
        assert get(*listener.getsockname(), "/metrics") is None


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
    assert get(host, port, "/") is None
    assert not answers_200(host, port, "/")
