"""Bounded reading of others' answers: nobody's mistake shall fill the operator's memory."""

from __future__ import annotations

import aiohttp

_CHUNK_BYTES = 65536


class TooLongError(OSError):
    """An answer is longer than it may be."""


async def read_bounded(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """The whole body.

    Raises:
        TooLongError: it is longer than `most_bytes`.
    """
    chunks, size = [], 0
    async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
        size += len(chunk)
        if size > most_bytes:
            raise TooLongError(f"{answer.url}: the answer is larger than {most_bytes} bytes")
        chunks.append(chunk)
    return b"".join(chunks)
