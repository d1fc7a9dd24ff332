"""The portal in a real Chromium: the whole path from login to a completed prompt, live updates and accessibility."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.api.conftest import JOB
from tests.api.memory_kube import MemoryKube
from tests.portal.conftest import Target, Visit, log_in, visit
from tests.portal.stage import Stage

from busbar.kube.resources import MODEL_SERVICES, PERFORMANCE_PROFILES, TENANTS, TRAINING_JOBS

PAGES = (
    "/",
    "/jobs",
    "/services",
    "/batches",
    "/pools",
    "/power",
    "/submit",
    "/submit?form=image",
    "/submit?form=serve",
    "/submit?form=yaml",
    "/usage",
    "/tokens",
)


PROFILE = {
    "metadata": {"name": "llama-8b-s4096-b8-adamw-bf16-9f8e7d6c"},
    "spec": {"workloadClass": "llama-4096h-32l-32a-14336i-bf16-s4096-b8-adamw-9f8e7d6c5b4a"},
    "status": {
        "places": 2,
        "cells": [
            {
                "accelerator": accelerator,
                "accelerators": 16,
                "mode": "optimizer-offload",
                "tokensPerSecond": 1234567,
                "low": 1034567,
                "high": 1434567,
                "source": "Ratio",
                "reports": 1280,
                "quarantined": 12,
            }
            for accelerator in ("H100", "cpu")
        ],
    },
}


def unique(prefix: str) -> str:
    return f"{prefix}-{int(time.time() * 1000) % 10_000_000}"


def held(target: Target, job: str) -> AbstractContextManager[None]:
    """In the test environment jobs end within seconds; this one runs until the block ends."""
    return contextlib.nullcontext() if target.stage is None else target.stage.holding(job)


def test_log_in_submit_with_preview_watch_it_run_serve_it_and_complete_a_prompt(
    desk: Visit, target: Target
) -> None:
    page, name = desk.page, unique("run")
    page.goto("/submit")
    assert "/login" in page.url, "strangers are sent to the login"
    page.get_by_label("Token").fill(target.token)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{target.url}/submit")

    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Namespace").select_option(target.namespace)
    # Long enough to be seen: what is told of a real job is up to 6 s old, and the page asks again within 5 s.
    page.get_by_label("Steps", exact=True).fill("60" if target.stage is not None else "160")
    page.get_by_label("Output").fill(f"pvc://stdlib/{name}")
    page.get_by_role("button", name="Preview").click()
    preview = page.locator("#preview")
    expect(preview.get_by_role("heading", level=2)).to_have_text(re.compile("Starts now|Waits"))
    expect(preview).to_contain_text("cpu")
    assert page.url.endswith("/submit"), "a preview makes nothing"

    state = page.locator("#status .state .badge")
    with held(target, name):
        page.locator("form#draft").get_by_role("button", name="Submit").click()
        page.wait_for_url(f"**/jobs/{target.namespace}/{name}")
        expect(state).to_have_text("Running")
        expect(page.locator("#status").get_by_role("progressbar", name="Progress")).to_be_visible()
        expect(page.locator("[data-log-text]")).to_contain_text("loss")
        expect(page.locator('.plot[data-series="loss"] canvas')).to_be_visible()
    expect(state).to_have_text("Succeeded")
    if target.stage is not None:
        expect(page.locator("#status")).to_contain_text("Bits per byte")

    page.get_by_role("link", name="Serve this model").click()
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Namespace").select_option(target.namespace)
    assert page.get_by_label("Training job").input_value() == name
    page.locator("form#draft").get_by_role("button", name="Submit").click()
    page.wait_for_url(f"**/services/{target.namespace}/{name}")
    expect(page.locator("#status .state .badge")).to_have_text("Ready")
    if target.stage is not None:
        target.stage.wait_until_routed(name)
    page.get_by_label("Prompt").fill("import ")
    page.get_by_label("Most tokens").fill("24")
    page.get_by_label("Temperature").fill("0")  # what a model draws may be anything, also its end
    page.get_by_role("button", name="Complete").click()
    expect(page.locator("[data-try-note]")).to_contain_text("in all")
    answer = page.locator("[data-try-answer]").text_content() or ""  # of a weak model perhaps only spaces
    assert answer.startswith("import ")
    assert answer != "import "
    key = re.search(r"bb_[\w-]{43}", page.content())
    assert key is None, "the key that was used never reaches the browser"


def test_the_list_filters_and_follows_changes_without_a_reload(
    desk: Visit, target: Target, staged: Stage
) -> None:
    page, name = desk.page, unique("live")
    log_in(page, target.token)
    page.evaluate("window.stayed = true")
    expect(page.locator("#live")).to_have_text("live")
    with staged.holding(name):
        staged.kube_call(
            lambda kube: kube.put(
                TRAINING_JOBS, {**JOB, "metadata": {"name": name, "namespace": target.namespace}}
            )
        )
        row = page.locator("tr", has_text=name)
        expect(row).to_be_visible()
        expect(row.locator(".badge")).to_have_text("Running")
    expect(row.locator(".badge")).to_have_text("Succeeded")
    page.get_by_role("searchbox").fill("no-such-job")
    expect(page.locator("#list")).to_contain_text("No job matches")
    page.get_by_role("searchbox").fill(name)
    expect(page.locator("tbody tr")).to_have_count(1)
    assert page.evaluate("window.stayed") is True


def test_the_front_page_follows_what_waits_and_why_without_a_reload(
    desk: Visit, target: Target, staged: Stage
) -> None:
    page, name = desk.page, unique("front")
    page.goto("/login")
    page.get_by_label("Token").fill(target.token)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{target.url}/")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.evaluate("window.stayed = true")
    spec = {"template": {"image": "busybox"}, "accelerators": ["H100"], "shape": {"acceleratorsPerPod": 16}}
    job = {**JOB, "metadata": {"name": name, "namespace": target.namespace}, "spec": spec}
    staged.kube_call(lambda kube: kube.put(TRAINING_JOBS, job))
    row = page.get_by_role("region", name="What waits, and why").locator("tr", has_text=name)
    expect(row).to_contain_text("5 of 16 are free")
    expect(row).to_contain_text("in 20 min")
    expect(
        page.get_by_role("region", name="Who holds what").get_by_role("region", name="ada")
    ).to_be_visible()
    assert page.evaluate("window.stayed") is True


def test_when_the_event_stream_breaks_the_page_polls(desk: Visit, target: Target, staged: Stage) -> None:
    page, name = desk.page, unique("poll")
    page.route("**/changes", lambda route: route.abort())
    log_in(page, target.token)
    expect(page.locator("#live")).to_have_text("every 5 s")
    staged.kube_call(
        lambda kube: kube.put(
            TRAINING_JOBS, {**JOB, "metadata": {"name": name, "namespace": target.namespace}}
        )
    )
    expect(page.locator("tr", has_text=name)).to_be_visible()
    desk.problems.clear()


def test_a_job_that_cannot_start_says_why_and_what_would_help(
    desk: Visit, target: Target, staged: Stage
) -> None:
    page = desk.page
    log_in(page, target.token)
    page.goto("/submit?form=yaml")
    page.get_by_label("Namespace").select_option(target.namespace)
    page.get_by_label("One TrainingJob or ModelService").fill(
        "apiVersion: busbar.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: big}\nspec:\n"
        "  template: {image: busybox}\n  shape: {acceleratorsPerPod: 64}\n  accelerators: [H100]\n"
    )
    page.get_by_role("button", name="Preview").click()
    preview = page.locator("#preview")
    expect(preview.get_by_role("heading", level=2)).to_have_text("Cannot start")
    expect(preview).to_contain_text("64")


def test_a_job_that_waits_says_for_what_and_when_it_is_likely_to_start(
    desk: Visit, target: Target, staged: Stage
) -> None:
    page, name = desk.page, unique("waits")
    log_in(page, target.token)
    spec = {"template": {"image": "busybox"}, "accelerators": ["H100"], "shape": {"acceleratorsPerPod": 16}}
    job = {**JOB, "metadata": {"name": name, "namespace": target.namespace}, "spec": spec}
    staged.kube_call(lambda kube: kube.put(TRAINING_JOBS, job))
    page.goto(f"/jobs/{target.namespace}/{name}")
    expect(page.get_by_role("heading", name="What it waits for")).to_be_visible()
    forecast = page.get_by_role("region", name="Forecast")
    expect(forecast).to_contain_text("Likely starts")
    expect(forecast).to_contain_text(re.compile(r"in \d+ min"))
    expect(forecast).to_contain_text(re.compile(r"nine times in ten in 1 h \d+ min or sooner"))


def test_what_a_person_unfolded_stays_open_while_the_page_refreshes(
    desk: Visit, target: Target, staged: Stage
) -> None:
    page, name = desk.page, unique("fold")
    log_in(page, target.token)
    with staged.holding(name):
        job = {**JOB, "metadata": {"name": name, "namespace": target.namespace}}
        staged.kube_call(lambda kube: kube.put(TRAINING_JOBS, job))
        page.goto(f"/jobs/{target.namespace}/{name}")
        conditions = page.get_by_role("region", name="Conditions")
        expect(conditions.get_by_role("row", name="Admitted")).to_be_visible()
        expect(conditions.get_by_role("row", name="Ready")).to_be_hidden()
        conditions.get_by_text("1 that does not hold").click()
        step = page.locator("#status .fact").first.inner_text()
        expect(page.locator("#status .fact").first).not_to_have_text(step, use_inner_text=True)
        expect(conditions.get_by_role("row", name="Ready")).to_be_visible()


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [("Steps", "many", "not a whole number"), ("Output", "s3://x", "spec.output.uri")],
)
def test_a_wrong_field_is_named_before_anything_is_made(
    desk: Visit, target: Target, staged: Stage, field: str, value: str, sentence: str
) -> None:
    page = desk.page
    log_in(page, target.token)
    page.goto("/submit")
    page.get_by_label("Name", exact=True).fill("wrong")
    page.get_by_label("Namespace").select_option(target.namespace)
    page.get_by_label(field, exact=field != "Output").fill(value)
    page.get_by_role("button", name="Preview").click()
    expect(page.locator("#preview [role=alert]")).to_contain_text(sentence)


def test_cancel_resume_and_delete_from_the_page(desk: Visit, target: Target, staged: Stage) -> None:
    page, name = desk.page, unique("stop")
    log_in(page, target.token)
    job = {**JOB, "metadata": {"name": name, "namespace": target.namespace}}
    job["spec"] = {**job["spec"], "engine": {**job["spec"]["engine"], "steps": 10_000}}
    with staged.holding(name):
        staged.kube_call(lambda kube: kube.put(TRAINING_JOBS, job))
        page.goto(f"/jobs/{target.namespace}/{name}")
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#status .badge").first).to_have_text("Suspended")
        page.get_by_role("button", name="Resume").click()
        expect(page.get_by_role("button", name="Cancel")).to_be_visible()
    page.get_by_text("Delete…").click()
    page.get_by_role("button", name="Yes, delete it").click()
    page.wait_for_url("**/jobs")
    expect(page.locator("tr", has_text=name)).to_have_count(0)
    # The page of the deleted job may have refreshed its parts once more before the browser left it.
    refresh = re.compile(rf"404 .*/{name}(/events|/samples)?")
    desk.errors[:] = [error for error in desk.errors if not refresh.fullmatch(error)]


def test_scaling_a_service_from_the_page(desk: Visit, target: Target, staged: Stage) -> None:
    page = desk.page
    log_in(page, target.token)
    page.goto("/services/ada-lab/ada-chat")
    page.locator("#replicas").fill("2")
    with page.expect_navigation():  # the page before navigation may show the new count too
        page.get_by_role("button", name="Set").click()
    expect(page.locator("#status")).to_contain_text("2 of 2")
    assert staged.kube.objects[MODEL_SERVICES.plural, "ada-lab", "ada-chat"]["spec"]["replicas"] == 2
    page.locator("#replicas").fill("")
    page.get_by_role("button", name="Set").click()
    expect(page.locator("#status")).to_contain_text("the autoscaler")


def test_a_token_is_shown_once_and_can_be_revoked(desk: Visit, target: Target, staged: Stage) -> None:
    page, what = desk.page, unique("laptop")
    log_in(page, target.token)
    page.goto("/tokens")
    page.get_by_label("What for").fill(what)
    page.get_by_role("button", name="Make it").click()
    token = page.get_by_label("The token").input_value()
    assert re.fullmatch(r"bb_[A-Za-z0-9_-]{43}", token)
    page.goto("/tokens")
    assert token not in page.content()
    row = page.locator("tr", has_text=what)
    row.get_by_role("button", name=re.compile("Revoke")).click()
    expect(row.locator("[data-label=Ends]")).to_have_text("revoked")


def test_the_whole_way_with_the_keyboard_alone(desk: Visit, target: Target, staged: Stage) -> None:
    page, name = desk.page, unique("keys")
    page.goto("/login")
    expect(page.locator("[autofocus]")).to_be_focused()  # set by the page, but only after it has loaded
    page.keyboard.type(target.token)
    page.keyboard.press("Enter")
    page.wait_for_url(f"{target.url}/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    page.goto("/jobs")
    _tab_to(page, "a[href='/submit']")
    page.keyboard.press("Enter")
    page.wait_for_url("**/submit")
    _tab_to(page, "#f-name")
    page.keyboard.type(name)
    _tab_to(page, "button[formaction]")
    page.keyboard.press("Enter")
    expect(page.locator("#preview h2")).to_have_text("Starts now")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/jobs/*/{name}")
    _tab_to(page, "details.menu > summary")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Log out")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Log out")).to_be_hidden()
    assert page.evaluate("document.activeElement.matches('details.menu > summary')")


def _tab_to(page: Page, selector: str, most: int = 60) -> None:
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            outline = page.evaluate(
                "() => { const s = getComputedStyle(document.activeElement); return s.outlineStyle !== 'none' || s.boxShadow !== 'none'; }"
            )
            assert outline, f"{selector} shows no focus"
            return
    raise AssertionError(f"{selector} cannot be reached with Tab")


def test_a_phone_shows_every_page_without_sideways_scrolling(
    phone: Visit, target: Target, staged: Stage
) -> None:
    page = phone.page
    log_in(page, target.token)
    for path in (*PAGES, "/jobs/ada-lab/ada-run", "/services/ada-lab/ada-chat"):
        page.goto(path)
        page.wait_for_timeout(150)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, f"{path} is {width} px wide"
        small = page.evaluate(
            "() => [...document.querySelectorAll('main button, main .button')].filter(b => b.offsetParent && b.getBoundingClientRect().height < 33).map(b => b.textContent)"
        )
        assert small == [], f"{path}: too small to touch: {small}"


OUT_OF_THEIR_CARD = """() => [...document.querySelectorAll('.card')].flatMap(card => {
  const right = card.getBoundingClientRect().right - parseFloat(getComputedStyle(card).paddingRight);
  return [...card.querySelectorAll('th, td, h2, h3, small, dd')].filter(e => e.getBoundingClientRect().right > right)
    .map(e => `${e.tagName} "${e.textContent.trim().slice(0, 30)}"`);
})"""


@pytest.mark.parametrize("width", [390, 800, 1280])
def test_measured_speeds_stay_inside_their_card(
    browser: Browser, target: Target, staged: Stage, width: int
) -> None:
    staged.kube_call(lambda kube: kube.put(PERFORMANCE_PROFILES, PROFILE))
    for seen in visit(browser, target, viewport={"width": width, "height": 850}):
        page = seen.page
        log_in(page, staged.tokens["root"])
        page.goto("/pools")
        expect(page.get_by_role("heading", name="Measured speeds")).to_be_visible()
        assert page.evaluate(OUT_OF_THEIR_CARD) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [390, 1280])
def test_the_power_page_shows_the_feeds_that_a_member_may_see(
    browser: Browser, target: Target, width: int
) -> None:
    for seen in visit(browser, target, viewport={"width": width, "height": 850}):
        page = seen.page
        log_in(page, target.token)
        page.goto("/power")
        card = page.get_by_role("region", name="rack-h100")
        expect(card).to_contain_text("below row")
        expect(card).to_contain_text("800 W of 2 kW")
        expect(card.get_by_role("progressbar")).to_have_attribute("value", "90.0")
        expect(card.get_by_role("listitem")).to_have_count(2)
        expect(card.get_by_role("listitem").last).to_have_attribute(
            "aria-label",
            "h100-node-1: 800 W of 1 kW, capped (there are watts enough), simulated, silent for 0 s",
        )
        expect(page.get_by_role("region", name="row", exact=True)).to_contain_text("not measured")
        curve = card.get_by_role("img", name="Draw of rack-h100, the last 15m")
        expect(curve).to_have_attribute("aria-label", re.compile("800 W to 800 W, of a budget of 2 kW"))
        page.get_by_role("link", name="24h").click()
        expect(card.get_by_role("img", name="Draw of rack-h100, the last 24h")).to_be_visible()
        assert "bob" not in page.content()
        assert page.evaluate(OUT_OF_THEIR_CARD) == []


def test_a_service_shows_its_load_against_what_its_replicas_carry(
    phone: Visit, target: Target, staged: Stage
) -> None:
    page = phone.page
    log_in(page, target.token)
    page.goto("/services/ada-lab/ada-chat")
    load = page.get_by_role("region", name="Load", exact=True)
    chart = load.get_by_role("img", name="Demand and capacity, the last 1h: demand 2 to 9 requests/s")
    expect(chart).to_be_visible()
    expect(load).to_contain_text("capacity on old (V100)")
    fills = chart.evaluate("e => [...e.querySelectorAll('path')].map(p => getComputedStyle(p).fill)")
    assert len(set(fills)) == 3, f"two pools and the line of the demand look alike: {fills}"
    page.get_by_role("link", name="24h").click()
    expect(load.get_by_role("img", name="Ready replicas, the last 24h")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


BUDGETS = [
    {
        "period": period,
        "started": "2026-11-01T00:00:00Z",
        "ends": "2026-12-01T00:00:00Z",
        "acceleratorHours": 123456.75,
        "acceleratorHoursLeft": 876543.25,
        "kilowattHours": 48.2,
        "kilowattHoursLeft": 0,
        "state": state,
        "exhausted": "2026-11-27T14:30:00Z",
        "exhaustedP50": "2026-11-27T16:00:00Z",
        "exhaustedP90": "2026-11-28T08:15:00Z",
    }
    for period, state in (("month", "Warning"), ("day", "Spent"))
]


@pytest.mark.parametrize("width", [390, 1280])
def test_the_usage_page_shows_the_budgets_of_own_tenants(
    browser: Browser, target: Target, staged: Stage, width: int
) -> None:
    for tenant in ("ada", "bob-corp"):
        staged.kube_call(
            partial(MemoryKube.status, resource=TENANTS, namespace="", name=tenant, budgets=BUDGETS)
        )
    for seen in visit(browser, target, viewport={"width": width, "height": 850}):
        page = seen.page
        log_in(page, target.token)
        page.goto("/usage?by=namespace")
        lines = page.get_by_role("region", name="Budgets").locator("tbody tr")
        expect(lines).to_have_count(4)
        expect(lines.nth(0)).to_contain_text("876,543.25")
        expect(lines.nth(0)).to_contain_text("2026-11-27 14:30")
        expect(lines.nth(0)).to_contain_text("2026-11-27 16:00; 90 %: 2026-11-28 08:15")
        expect(lines.nth(3)).to_contain_text("Spent")
        expect(page.get_by_role("link", name="Download as CSV")).to_be_visible()
        assert "bob" not in page.content()
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_in_both_themes(
    browser: Browser, target: Target, staged: Stage, scheme: str
) -> None:
    for seen in visit(browser, target, color_scheme=scheme, viewport={"width": 1280, "height": 850}):
        page = seen.page
        log_in(page, target.token)
        for path in (
            "/",
            "/jobs",
            "/pools",
            "/power",
            "/submit",
            "/tokens",
            "/jobs/ada-lab/ada-run",
            "/services/ada-lab/ada-chat",
        ):
            page.goto(path)
            page.wait_for_timeout(200)
            if path == "/pools":
                page.evaluate(EVERY_HEAT)
            poor = page.evaluate(CONTRAST)
            assert poor == [], f"{path} in {scheme}: {poor[:5]}"


EVERY_HEAT = """() => {
  for (let heat = 0; heat <= 10; heat++) {
    const cell = Object.assign(document.createElement('li'), {className: `heat h${heat}`, textContent: '4/8'});
    document.querySelector('.heatmap').append(cell);
  }
}"""
CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = color => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    const d = canvas.getImageData(0, 0, 1, 1).data; return [d[0], d[1], d[2], d[3] / 255]; };
  const light = c => { const f = c.slice(0, 3).map(v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * f[0] + 0.7152 * f[1] + 0.0722 * f[2]; };
  const ground = e => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor); if (c[3] > 0.95) return c; } return [255, 255, 255, 1]; };
  const poor = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.offsetParent || e.closest('.quiet, .skip, option, canvas, svg, .live-text, .dead, .u-legend')) continue;
    const a = light(rgba(getComputedStyle(e).color)), b = light(ground(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${e.tagName}.${e.className} "${e.textContent.trim().slice(0, 30)}" ${ratio.toFixed(2)}`);
  }
  return poor;
}"""


