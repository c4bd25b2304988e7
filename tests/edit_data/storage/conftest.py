"""One S3 server for all tests of storage, and the environment that leads to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qwen_edit_zero.edit_data.storage import store
from qwen_edit_zero.edit_data.storage.options import StorageOptions
from tests.edit_data.storage.server import KEY_ID, SECRET, S3Server

PATIENCE = StorageOptions(retries=3, timeout_seconds=5)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server, with credentials in the environment and nothing remembered from other tests."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CONFIG_FILE", "HTTP_PROXY", "http_proxy", "FSSPEC_S3_ANON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(store, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(store, "_stores", {})
    s3_server.faults.clear()
    s3_server.requests.clear()
    yield s3_server
    s3_server.faults.clear()
