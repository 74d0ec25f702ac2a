"""HTTPS, with certificates made for the occasion."""

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE_S
from server_process import HTTP, Server, closed, serving, until

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
        folder, "req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"
    )  # fmt: skip
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


@pytest.fixture(scope="module")
def server(entities_bundle: Path, folder: Path) -> Iterator[Server]:
    """HTTPS with a key that a password locks, for three connections; on a busy machine a handshake takes its time."""
    files = ["--tls-cert", folder / "server.pem", "--tls-key", folder / "locked.key"]
    locked = {"STILLROOM_TLS_PASSWORD": PASSWORD}
    limits = ["--head-s", 3, "--connections", 3]
    with serving(entities_bundle, *files, *limits, environment=locked, said="https://", ready=False) as server:
        yield server


def asked(url: str, context: ssl.SSLContext, path: str = "/healthz") -> httpx.Response:
    return httpx.get(f"{url}{path}", verify=context, timeout=PATIENCE_S)


def ready(server: Server, context: ssl.SSLContext) -> bool:
    return asked(server.url, context, "/readyz").status_code == 200


@contextmanager
def reloadable(bundle: Path, folder: Path, tmp_path: Path, *, read_s: float = 60.0) -> Iterator[tuple[Server, Path]]:
    """A ready server whose certificate, key and keys of clients a test replaces, and the file of the latter.

    It gives up reading one of them again after `read_s`.
    """
    put(folder, "server", tmp_path)
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{'a' * 32}\n")
    files = ["--tls-cert", tmp_path / "now.pem", "--tls-key", tmp_path / "now.key", "--keys", keys]
    with serving(bundle, *files, said="https://", ready=False, constants={"serve.http.app.READ_S": read_s}) as server:
        trusting = ssl.create_default_context(cafile=folder / "ca.pem")
        until(lambda: ready(server, trusting))
        yield server, keys


def hangup(server: Server) -> None:
    os.kill(server.process.pid, signal.SIGHUP)


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


def test_https_is_served_to_clients_that_trust_its_authority(server: Server, trusting: ssl.SSLContext) -> None:
    until(lambda: ready(server, trusting))
    answer = httpx.post(f"{server.url}/v1/entities", json={"text": "fly to rome"}, verify=trusting, timeout=PATIENCE_S)
    assert answer.json()["results"][0]["entities"][0]["text"] == "rome"
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        server.get("/healthz")
    with pytest.raises(httpx.HTTPError):
        HTTP.get(f"{server.url}/healthz".replace("https", "http"))


def test_an_endless_handshake_is_cut_off_and_counts_as_a_connection(server: Server, trusting: ssl.SSLContext) -> None:
    def samples() -> str:
        return asked(server.url, trusting, "/metrics").text

    def cut() -> float:
        return sum(
            map(
                float,
                re.findall(r'^stillroom_connections_cut_total{process="0",reason="handshake"} (\S+)$', samples(), re.M),
            )
        )

    before = cut()
    silent = [server.connect() for _ in range(2)]
    until(lambda: 'stillroom_connections{process="0"} 3.0' in samples())  # and the one that asks
    silent.append(server.connect())
    with server.connect() as refused:
        assert closed(refused)
    for connection in silent:
        assert closed(connection)
        connection.close()
    until(lambda: 'stillroom_connections{process="0"} 1.0' in samples())
    assert cut() == before + 3


def test_a_slow_head_is_cut_off_behind_tls_too(server: Server, trusting: ssl.SSLContext) -> None:
    with trusting.wrap_socket(server.connect(), server_hostname="127.0.0.1") as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost:")
        assert connection.recv(12) == b"HTTP/1.1 408"


def test_a_renewed_certificate_is_used_after_sighup_and_one_that_does_not_fit_changes_nothing(
    entities_bundle: Path, folder: Path, trusting: ssl.SSLContext, tmp_path: Path
) -> None:
    with reloadable(entities_bundle, folder, tmp_path) as (server, keys):
        assert "'server'" in shown(server, trusting)
        put(folder, "next", tmp_path)
        keys.write_text("nonsense\n")  # which does not keep the certificate from being read
        hangup(server)
        until(lambda: "'next'" in shown(server, trusting))
        shutil.copy(folder / "server.pem", tmp_path / "now.pem")  # with the key of the other
        hangup(server)
        until(lambda: "the certificate stays as it was" in " ".join(server.log()))
        assert "'next'" in shown(server, trusting)


def test_files_that_hang_delay_no_answer_and_no_other_file_and_undo_nothing_later(
    entities_bundle: Path, folder: Path, trusting: ssl.SSLContext, tmp_path: Path
) -> None:
    key = tmp_path / "now.key"
    with reloadable(entities_bundle, folder, tmp_path, read_s=3.0) as (server, keys):
        key.unlink()
        os.mkfifo(key)
        hangup(server)
        with key.open("wb") as slow:
            until(lambda: "the certificate stays as it was: it took longer" in " ".join(server.log()))
            key.rename(tmp_path / "slow.key")
            put(folder, "next", tmp_path)
            keys.unlink()
            os.mkfifo(keys)  # nobody writes to it
            hangup(server)
            until(lambda: "'next'" in shown(server, trusting))
            assert ready(server, trusting)
            assert "keys stay" not in " ".join(server.log())  # they are still being read
            slow.write((folder / "server.key").read_bytes())
        until(lambda: not any(link.endswith("slow.key") for link in open_files(server.processes()[0].pid)))
        for _ in range(20):
            assert "'next'" in shown(server, trusting)
        until(lambda: "keys stay as they were: it took longer" in " ".join(server.log()))


def test_only_clients_with_a_certificate_of_an_authority_that_is_trusted_now_are_let_in(
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
    with serving(entities_bundle, *files, said="https://", ready=False) as server:
        with pytest.raises(httpx.TransportError):
            asked(server.url, trusting)
        trusting.load_cert_chain(folder / "client.pem", folder / "client.key")
        assert asked(server.url, trusting).status_code == 200
        shutil.copy(tmp_path / "b.pem", tmp_path / "ca.pem")
        hangup(server)

        def refused() -> bool:
            try:
                return asked(server.url, trusting).status_code != 200
            except httpx.TransportError:
                return True

        until(refused)


def test_a_certificate_out_of_date_is_warned_of(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    signed(folder, "old", "subjectAltName=IP:127.0.0.1", days="0")  # valid for no second
    ends = subprocess.run(
        ["openssl", "x509", "-in", folder / "old.pem", "-noout", "-enddate"], check=True, capture_output=True, text=True
    ).stdout
    date = datetime.fromtimestamp(ssl.cert_time_to_seconds(ends.strip().partition("=")[2]), UTC)
    chain = tmp_path / "chain.pem"
    for leaf, warnings in (("server", 0), ("old", 1)):
        chain.write_text((folder / f"{leaf}.pem").read_text() + (folder / "ca.pem").read_text())
        tls_context(ServeSettings(tls_cert=chain, tls_key=folder / f"{leaf}.key"))
        told = [m for m in caplog.messages if f"{chain}" in m and f"{date:%Y-%m-%d %H:%M} UTC" in m]
        assert len(told) == len(caplog.messages) == warnings


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
