"""Exit 0 if the server in this container is ready for requests; used by HEALTHCHECK.

Queries Triton's own endpoint, /v2/health/ready, on HTTP_PORT (8000). In Kubernetes the probes query it through the
service in front.
"""

import os
import sys
import urllib.error
import urllib.request

URL = f"http://127.0.0.1:{os.environ.get('HTTP_PORT', '8000')}/v2/health/ready"

try:
    with urllib.request.urlopen(URL, timeout=2) as answer:
        sys.exit(0 if answer.status == 200 else 1)
except (urllib.error.URLError, OSError) as error:
    sys.exit(f"not ready: {URL}: {error}")
