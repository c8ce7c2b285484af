"""HTTP server of the agent, a pod's first process, and its command line.

    python -m cost_aware_trainer.agent [--port N] [--run-folder DIR] [--token-file FILE] ...

`GET /livez`, `GET /status` and `GET /ends` are open; `POST /order` and `POST /release` need the job's token. The agent imports the
standard library only, so that the pod answers within a fraction of a second of its start.
"""

from __future__ import annotations

import argparse
import hmac
import logging
import os
import signal
import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cost_aware_trainer.agent.lifeline import watch_lifeline
from cost_aware_trainer.agent.pod_ends import last_words, leave_result, leave_word
from cost_aware_trainer.agent.processes import adopt_orphans
from cost_aware_trainer.agent.settings import AgentSettings
from cost_aware_trainer.agent.supervisor import Answer, Supervisor
from cost_aware_trainer.contract import (
    AGENT_PORT,
    ENV_ADDRESS,
    ENV_COLD,
    ENV_ENDS_FOLDER,
    ENV_METRICS_PORT,
    ENV_NODE,
    ENV_POD_INDEX,
    ENV_POD_UID,
    ENV_PRELOAD,
    ENV_RENDEZVOUS_PORT,
    MAX_MESSAGE_BYTES,
    MEMORY_FOLDER,
    RENDEZVOUS_PORT,
    RUN_FOLDER,
    TERMINATION_FILE,
    TOKEN_FILE,
    ContractError,
    Release,
    RunOrder,
)
from cost_aware_trainer.contract.heartbeat import LIMIT_SECONDS

logger = logging.getLogger("cost_aware_trainer.agent")

REQUEST_TIMEOUT_SECONDS = 10
SETTLE_SECONDS = 1.0
"""Longest wait for open requests when the pod ends."""
KNOWN_REQUESTS = "there are GET /livez, GET /status, GET /ends, POST /order and POST /release"


