"""Ranks that live as long as a test session and run many cases, each in process groups of its own."""

import os
import signal
from datetime import timedelta


class PoolError(AssertionError):
    pass


class RankPool:
    """Runs functions of `cases`, `compression_cases`, `probe_cases` and `session_cases` on the first `world` of `size` processes."""

    def __init__(self, context, size):
        self._context, self._size, self._number = context, size, 0
        self._connections, self._processes, self._store = [], [], None

    def _start(self):
        import torch.distributed as dist
        from tests.support.ranks import pool_process

        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        for rank in range(self._size):
            ours, theirs = self._context.Pipe()
            arguments = (theirs, rank, self._store.port)
            process = self._context.Process(target=pool_process.serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, world, name, timeout=120, **arguments):
        """The answers of all ranks, in order; the first failure's traceback as an error."""
        if not self._processes:
            self._start()
        self._number += 1
        for connection in self._connections[:world]:
            connection.send((self._number, world, name, arguments))
        answers, problems = [], []
        for rank, connection in enumerate(self._connections[:world]):
            if not connection.poll(1 if problems else timeout):
                problems.append(f"rank {rank} of {world} does not answer")
                continue
            try:
                answer, problem = connection.recv()
            except EOFError:
                self._processes[rank].join(5)
                answer, problem = None, f"it died with exit code {self._processes[rank].exitcode}"
            answers.append(answer)
            if problem:
                problems.append(f"rank {rank} of {world}: {problem}")
        if problems:
            self.close()
            raise PoolError(problems[0])
        return answers

    def close(self):
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        self._connections, self._processes, self._store = [], [], None
