"""The studio in a real browser, with mouse and keyboard: what appears on the page.

``SHORTRUN_SCREENSHOTS=docs/images make test`` also keeps pictures of it.
"""

import json
import re

import numpy as np
import pytest
from PIL import Image
from studio_server import SCREENSHOTS, browser, served, shoot

import shortrun as sr
from shortrun.cli import main
from shortrun.studio.work import STEP_GRID

pytestmark = pytest.mark.slow
pytest.importorskip("gradio")
MODELS = ("mnist-small", "svhn-small", "faces-small")
SLOW = 120_000  # milliseconds to wait on a busy machine
UNNAMED = """() => [...document.querySelectorAll("button, input, select, textarea, canvas, a[href], [role=tab]")]
  .filter((each) => each.checkVisibility() && !each.closest("[aria-hidden=true]"))
  .filter((each) => !(each.getAttribute("aria-label") || each.getAttribute("aria-labelledby") || each.title
    || each.textContent.trim() || [...(each.labels || [])].some((label) => label.textContent.trim())))
  .map((each) => each.outerHTML.slice(0, 160))"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    size = ["--minutes", "1.5"] if SCREENSHOTS else ["--preset", "smoke"]  # pictures ask for models that have learned
    for method in ("short-run", "vae"):
        main(["train", "--data", "embedded", *size, "--method", method, "--out", str(runs / method)])
    with served([*MODELS, f"{runs.name}/short-run", f"{runs.name}/vae"], runs) as url:
        yield url, runs


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


@pytest.fixture
def page(address, chromium):
    """A fresh page that nothing but this machine may answer."""
    context = chromium.new_context(viewport={"width": 1440, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(SLOW)
    strangers, broken = [], []
    opened.on("request", lambda request: strangers.append(request.url) if is_strange(request.url) else None)
    opened.on("pageerror", lambda error: broken.append(str(error)))
    opened.goto(address[0])
    opened.wait_for_selector("#picker img")
    opened.wait_for_function("document.querySelector('.painter-status').textContent.includes('hidden')")
    yield opened
    context.close()
    assert not strangers
    assert not broken


def is_strange(url):
    return not re.match(r"(http://127\.0\.0\.1:\d+|data:|blob:)", url)


def open_tab(page, name):
    page.get_by_role("tab", name=name).click()


def choose(page, label, text):
    """From a dropdown, as users do."""
    page.get_by_label(label, exact=True).click()
    page.get_by_role("option", name=text, exact=True).click()


def choose_model(page, name):
    before = page.locator("#picker img").first.get_attribute("src")
    if page.get_by_label("Model", exact=True).input_value() != name:
        choose(page, "Model", name)
        page.wait_for_function("(old) => document.querySelector('#picker img').src !== old", arg=before)


def count(page, selector):
    return page.locator(selector).count()


def stroke(page, *points):
    """With the mouse over the mask; points are shares of its sides."""
    box = page.locator("#painter canvas").bounding_box()
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=8)
    page.mouse.up()


def hidden(page):
    return int(page.locator(".painter-status").text_content().split()[0])


def snippet(page, elem, language):
    """The text of a snippet, which the page shows once it is unfolded."""
    panel = page.get_by_role("tabpanel").filter(has=page.locator(elem))
    panel.get_by_role("button", name="The same in Python and on the command line").click()
    text = panel.locator(".snippet").nth(0 if language == "python" else 1).locator(".cm-content")
    text.wait_for()
    return text.inner_text()


# --- six tabs, three models ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_all_tabs(page, address, name):
    layers = len(sr.load(name).model.latent_shapes)
    choose_model(page, name)
    assert count(page, "#picker img") == 12

    # Inpaint: clear the mask, paint over the middle, fill.
    page.locator(".painter-clear").click()
    assert hidden(page) == 0
    page.locator("#picker label").nth(4).click()
    page.locator(".painter-size").fill("6")
    stroke(page, (0.3, 0.3), (0.7, 0.3), (0.3, 0.65), (0.7, 0.65))
    painted = hidden(page)
    assert painted > 100
    assert page.get_by_label("Mask", exact=True).input_value() == "painted"
    page.locator("#fill").click()
    page.wait_for_selector("#fills [data-state=done] ~ p a, #fills [data-state=done]")
    page.locator("#fills a[download]").wait_for()
    rows = page.locator("#fills .tiles")
    assert rows.nth(0).locator("img").count() == 2
    fills = {image.get_attribute("src") for image in rows.nth(1).locator("img").all()}
    assert len(fills) == 8
    error = float(re.search(r"hidden pixels ([\d.]+)", page.locator("#fills").inner_text())[1])
    assert 0 < error < 1
    assert hidden(page) == painted
    shoot(page, f"inpaint-{name}")
    assert f"trained.inpaint(x, mask, fills=8, seed=0)" in snippet(page, "#fill", "python")  # noqa: F541

    # Watch a chain: K + 1 frames, and a slider that moves through them.
    open_tab(page, "Watch a chain")
    page.locator("#run-chain").click()
    page.wait_for_selector("#film .strip img")
    steps = sr.load(name).dynamics.steps
    assert count(page, "#film .strip img") == steps + 1
    assert count(page, "#film svg path.line") == 3
    last = page.locator("#film .big").first.get_attribute("src")
    shoot(page, f"chain-{name}")
    page.get_by_label("Step k of the chain").press("Home")
    assert page.locator("#film .told").first.inner_text().startswith(f"k = 0 of {steps}")
    begin = page.locator("#film .big").first.get_attribute("src")
    assert begin != last
    page.locator("#another-start").click()
    page.wait_for_function("(old) => document.querySelector('#film .strip img').src !== old", arg=begin)

    # Move the step size.
    open_tab(page, "Move the step size")
    page.locator("#curve").click()
    page.wait_for_function(f"document.querySelector('#steps input')?.max === '{len(STEP_GRID) - 1}'")
    assert "(tuned)" in page.locator("#steps .told").inner_text()
    assert count(page, "#steps .star") == 2
    assert count(page, "#steps .zone") == 2
    shoot(page, f"steps-{name}")
    slider, dot = page.get_by_label("Step size s"), page.locator("#steps svg circle.one").first
    tuned, place = page.locator("#steps .pictures .tiles").nth(1).inner_html(), dot.get_attribute("cx")
    slider.press("End")
    assert "chains diverge" in page.locator("#steps .told").inner_text()
    assert dot.get_attribute("cx") != place
    assert page.locator("#steps .pictures .tiles").nth(1).inner_html() != tuned

    # Look into the layers.
    open_tab(page, "Look into the layers")
    page.locator("#resample").click()
    page.wait_for_selector("#layers img")
    assert count(page, "#layers .tiles") == layers
    assert count(page, "#layers img") == 8 * layers
    shoot(page, f"layers-{name}")
    page.locator("#interpolate").click()
    page.wait_for_function("document.querySelectorAll('#layers img').length === 10")
    page.locator("#samples").click()
    page.wait_for_function("document.querySelectorAll('#layers img').length === 32")
    assert "learned prior" in page.locator("#layers").inner_text()
    assert "N(0, I)" in page.locator("#layers").inner_text()

    # Compare methods: all models whose images have this shape.
    open_tab(page, "Compare methods")
    page.locator("#compare").click()
    others = 3 if name == "mnist-small" else 2
    page.wait_for_function(f"document.querySelectorAll('#compared tr').length === {others + 1}")
    assert name in page.locator("#compared").inner_text()
    if name == "mnist-small":
        assert "vae" in page.locator("#compared").inner_text()
    shoot(page, f"compare-{name}")

    # Your run.
    open_tab(page, "Your run")
    page.locator("#follow").click()
    page.wait_for_selector("#curves svg")
    assert page.locator("#run-words img").get_attribute("src").startswith("data:image/png")
    shoot(page, f"run-{name}")


def test_the_page_follows_a_run(page, address):
    """Lines that are written while one looks appear within seconds."""
    folder = address[1] / "short-run"
    open_tab(page, "Your run")
    choose(page, "Run folder", f"{folder.parent.name}/{folder.name}")
    page.locator("#follow").click()
    page.wait_for_selector("#curves svg")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    evaluation = next(json.loads(line) for line in lines if json.loads(line).get("loss") is not None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(evaluation | {"iteration": 77_777, "seconds": 600.0}) + "\n")
    page.wait_for_function("document.querySelector('#run-words').textContent.includes('iteration 77777')")


# --- what goes wrong gets a sentence ------------------------------------------------------------------


def test_masks_that_hide_nothing_or_everything(page):
    page.locator(".painter-clear").click()
    page.locator("#fill").click()
    page.locator("#inpaint-note [role=alert]", has_text="Nothing is hidden").wait_for()
    page.locator(".painter-size").fill("12")
    for y in np.linspace(0.02, 0.98, 12):
        stroke(page, (0.0, y), (0.999, y))
    page.locator("#fill").click()
    page.locator("#inpaint-note [role=alert]", has_text="Everything is hidden").wait_for()


def test_uploads(page, chromium, address, tmp_path):
    """A picture of one's own is inferred; what is no picture gets a sentence; nobody else sees it."""
    (tmp_path / "words.png").write_text("no image at all")
    moving = [Image.new("L", (20, 20), level) for level in (0, 255)]
    moving[0].save(tmp_path / "moving.gif", save_all=True, append_images=moving[1:])
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 65535, (60, 50), np.uint16)).save(tmp_path / "deep.png")
    box = page.locator("#upload input[type=file], input[type=file]").first
    for name, message in (("words.png", "The file is not an image"), ("moving.gif", "2 frames")):
        box.set_input_files(tmp_path / name)
        page.locator("#note [role=alert]", has_text=message).wait_for()
    box.set_input_files(tmp_path / "deep.png")
    page.wait_for_function("document.querySelectorAll('#picker img').length === 13")
    assert page.get_by_label("Your image").is_checked()
    page.locator("#fill").click()
    page.locator("#fills a[download]").wait_for()
    other = chromium.new_context().new_page()
    other.goto(address[0])
    other.wait_for_selector("#picker img")
    assert other.locator("#picker img").count() == 12
    assert other.locator("#fills img").count() == 0
    other.context.close()


