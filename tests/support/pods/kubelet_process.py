"""A kubelet in a process of its own, which a test kills: `python kubelet_process.py STATE PODS`."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.support.pods.pods import PodWorld, pod_document


async def main():
    world = PodWorld(sys.argv[1])
    for number in range(int(sys.argv[2])):
        world.put(pod_document(f"pod-{number}", node=f"node-{number % 2}", index=number))
    await world.kubelet.run()


asyncio.run(main())
