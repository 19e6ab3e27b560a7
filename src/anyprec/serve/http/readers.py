"""RequestReaders: posted images and long JSON in, arrays out, in processes that can be killed.

Used by app.py and classify.py. Images have processes of their own, so that they cannot delay tensors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

from anyprec.serve.http.protocol import InferRequest, ModelSignature, RequestedOutput, read_infer_request
from anyprec.serve.http.workers import Workers

LONG_JSON = 64 << 10  # bytes; parsing them would block the event loop for 2 to 4 ms
LARGE = 1 << 20  # bytes of a binary tensor; converting more takes over 1 ms
CALL_S = 5.0  # for a JSON request; 4 MiB take 0.3 s


class RequestReaders:
    """image_s: the longest that an image may take. on_kill: called for every job that was ended."""

    def __init__(self, image_s: float, on_kill: Callable[[], None] = lambda: None) -> None:
        self.images = Workers(2, image_s, on_kill)
        self.calls = Workers(1, CALL_S, on_kill)

    def start(self) -> None:
        self.images.start()
        self.calls.start()

    def close(self) -> None:
        self.images.close()
        self.calls.close()

    async def image(self, body: bytes, signature: ModelSignature, max_pixels: int, until: float) -> np.ndarray:
        head, data = await self.images.run("image", body, signature, max_pixels, until=until)
        return np.frombuffer(data, head["dtype"]).reshape(head["shape"])

    async def call(self, body: bytes, header_length: int | None, signature: ModelSignature) -> InferRequest:
        if (len(body) if header_length is None else header_length) <= LONG_JSON:
            if len(body) <= LARGE:
                return read_infer_request(body, header_length, signature)
            loop = asyncio.get_running_loop()  # numpy converts and copies without the GIL
            return await loop.run_in_executor(None, read_infer_request, body, header_length, signature)
        # Its deadline is unknown until it has been read.
        head, data = await self.calls.run("call", body, header_length, signature, until=time.monotonic() + CALL_S)
        return InferRequest(
            np.frombuffer(data, head["dtype"]).reshape(head["shape"]),
            tuple(RequestedOutput(**one) for one in head["wanted"]),
            head["id"],
            head["bits"],
            head["min_bits"],
            head["deadline_s"],
        )
