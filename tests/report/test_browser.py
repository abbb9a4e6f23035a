"""The web page in Debian's chromium: errors, requests, hover, keyboard, sorting and accessibility."""

from __future__ import annotations

import shutil

import pytest
from test_web_page import deep_report, page_of

pytestmark = pytest.mark.once
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install -e '.[browser]'"
)
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright",
    reason="axe-core is not installed: pip install -e '.[browser]'",
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no chromium on PATH: apt-get install chromium", allow_module_level=True)
SCHEMES = ("light", "dark")
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page_of(deep_report(6)), encoding="utf-8")
    return path


@pytest.fixture
def open_page(browser, path):
    """Opens the page; at the end nothing was logged, and nothing was asked of a network."""
    contexts, messages, requests = [], [], []

    def opened(width=1280, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert messages == []
    assert set(requests) == {path.as_uri()}


def test_a_cell_answers_to_the_pointer_and_to_the_keyboard(open_page):
    page = open_page()
    cells, tip = page.locator("#layers .cell"), page.locator("#tip")
    assert tip.is_hidden()
    cells.nth(7).hover()
    assert tip.inner_text().startswith("gpt2.h.1.attention_key\nkey: 768 in, 768 out")
    page.mouse.move(0, 0)
    cells.first.focus()
    for key, name in (
        ("ArrowRight", "h.0.attention_key"),
        ("ArrowDown", "h.1.attention_key"),
        ("ArrowLeft", "h.1.attention_query"),
        ("ArrowUp", "h.0.attention_query"),
        ("ArrowUp", "h.0.attention_query"),
    ):
        page.keyboard.press(key)
        assert tip.inner_text().startswith(f"gpt2.{name}\n"), key
    for _ in range(6):
        page.keyboard.press("ArrowDown")
    assert tip.inner_text().startswith("lm_head\n"), "from the last block to projections outside of blocks"
    assert page.locator("#layers [tabindex='0'].cell").count() == 1
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_the_switch_colours_cells_by_error(open_page):
    page = open_page()
    cell = page.locator("#layers .cell").first
    before = cell.inner_text(), cell.evaluate("e => getComputedStyle(e).backgroundColor")
    page.get_by_role("button", name="Error").click()
    after = cell.inner_text(), cell.evaluate("e => getComputedStyle(e).backgroundColor")
    assert (before[0], after[0]) == ("INT8", "0.50%")
    assert before[1] != after[1]
    assert page.get_by_role("button", name="Error").get_attribute("aria-pressed") == "true"


def test_a_column_of_numbers_sorts_in_both_directions(open_page):
    page = open_page()
    page.get_by_text("All projections as a table").click()
    table = page.get_by_role("region", name="All projections")
    head = table.get_by_role("button", name="error of weights")
    column = "rows => rows.map(row => row.cells[5].textContent)"

    def numbers():
        texts = table.locator("tbody tr").evaluate_all(column)
        return [float(text.rstrip("%")) for text in texts if text != "-"]

    head.click()
    descending = numbers()
    assert descending == sorted(descending, reverse=True)
    assert len(set(descending)) > 10
    head.click()
    assert numbers() == descending[::-1]
    assert table.locator("th[aria-sort=ascending]").count() == 1


def test_a_point_of_the_search_answers_too(open_page):
    page = open_page()
    page.locator("circle.chosen").first.focus()  # the next are those of the roofline
    assert page.locator("#tip").inner_text().startswith("step 4, chosen\n1 x int4\n4.00 MB of projections")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("mode", ["Format", "Error"])
def test_axe_finds_nothing_serious(open_page, scheme, mode):
    page = open_page(color_scheme=scheme, bypass_csp=True)  # axe is a script of its own
    page.get_by_role("button", name=mode, exact=True).click()
    page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
    violations = axe.Axe().run(page).response["violations"]
    serious = [(entry["id"], entry["nodes"][0]["html"]) for entry in violations if entry["impact"] in SERIOUS]
    assert serious == []


@pytest.mark.parametrize("width", [1280, 820, 390])
def test_no_width_scrolls_sideways(open_page, width):
    page = open_page(width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_reads_without_its_script(open_page):
    page = open_page(java_script_enabled=False)
    page.get_by_text("All projections as a table").click()
    assert page.get_by_role("region", name="All projections").is_visible()
    assert page.locator(".switch").is_hidden()
    assert "reason: max(768" in page.locator("#layers .cell").first.get_attribute("title")
