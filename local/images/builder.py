"""Build and push the images that are missing."""

from __future__ import annotations

import compileall
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from busbar.local import build
from busbar.local.errors import BuildError
from busbar.local.images import recipe, sbom
from busbar.local.images.buildah import (
    buildah,
    configure,
    exists,
    find_uv,
    folder,
    push,
    push_to,
    pushed,
    run,
    working_container,
)
from busbar.local.images.recipe import COMMANDS, IMAGES, USER, Image
from busbar.local.parts import registry_program
from busbar.local.progress import step

PREFIX = "localhost"
PYTHON = "/opt/venv/bin/python"


def build_images() -> str:
    """Bring the registry's storage up to date; returns the tag of both images.

    Raises:
        BuildError: a step failed.
    """
    with build.locked(folder() / ".lock", "another image build"):
        tag = recipe.release_tag()
        if everything_pushed(tag):
            return tag
        _base()
        _pause()
        for image in IMAGES:
            _dependencies(image)
        for image in IMAGES:
            _source(image, tag)
    return tag


def everything_pushed(tag: str) -> bool:
    """Whether the registry's storage already has all images with their current tags."""
    small = pushed("busbar-base", recipe.base_tag()) and pushed("busbar-pause", recipe.pause_tag())
    return small and all(pushed(image.name, tag) for image in IMAGES)


def push_elsewhere(registry: str, tag: str) -> dict[str, str]:
    """Push both images to the user's registry, for the user's own cluster; their digests, as the chart names them."""
    digests = {}
    for image in IMAGES:
        reference = f"{PREFIX}/{image.name}:{tag}"
        if not exists(reference):
            _dependencies(image)
            _source_layer(image, tag)
        with step(f"push {registry}/{image.name}:{tag}") as running:
            digest = push_to(reference, registry, image.name, tag, running)
        digests[image.extra] = digest
    return digests


def _push(reference: str, name: str, tag: str) -> None:
    with step(f"push {name}:{tag}") as running:
        push(reference, name, tag, registry_program(), running)


def _base() -> None:
    tag = recipe.base_tag()
    reference = _base_reference()
    if pushed("busbar-base", tag) and exists(reference):
        return
    _debian(reference, ())
    _push(reference, "busbar-base", tag)


def _base_reference(more: tuple[str, ...] = ()) -> str:
    return f"{PREFIX}/busbar-base:{recipe.base_tag(more)}"


def _debian(reference: str, more: tuple[str, ...]) -> None:
    """A base image with `more` packages."""
    archive = folder() / "base.tar"
    archive.parent.mkdir(parents=True, exist_ok=True)
    with step(f"base image: {', '.join(('Debian with Python', *more))}"):
        _bootstrap(archive, more)
        with working_container("scratch") as container:
            buildah("add", container, str(archive), "/")
            path = "PATH=/opt/busbar/bin:/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            variables = (path, "LANG=C.UTF-8", "PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1")
            configure(container, [flag for variable in variables for flag in ("--env", variable)])
            buildah("commit", "-q", container, reference)
        archive.unlink()


def _bootstrap(archive: Path, more: tuple[str, ...]) -> None:
    """A minimal Debian as a tar archive; if that fails, with the host's apt sources (private mirrors)."""
    user = f"echo 'busbar:x:{USER}:{USER}:Busbar:/tmp:/usr/sbin/nologin' >> \"$1/etc/passwd\""
    group = f"echo 'busbar:x:{USER}:' >> \"$1/etc/group\""
    excluded = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
    command = [
        "mmdebstrap",
        "--variant=minbase",
        f"--include={','.join((*recipe.DEBIAN_PACKAGES, *more))}",
        *(f"--dpkgopt=path-exclude={path}" for path in excluded),
        f"--customize-hook={user}",
        f"--customize-hook={group}",
        '--customize-hook=rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/* "$1"/var/log/*',
        recipe.SUITE,
        str(archive),
    ]
    sources = [
        str(p)
        for p in (Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("debian*"))
        if p.exists()
    ]
    first = subprocess.run(command, text=True, capture_output=True, check=False)
    if first.returncode == 0:
        return
    second = subprocess.run([*command, *sources], text=True, capture_output=True, check=False)
    if second.returncode:
        raise BuildError(
            f"mmdebstrap could not make the base image:\n{first.stderr[-1500:]}\n{second.stderr[-1500:]}"
        )


