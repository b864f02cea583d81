"""What `helm test` runs: the routers answer, and a model that is there completes. Standard library only."""

from __future__ import annotations

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from typing import Any

BASE = os.environ["NARU_URL"]
TIMEOUT_S = float(os.environ["TIMEOUT_SECONDS"])
TLS = ssl.create_default_context()
# The Service's name need not stand in the certificate: whether the routers answer is asked, not who they are.
TLS.check_hostname = False
TLS.verify_mode = ssl.CERT_NONE


def ask(path: str, body: object = None) -> Any:
    """One request to the routers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(BASE + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=TLS) as response:
        return json.load(response)


def main() -> int:
    """0 when all that could be asked was answered."""
    try:
        models = [model["id"] for model in ask("/v1/models")["data"]]
        print(f"models: {', '.join(models) or 'none yet'}")
        if models:
            answer = ask("/v1/completions", {"model": models[0], "prompt": "The", "max_tokens": 4, "temperature": 0})
            print(f"{models[0]} went on with {answer['choices'][0]['text']!r}")
    except urllib.error.HTTPError as exc:
        with exc:
            if exc.code == 401:
                print("the routers answer and ask for an API key, which this test has none of")
                return 0
            print(f"{exc.url}: {exc.code} {exc.read(2048).decode(errors='replace')}", file=sys.stderr)
        return 1
    except (OSError, ValueError, LookupError) as exc:
        print(f"{BASE} did not answer as it should: {exc!r}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
