"""Errors that a client sees, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from shared.messages import FinishReason


class ApiError(Exception):
    """Ends a request with `status`.  `param` is the path of the field at fault: `messages[0].role`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


def invalid(param: str, problem: str) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, f"{param}: {problem}", param=param)


def shown(value: Any) -> str:
    """`value` in an error message: short ASCII, and only the type of what may be large or deeply nested."""
    if value is None or isinstance(value, bool | int | float | str):
        return ascii(value)[:60]
    return f"a {type(value).__name__}"


def from_validation(error: ValidationError) -> ApiError:
    """The first of pydantic's findings."""
    first = error.errors(include_url=False)[0]
    path = ""
    for step in first["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{ascii(step)[1:-1][:100]}"
    problem = first["msg"]
    if first["type"] != "missing":
        problem += f" (got {shown(first['input'])})"
    return invalid(path.removeprefix("."), problem)


def error_of_finish(reason: FinishReason | None) -> ApiError | None:
    """The error that a request ended with.  An abort without a status was asked for, and is none."""
    if reason is None or reason.type != "abort" or reason.status is None:
        return None
    return ApiError(reason.status, reason.message or "the request was aborted", code="aborted")
