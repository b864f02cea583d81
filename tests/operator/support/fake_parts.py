"""Small real programs in the place of router and worker: they serve just what the command waits for.

``python fake_parts.py router PORT MODEL...`` or ``python fake_parts.py worker ID REDIS_URL [ERROR]``.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import signal
import sys
import threading

from fake_worker import FakeWorker

from naru_proto.v1 import worker_pb2


def router(port: int, models: list[str]) -> None:
    """Lists the models; says when it is told to stop."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Any path tells the models, as readiness does."""
            body = json.dumps({"models": dict.fromkeys(models, 1)}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever(poll_interval=0.01)
    print("router stopped", flush=True)


async def worker(worker_id: str, redis_url: str, error: str) -> None:
    """Takes a lease and every load; renews when something was loaded."""
    fake = FakeWorker(worker_id, redis_url)
    if error:
        fake.error = worker_pb2.Error(code="model_load_failed", message=error)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await fake.start()
    print("worker started", flush=True)
    seen: dict[str, object] = {}
    while not stop.is_set():
        if seen != fake.models:
            seen = dict(fake.models)
            await fake.renew()
        try:
            async with asyncio.timeout(0.02):
                await stop.wait()
        except TimeoutError:
            continue
    print("worker stopped", flush=True)
    await fake.stop()


if __name__ == "__main__":
    if sys.argv[1] == "router":
        router(int(sys.argv[2]), sys.argv[3:])
    else:
        asyncio.run(worker(sys.argv[2], sys.argv[3], "".join(sys.argv[4:])))
