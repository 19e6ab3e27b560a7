"""Log lines with fields, as text or as JSON lines, on stderr. `log.info("ready", port=8000)`.

Used by every part of the server; uvicorn's own messages pass through here too.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class StructuredLogger:
    """A logger whose messages have fields."""

    def __init__(self, name: str = "anyprec.serve") -> None:
        self.logger = logging.getLogger(name)

    def debug(self, message: str, **fields: Any) -> None:
        self._write(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: Any) -> None:
        self._write(logging.INFO, message, fields)

    def warning(self, message: str, **fields: Any) -> None:
        self._write(logging.WARNING, message, fields)

    def error(self, message: str, exc_info: BaseException | None = None, **fields: Any) -> None:
        self._write(logging.ERROR, message, fields, exc_info)

    def _write(self, level: int, message: str, fields: dict[str, Any], exc_info: BaseException | None = None) -> None:
        if self.logger.isEnabledFor(level):
            self.logger.log(level, message, extra={"fields": fields}, exc_info=exc_info)


log = StructuredLogger()


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={shown(value)}" for key, value in getattr(record, "fields", {}).items())
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{stamp} {record.levelname.lower():<7} {one_line(record.getMessage())} {fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        whole: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            whole["trace"] = self.formatException(record.exc_info)
        return json.dumps(whole, default=str)


def shown(value: Any) -> str:
    text = one_line(str(value))
    return json.dumps(text) if not text or " " in text or '"' in text else text


def one_line(text: str) -> str:
    """What a client sent may have line breaks in it, which would forge lines of the log."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def set_up(form: str = "text", level: str = "info", file: TextIO | None = None) -> logging.Handler:
    """Send the server's lines (and uvicorn's warnings) to stderr."""
    handler = logging.StreamHandler(sys.stderr if file is None else file)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    for name, least in (("anyprec.serve", LEVELS[level]), ("uvicorn.error", logging.CRITICAL)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(least)
        logger.propagate = False
    return handler
