"""A parent that waits to be killed while its engine is in the middle of a step."""

import asyncio
import sys
from pathlib import Path

from children import FAULTY, request, running, tiny_config
from faulty_engine import HANGS

from headrace.engine.client import EngineClient


async def main(folder: Path) -> None:
    client = await EngineClient.start(tiny_config(folder), program=FAULTY)
    async with running(client, request()):
        stuck = client.generate(request([HANGS]))
        await anext(stuck)  # accepted: the step that hangs comes next
        print(client.info.pid, flush=True)
        await anext(stuck)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