STOP_AT_ONCE = """() => new Promise((done) => {
  const until = performance.now() + 20000;
  const look = () => {
    if (performance.now() > until) return done();
    if (!document.querySelector("#fills progress")) return requestAnimationFrame(look);
    document.querySelector("#stop").click();
    done();
  };
  document.querySelector("#fill").click();
  look();
})"""


def test_stop(page):
    """Chains take half a second, so the button is pressed by the page itself, and again if it came too late."""
    choose_model(page, "faces-small")
    stopped, ended = page.locator("#inpaint-note [role=alert]", has_text="Stopped"), page.locator("#fills a[download]")
    for seed in range(3, 13):
        page.get_by_label("Seed", exact=True).first.fill(str(seed))
        page.evaluate(STOP_AT_ONCE)
        stopped.or_(ended).first.wait_for()
        if stopped.count():
            break
    assert stopped.count()
    page.locator("#fill").click()  # and it goes on to work
    ended.wait_for()


def test_a_folder_that_is_no_run(page, tmp_path):
    open_tab(page, "Your run")
    box = page.get_by_label("Run folder", exact=True)
    box.fill(str(tmp_path))
    box.press("Enter")
    page.locator("#follow").click()
    page.locator("#run-note [role=alert]", has_text="is not the folder of a run").wait_for()


