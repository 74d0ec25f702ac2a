"""The health check of the image: whether the server of this container is ready, on its own port and with TLS if it has it.

The image has no curl. `python -I -m serve.health` reads the server's command line, so that a container with other options is checked
too. It imports nothing that is not Python's, since it starts every few seconds.
"""

import argparse
import http.client
import ssl
import sys
from pathlib import Path


def main(command_file: str = "/proc/1/cmdline") -> int:
    """0 when the server with the command line in `command_file` is ready, otherwise 1."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tls-cert")
    parser.add_argument("--tls-client-ca")
    words = Path(command_file).read_text(encoding="utf-8").split("\0")
    # With `init` the first process is docker's, and the server's command line comes after its `--`.
    server, _ = parser.parse_known_args([word for word in words if word != "--"])
    connection: http.client.HTTPConnection
    if server.tls_cert:
        context = ssl.create_default_context()  # it does not know for which name the certificate is
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=4, context=context)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=4)
    try:
        connection.connect()
        if server.tls_client_ca:  # it answers clients with a certificate alone, and this check has none
            return 0
        connection.request("GET", "/readyz")
        return int(connection.getresponse().status != 200)
    except OSError:
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
