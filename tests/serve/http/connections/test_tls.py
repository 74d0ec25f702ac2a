"""HTTPS, with certificates made for the occasion."""

import os
import shutil
import signal
import socket
import ssl
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE_S
from server_process import Server, closed, serving, until

from serve.errors import BadInput
from serve.http.connections.sockets import tls_context
from serve.settings import ServeSettings

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")

PASSWORD = "only-for-this-test"  # noqa: S105


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def signed(folder: Path, name: str, *more: str, days: str = "2") -> None:
    """`NAME.pem` and `NAME.key`, signed by the authority in `folder`."""
    openssl(
        folder,
        "req",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        f"{name}.key",
        "-out",
        f"{name}.csr",
        "-subj",
        f"/CN={name}",
    )
    (folder / f"{name}.ext").write_text("\n".join(more))
    openssl(
        folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
        "-out", f"{name}.pem", "-days", days, "-extfile", f"{name}.ext",
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    openssl(
        folder, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca",
        "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign",
    )  # fmt: skip
    for name in ("server", "next"):
        signed(folder, name, "subjectAltName=IP:127.0.0.1", "extendedKeyUsage=serverAuth")
    signed(folder, "client", "extendedKeyUsage=clientAuth")
    openssl(folder, "rsa", "-aes256", "-in", "server.key", "-out", "locked.key", "-passout", f"pass:{PASSWORD}")
    return folder


@pytest.fixture
def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / "ca.pem")


def asked(url: str, context: ssl.SSLContext, path: str = "/healthz") -> int:
    return httpx.get(f"{url}{path}", verify=context, timeout=PATIENCE_S).status_code


def test_https_is_served_with_a_key_that_a_password_locks(
    entities_bundle: Path, folder: Path, trusting: ssl.SSLContext
) -> None:
    files = ["--tls-cert", folder / "server.pem", "--tls-key", folder / "locked.key"]
    environment = {"STILLROOM_TLS_PASSWORD": PASSWORD}
    with serving(entities_bundle, *files, environment=environment, said="https://", ready=False) as server:
        until(lambda: asked(server.url, trusting, "/readyz") == 200)
        answer = httpx.post(
            f"{server.url}/v1/entities", json={"text": "fly to rome"}, verify=trusting, timeout=PATIENCE_S
        )
        assert answer.json()["results"][0]["entities"][0]["text"] == "rome"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{server.url}/healthz", timeout=PATIENCE_S)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/healthz".replace("https", "http"), timeout=PATIENCE_S)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0


def test_only_clients_with_a_certificate_of_the_authority_are_let_in(
    entities_bundle: Path, folder: Path, trusting: ssl.SSLContext
) -> None:
    files = [
        "--tls-cert",
        folder / "server.pem",
        "--tls-key",
        folder / "server.key",
        "--tls-client-ca",
        folder / "ca.pem",
    ]
    with serving(entities_bundle, *files, said="https://", ready=False) as server:
        with pytest.raises(httpx.TransportError):
            asked(server.url, trusting)
        trusting.load_cert_chain(folder / "client.pem", folder / "client.key")
        assert asked(server.url, trusting) == 200


def test_a_handshake_that_does_not_end_is_cut_off_and_counts_as_a_connection(
    entities_bundle: Path, folder: Path, trusting: ssl.SSLContext
) -> None:
    files = ["--tls-cert", folder / "server.pem", "--tls-key", folder / "server.key"]
    limits = ["--head-s", 5, "--connections", 3]  # on a busy machine a handshake takes its time
    with serving(entities_bundle, *files, *limits, said="https://", ready=False) as server:

        def samples() -> str:
            return httpx.get(f"{server.url}/metrics", verify=trusting, timeout=PATIENCE_S).text

        silent = [server.connect() for _ in range(2)]
        until(lambda: "stillroom_connections 3.0" in samples())  # and the one that asks
        silent.append(server.connect())
        with server.connect() as refused:
            assert closed(refused)
        for connection in silent:
            assert closed(connection)
            connection.close()
        until(lambda: "stillroom_connections 1.0" in samples())
        assert 'stillroom_connections_cut_total{reason="handshake"} 3.0' in samples()


