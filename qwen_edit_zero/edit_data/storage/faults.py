"""What a store's failure means: may it pass, is the object at fault, or does the user have to change something?"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto


class FaultKind(Enum):
    """What to do about a failure."""

    PASSING = auto()  # ask again
    MISSING = auto()  # this object is not there
    DENIED = auto()  # this object may not be read
    SETUP = auto()  # nothing can be read before the user changes something
    OTHER = auto()  # not understood


@dataclass(frozen=True)
class Fault:
    """A failure, what was answered, and what to do."""

    kind: FaultKind
    answer: str
    advice: str = ""


_PASSING_CODES = {
    "SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling", "ThrottlingException",
    "RequestLimitExceeded", "TooManyRequests", "OperationAborted", "IncompleteBody", "RequestTimeoutException",
}  # fmt: skip
_PASSING_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
_PASSING_TYPES = {  # by name, since their packages may not be installed
    "ClientConnectionError", "ClientConnectorError", "ClientOSError", "ClientPayloadError", "ConnectTimeoutError",
    "ConnectionClosedError", "EndpointConnectionError", "FSTimeoutError", "HTTPClientError", "IncompleteRead",
    "IncompleteReadError", "ProxyConnectionError", "ReadTimeoutError", "RequestError", "ResponseParserError",
    "ResponseStreamingError", "RetryError", "ServerDisconnectedError", "ServiceRequestError", "ServiceResponseError",
}  # fmt: skip
_PASSING_ERRNO = {
    errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT, errno.ENETUNREACH,
    errno.EHOSTUNREACH, errno.EBUSY, getattr(errno, "EREMOTEIO", errno.EBUSY),
}  # fmt: skip
_NO_CREDENTIALS = {
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError",
    "TokenRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError", "DefaultCredentialsError",
    "ClientAuthenticationError", "RefreshError",
}  # fmt: skip
_BAD_CREDENTIALS = {
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "TokenRefreshRequired", "InvalidSecurity",
    "AuthorizationHeaderMalformed", "NotSignedUp", "AccountProblem", "AuthenticationFailed",
}  # fmt: skip
_NO_BUCKET = {"NoSuchBucket", "InvalidBucketName", "ContainerNotFound", "ParamValidationError"}
_ELSEWHERE = {"PermanentRedirect", "Redirect", "TemporaryRedirect", "301", "307", "IllegalLocationConstraintException"}


def fault_of(error: BaseException, credentials: str) -> Fault:
    """Judge an exception of any store's package by it and by what caused it.

    Args:
        credentials: where the store's credentials come from, for advice.
    """
    chain = list(_chain(error))
    code, status, said = _code(chain)
    types = {type(e).__name__ for e in chain}
    answer = _answer(chain[0], code, status, said)
    if types & _NO_CREDENTIALS:
        return Fault(FaultKind.SETUP, answer, f"set the credentials in the environment: {credentials}")
    if code == "ExpiredToken":
        return Fault(FaultKind.SETUP, answer, "the session has expired: get new credentials into the environment")
    if code == "RequestTimeTooSkewed":
        return Fault(
            FaultKind.SETUP, answer, "the clock of this machine is over 15 minutes wrong: set it (chrony, ntp)"
        )
    if code in _BAD_CREDENTIALS:
        return Fault(
            FaultKind.SETUP, answer, f"the credentials in the environment are not valid here; check {credentials}"
        )
    if code in _NO_BUCKET or "ParamValidationError" in types:
        return Fault(
            FaultKind.SETUP, answer, "there is no such bucket; check its name, and the endpoint and account it is of"
        )
    if code in _ELSEWHERE or status in (301, 307):
        return Fault(FaultKind.SETUP, answer, "the bucket is of another region or endpoint; set AWS_DEFAULT_REGION")
    if code in _PASSING_CODES or status in _PASSING_STATUS:
        return Fault(FaultKind.PASSING, answer)
    if any(isinstance(e, FileNotFoundError) for e in chain) or code in ("NoSuchKey", "404") or status == 404:
        return Fault(FaultKind.MISSING, answer)
    if any(isinstance(e, PermissionError) for e in chain) or code == "AccessDenied" or status in (401, 403):
        return Fault(FaultKind.DENIED, answer)
    if types & _PASSING_TYPES or any(_may_pass(e) for e in chain):
        return Fault(FaultKind.PASSING, answer)
    return Fault(FaultKind.OTHER, answer)


def has_code(error: BaseException) -> bool:
    """Whether the store said more than a bare HTTP status, as it cannot in answer to a HEAD request."""
    code = _code(list(_chain(error)))[0]
    return bool(code) and not code.isdigit()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and what led to it, outermost first."""
    at: BaseException | None = error
    seen: set[int] = set()
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def _code(chain: list[BaseException]) -> tuple[str, int, str]:
    """Code, HTTP status and message of a store's answer, as far as there are any."""
    for error in chain:
        response = getattr(error, "response", None)  # botocore
        if isinstance(response, dict):
            said = response.get("Error", {})
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return str(said.get("Code", "")), int(status), str(said.get("Message", ""))
    for error in chain:
        for name in ("status", "status_code", "code"):  # oss2 and aiohttp, azure, gcsfs
            status = getattr(error, name, None)
            if isinstance(status, int | str) and str(status).isdigit():
                return str(getattr(error, "error_code", "") or ""), int(status), ""
    return "", 0, ""


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, TimeoutError | ConnectionError) or getattr(error, "errno", None) in _PASSING_ERRNO


def _answer(error: BaseException, code: str, status: int, said: str) -> str:
    if code or status:
        numbers = f"{status} {code}".strip() if status and code and code != str(status) else str(status or code)
        return without_secrets(f"{numbers}: {said}" if said else numbers)
    text = " ".join(str(error).split())[:300]
    if isinstance(error, TimeoutError) and not text:
        return "no answer in time"
    return without_secrets(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def without_secrets(text: str) -> str:
    """The text with the values of variables that hold credentials taken out."""
    for name, value in os.environ.items():
        if len(value) >= 8 and any(part in name for part in ("SECRET", "TOKEN", "ACCESS_KEY", "PASSWORD", "_KEY")):
            text = text.replace(value, f"<{name}>")
    return text