def test_the_theme_can_be_chosen_and_is_remembered(desk: Visit, target: Target, staged: Stage) -> None:
    page = desk.page
    log_in(page, target.token)
    page.locator("details.menu > summary").click()
    switch = page.get_by_role("button", name=re.compile("Theme"))
    switch.click()
    switch.click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.goto("/pools")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"


@pytest.fixture
def bobs_desk(browser: Browser, target: Target, staged: Stage) -> Iterator[Visit]:
    yield from visit(browser, target, viewport={"width": 1280, "height": 850})


def test_another_tenants_page_is_a_page_that_does_not_exist(bobs_desk: Visit, staged: Stage) -> None:
    page = bobs_desk.page
    log_in(page, staged.tokens["bob"])
    # Tokens and uids are hexadecimal and may contain "ada".
    told = re.sub(r"[0-9a-f-]{36,}", "", page.content())
    assert "bob-run" in told
    assert "ada" not in told
    page.goto("/jobs/ada-lab/ada-run")
    expect(page.get_by_role("alert")).to_have_text("TrainingJob ada-lab/ada-run does not exist")
    bobs_desk.errors.clear()


def test_every_control_has_a_name_and_every_page_one_heading(desk: Visit, staged: Stage) -> None:
    page = desk.page
    log_in(page, staged.tokens["root"])
    for path in (*PAGES, "/audit", "/jobs/ada-lab/ada-run", "/services/ada-lab/ada-chat"):
        page.goto(path)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('input:not([type=hidden]), select, textarea, button, a')]
               .filter(e => !(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.textContent.trim())
               .map(e => e.outerHTML.slice(0, 80))"""
        )
        assert nameless == [], path
        assert page.locator("h1").count() == 1, path
        assert page.evaluate("document.documentElement.lang") == "en"
