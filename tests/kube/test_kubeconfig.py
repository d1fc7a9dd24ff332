"""What people's kubeconfigs hold: several files, plug-ins, certificates, proxies; and what is refused, by a sentence."""

from __future__ import annotations

import asyncio
import base64
import datetime
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from busbar.kube.client import KubeClient
from busbar.kube.errors import ConfigError, ConnectionFailed, Unauthorized
from busbar.kube.exec_plugin import AGAIN_S, EARLY_S, ExecPlugin
from busbar.kube.login import Login, find_login, from_kubeconfig
from busbar.kube.resources import NAMESPACES

PEM = "-----BEGIN CERTIFICATE-----\n"
DATA = base64.b64encode(PEM.encode()).decode()


def kubeconfig(folder: Path, user: dict[str, Any], name: str = "config", **cluster: Any) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    body = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://host:6443/", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(body))
    return path


def plugin(folder: Path, text: str, name: str = "plugin") -> Path:
    """A program that appends its KUBERNETES_EXEC_INFO to ``asked`` and then does what the text says."""
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$KUBERNETES_EXEC_INFO" >> {folder}/asked\n{text}\n')
    path.chmod(0o755)
    return path


def prints(**status: str) -> str:
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
    return f"echo '{json.dumps(answer)}'"


def asked(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "asked").read_text().splitlines()]


# -- entries of one file -------------------------------------------------------------------------------


def test_a_token_and_a_certificate_authority(tmp_path: Path) -> None:
    login = from_kubeconfig(kubeconfig(tmp_path, {"token": "t"}, **{"certificate-authority-data": DATA}))
    assert (login.server, login.credential().token, login.ca_pem) == ("https://host:6443", "t", PEM)
    assert (login.namespace, login.insecure, login.proxy_url) == ("team", False, None)


def test_a_token_file_is_relative_to_the_kubeconfig_and_goes_before_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    login = from_kubeconfig(kubeconfig(tmp_path, {"token": "t", "tokenFile": "token"}))
    assert login.credential().token == "from-file"


