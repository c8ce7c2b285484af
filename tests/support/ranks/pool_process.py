"""A process of a rank pool: torch is imported once, then one case after the other runs in it."""

import gc
import sys
import traceback
from datetime import timedelta


def serve(connection, rank, port):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    from tests.support.ranks import (
        cases,
        checkpoint_cases,
        compression_cases,
        late_cases,
        probe_cases,
        session_cases,
    )

    from cost_aware_trainer.distributed.collectives import Rendezvous, disconnect

    known = vars(cases) | vars(checkpoint_cases) | vars(compression_cases) | vars(probe_cases)
    known |= vars(session_cases) | vars(late_cases)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    gc.freeze()
    while True:
        try:
            number, world, name, arguments = connection.recv()
        except EOFError:
            sys.exit(0)
        place = Rendezvous(dist.PrefixStore(f"case-{number}", store) if world > 1 else None, rank, world, rank)
        try:
            answer = known[name](place, **arguments), ""
        except BaseException:
            answer = None, traceback.format_exc()
        finally:
            disconnect()
            # Groups that are still referred to keep their threads.
            gc.collect()
        connection.send(answer)
