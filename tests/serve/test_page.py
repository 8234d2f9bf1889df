"""The page of a server, in Chromium without a window."""

import re
import shutil

import pytest
from models import make_model
from served import client_of, serving

from gla_ext.serve import Engine, Limits
from gla_ext.serve.text import Bytes

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package)

PROMPT = "<b>x</b> & 'y'"


@pytest.mark.parametrize("page", [True, False])
def test_the_route(page):
    """One file that loads nothing from elsewhere, and that the server may leave out."""
    engine = Engine(make_model(vocab_size=256), Bytes(), Limits(rows=1))
    with client_of(engine, page=page, api_key="s3cret") as client:
        reply = client.get("/")
    assert reply.status_code == (200 if page else 404)
    if page:
        assert reply.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert not re.search(r"https?:|@import|url\(|\bsrc=", reply.text)


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no Chromium: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("server")
    model.save_pretrained(path / "letters")
    options = ["--api-key", "s3cret", "--rows", "2", "--max-new-tokens", "100000"]
    with serving(path / "letters", path / "log", *options) as server:
        yield server
    assert "Traceback" not in (path / "log").read_text()


@pytest.fixture
def page(browser, server, request):
    """The page with the key filled in; errors on it, and requests to elsewhere, fail the test."""
    address, wrong = f"http://127.0.0.1:{server.port}/", []
    context = browser.new_context(**getattr(request, "param", {}))
    page = context.new_page()
    page.set_default_timeout(30_000)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request", lambda sent: sent.url.startswith((address, "data:")) or wrong.append(sent.url)
    )
    page.goto(address)
    page.get_by_text("Options").click()
    page.get_by_label("Key of the server").fill("s3cret")
    yield page
    context.close()
    assert wrong == []


def ask(page, prompt, **options) -> None:
    for label, value in options.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(str(value))
    page.get_by_label("Text to continue").fill(prompt)
    page.get_by_role("button", name="Continue").click()


def status(page, pattern) -> str:
    page.get_by_role("status").filter(has_text=re.compile(pattern)).wait_for()
    return page.get_by_role("status").inner_text()


def text_of(page) -> str:
    return page.locator("#text").text_content()


@pytest.mark.slow
def test_a_text_streams_in_with_its_shades(page, model):
    """It is the model's; a piece is the darker the less probable it was, and says what else came
    into question.
    """
    ask(page, PROMPT, Most_tokens=40, Temperature=0)
    assert re.fullmatch(r"40 tokens, \d+\.\d tokens/s, the most asked for", status(page, "most"))
    tokens = Bytes().encode(PROMPT)
    (row,) = model.generate([tokens], 40, temperature=0)
    text = bytes(row[1:].tolist()).decode(errors="replace")
    assert text_of(page).rstrip("\ufffd") == text.rstrip("\ufffd")
    assert text_of(page).startswith(PROMPT)
    pieces = page.locator("#text .new")
    shades = pieces.evaluate_all("all => all.map(x => getComputedStyle(x).backgroundColor)")
    titles = pieces.evaluate_all("all => all.map(x => x.title)")
    found = []
    for shade, title in zip(shades, titles, strict=True):
        alpha = float(re.search(r"([\d.]+)\)$", shade.replace("/", ","))[1])
        shown = [float(x) for x in re.findall(r"^\".*?\" ([\d.]+) %; else", title, re.MULTILINE)]
        found.append((alpha, shown))
    assert len(found) > 5
    for alpha, shown in found:
        if len(shown) == 1:
            assert alpha == pytest.approx(0.85 * (1 - shown[0] / 100), abs=0.01)
    pieces.first.click()
    assert page.locator("#token").inner_text() == titles[0].replace("\n", " ")


@pytest.mark.slow
def test_stop(page):
    """The text stays, and the server goes on with nothing."""
    ask(page, "a", Most_tokens=100_000)
    status(page, r"^[5-9]\d* tokens, ")
    page.get_by_role("button", name="Stop").click()
    assert re.search(r"^\d+ tokens, .* tokens/s, stopped$", status(page, "stopped"))
    assert len(text_of(page)) > 3
    page.wait_for_function(
        "async () => (await (await fetch('metrics')).text()).includes('gla_ext_running 0')"
    )
    page.get_by_label("Text to continue").press("Control+Enter")
    status(page, r"^[5-9]\d* tokens, ")
    page.keyboard.press("Escape")
    status(page, "stopped")


@pytest.mark.slow
def test_refusals_are_shown(page):
    ask(page, "a", Most_tokens=100_001)
    assert status(page, "expected") == "expected at most 100000 new tokens, got 100001"
    ask(page, "a", Most_tokens=5, Key_of_the_server="none")
    assert status(page, "key").startswith("expected the server's key")
    ask(page, "a", Key_of_the_server="s3cret", Stop_at="")
    assert status(page, "asked for").startswith("5 tokens")


def numbers(color: str) -> list[float]:
    return [float(x) for x in re.findall(r"[\d.]+", color)]


def brightness(color) -> float:
    """Relative luminance, as in WCAG 2."""
    parts = [x / 255 for x in color]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(x * y for x, y in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


PHONE = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [PHONE | {"color_scheme": x} for x in ("light", "dark")], indirect=True
)
def test_on_a_phone_and_in_the_dark(page):
    """Nothing is wider than the screen, and text can be read on its ground."""
    ask(page, "word " * 100 + "x" * 500, Most_tokens=5)
    status(page, "asked for")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    script = "x => ['color', 'backgroundColor'].map(name => getComputedStyle(x)[name])"
    text, ground = (numbers(color) for color in page.locator("body").evaluate(script))
    is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert (brightness(text) > brightness(ground)) == is_dark
    piece = page.locator("#text .new").first
    piece.evaluate("x => x.style.setProperty('--doubt', 0.85)")
    *shade, alpha = numbers(piece.evaluate(script)[1])
    shaded = [alpha * x + (1 - alpha) * y for x, y in zip(shade, ground, strict=True)]
    for behind in (ground, shaded):
        low, high = sorted(map(brightness, (text, behind)))
        assert (high + 0.05) / (low + 0.05) > 4.5  # the contrast that WCAG asks for
    for button in page.get_by_role("button").all():
        assert button.bounding_box()["height"] >= 36  # wide enough for a finger