def test_client_certificates_come_as_data_or_as_files_beside_the_kubeconfig(tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("CERT")
    user = {"client-certificate": "cert", "client-key-data": DATA}
    login = from_kubeconfig(kubeconfig(tmp_path, user))
    proof = login.credential()
    assert (proof.client_cert_pem, proof.client_key_pem, proof.token) == ("CERT", PEM, None)
    assert PEM not in repr(login)
    assert "BEGIN" not in repr(proof)
    with pytest.raises(ConfigError, match=r"user 'u': client-certificate and client-key come together"):
        from_kubeconfig(kubeconfig(tmp_path, {"client-certificate": "cert"}))
    with pytest.raises(ConfigError, match=r"user 'u': client-key cannot be read"):
        from_kubeconfig(kubeconfig(tmp_path, {**user, "client-key-data": "no base64"}))


@pytest.mark.parametrize("text", ["", "[]", "current-context: nowhere", "{}"])
def test_an_unusable_kubeconfig_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(ConfigError, match="config"):
        from_kubeconfig(path)


@pytest.mark.parametrize(
    ("user", "cluster", "sentence"),
    [
        ({"auth-provider": {"name": "oidc"}}, {}, "auth-provider is not supported here; use an exec plug-in"),
        ({"username": "a", "password": "b"}, {}, "username is basic authentication"),
        ({"token": "t", "as": "other"}, {}, "as is impersonation"),
        ({"token": "t", "as-groups": ["g"]}, {}, "as-groups is impersonation"),
        ({}, {"proxy-url": "socks5://p:1080"}, "only http:// and https:// proxies are"),
        ({}, {"server": ""}, "names no server"),
        ({"exec": {"command": "x", "interactiveMode": "Always"}}, {}, "wants a terminal"),
        ({"exec": {"args": ["x"]}}, {}, "has no command"),
        ({"exec": {"command": "no-such-plugin", "installHint": "see HOWTO"}}, {}, "not installed; see HOWTO"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_sentence(
    tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        from_kubeconfig(kubeconfig(tmp_path, user, **cluster))


# -- several files -------------------------------------------------------------------------------------


def test_of_several_files_the_first_that_says_something_is_right(tmp_path: Path) -> None:
    first = kubeconfig(tmp_path, {"token": "first"}, "1/config", server="https://one")
    second = kubeconfig(tmp_path, {"token": "second"}, "2/config", server="https://two")
    listed = os.pathsep.join(map(str, (tmp_path / "missing", first, second)))
    login = find_login({"KUBECONFIG": listed})
    assert (login.server, login.credential().token) == ("https://one", "first")


def test_contexts_clusters_and_users_may_stand_in_different_files_each_with_its_own_folder(
    tmp_path: Path,
) -> None:
    whole = yaml.safe_load(kubeconfig(tmp_path, {"tokenFile": "token"}).read_text())
    files = []
    for number, key in enumerate(("contexts", "users", "clusters")):
        folder = tmp_path / key
        folder.mkdir()
        (folder / "token").write_text(f"token of {key}")
        part = {key: whole[key], "current-context": "here" if number == 1 else ""}
        (folder / "config").write_text(yaml.safe_dump(part))
        files.append(str(folder / "config"))
    login = find_login({"KUBECONFIG": os.pathsep.join(files)})
    assert (login.server, login.credential().token) == ("https://host:6443", "token of users")


def test_a_context_can_be_named(tmp_path: Path) -> None:
    here = kubeconfig(tmp_path, {"token": "a"}, "1/config")
    other = kubeconfig(tmp_path, {"token": "b"}, "2/config")
    other.write_text(
        other.read_text().replace("here", "there").replace("name: u", "name: v").replace(": u\n", ": v\n")
    )
    assert from_kubeconfig([here, other], "there").credential().token == "b"
    with pytest.raises(ConfigError, match="no context named 'nowhere'"):
        from_kubeconfig([here, other], "nowhere")


# -- exec plug-ins -------------------------------------------------------------------------------------


def test_a_plugin_gives_a_token_and_learns_of_the_cluster_if_it_asks(tmp_path: Path) -> None:
    path = plugin(tmp_path, '[ "$1 $WHO" = "token me" ] && ' + prints(token="from-plugin"))
    spec = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": f"./{path.name}",
        "args": ["token"],
        "env": [{"name": "WHO", "value": "me"}],
        "provideClusterInfo": True,
    }
    extension = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "x"}}
    cluster: dict[str, Any] = {"certificate-authority-data": DATA, "extensions": [extension]}
    login = from_kubeconfig(kubeconfig(tmp_path, {"exec": spec}, **cluster))
    assert login.credential().token == "from-plugin"
    (info,) = asked(tmp_path)
    assert info["spec"] == {
        "interactive": False,
        "cluster": {
            "server": "https://host:6443/",
            "certificate-authority-data": DATA,
            "config": {"audience": "x"},
        },
    }


def test_a_token_of_the_entry_goes_before_its_plugin(tmp_path: Path) -> None:
    user = {"token": "static", "exec": {"command": "no-such-plugin"}}
    assert from_kubeconfig(kubeconfig(tmp_path, user)).credential().token == "static"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("echo who are you >&2; exit 3", "ended with code 3: who are you"),
        ("echo no json", "Expecting value"),
        ("echo '{}'", "its answer has no status"),
        (prints(), "neither token nor client certificate"),
        (prints(clientCertificateData="C"), "come together"),
        (prints(token="t").replace("k8s.io/v1", "k8s.io/v1beta1"), "answered as client.auth"),
    ],
)
def test_a_plugin_that_fails_is_named_with_its_reason(tmp_path: Path, text: str, sentence: str) -> None:
    path = plugin(tmp_path, text)
    with pytest.raises(ConfigError, match=f"exec plug-in {path} gave no credential.*{sentence}"):
        from_kubeconfig(kubeconfig(tmp_path, {"exec": {"command": str(path)}}))