def _pause() -> None:
    tag = recipe.pause_tag()
    if pushed("busbar-pause", tag):
        return
    reference = f"{PREFIX}/busbar-pause:{tag}"
    program = build.binary("pause")
    with working_container("scratch") as container:
        buildah("copy", container, str(program), "/pause")
        configure(container, ["--entrypoint", '["/pause"]', "--user", "65535:65535"])
        buildah("commit", "-q", container, reference)
    _push(reference, "busbar-pause", tag)


def _dependencies_reference(image: Image) -> str:
    return f"{PREFIX}/{image.name}-deps:{recipe.dependencies_tag(image)}"


def _dependencies(image: Image) -> None:
    """The layer with the image's Python packages."""
    reference = _dependencies_reference(image)
    if exists(reference):
        return
    mounts, environment = host_settings()
    mounts[str(image.lock)] = "/mnt/requirements.lock:ro"
    script = (
        "mkdir -p /opt && /mnt/uv venv -q --python /usr/bin/python3 /opt/venv && "
        f"/mnt/uv pip install --python {PYTHON} --link-mode=copy --compile-bytecode --require-hashes "
        "-r /mnt/requirements.lock"
    )
    if image.check:
        script += f' && TRITON_CACHE_DIR=/tmp/check {PYTHON} -c "{image.check}"'
    base = _base_reference(image.debian)
    if not exists(base):
        _debian(base, image.debian)
    with step(f"{image.name}: Python packages") as running, working_container(base) as container:
        run(container, script, mounts=mounts, environment=environment, running=running)
        run(container, "rm -rf /mnt/* /root/.cache /tmp/*")
        running.update("writing the layer")
        buildah("commit", "-q", container, reference)


def host_settings() -> tuple[dict[str, str], dict[str, str]]:
    """The host's uv, cache, certificates, proxies and index settings, as mounts and environment."""
    uv = find_uv()
    cache = subprocess.run([uv, "cache", "dir"], text=True, capture_output=True, check=True).stdout.strip()
    os.makedirs(cache, exist_ok=True)
    mounts = {uv: "/mnt/uv:ro", cache: "/mnt/cache:rw"}
    environment = {"UV_CACHE_DIR": "/mnt/cache", "UV_NO_PROGRESS": "1", "HOME": "/tmp"}
    proxies = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
    for name, value in os.environ.items():
        if name.lower() in proxies or (
            name.startswith("UV_") and name not in ("UV_CACHE_DIR", "UV_CONFIG_FILE")
        ):
            environment[name] = value
    if "UV_DEFAULT_INDEX" not in environment and (index := pip_index()):
        environment["UV_DEFAULT_INDEX"] = index
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        bundle = os.environ.get(name)
        if bundle and Path(bundle).is_file():
            mounts[str(Path(bundle).resolve())] = "/mnt/ca.crt:ro"
            environment["SSL_CERT_FILE"] = "/mnt/ca.crt"
            break
    else:
        mounts["/etc/ssl/certs/ca-certificates.crt"] = "/mnt/ca.crt:ro"
        environment["SSL_CERT_FILE"] = "/mnt/ca.crt"
    candidates = (
        os.environ.get("UV_CONFIG_FILE"),
        str(Path.home() / ".config/uv/uv.toml"),
        "/etc/uv/uv.toml",
    )
    for candidate in candidates:
        if candidate and Path(candidate).is_file():
            mounts[str(Path(candidate).resolve())] = "/mnt/uv.toml:ro"
            environment["UV_CONFIG_FILE"] = "/mnt/uv.toml"
            break
    return mounts, environment


