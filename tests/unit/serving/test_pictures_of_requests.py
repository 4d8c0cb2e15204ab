"""Pictures in requests: what a data URL must be, and fetching from allowed hosts alone."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.pictures import content_of, fetched

MOST = 1000


class Shelf(BaseHTTPRequestHandler):
    """Serves /good, /large and a redirection."""

    def do_GET(self) -> None:
        content = {"/good?size=1": b"picture", "/large": b"x" * (MOST + 1)}.get(self.path)
        self.send_response(302 if content is None else 200)
        self.send_header("Location", "/good?size=1")
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Shelf) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_data_urls_become_bytes_and_allowed_urls_stay() -> None:
    assert content_of("data:image/JPG;base64,aGVsbG8=", 1, ()) == b"hello"
    assert content_of("https://Pictures.example/1.png", 1, ("pictures.example",)) == "https://Pictures.example/1.png"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:image/png;base64,aGVsbG8", "Picture 3 is not whole base64: Incorrect padding"),
        ("data:image/png;base64,a b=", "Picture 3 is not whole base64"),
        ("data:image/svg+xml;base64,aGVsbG8=", "the URL 'data:image/svg\\+xml;.*must start with data:image/png;base64"),
        ("data:image/png,hello", "must start with data:image/png;base64"),
        ("ftp://pictures.example/1.png", "the URL 'ftp://pictures.example/1.png'"),
        (
            "https://pictures.example:8443/1.png",
            "'pictures.example:8443'. .* fetches pictures from pictures.example",
        ),
        ("https://pictures.example@10.0.0.1/", "is at 'pictures.example@10.0.0.1'"),
        ("http://[::1/", "is at ''"),
    ],
)
def test_other_urls_are_refused(url: str, said: str) -> None:
    with pytest.raises(ApiError, match=said):
        content_of(url, 3, ("pictures.example",))


def test_a_picture_is_fetched_from_an_address_that_is_allowed_by_itself(port: int) -> None:
    assert fetched(f"http://127.0.0.1:{port}/good?size=1", 1, MOST) == b"picture"


@pytest.mark.parametrize(
    ("path", "said"),
    [("large", "it has more than 1,000 bytes .serving.max_body_bytes."), ("elsewhere", "the server answered 302")],
)
def test_what_is_too_large_or_elsewhere_is_refused(port: int, path: str, said: str) -> None:
    with pytest.raises(ApiError, match=f"Picture 2 could not be fetched from '127.0.0.1:{port}': {said}"):
        fetched(f"http://127.0.0.1:{port}/{path}", 2, MOST)


def test_a_name_of_a_private_address_is_refused(port: int) -> None:
    with pytest.raises(ApiError, match=r"'localhost' is the address 127.0.0.1, which is not public"):
        fetched(f"http://localhost:{port}/good?size=1", 1, MOST)
