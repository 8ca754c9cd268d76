"""Do the same work for many items at the same time."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

NUM_THREADS = 16


def in_threads(work, items):
    """Return the results of a function, called in threads."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(work, items))


def in_tasks(work, items):
    """Return the results of an async function, awaited in tasks of one event loop."""

    async def all_of_them():
        return await asyncio.gather(*map(work, items))

    return asyncio.run(all_of_them())