def test_a_plugin_runs_again_when_its_credential_expires_and_after_a_refusal(tmp_path: Path) -> None:
    now = 1_700_000_000.0
    ends = datetime.datetime.fromtimestamp(now + 60, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    path = plugin(tmp_path, prints(token="t", expirationTimestamp=ends))
    made = ExecPlugin({"command": str(path)}, {}, tmp_path / "config", clock=lambda: now)
    first = made.current()
    assert made.current() is first
    now += 60 - EARLY_S
    assert made.is_due()
    second = made.current()
    assert (second is not first, len(asked(tmp_path))) == (True, 2)
    path = plugin(tmp_path, prints(token="for ever"))
    now += 60
    third = made.current()
    assert not made.refuse(third)  # it has just been made: another would be the same
    now += AGAIN_S
    assert made.refuse(third)
    assert made.refuse(third)  # the second who reports it finds it gone
    assert made.current() is not third
    assert len(asked(tmp_path)) == 4


# -- over the wire -------------------------------------------------------------------------------------


@asynccontextmanager
async def api_server(
    answer: Callable[[web.Request], web.Response], tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.Response:
        return answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server(ssl=tls)
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.port}"
    finally:
        await server.close()


async def test_a_call_that_is_refused_is_made_again_with_a_new_credential_writes_too(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    good = "two"

    def answer(request: web.Request) -> web.Response:
        bearer = request.headers["Authorization"].removeprefix("Bearer ")
        seen.append((request.method, bearer))
        return web.json_response(
            {"ok": True} if bearer == good else {}, status=200 if bearer == good else 401
        )

    plugin(tmp_path, prints(token="one"))
    clock = [0.0]
    made = ExecPlugin({"command": str(tmp_path / "plugin")}, {}, tmp_path / "config", clock=lambda: clock[0])
    async with api_server(answer) as url, KubeClient(Login(url, plugin=made)) as client:
        with pytest.raises(Unauthorized):
            await client.create(NAMESPACES, {})
        clock[0] = AGAIN_S
        plugin(tmp_path, prints(token="two"))
        assert await client.create(NAMESPACES, {}) == {"ok": True}
        assert seen == [("POST", "one"), ("POST", "one"), ("POST", "two")]
        clock[0] = 2 * AGAIN_S
        good = "three"
        with pytest.raises(Unauthorized):  # once more, and no further
            await client.get(NAMESPACES, "x")
        assert [bearer for _, bearer in seen[3:]] == ["two", "two"]
        clock[0] = 3 * AGAIN_S
        plugin(tmp_path, "exit 1")
        with pytest.raises(ConnectionFailed, match=r"no credential.*ended with code 1"):
            await client.get(NAMESPACES, "x")


def certificates(folder: Path, name: str) -> tuple[str, ssl.SSLContext]:
    """The PEM of an authority, and a server's context with a certificate of it for this name."""
    day, now = datetime.timedelta(days=1), datetime.datetime.now(datetime.UTC)

    def sign(
        subject: str, key: ec.EllipticCurvePrivateKey, ca: ec.EllipticCurvePrivateKey, *ext: Any
    ) -> bytes:
        made = x509.CertificateBuilder().serial_number(x509.random_serial_number())
        made = made.subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)]))
        made = made.issuer_name(
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"authority of {folder.name[:40]}")])
        )
        made = made.not_valid_before(now - day).not_valid_after(now + day).public_key(key.public_key())
        for one in ext:
            made = made.add_extension(one, critical=False)
        return made.sign(ca, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    ca, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = sign(
        f"authority of {folder.name[:40]}", ca, ca, x509.BasicConstraints(ca=True, path_length=None)
    )
    (folder / "cert").write_bytes(sign(name, key, ca, x509.SubjectAlternativeName([x509.DNSName(name)])))
    (folder / "key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "cert", folder / "key")
    return authority.decode(), tls


async def test_the_servers_certificate_is_checked_for_the_tls_server_name(tmp_path: Path) -> None:
    authority, tls = certificates(tmp_path, "kube.example")
    data = base64.b64encode(authority.encode()).decode()
    cluster: dict[str, Any] = {"certificate-authority-data": data, "tls-server-name": "kube.example"}
    names: list[str | None] = []
    tls.set_servername_callback(lambda _, name, __: names.append(name))
    async with api_server(lambda _: web.json_response({"ok": True}), tls) as url:
        login = from_kubeconfig(kubeconfig(tmp_path, {"token": "t"}, **{**cluster, "server": url}))
        async with KubeClient(login) as client:
            assert await client.call("GET", "/x") == {"ok": True}
        assert names == ["kube.example"]
        for wrong in ({"tls-server-name": "other.example"}, {"tls-server-name": ""}):
            login = from_kubeconfig(
                kubeconfig(tmp_path, {"token": "t"}, **{**cluster, "server": url, **wrong})
            )
            async with KubeClient(login) as client:
                with pytest.raises(ConnectionFailed, match="certificate"):
                    await client.call("POST", "/x", body={})
        unchecked: dict[str, Any] = {"server": url, "insecure-skip-tls-verify": True}
        async with KubeClient(from_kubeconfig(kubeconfig(tmp_path, {"token": "t"}, **unchecked))) as client:
            assert await client.call("GET", "/x") == {"ok": True}


async def test_a_plugins_new_client_certificate_is_used_on_new_connections(tmp_path: Path) -> None:
    authority, tls = certificates(tmp_path, "client.example")
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_verify_locations(cadata=authority)
    old, clock = {name: (tmp_path / name).read_text() for name in ("cert", "key")}, [0.0]
    (tmp_path / "second").mkdir()
    other, _ = certificates(tmp_path / "second", "client.example")
    tls.load_verify_locations(cadata=other)
    seen: list[bytes] = []

    def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        seen.append(request.transport.get_extra_info("ssl_object").getpeercert(binary_form=True))
        return web.json_response({})

    def printed(cert: str, key: str) -> str:
        (tmp_path / "answer").write_text(
            json.dumps({"status": {"clientCertificateData": cert, "clientKeyData": key}})
        )
        return f"cat {tmp_path}/answer"

    plugin(tmp_path, printed(old["cert"], old["key"]))
    made = ExecPlugin({"command": str(tmp_path / "plugin")}, {}, tmp_path / "config", clock=lambda: clock[0])
    async with api_server(answer, tls) as url, KubeClient(Login(url, insecure=True, plugin=made)) as client:
        await client.call("GET", "/x")
        first = client._session
        new = [(tmp_path / "second" / name).read_text() for name in ("cert", "key")]
        plugin(tmp_path, printed(*new))
        clock[0] = AGAIN_S
        assert made.refuse(made.current())
        await client.call("GET", "/x")
        assert client._session is not first
        assert first is not None
        assert not first.closed  # requests on it may still run
    assert seen == [ssl.PEM_cert_to_DER_cert(old["cert"]), ssl.PEM_cert_to_DER_cert(new[0])]


async def test_calls_go_through_the_proxy_of_the_cluster(tmp_path: Path) -> None:
    lines: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\nConnection: close\r\n\r\n{"ok": true}')
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        cluster = {"server": "http://kube.invalid:6443", "proxy-url": f"http://127.0.0.1:{port}"}
        login = from_kubeconfig(kubeconfig(tmp_path, {"token": "t"}, **cluster))
        async with KubeClient(login) as client:
            assert await client.call("GET", "/x") == {"ok": True}
    assert lines == [b"GET http://kube.invalid:6443/x HTTP/1.1"]
