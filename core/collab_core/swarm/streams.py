"""How the stream of an RPC ends."""

from __future__ import annotations

import asyncio

CLOSING_S = 5.0


async def until_closed() -> None:
    """The last thing an RPC does that streams its answer: the caller, who has everything then, closes the stream.

    hivemind 1.1.12 closes it as soon as the RPC returns, the daemon resets it, and what is still on its way is lost.
    When the caller closes it, hivemind cancels the RPC, and so this.
    """
    await asyncio.sleep(CLOSING_S)
