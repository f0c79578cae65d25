"""The errors of KVBM: every one has a type and a stable code."""

from __future__ import annotations


class KvbmError(Exception):
    """The base of every error that KVBM raises. `code` is stable and travels on the wire.

    `field` names the part of the message or configuration at fault; empty where no part is.
    """

    code: str = "error"
    field: str = ""

    @property
    def label(self) -> str:
        """The error in one of few words, for log kinds and metric labels."""
        return self.code

    @property
    def text(self) -> str:
        """The message without the code: for answers that have the code beside it."""
        return str(self)


class ConfigError(KvbmError):
    """A setting has a value that it cannot have. The text names the variable and what it takes."""

    code = "bad_config"

    def __init__(self, variable: str, value: object, accepted: str) -> None:
        super().__init__(f"{variable} is {str(value)!r}, but accepts {accepted}")
        self.accepted = accepted
        self.field = variable


class BusUnavailable(KvbmError):
    """NATS cannot be reached now. The caller may try again; the bus reconnects by itself."""

    code = "bus_unavailable"


class NotPermitted(KvbmError):
    """NATS does not let this role do it; `kvbm creds` lists the roles."""

    code = "not_permitted"


class NoResponder(BusUnavailable):
    """NATS is there, but no service answers on this subject."""

    code = "no_responder"


class NotReady(KvbmError):
    """The service has started and does not serve yet."""

    code = "not_ready"


class MessageTooLarge(KvbmError):
    """The server does not take messages of this size; no retry will help."""

    code = "message_too_large"


class RegistryUnavailable(KvbmError):
    """The registry cannot be read or written now."""

    code = "registry_unavailable"


class DeadlineExceeded(KvbmError):
    """A wait ended by its deadline."""

    code = "deadline_exceeded"


class RequestFailed(KvbmError):
    """A peer answered a request with an error; `code` and `field` are the peer's."""

    def __init__(self, code: str, message: str, field: str = "") -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.field = field

    @property
    def text(self) -> str:
        """The peer's message, without its code."""
        return self.message

    @property
    def label(self) -> str:
        """One word for all: the codes of peers are theirs to invent."""
        return "peer_failed"


class ServiceFailed(KvbmError):
    """A process of the stack did not become ready, or ended by itself."""

    code = "service_failed"
