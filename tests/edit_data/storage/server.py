"""An S3 server (moto's) on this machine, which can be told to misbehave."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import boto3
from werkzeug.serving import WSGIRequestHandler, make_server

KEY_ID, SECRET = "testing-key-id", "testing-secret-key"


@dataclass
class Fault:
    """What happens to the next `times` requests for a path; `status` answers, or the body is cut, or it comes late."""

    times: int = 1
    status: int = 0
    code: str = ""
    cut: bool = False
    seconds: float = 0.0
    method: str = ""


@dataclass
class S3Server:
    """Runs in threads of this process.

    Attributes:
        requests: (method, path, Range header) of all requests so far.
    """

    url: str = ""
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()

    def client(self) -> Any:
        return boto3.client(
            "s3", endpoint_url=self.url, region_name="us-east-1",
            aws_access_key_id=KEY_ID, aws_secret_access_key=SECRET,
        )  # fmt: skip

    def put(self, bucket: str, **objects: bytes) -> None:
        client = self.client()
        client.create_bucket(Bucket=bucket)
        for key, content in objects.items():
            client.put_object(Bucket=bucket, Key=key, Body=content)

    def fail(self, path: str, *faults: Fault) -> None:
        self.faults[path] = list(faults)

    def ranges(self, path: str) -> list[str]:
        """The Range headers of the GET requests for a path."""
        return [asked for method, at, asked in self.requests if method == "GET" and at == path]

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        self.requests.append((method, path, environ.get("HTTP_RANGE", "")))
        fault = self._fault(path, method)
        if fault is None:
            return self._app(environ, start_response)
        time.sleep(fault.seconds)
        if fault.status:
            body = f"<Error><Code>{fault.code}</Code><Message>as told</Message></Error>".encode() if fault.code else b""
            start_response(
                f"{fault.status} Told", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
            )
            return [] if method == "HEAD" else [body]
        answer = self._app(environ, start_response)
        return self._cut(answer) if fault.cut else answer

    def _fault(self, path: str, method: str) -> Fault | None:
        for fault in self.faults.get(path, []):
            if fault.times > 0 and fault.method in ("", method):
                fault.times -= 1
                return fault
        return None

    def _cut(self, answer: Iterable[bytes]) -> Iterator[bytes]:
        body = b"".join(answer)
        yield body[: len(body) // 2]


class _Quiet(WSGIRequestHandler):
    def log(self, kind: str, message: str, *arguments: Any) -> None:
        pass
