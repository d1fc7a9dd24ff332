"""Fixtures of the portal tier: a real Chromium, and a portal to point it at.

By default the portal is the stage (`tests/portal/stage.py`). The end-to-end tier points the same tests at a real
cluster by three variables: BUSBAR_PORTAL_URL, BUSBAR_PORTAL_TOKEN, BUSBAR_PORTAL_NAMESPACE.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.portal.stage import Stage, stage

CHROMIUM = os.environ.get("BUSBAR_CHROMIUM", "/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 30_000 if "BUSBAR_PORTAL_URL" not in os.environ else 900_000
expect.set_options(timeout=PATIENCE_MS)
HARMLESS = ("/logs?",)
"""Console messages about these are expected: a log that has not begun answers 404."""


@dataclass(frozen=True)
class Target:
    """The portal under test and one person's login."""

    url: str
    token: str
    namespace: str
    stage: Stage | None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def target() -> Iterator[Target]:
    if url := os.environ.get("BUSBAR_PORTAL_URL"):
        yield Target(
            url.rstrip("/"), os.environ["BUSBAR_PORTAL_TOKEN"], os.environ["BUSBAR_PORTAL_NAMESPACE"], None
        )
        return
    with stage() as running:
        yield Target(running.url, running.tokens["alice"], running.namespace, running)


@pytest.fixture
def staged(target: Target) -> Stage:
    """The stage, for tests that script the cluster."""
    if target.stage is None:
        pytest.skip("scripts the stage; a real cluster cannot be scripted")
    return target.stage


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@dataclass
class Visit:
    """A page, and the errors on it."""

    page: Page
    problems: list[str]
    errors: list[str]


def visit(browser: Browser, target: Target, **context: object) -> Iterator[Visit]:
    """A fresh browser context that notes script errors, policy violations and failed requests."""
    made = browser.new_context(base_url=target.url, **context)  # type: ignore[arg-type]
    made.set_default_timeout(PATIENCE_MS)
    page = made.new_page()
    seen = Visit(page, [], [])
    page.on("pageerror", lambda error: seen.problems.append(str(error)))
    page.on(
        "console",
        lambda message: (
            seen.problems.append(message.text)
            if message.type == "error" and not message.text.startswith("Failed to load resource")
            else None
        ),
    )
    page.on(
        "response",
        lambda answer: (
            seen.errors.append(f"{answer.status} {answer.url}")
            if answer.status >= 400 and not any(part in answer.url for part in HARMLESS)
            else None
        ),
    )
    yield seen
    made.close()
    assert seen.problems == [], "scripts or the content policy complained"
    assert seen.errors == [], "requests failed"


@pytest.fixture
def desk(browser: Browser, target: Target) -> Iterator[Visit]:
    """A desktop window."""
    yield from visit(browser, target, viewport={"width": 1280, "height": 850})


@pytest.fixture
def phone(browser: Browser, target: Target) -> Iterator[Visit]:
    """A phone's window."""
    yield from visit(
        browser,
        target,
        viewport={"width": 390, "height": 844},
        has_touch=True,
        is_mobile=True,
        color_scheme="dark",
    )


def log_in(page: Page, token: str) -> None:
    page.goto("/login?next=/jobs")
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/jobs")
