"""An object store for tests: moto's server in a process of its own, behind a proxy in this one that is at fault.

`start_store` starts the first, once; nothing leaves the loopback. The fixtures `object_store` (the proxy) and `bucket`
(an empty one, as a `RemotePath`) are in `tests/conftest.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, NamedTuple

NEEDED = ("moto", "flask", "s3fs")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
"""Packages without which there is no store; they are in the extra [dev]."""
ACCESS_KEY = "of-no-account"
_HOST = "127.0.0.1"
_PIECE_BYTES = 1 << 17
_CODES = {400: "ExpiredToken", 403: "AccessDenied", 429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "server", "date", "expect", "host"}

_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class Answer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass
class Fault:
    """What happens to the first `times` requests that it fits, once `after` of them have passed.

    - "status": another one is answered, and the store is not asked: 500, 503 or 429; 403 for no rights; 400 for
      credentials that have expired (`code` names another error of S3's)
    - "cut": the connection ends in the middle of the body
    - "short": half of the body, told as if that were all
    - "flip": one byte in the middle of the body is another one
    - "etag": another etag, in the headers and in listings
    - "drop": the connection ends without an answer
    """

    kind: Literal["status", "cut", "short", "flip", "etag", "drop"]
    times: int = 1
    path: str = ""
    """A pattern that is searched for in path and query."""
    method: str = "GET"
    """"" for all."""
    status: int = 500
    code: str = ""
    after: int = 0
    num_met: int = field(default=0, init=False)
    """Requests that it has fitted so far, those before and after it included."""

    def fits(self, method: str, path: str) -> bool:
        return self.method in ("", method) and re.search(self.path, path) is not None

    def applied(self, answer: Answer) -> Answer:
        """Return the answer with the body and the headers as they are told; cuts are made as it is sent."""
        status, headers, body = answer
        if self.kind == "short":
            return Answer(status, headers, body[: len(body) // 2])
        if self.kind == "flip" and body:
            middle = len(body) // 2
            return Answer(status, headers, body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :])
        if self.kind == "etag":
            other = [(name, '"0123"' if name.lower() == "etag" else value) for name, value in headers]
            return Answer(status, other, re.sub(rb"<ETag>.*?</ETag>", b"<ETag>&quot;0123&quot;</ETag>", body))
        return answer


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on to a store on this machine, late, slowly or wrongly, as it is told; and counts them.

    Its fields may be changed at any time; `reset` puts all of them back.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, store_port: int) -> None:
        super().__init__((_HOST, 0), _Handler)
        self.store_port = store_port
        self.lock = threading.Lock()
        self.num_open = 0
        self.reset()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def reset(self) -> None:
        with self.lock:
            self.delay_seconds = 0.0
            """What each answer is late."""
            self.bytes_per_second = 0.0
            """Of all bodies that are answered, together; 0: no limit."""
            self.refuses = False
            """Whether connections are ended at once."""
            self.faults: list[Fault] = []
            """The first one that fits a request is taken."""
            self.requests: list[tuple[str, str, str]] = []
            """Method, path with query, and range of each request, in the order they came."""
            self.num_bytes = 0
            """Of the bodies that were answered."""
            self.most_open = self.num_open
            """Connections that were open at the same time."""
            self._link_is_free_at = 0.0

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which the clients of this and of other processes find it, and nothing else."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": ACCESS_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "NO_PROXY": _HOST,
        }

    def num_requests(self, path: str = "", method: str = "GET") -> int:
        """Return how many requests had this method and a path in which the pattern is found."""
        return sum(method == each[0] and re.search(path, each[1]) is not None for each in [*self.requests])

    def ask_store(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Ask the store itself, past all faults."""
        connection = HTTPConnection(_HOST, self.store_port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body)
            answer = connection.getresponse()
            return Answer(answer.status, answer.getheaders(), answer.read())

    # What the handlers ask --------------------------------------------------------------------------------------------

    def answer(self, store: HTTPConnection, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """Ask the store, by a connection of one client's; another store may answer by itself."""
        for is_last in (False, True):
            try:
                store.request(method, path, body, headers)
                answer = store.getresponse()
                return Answer(answer.status, answer.getheaders(), answer.read())
            except (OSError, HTTPException):  # the store may have ended a connection that was idle
                store.close()
                if is_last:
                    raise
        raise AssertionError

    def fault_of(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.fits(method, path):
                    fault.num_met += 1
                    if fault.after < fault.num_met <= fault.after + fault.times:
                        return fault
        return None

    def wait_for_link(self, num_bytes: int) -> None:
        with self.lock:
            self.num_bytes += num_bytes
            if not self.bytes_per_second:
                return
            now = time.monotonic()
            self._link_is_free_at = max(now, self._link_is_free_at) + num_bytes / self.bytes_per_second
            seconds = self._link_is_free_at - now
        time.sleep(seconds)

    # Of socketserver --------------------------------------------------------------------------------------------------

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self.lock:
            self.num_open -= 1
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # clients that end in the middle
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """The requests of one connection, one after the other."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FaultyProxy

    def setup(self) -> None:
        super().setup()
        self.store = HTTPConnection(_HOST, self.server.store_port, timeout=600)

    def finish(self) -> None:
        self.store.close()
        super().finish()

    def handle(self) -> None:
        if not self.server.refuses:
            super().handle()

    def pass_on(self) -> None:
        body = self._received()
        with self.server.lock:
            self.server.requests.append((self.command, self.path, self.headers.get("Range", "")))
        fault = self.server.fault_of(self.command, self.path)
        if (fault and fault.kind == "drop") or self.server.refuses:
            self.close_connection = True
            return
        if fault and fault.kind == "status":
            answer = Answer(fault.status, [], _error_body(fault.code or _CODES[fault.status]))
        else:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
            answer = self.server.answer(self.store, self.command, self.path, headers, body)
        time.sleep(self.server.delay_seconds)
        self._send(fault.applied(answer) if fault else answer, cut=fault is not None and fault.kind == "cut")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass

    def _received(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(pieces)

    def _send(self, answer: Answer, *, cut: bool) -> None:
        status, headers, body = answer
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        told = {name.lower(): value for name, value in headers}
        if self.command == "HEAD":
            self.send_header("Content-Length", told.get("content-length", "0"))
            body = b""
        elif status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.close_connection = self.close_connection or cut
        end = len(body) // 2 if cut else len(body)
        for start in range(0, end, _PIECE_BYTES):
            piece = body[start : min(end, start + _PIECE_BYTES)]
            self.server.wait_for_link(len(piece))
            self.wfile.write(piece)


def _error_body(code: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>a fault of the proxy</Message></Error>'.encode()


@contextlib.contextmanager
def start_store() -> Iterator[FaultyProxy]:
    """Start moto's server in another process, which ends with this one, and the proxy before it."""
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdin
        assert server.stdout
        try:
            with FaultyProxy(int(server.stdout.readline())) as proxy:
                yield proxy
                proxy.shutdown()
        finally:
            server.kill()