# --- anybody, on anything -----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [360, 1440])
def test_narrow_and_wide_light_and_dark(chromium, address, width):
    for scheme in ("light", "dark"):
        context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = context.new_page()
        page.set_default_timeout(SLOW)
        page.goto(address[0])
        page.wait_for_selector("#picker img")
        page.locator("#fill").click()
        page.locator("#fills a[download]").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        levels = [int(level) for level in re.findall(r"\d+", back)[:3]]
        assert (sum(levels) > 600) == (scheme == "light")
        shoot(page, f"{width}-{scheme}")
        context.close()


def test_every_control_has_a_name(page):
    names = ("Inpaint", "Watch a chain", "Move the step size", "Look into the layers", "Compare methods", "Your run")
    for name in names:
        open_tab(page, name)
        page.wait_for_timeout(200)
        assert page.evaluate(UNNAMED) == []


def test_with_the_keyboard_alone(page):
    """From the mask to the fills without a mouse."""
    page.locator(".painter-clear").focus()
    page.keyboard.press("Enter")
    assert hidden(page) == 0
    for _ in range(10):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.tagName") == "CANVAS":
            break
    page.keyboard.press("Space")
    one = hidden(page)
    assert one > 0
    for _ in range(6):
        page.keyboard.press("Shift+ArrowDown")
    assert hidden(page) > one
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "fill":
            break
    page.keyboard.press("Enter")
    page.locator("#fills a[download]").wait_for()
