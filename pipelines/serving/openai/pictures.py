"""Pictures in requests: data URLs, and files of hosts that a setting allows."""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import re
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from pipelines.serving.openai.errors import ApiError, shortened

DATA = re.compile(r"data:image/(png|jpe?g|webp);base64", re.IGNORECASE)
FETCH_S = 10.0
"""Time for a file of another server."""
CHUNK_BYTES = 2**16


def refused(message: str, param: str = "messages") -> ApiError:
    """Make the error of a picture that cannot be used."""
    return ApiError(400, message, param=param, code="invalid_image")


def content_of(url: str, number: int, hosts: Sequence[str]) -> bytes | str:
    """Return the content of a data URL, or the URL itself where its host is allowed.

    Raises:
        ApiError: 400, it is neither.
    """
    head, comma, data = url.partition(",")
    if comma and DATA.fullmatch(head):
        try:
            return base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise refused(f"Picture {number} is not whole base64: {error}.") from None
    if url[:8].lower().startswith(("http://", "https://")):
        try:
            host = urlsplit(url).netloc.lower()
        except ValueError:
            host = ""
        if host not in hosts:
            raise refused(
                f"Picture {number} is at '{shortened(host)}'. This server fetches pictures from"
                f" {', '.join(hosts) or 'no other server'} (serving.image_hosts). Send it as a data URL."
            )
        return url
    raise refused(
        f"Picture {number} has the URL '{shortened(url, 60)}'; it must start with data:image/png;base64,"
        " (or jpeg, webp), http:// or https://."
    )


def fetched(url: str, number: int, most: int) -> bytes:
    """Fetch a picture from an allowed host, without following it elsewhere.

    A name must belong to a public address; an address that the setting itself allows may be a private one.

    Raises:
        ApiError: 400, it did not come.
    """
    parts, until = urlsplit(url), time.monotonic() + FETCH_S
    kind = http.client.HTTPSConnection if parts.scheme.lower() == "https" else http.client.HTTPConnection
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=FETCH_S)
        connection.connect()
        _refuse_private(parts.hostname or "", connection.sock.getpeername()[0])
        connection.request("GET", f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}")
        answer, content = connection.getresponse(), bytearray()
        if answer.status != 200:  # a redirection too
            raise OSError(f"the server answered {answer.status} {answer.reason}")
        while chunk := answer.read1(CHUNK_BYTES):
            content += chunk
            if len(content) > most:
                raise OSError(f"it has more than {most:,} bytes (serving.max_body_bytes)")
            if time.monotonic() > until:
                raise TimeoutError(f"it took more than {FETCH_S:g} s")
        return bytes(content)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise refused(f"Picture {number} could not be fetched from '{shortened(parts.netloc)}': {error}.") from None
    finally:
        if "connection" in locals():
            connection.close()


def _refuse_private(name: str, address: str) -> None:
    """Raise OSError where a name leads to an address that is not public."""
    peer = ipaddress.ip_address(address)
    if not peer.is_global and name.strip("[]") != address:
        raise OSError(f"'{name}' is the address {address}, which is not public")
