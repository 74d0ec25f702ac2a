"""The TLS context of connections, and another one from files that were renewed."""

import logging
import os
import re
import ssl
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from serve.errors import BadInput
from serve.options import rule_faults
from serve.settings import ServeSettings

log = logging.getLogger("serve")

TLS_PASSWORD_VARIABLE = "STILLROOM_TLS_PASSWORD"  # noqa: S105 - the name of a variable


class Tls:
    """The TLS context of new connections, None without a certificate.

    A context in use is never changed, so that a file which cannot be used leaves it whole, and nothing of old files stays in a
    new one: another context takes its place. BadInput names the file that cannot be used.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.context = tls_context(settings)


def tls_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """The context for TLS 1.2 or later; None without a certificate. BadInput names the file that cannot be used."""
    if settings.tls_cert is None:
        if faults := rule_faults(settings):
            raise BadInput(" ".join(faults))
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    certificate, key, authority = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    try:
        # Without this function OpenSSL would ask for the password at the terminal, and wait.
        context.load_cert_chain(certificate, key, password=lambda: os.environ.get(TLS_PASSWORD_VARIABLE, ""))
    except (OSError, ValueError) as error:
        raise BadInput(
            f"the certificate {certificate} with the key {key or 'in it'} cannot be used ({error}); give the chain and its key "
            f"in PEM, and the password of an encrypted key in {TLS_PASSWORD_VARIABLE}"
        ) from error
    if authority:
        try:
            context.load_verify_locations(authority)
        except (OSError, ValueError) as error:
            raise BadInput(f"--tls-client-ca {authority} cannot be used ({error}); give certificates in PEM") from error
        context.verify_mode = ssl.CERT_REQUIRED
    for file in filter(None, (certificate, authority)):
        warn_of_dates(file)
    return context


def warn_of_dates(file: Path) -> None:
    """Logs a warning for each certificate in `file`, which OpenSSL has read, that is not valid now."""
    text = ""
    with suppress(OSError):  # it was replaced meanwhile
        text = file.read_text("latin-1") if file.is_file() else ""  # a pipe has been read to its end
    now = datetime.now(UTC)
    for block in re.findall(f"{ssl.PEM_HEADER}.+?{ssl.PEM_FOOTER}", text, re.DOTALL):
        try:
            begin, end = validity(ssl.PEM_cert_to_DER_cert(block))
        except (ValueError, IndexError, StopIteration):  # OpenSSL is more lenient
            continue
        if not begin <= now <= end:
            log.warning(
                "%s: a certificate in it is valid from %s to %s only, and clients refuse it now; renew it and send SIGHUP",
                file,
                f"{begin:%Y-%m-%d %H:%M} UTC",
                f"{end:%Y-%m-%d %H:%M} UTC",
            )


def validity(certificate: bytes) -> tuple[datetime, datetime]:
    """From when to when a certificate in DER is valid. The ssl module says so only of the peer's, and of authorities'."""
    _, signed = next(_values(next(_values(certificate))[1]))
    # The fields of TBSCertificate, RFC 5280, 4.1: an optional version with tag 0xA0, the serial number, algorithm and issuer before it.
    fields = [value for tag, value in _values(signed) if tag != 0xA0]
    begin, end = (
        # UTCTime has two digits of the year, of which 50 and later are of the last century; GeneralizedTime has four.
        (b"" if tag == 0x18 else b"19" if time >= b"5" else b"20") + time
        for tag, time in _values(fields[3])
    )
    return _time(begin), _time(end)


def _time(digits: bytes) -> datetime:
    return datetime.strptime(digits.decode(), "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _values(der: bytes) -> Iterator[tuple[int, bytes]]:
    """The tag and content of each value in `der`: a byte of tag, the length in one byte, or the count of its bytes and these (X.690)."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length >= 0x80:
            size = length - 0x80
            length, at = int.from_bytes(der[at : at + size], "big"), at + size
        yield tag, der[at : at + length]
        at += length
