"""`make test-under-load`: the tests several times in a row, beside two processes that keep the processors busy."""

import subprocess
import sys
import time

BUSY = 2


def main(rounds: int, words: list[str]) -> int:
    """Run pytest with these words so many times; stop at the first round that fails."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        for number in range(1, rounds + 1):
            start = time.monotonic()
            code = subprocess.run([sys.executable, "-m", "pytest", *words], check=False).returncode
            minutes = (time.monotonic() - start) / 60
            sys.stdout.write(f"round {number} of {rounds}: {minutes:.0f} min, exit code {code}\n")
            if code:
                return code
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return 0


if __name__ == "__main__":
    given = sys.argv[1]
    if not given.isdecimal() or int(given) < 1:
        sys.exit(f"rounds={given} is no number of rounds; give 1 or more.")
    sys.exit(main(int(given), sys.argv[2:]))