def pip_index() -> str | None:
    """The index that the host's pip is configured with, if it is not the default."""
    if found := os.environ.get("PIP_INDEX_URL"):
        return found
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        text=True,
        capture_output=True,
        check=False,
    )
    return asked.stdout.strip() or None if asked.returncode == 0 else None


def _source(image: Image, tag: str) -> None:
    """The last layer: our own code, compiled, and the commands."""
    if pushed(image.name, tag):
        return
    _source_layer(image, tag)
    _push(f"{PREFIX}/{image.name}:{tag}", image.name, tag)
    _push(f"{PREFIX}/{image.name}:{tag}", image.name, "latest")  # the tag for people's own manifests
    _forget_older(image, tag)


def _source_layer(image: Image, tag: str) -> None:
    reference = f"{PREFIX}/{image.name}:{tag}"
    with step(f"{image.name}: our source"), tempfile.TemporaryDirectory(dir=folder()) as name:
        root = Path(name) / "busbar"
        stage(image, root)
        with working_container(_dependencies_reference(image)) as container:
            _bill(image, tag, container, root)
            buildah("copy", container, str(root), "/opt/busbar")
            if not compiled_here():
                quiet = "-m compileall -q --invalidation-mode unchecked-hash /opt/busbar"
                run(container, f"PYTHONDONTWRITEBYTECODE= {PYTHON} {quiet}")
            settings = ["--user", f"{USER}:{USER}", "--workingdir", "/tmp", "--env", "PYTHONPATH=/opt/busbar"]
            settings += ["--env", "HOME=/tmp", "--entrypoint", '["/usr/bin/tini", "--"]']
            configure(container, settings)
            buildah("commit", "-q", container, reference)


def _bill(image: Image, tag: str, container: str, root: Path) -> None:
    """Says what is in the image: in the image, and in the images' folder."""
    command = ["run", "--isolation", "chroot", container, "--", PYTHON, "-c", sbom.INSPECT]
    source = {f"/opt/busbar/busbar/{name}": file.read_bytes() for name, file in recipe.source_files(image)}
    text = sbom.bill(image.name, tag, sbom.read(buildah(*command)), source)
    kept = sbom_file(image.name, tag)
    kept.parent.mkdir(parents=True, exist_ok=True)
    for file in (kept, root / Path(sbom.PLACE).name):
        file.write_text(text)
        os.utime(file, (0, 0))
        file.chmod(0o644)


def sbom_file(name: str, tag: str) -> Path:
    """Where this machine keeps the bill of materials of an image that it has built."""
    return folder() / "sbom" / f"{name}-{tag}.cdx.json"


def compiled_here() -> bool:
    """Whether this Python writes byte code that the image's Python (3.11) reads."""
    return sys.version_info[:2] == (3, 11)


def stage(image: Image, root: Path) -> None:
    """Lay out ``/opt/busbar``: ``busbar/<part>``, ``bin/<command>`` and the metadata."""
    for name, file in recipe.source_files(image):
        target = root / "busbar" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    for relative, text in recipe.distribution_metadata().items():
        target = root / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    (root / "bin").mkdir(parents=True)
    for command, where in COMMANDS.items():
        module, _, function = where.partition(":")
        script = root / "bin" / command
        script.write_text(
            f"#!{PYTHON}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        )
        script.chmod(0o755)
    if compiled_here():
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        compileall.compile_dir(
            root / "busbar", quiet=1, stripdir=str(root), prependdir="/opt/busbar", invalidation_mode=mode
        )
    for path in (root, *root.rglob("*")):
        os.utime(path, (0, 0))
        path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)


def _forget_older(image: Image, tag: str) -> None:
    """Delete buildah's copies of earlier source layers; the registry keeps the pushed ones."""
    listed = buildah("images", "--format", "{{.Name}}:{{.Tag}}")
    for reference in listed.splitlines():
        if reference.startswith(f"{PREFIX}/{image.name}:") and not reference.endswith(f":{tag}"):
            buildah("rmi", reference)
