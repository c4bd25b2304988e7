"""The kinds of stores that URLs may name: their packages, how they are set up, where their credentials come from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qwen_edit_zero.edit_data.storage.options import StorageOptions
from qwen_edit_zero.edit_data.wording import nearest, shown
from qwen_edit_zero.errors import SettingsError

_CONNECTIONS = 64  # of one process to a store, as many as threads may read at once

# Nothing is fetched from the web or from hubs; the last ones are wrappers, which would read something else.
_REFUSED = (
    *("http", "https", "hf", "github", "git", "gist", "dataverse", "jupyter", "jlab", "data", "asynclocal"),
    *("blockcache", "cached", "dir", "filecache", "generic", "libarchive", "reference", "simplecache", "tar", "zip"),
)


@dataclass(frozen=True)
class StoreKind:
    """One scheme of URLs.

    Attributes:
        protocol: fsspec's name of it.
        package: what pip installs for it.
        credentials: which variables of the environment hold what it asks for; no value of one is ever shown.
        options: arguments of the file system for our retries and time-outs.
        end_is_inclusive: its `cat_file` takes the last byte wanted, where fsspec says the one behind it.
    """

    protocol: str
    package: str
    credentials: str
    options: Callable[[StorageOptions], Mapping[str, Any]] = lambda options: {}
    end_is_inclusive: bool = False


def _s3(options: StorageOptions) -> Mapping[str, Any]:
    seconds = options.timeout_seconds
    config = {
        "connect_timeout": seconds,
        "read_timeout": seconds,
        "max_pool_connections": _CONNECTIONS,
        "retries": {"total_max_attempts": 1},  # we count tries ourselves
    }
    return {"config_kwargs": config}


def _oss(options: StorageOptions) -> Mapping[str, Any]:
    # ossfs takes credentials as arguments only; the names are those of Alibaba's own tools
    names = {"key": "OSS_ACCESS_KEY_ID", "secret": "OSS_ACCESS_KEY_SECRET", "token": "OSS_SESSION_TOKEN"}
    return {argument: os.environ[name] for argument, name in names.items() if os.environ.get(name)}


_S3 = StoreKind(
    "s3",
    "s3fs",
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN with temporary ones), or AWS_PROFILE; "
    "AWS_ENDPOINT_URL and AWS_DEFAULT_REGION where the store is not Amazon's; FSSPEC_S3_ANON=true for a public bucket",
    _s3,
)
_GCS = StoreKind("gcs", "gcsfs", "GOOGLE_APPLICATION_CREDENTIALS; FSSPEC_GCS_TOKEN=anon for a public bucket")
_AZURE = StoreKind("abfs", "adlfs", "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or _SAS_TOKEN")
_OSS = StoreKind(
    "oss", "ossfs", "OSS_ENDPOINT, OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET", _oss, end_is_inclusive=True
)
_KINDS = {"s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS, "az": _AZURE, "abfs": _AZURE, "abfss": _AZURE, "oss": _OSS}


def kind_of(scheme: str, url: str) -> StoreKind:
    """The kind of store that a URL's scheme means. Raises SettingsError for schemes that are refused or unknown."""
    from fsspec.registry import known_implementations

    if scheme in _KINDS:
        return _KINDS[scheme]
    if scheme in _REFUSED:
        raise SettingsError(
            f"{shown(url)}: nothing is fetched from {scheme}://; data lies in folders or on object stores "
            "(s3://, oss://, gs://, az://). Copy it there first"
        )
    known = known_implementations.get(scheme)
    if known is None:
        near = nearest(scheme, [*_KINDS, "file"])
        hint = f"; did you mean {near}://?" if near else "; stores are s3://, oss://, gs:// and az://"
        raise SettingsError(f"{shown(url)}: {scheme}:// is no kind of store that fsspec knows{hint}")
    return StoreKind(scheme, str(known["class"]).split(".")[0], "those that its fsspec package reads (FSSPEC_...)")


def make_file_system(kind: StoreKind, options: StorageOptions, url: str) -> Any:
    """An fsspec file system of its own for this process. Raises SettingsError if its package is not installed."""
    import fsspec

    common = {"skip_instance_cache": True, "use_listings_cache": False}
    try:
        cls = _asynchronous_oss() if kind is _OSS else fsspec.get_filesystem_class(kind.protocol)
        made = cls(**common, **_configured(kind.protocol), **kind.options(options))
    except ImportError as error:
        raise SettingsError(
            f"{shown(url)}: {kind.protocol}:// needs the package {kind.package}, which is not installed here "
            f"({error}): pip install -c constraints.txt {kind.package}"
        ) from None
    except Exception as error:  # every package raises its own about its arguments and credentials
        raise SettingsError(
            f"{shown(url)}: the store cannot be set up ({type(error).__name__}: {error}); its credentials are taken "
            f"from the environment: {kind.credentials}"
        ) from error
    if kind is _S3:
        made.retries = 1
    return made


def _configured(protocol: str) -> dict[str, Any]:
    """What the user's fsspec configuration (FSSPEC_..., ~/.config/fsspec) says of this kind."""
    from fsspec.config import conf

    return dict(conf.get(protocol, {}))


def _asynchronous_oss() -> Any:
    from ossfs.async_oss import AioOSSFileSystem  # asks for one object where the other class lists its folder

    return AioOSSFileSystem
