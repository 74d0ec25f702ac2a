"""The TLS context of connections, and another one from files that were renewed."""

import os
import ssl

from serve.errors import BadInput
from serve.settings import ServeSettings

TLS_PASSWORD_VARIABLE = "STILLROOM_TLS_PASSWORD"  # noqa: S105 - the name of a variable


class Tls:
    """The TLS context of new connections, None without a certificate.

    A context in use is never changed, so that a file which cannot be used leaves it whole, and nothing of old files stays in a
    new one: another context takes its place. BadInput names the file that cannot be used.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self.context = tls_context(settings)

    def read_again(self) -> None:
        """Makes a context of the files as they are now. BadInput leaves the present one."""
        self.context = tls_context(self._settings)


def tls_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """The context for TLS 1.2 or later; None without a certificate. BadInput names the file that cannot be used."""
    if settings.tls_cert is None:
        if settings.tls_key or settings.tls_client_ca:
            raise BadInput("--tls-key and --tls-client-ca need --tls-cert; give the certificate too")
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
    return context
