"""A program: a router with the stub workers of the compatibility rows, for clients in other processes.

    python tests/router/support/served_stub.py FOLDER

Prints `ready URL` and serves until its input ends. FOLDER takes the files of Redis and of clients.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from compatibility.known_worker import FACTS, answer
from redis_process import RedisProcess
from router_rig import Rig


async def serve(folder: Path) -> None:
    """Until the input ends."""
    process = RedisProcess(folder)
    process.start()
    rig = Rig(process.url)
    try:
        for name in FACTS:
            await rig.publish_model(name)
        for name, facts in FACTS.items():
            await rig.start_worker(f"w-{name}", answer, models=(name,), facts=facts)
        await rig.start_router(files_dir=str(folder / "files"))
        print(f"ready http://127.0.0.1:{rig.app.http_port} 127.0.0.1:{rig.app.grpc_port}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await rig.close()
        process.stop()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
