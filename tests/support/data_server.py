"""A web server with a data set, which fails as it is told to."""

import http.server
import re
import shutil
import threading
import time

import pytest


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves a folder with HEAD and ranges; `faults` are popped, one for each request of a name."""

    def log_message(self, *_arguments):
        pass

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, *, with_body):
        server = self.server
        name = self.path.rpartition("/")[2]
        server.requests.append((self.command, name, self.headers.get("Range")))
        fault = server.faults.get(name) and server.faults[name].pop(0)
        path = server.folder / name
        if isinstance(fault, int) or not path.exists():
            self.send_error(fault or 404)
            return
        content = path.read_bytes()
        status, found = 200, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found and not server.ignores_ranges:
            status, content = 206, content[int(found[1]) : int(found[2]) + 1]
        if fault == "slow":
            time.sleep(1.0)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content[: len(content) // 2] if fault == "cut" else content)


@pytest.fixture
def data_server(data_folder, tmp_path):
    folder = tmp_path / "served"
    shutil.copytree(data_folder, folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.folder, server.faults, server.requests, server.ignores_ranges = folder, {}, [], False
    server.address = f"http://127.0.0.1:{server.server_port}/set"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
