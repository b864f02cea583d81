"""`naru-operator`: reads settings, sets up logs, runs the operator until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence

from naru_operator.app import build
from naru_operator.settings import Settings, load_settings
from naru_proto.errors import NaruError
from naru_proto.settings import SettingsError

EXIT_BAD_SETTINGS = 2


class _JsonLines(logging.Formatter):
    """One object on each line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger, message, and a traceback where there is one."""
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    try:
        settings = load_settings(sys.argv[1:] if arguments is None else arguments, os.environ)
        _set_up_logs(settings)
        return asyncio.run(_serve(settings))
    except SettingsError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    except NaruError as exc:
        print(f"error: {exc.message}", file=sys.stderr)
        return 1


async def _serve(settings: Settings) -> int:
    app = build(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(app.run(), name="operator")
    stopping = asyncio.create_task(stop.wait(), name="signals")
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if serving.done():
        serving.result()
        return 1  # it never ends by itself
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return 0


def _set_up_logs(settings: Settings) -> None:
    handler = logging.StreamHandler()
    if settings.log_format == "json":
        handler.setFormatter(_JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    for name in ("urllib3", "kubernetes", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
