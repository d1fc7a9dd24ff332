"""Certificates: valid ones are kept, and ones that do not match are issued again."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509

from busbar.local.pki import Authority, Certificate

CA = Certificate("cluster", "", "busbar")
LEAF = Certificate("apiserver", "cluster", "kube-apiserver", names=("localhost", "10.64.0.2"))


def make(folder: Path) -> dict[str, bytes]:
    """Issues certificates as a start does; returns the files."""
    authority = Authority(folder)
    for certificate in (CA, LEAF):
        authority.ensure(certificate)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_second_start_changes_nothing(tmp_path: Path) -> None:
    assert make(tmp_path / "pki") == make(tmp_path / "pki")


@pytest.mark.parametrize("torn", ["cluster.crt", "cluster.key", "apiserver.crt", "apiserver.key"])
@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN"], ids=["gone", "empty", "torn"])
def test_a_torn_file_is_made_anew_with_all_that_hangs_on_it(
    torn: str, content: bytes | None, tmp_path: Path
) -> None:
    folder = tmp_path / "pki"
    make(folder)
    (folder / torn).unlink()
    if content is not None:
        (folder / torn).write_bytes(content)
    files = make(folder)
    signer = x509.load_pem_x509_certificate(files["cluster.crt"])
    leaf = x509.load_pem_x509_certificate(files["apiserver.crt"])
    leaf.verify_directly_issued_by(signer)
    assert make(folder) == files