class Server(ThreadingHTTPServer):
    """HTTP server of the agent. Requests are short, so the number of their threads needs no bound."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, port: int, supervisor: Supervisor, token_file: Path, ends_folder: Path | None, address: str = ""
    ) -> None:
        self.supervisor, self.token_file, self.ends_folder = supervisor, token_file, ends_folder
        self._answering, self._answered = 0, threading.Condition()
        super().__init__((address, port), Handler)

    def process_request_thread(self, *request: Any) -> None:
        """Answers one connection, and counts it while it is open."""
        with self._answered:
            self._answering += 1
        try:
            super().process_request_thread(*request)
        finally:
            with self._answered:
                self._answering -= 1
                self._answered.notify_all()

    def settle(self, timeout_seconds: float = SETTLE_SECONDS) -> None:
        """Waits until open requests have their answers: the one that releases the pod ends it, and wants its own whole."""
        with self._answered:
            self._answered.wait_for(lambda: self._answering == 0, timeout_seconds)


class Handler(BaseHTTPRequestHandler):
    """Handler of one request."""

    server: Server
    timeout = REQUEST_TIMEOUT_SECONDS
    wbufsize = -1
    server_version = "catj-agent"
    sys_version = ""

    def do_GET(self) -> None:
        """Answers probes, the status, and the ends of pods."""
        if self.path == "/livez":
            self._answer(HTTPStatus.OK, "ok\n", "text/plain")
        elif self.path == "/status":
            self._answer(HTTPStatus.OK, self.server.supervisor.status().to_json(), "application/json")
        elif self.path == "/ends":
            self._answer(HTTPStatus.OK, last_words(self.server.ends_folder).to_json(), "application/json")
        else:
            self._say(HTTPStatus.NOT_FOUND, KNOWN_REQUESTS)

    def do_POST(self) -> None:
        """Takes an order or a release."""
        # A refused request leaves an unread body behind, so the connection ends with the answer.
        self.close_connection = True
        if self.path not in ("/order", "/release"):
            self._say(HTTPStatus.NOT_FOUND, KNOWN_REQUESTS)
        elif not self._is_authorised():
            self._say(HTTPStatus.UNAUTHORIZED, "needs `Authorization: Bearer` with the job's token")
        else:
            self._take_message()

    def _take_message(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self._say(HTTPStatus.BAD_REQUEST, "needs a Content-Length")
        elif int(length) > MAX_MESSAGE_BYTES:
            self._say(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_MESSAGE_BYTES} bytes")
        else:
            try:
                answer = self._obey(self.rfile.read(int(length)))
            except ContractError as error:
                answer = Answer(HTTPStatus.BAD_REQUEST, str(error))
            self._say(answer.status, answer.text)

    def _obey(self, body: bytes) -> Answer:
        supervisor = self.server.supervisor
        if self.path == "/order":
            return supervisor.order(RunOrder.from_json(body))
        return supervisor.release(Release.from_json(body))

    def _is_authorised(self) -> bool:
        """Whether the bearer token is the mounted one. The file is read each time, so that the token can be rotated."""
        try:
            expected = self.server.token_file.read_text().strip()
        except OSError as error:
            logger.error("token file %s: %s: every order is refused", self.server.token_file, error.strerror)
            return False
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        is_equal = hmac.compare_digest(token.strip().encode(), expected.encode())
        return scheme.lower() == "bearer" and bool(expected) and is_equal

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, text + "\n", "text/plain; charset=utf-8")

    def _answer(self, status: HTTPStatus, text: str, kind: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        """Logs POST requests only: probes and scrapes are no news."""
        if self.command == "POST":
            logger.info("%s %s", self.address_string(), format % args)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m cost_aware_trainer.agent", description="The agent of a training pod."
    )
    parser.add_argument("--port", type=int, default=AGENT_PORT, help="HTTP port; 0 takes any free one")
    parser.add_argument("--run-folder", type=Path, default=Path(RUN_FOLDER), help="writable folder for attempts")
    parser.add_argument("--token-file", type=Path, default=Path(TOKEN_FILE), help="the job's token")
    parser.add_argument(
        "--termination-file", type=Path, default=Path(TERMINATION_FILE), help="where the kubelet reads a last message"
    )
    parser.add_argument("--grace-seconds", type=float, default=45.0, help="for the last checkpoint after SIGTERM")
    parser.add_argument("--linger-seconds", type=float, default=120.0, help="after completion, for a release")
    parser.add_argument(
        "--reconfigure-seconds", type=float, default=120.0, help="for running ranks to go on under another plan"
    )
    parser.add_argument("--cold", action="store_true", help="import PyTorch in new processes for each launch")
    parser.add_argument(
        "--memory-folder", type=Path, default=Path(MEMORY_FOLDER), help="memory-backed, for copies of states"
    )
    parser.add_argument(
        "--stall-seconds",
        type=float,
        default=LIMIT_SECONDS,
        help="without progress, after which a rank counts as stalled; at least ten median steps",
    )
    parser.add_argument("--rendezvous-port", type=int, help="one port for all attempts (tests on one host)")
    parser.add_argument(
        "--lifeline-fd", type=int, help="a pipe's reading end (0 is standard input): its end counts as SIGTERM"
    )
    parser.add_argument("--metrics-port", type=int, help="first metrics port (tests on one host)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Serves until the pod may end. Returns 0 only if the run is complete, so that an Indexed Job counts the index done."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = parse_arguments(arguments)
    environment = dict(os.environ)
    if options.metrics_port:
        environment[ENV_METRICS_PORT] = str(options.metrics_port)
    settings = AgentSettings(
        pod=environment.get("HOSTNAME") or socket.gethostname(),
        index=int(environment.get(ENV_POD_INDEX, "0")),
        run_folder=options.run_folder,
        grace_seconds=options.grace_seconds,
        linger_seconds=options.linger_seconds,
        reconfigure_seconds=options.reconfigure_seconds,
        is_cold=options.cold or bool(environment.get(ENV_COLD)),
        preloads=bool(environment.get(ENV_PRELOAD)),
        memory_folder=options.memory_folder,
        node=environment.get(ENV_NODE, ""),
        stall_seconds=options.stall_seconds,
        rendezvous_port=options.rendezvous_port,
        first_rendezvous_port=int(environment.get(ENV_RENDEZVOUS_PORT) or RENDEZVOUS_PORT),
    )
    supervisor = Supervisor(settings, environment)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.terminate())
    adopt_orphans()
    if options.lifeline_fd is not None:
        watch_lifeline(options.lifeline_fd, supervisor.terminate)
    ends_folder = Path(environment[ENV_ENDS_FOLDER]) if environment.get(ENV_ENDS_FOLDER) else None
    server = Server(options.port, supervisor, options.token_file, ends_folder, environment.get(ENV_ADDRESS, ""))
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    logger.info("pod %s of index %d listens on port %d", settings.pod, settings.index, server.server_port)
    exit_code = supervisor.run()
    if exit_code == 0:
        leave_result(options.termination_file, supervisor.status().result)
    leave_word(ends_folder, environment.get(ENV_POD_UID, ""), time.time())
    server.settle()
    logger.info("exiting with %d", exit_code)
    return exit_code