def test_a_slow_head_is_cut_off_behind_tls_too(entities_bundle: Path, folder: Path, trusting: ssl.SSLContext) -> None:
    files = ["--tls-cert", folder / "server.pem", "--tls-key", folder / "server.key"]
    with (
        serving(entities_bundle, *files, "--head-s", 3, said="https://", ready=False) as server,
        trusting.wrap_socket(server.connect(), server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\nHost:")
        assert connection.recv(12) == b"HTTP/1.1 408"


def test_a_renewed_certificate_is_used_after_sighup_whatever_became_of_the_keys(
    entities_bundle: Path, folder: Path, trusting: ssl.SSLContext, tmp_path: Path
) -> None:
    put(folder, "server", tmp_path)
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{'a' * 32}\n")
    files = ["--tls-cert", tmp_path / "now.pem", "--tls-key", tmp_path / "now.key", "--keys", keys]
    with serving(entities_bundle, *files, said="https://", ready=False) as server:

        def shown() -> str:
            with trusting.wrap_socket(
                socket.create_connection(server.address), server_hostname="127.0.0.1"
            ) as connection:
                return str(connection.getpeercert())

        assert "'server'" in shown()
        until(lambda: asked(server.url, trusting, "/readyz") == 200)
        put(folder, "next", tmp_path)
        keys.write_text("nonsense\n")
        os.kill(server.process.pid, signal.SIGHUP)
        until(lambda: "'next'" in shown())


def test_a_certificate_is_renewed_while_the_file_of_keys_hangs_and_requests_are_answered(
    entities_bundle: Path, folder: Path, trusting: ssl.SSLContext, tmp_path: Path
) -> None:
    put(folder, "server", tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("alice:0123456789abcdef\n")
    files = ["--tls-cert", tmp_path / "now.pem", "--tls-key", tmp_path / "now.key", "--keys", keys]
    with serving(entities_bundle, *files, said="https://", ready=False) as server:
        until(lambda: asked(server.url, trusting, "/readyz") == 200)
        keys.unlink()
        os.mkfifo(keys)  # nobody writes to it
        put(folder, "next", tmp_path)
        os.kill(server.process.pid, signal.SIGHUP)

        until(lambda: "'next'" in shown(server, trusting))
        assert asked(server.url, trusting, "/readyz") == 200
        until(lambda: "keys stay as they were: it took longer than 10 s" in " ".join(server.log()))


def test_a_key_that_was_read_too_slowly_takes_no_renewed_certificate_away(
    entities_bundle: Path, folder: Path, trusting: ssl.SSLContext, tmp_path: Path
) -> None:
    put(folder, "server", tmp_path)
    files = ["--tls-cert", tmp_path / "now.pem", "--tls-key", tmp_path / "now.key"]
    with serving(entities_bundle, *files, said="https://", ready=False) as server:
        until(lambda: asked(server.url, trusting, "/readyz") == 200)
        (tmp_path / "now.key").unlink()
        os.mkfifo(tmp_path / "now.key")
        os.kill(server.process.pid, signal.SIGHUP)
        with (tmp_path / "now.key").open("wb") as slow:
            until(lambda: "the certificate stays as it was: it took longer" in " ".join(server.log()))
            (tmp_path / "now.key").rename(tmp_path / "slow.key")
            put(folder, "next", tmp_path)
            os.kill(server.process.pid, signal.SIGHUP)
            until(lambda: "'next'" in shown(server, trusting))
            slow.write((folder / "server.key").read_bytes())
        until(lambda: not any(link.endswith("slow.key") for link in open_files(server.process.pid)))
        for _ in range(20):
            assert "'next'" in shown(server, trusting)


def put(folder: Path, name: str, there: Path) -> None:
    """Puts a certificate and its key where the server looks for them."""
    for kind in ("pem", "key"):
        shutil.copy(folder / f"{name}.{kind}", there / f"now.{kind}")


def shown(server: Server, trusting: ssl.SSLContext) -> str:
    """The certificate that a new connection gets."""
    with (
        socket.create_connection(server.address, timeout=PATIENCE_S) as connection,
        trusting.wrap_socket(connection, server_hostname="127.0.0.1") as secured,
    ):
        return str(secured.getpeercert())


def open_files(pid: int) -> list[str]:
    """The files that a process has open."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found.append(os.readlink(link))
    return found


def test_files_that_do_not_fit_after_sighup_change_nothing(
    entities_bundle: Path, folder: Path, trusting: ssl.SSLContext, tmp_path: Path
) -> None:
    put(folder, "server", tmp_path)
    files = ["--tls-cert", tmp_path / "now.pem", "--tls-key", tmp_path / "now.key"]
    with serving(entities_bundle, *files, said="https://", ready=False) as server:
        until(lambda: asked(server.url, trusting, "/readyz") == 200)
        shutil.copy(folder / "next.pem", tmp_path / "now.pem")  # with the key of the old one
        os.kill(server.process.pid, signal.SIGHUP)
        until(lambda: "the certificate stays as it was" in " ".join(server.log()))
        assert asked(server.url, trusting) == 200


def test_a_certificate_that_is_not_valid_now_is_told_at_start_and_at_a_reload(
    entities_bundle: Path, folder: Path, tmp_path: Path
) -> None:
    signed(folder, "old", "subjectAltName=IP:127.0.0.1", days="0")  # valid for no second
    ends = subprocess.run(
        ["openssl", "x509", "-in", folder / "old.pem", "-noout", "-enddate"], check=True, capture_output=True, text=True
    ).stdout
    date = datetime.fromtimestamp(ssl.cert_time_to_seconds(ends.strip().partition("=")[2]), UTC)
    chain, key = tmp_path / "chain.pem", tmp_path / "now.key"

    def renew(leaf: str) -> None:
        chain.write_text((folder / f"{leaf}.pem").read_text() + (folder / "ca.pem").read_text())
        shutil.copy(folder / f"{leaf}.key", key)

    def told() -> list[str]:
        return [line for line in server.log() if f"{chain}" in line and f"{date:%Y-%m-%d %H:%M} UTC" in line]

    renew("old")
    with serving(entities_bundle, "--tls-cert", chain, "--tls-key", key, said="https://", ready=False) as server:
        until(lambda: bool(server.entries("ready")))
        assert len(told()) == 1
        for reloads, (leaf, warnings) in enumerate((("server", 1), ("old", 2)), 1):
            renew(leaf)
            os.kill(server.process.pid, signal.SIGHUP)
            until(lambda: sum("model 'cities' is now" in line for line in server.log()) == reloads)  # noqa: B023  # awaited here
            assert len(told()) == warnings


def test_an_authority_that_was_removed_is_trusted_no_longer_after_sighup(
    entities_bundle: Path, folder: Path, trusting: ssl.SSLContext, tmp_path: Path
) -> None:
    shutil.copy(folder / "ca.pem", tmp_path / "ca.pem")
    openssl(
        tmp_path, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "b.key", "-out", "b.pem", "-subj", "/CN=b"
    )
    files = [
        "--tls-cert",
        folder / "server.pem",
        "--tls-key",
        folder / "server.key",
        "--tls-client-ca",
        tmp_path / "ca.pem",
    ]
    trusting.load_cert_chain(folder / "client.pem", folder / "client.key")
    with serving(entities_bundle, *files, said="https://", ready=False) as server:
        assert asked(server.url, trusting) == 200
        shutil.copy(tmp_path / "b.pem", tmp_path / "ca.pem")
        os.kill(server.process.pid, signal.SIGHUP)

        def refused() -> bool:
            try:
                return asked(server.url, trusting) != 200
            except httpx.TransportError:
                return True

        until(refused)


def test_files_that_do_not_fit_are_told_by_name(folder: Path) -> None:
    server, locked = folder / "server.pem", folder / "locked.key"
    for settings, said in (
        (ServeSettings(tls_cert=server, tls_key=folder / "client.key"), "client.key"),
        (ServeSettings(tls_cert=server, tls_key=locked), "STILLROOM_TLS_PASSWORD"),
        (ServeSettings(tls_cert=server), "the key in it"),
        (ServeSettings(tls_cert=server, tls_key=folder / "server.key", tls_client_ca=locked), "--tls-client-ca"),
        (ServeSettings(tls_client_ca=folder / "ca.pem"), "--tls-client-ca needs --tls-cert"),
    ):
        with pytest.raises(BadInput, match=said):
            tls_context(settings)
    assert tls_context(ServeSettings()) is None


def test_only_tls_from_1_2_on_is_spoken(folder: Path) -> None:
    context = tls_context(ServeSettings(tls_cert=folder / "server.pem", tls_key=folder / "server.key"))
    assert context
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
