"""The public surface: metric names, setting names, error documents. A change here breaks clients and dashboards."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from busbar.gateway import errors
from busbar.gateway.metrics import Metrics
from busbar.gateway.settings import Settings, load
from busbar.kube.errors import SettingsError

METRICS = {
    "busbar_gateway_hold_seconds",
    "busbar_gateway_leases_renewed",
    "busbar_gateway_requests",
    "busbar_gateway_requests_in_hand",
    "busbar_gateway_requests_limited",
    "busbar_gateway_retries",
    "busbar_gateway_routes_connected",
    "busbar_gateway_services",
    "busbar_gateway_streams_broken",
    "busbar_gateway_streams_moved",
    "busbar_gateway_streams_resumed",
    "busbar_gateway_time_to_first_byte_seconds",
    "busbar_gateway_usage_oldest_seconds",
    "busbar_gateway_usage_spool_bytes",
    "busbar_gateway_usage_undelivered_records",
}
PER_SERVICE = {
    "busbar_gateway_service_in_flight",
    "busbar_gateway_service_requests",
    "busbar_gateway_service_tokens",
    "busbar_gateway_service_waiting",
}


def test_the_names_of_the_metrics() -> None:
    metrics = Metrics()
    metrics.watch_demand(list)
    assert {family.name for family in metrics.totals.collect()} == METRICS
    assert {family.name for family in metrics.per_service.collect()} == PER_SERVICE


def test_the_status_and_code_of_each_error() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.ClientError)]
    assert {(c.__name__, c.status, c.type, c.code) for c in classes} == {
        ("ClientError", 500, "api_error", "internal_error"),
        ("BadRequest", 400, "invalid_request_error", "bad_request"),
        ("Unauthenticated", 401, "authentication_error", "invalid_api_key"),
        ("Forbidden", 403, "permission_error", "missing_scope"),
        ("ModelNotFound", 404, "invalid_request_error", "model_not_found"),
        ("NoSuchObject", 404, "invalid_request_error", "not_found"),
        ("Conflict", 409, "invalid_request_error", "conflict"),
        ("UnknownRoute", 404, "invalid_request_error", "unknown_route"),
        ("MethodNotAllowed", 405, "invalid_request_error", "method_not_allowed"),
        ("TooLarge", 413, "invalid_request_error", "request_too_large"),
        ("TooManyRequests", 429, "rate_limit_error", "too_many_waiting"),
        ("LimitReached", 429, "api_error", "rate_limit_exceeded"),
        ("RateLimited", 429, "api_error", "rate_limit_exceeded"),
        ("QuotaSpent", 429, "insufficient_quota", "insufficient_quota"),
        ("BadUpstream", 502, "api_error", "bad_upstream"),
        ("Unavailable", 503, "service_unavailable_error", "unavailable"),
    }


def test_settings_come_from_the_environment_and_the_services_own_links_are_passed_over() -> None:
    settings = load(
        {
            "BUSBAR_GATEWAY_HOLD_TIMEOUT_S": "12.5",
            "BUSBAR_GATEWAY_HOLD_LIMIT": "7",
            "BUSBAR_GATEWAY_STATE_DIR": "/state",
            "BUSBAR_GATEWAY_METRICS_SUBJECTS": "a, b",
            "BUSBAR_GATEWAY_PORT": "tcp://10.0.0.1:8080",
            "BUSBAR_GATEWAY_SERVICE_HOST": "10.0.0.1",
            "BUSBAR_GATEWAY_SERVICE_PORT_HTTP": "8080",
            "BUSBAR_GATEWAY_PORT_8080_TCP_ADDR": "10.0.0.1",
            "PATH": "/bin",
        }
    )
    changed = {
        "hold_timeout_s": 12.5,
        "hold_limit": 7,
        "state_dir": Path("/state"),
        "metrics_subjects": ("a", "b"),
    }
    assert settings == dataclasses.replace(Settings(), **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("HOLD_TIMEOUT_S", "soon", "5"),
        ("HOLD_TIMEOUT_S", "-1", "0"),
        ("HOLD_LIMIT", "0", "1"),
        ("HOLD_LIMIT", "1.5", "2"),
        ("ATTEMPTS", "0", "1"),
        ("USAGE_BATCH", "1001", "1000"),
        ("REQUEST_BODY_MIB", "9", "8"),
        ("REQUEST_BODY_MIB", "0", "1"),
        ("RESUME_TOKENS", "131073", "131072"),
        ("PUBLIC_ADDRESS", "8080", "0.0.0.0:8080"),
        ("PUBLIC_ADDRESS", "host:99999", "host:9999"),
        ("API_URL", "", "http://api"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(name: str, value: str, accepted: str) -> None:
    with pytest.raises(SettingsError, match=f"BUSBAR_GATEWAY_{name}"):
        load({f"BUSBAR_GATEWAY_{name}": value})
    load({f"BUSBAR_GATEWAY_{name}": accepted})
