"""Only what the operator has signed is a lease."""

from __future__ import annotations

import pytest
from tests.operator.agent.lease_keys import ANOTHER_KEY, CERTIFICATE, KEY

from busbar.kube.errors import SettingsError
from busbar.operator.agent import main
from busbar.operator.agent.settings import Settings
from busbar.operator.agent.signing import Signer, Verifier


def test_a_signature_is_of_one_body_by_one_key() -> None:
    verifier, signature = Verifier(CERTIFICATE), Signer(KEY).sign(b"body")
    assert verifier.is_signed(b"body", signature)
    assert not verifier.is_signed(b"body ", signature)
    for wrong in ("", "x", "é", signature[:-4], Signer(ANOTHER_KEY).sign(b"body")):
        assert not verifier.is_signed(b"body", wrong)


def test_keys_that_are_none_are_refused() -> None:
    for pem in (b"", b"x" * 64, CERTIFICATE):
        with pytest.raises(ValueError, match=r"\w"):
            Signer(pem)
    for pem in (b"", b"x" * 64, KEY):
        with pytest.raises(ValueError, match=r"\w"):
            Verifier(pem)


@pytest.mark.parametrize("certificate", [b"", b"not a certificate"])
async def test_an_agent_that_may_set_limits_does_not_start_without_a_certificate(certificate: bytes) -> None:
    settings = Settings(node="n", key=b"0123456789abcdef", set_limits=True, lease_cert=certificate, port=0)
    with pytest.raises(SettingsError, match="BUSBAR_POWER_LEASE_CERT_FILE"):
        await main._serve(settings)
